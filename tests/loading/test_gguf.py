"""Engines on GGUF files compute what transformers computes with the numbers of the package gguf."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.kernels.ops.parameter import ExpertRows, HeadRows, Narrowed, Slice
from stepgraph.runtime.kernels.weights.gguf import GGUF_TYPES, GGUFType
from stepgraph.runtime.loading.gguf_checkpoint import GGUFReader, gguf_config
from stepgraph.runtime.loading.gguf_file import open_gguf
from stepgraph.runtime.loading.loader import CheckpointReader, iter_weights, read_config
from stepgraph.runtime.models.config import ModelConfig

from ..rigs.engine_rig import opened
from ..rigs.expert_models import YARN
from ..rigs.gguf_files import Array, random_blocks, write_gguf
from ..rigs.tiny_models import BASE, LLAMA3_ROPE, VARIANTS, TinyModel, random_model

UNWINDOWED = {"use_sliding_window": False, "layer_types": None, "sliding_window": None}
LLAMA4 = {"floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4}
OLMO3_ROPES = {
    "full_attention": {"rope_theta": 5e4, "rope_type": "yarn", "factor": 8.0}
    | {"original_max_position_embeddings": 32},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
UNCHANGED = (
    *("base", "odd", "llama3_rope", "linear_rope", "mistral_full", "biases", "mixtral", "phi3"),
    *("qwen3_yarn", "phi3_longrope", "granite", "olmo2", "glm", "glm4", "cohere2", "lfm2"),
    *("deepseek_v2_moe", "deepseek_v3_moe", "deepseek_v3_scaled"),
)
CASES: dict[str, dict[str, Any]] = {
    **{variant: {} for variant in UNCHANGED},
    "qwen2": UNWINDOWED,
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "olmo3": {"rope_parameters": OLMO3_ROPES},
    "smollm3": UNWINDOWED | {"no_rope_layer_interval": 4},
    "gpt_oss": {"swiglu_limit": 7.0},
    "gpt_oss_odd": {"swiglu_alpha": 1.702, "layer_types": None},
    "deepseek_v2": {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}},
    "deepseek_v2_greedy": {"n_group": 1},
    "llama4": LLAMA4 | {"rope_parameters": None},
}
"""Variants of tiny models, with changes of what GGUF has no metadata for."""


def saved(directory: Path, variant: str, **changes: Any) -> TinyModel:
    settings = BASE | VARIANTS[variant] | changes
    for name in ("save_original_format", "max_shard_size"):
        settings.pop(name, None)
    model = random_model(settings)
    model.save_pretrained(directory)
    return TinyModel(directory, model)


WITH_IMAGES = {"qwen2vl": "qwen2", "qwen3vl": "qwen3_yarn", "qwen3vlmoe": "qwen3_moe"}
"""Architectures of models for text and images, and variants of their text models."""


@pytest.mark.parametrize("case", [*CASES, *WITH_IMAGES])
def test_family_has_the_logits_of_its_checkpoint(tmp_path: Path, case: str) -> None:
    variant, changes = WITH_IMAGES.get(case, case), {}
    if case in WITH_IMAGES:
        changes = {"architecture": case, "rope__dimension_sections": [1, 1, 1, 0]}
    model = saved(tmp_path / "checkpoint", variant, **CASES[variant])
    write_gguf(model, tmp_path / "model.gguf", **changes)
    (token_ids,) = model.prompts(40)
    expected = model.logits(token_ids)[19:]
    with opened(tmp_path / "model.gguf") as engine:
        torch.testing.assert_close(engine.score(token_ids, 20), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("experts", "groups"), [(8, (1, 1)), (256, (8, 4))])
def test_groups_of_experts_that_older_files_lack(
    tmp_path: Path, experts: int, groups: tuple[int, int]
) -> None:
    model = saved(tmp_path / "checkpoint", "deepseek_v3_moe", num_experts_per_tok=1)
    counts = {"expert_count": experts, "expert_group_count": None, "expert_group_used_count": None}
    write_gguf(model, tmp_path / "model.gguf", **counts)
    found = gguf_config(open_gguf(tmp_path / "model.gguf")).experts
    assert found is not None
    assert (found.n_group, found.topk_group) == groups


TYPES = list(GGUF_TYPES.values())
WIDE = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
QUANTISED: dict[str, tuple[str, dict[str, Any], Sequence[str]]] = {
    "every type": ("one_kv_head", WIDE | {"head_dim": 64}, [found.name for found in TYPES]),
    "experts": ("qwen3_moe", WIDE | {"moe_intermediate_size": 256}, ["Q4_K", "NVFP4", "Q6_K"]),
    "gpt-oss": ("gpt_oss_mxfp4", {}, ["MXFP4"]),
    "latent": (
        "deepseek_v3_moe",
        WIDE | {"num_key_value_heads": 4},
        ["Q5_1", "Q3_K", "F16", "BF16"],
    ),
    "fused": ("phi3", WIDE | {"head_dim": 16}, ["IQ4_XS", "Q2_K"]),
    "norms": ("gemma3", WIDE | {"num_hidden_layers": 6}, ["Q5_K", "Q8_0"]),
}
"""Variant and sizes of a model, and the types that its matrices have in turn."""


class Encoded:
    """Encodes matrices with random codes; scales keep the size of the numbers."""

    def __init__(self, types: Sequence[str]) -> None:
        self.types = itertools.cycle(types)
        self.numbers: dict[str, Array] = {}

    def __call__(self, name: str, weight: Array) -> tuple[Array, GGMLQuantizationType]:
        kind = GGMLQuantizationType[next(self.types)]
        data, found = gguf.quantize(weight, GGMLQuantizationType.F32), GGUF_TYPES.get(kind)
        if found is None:
            data = gguf.quantize(weight, kind)
        elif weight.shape[-1] % found.elements == 0 and "norm" not in name:
            rows, blocks = weight.shape[:-1], weight.shape[-1] // found.elements
            unscaled = random_blocks(found, rows, blocks, len(self.numbers))
            size = gguf.dequantize(unscaled.reshape(*rows, -1), kind).std()
            scale = 2.0 ** np.round(np.log2(weight.std() / size))
            data = random_blocks(found, rows, blocks, len(self.numbers), scale)
            data = data.reshape(*rows, -1)
        else:
            kind = GGMLQuantizationType.F32
        self.numbers[name] = gguf.dequantize(data, kind)
        return data, kind

    def decoded(self, name: str, weight: Array) -> tuple[Array, GGMLQuantizationType]:
        return self.numbers[name], GGMLQuantizationType.F32


@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_weights_are_the_dequantised_ones(tmp_path: Path, case: str) -> None:
    variant, changes, types = QUANTISED[case]
    model = saved(tmp_path / "checkpoint", variant, **(CASES.get(variant, {}) | changes))
    encoded = Encoded(types)
    write_gguf(model, tmp_path / "quantised.gguf", encoded)
    write_gguf(model, tmp_path / "plain.gguf", encoded.decoded)
    config = gguf_config(open_gguf(tmp_path / "plain.gguf"))
    with GGUFReader(open_gguf(tmp_path / "quantised.gguf"), config) as reader:
        stored = {header.dtype for header in reader.headers().values()} - {"F32"}
        assert stored == set(types)
        assert sum(reader.formats().values()) > 0
    (token_ids,) = model.prompts(20)
    scores = []
    for name in ("quantised", "plain"):
        with opened(tmp_path / f"{name}.gguf", dtype="float32") as engine:
            scores.append(engine.score(token_ids, 10))
    assert scores[0].std() > 0.1
    assert torch.equal(*scores)


@pytest.mark.parametrize("variant", ["llama3_rope", "gpt_oss", "gemma2", "phi3"])
def test_ranks_read_their_parts(tmp_path: Path, variant: str) -> None:
    changes = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 64}
    model = saved(tmp_path / "checkpoint", variant, **(CASES[variant] | changes))
    write_gguf(model, tmp_path / "model.gguf")
    config = read_config(model.directory)
    assert isinstance(config, ModelConfig)
    for rank in range(2):
        part = replace(config, shard=(rank, 2))
        with (
            CheckpointReader(model.directory) as theirs,
            GGUFReader(open_gguf(tmp_path / "model.gguf"), part) as ours,
        ):
            expected = dict(iter_weights(theirs, part, torch.float32))
            found = dict(iter_weights(ours, part, torch.float32))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_scale_of_a_tensor(tmp_path: Path) -> None:
    """NVFP4 has a second scale, as a tensor of its own."""
    model = saved(tmp_path / "checkpoint", "base", **WIDE)
    encoded = Encoded(["NVFP4"])
    name = "blk.0.ffn_up"
    extra = {f"{name}.scale": np.array([0.25], np.float32), f"{name}.input_scale": np.ones(1)}
    write_gguf(model, tmp_path / "model.gguf", encoded, extra=extra)
    config = gguf_config(open_gguf(tmp_path / "model.gguf"))
    theirs = "model.layers.0.mlp.up_proj.weight"
    with GGUFReader(open_gguf(tmp_path / "model.gguf"), config) as reader:
        found = reader.tensor(theirs)
        assert f"{name}.scale" not in " ".join(reader.headers())
    assert torch.equal(found, 0.25 * torch.from_numpy(encoded.numbers[theirs]))


def test_llama3_scaling_is_recognised(tmp_path: Path) -> None:
    """By its factors, which are all that a file has."""
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
    model = saved(tmp_path / "checkpoint", "base", rope_parameters=rope)
    write_gguf(model, tmp_path / "model.gguf")
    config = read_config(model.directory)
    assert isinstance(config, ModelConfig)
    assert gguf_config(open_gguf(tmp_path / "model.gguf")).rope_scaling == config.rope_scaling


@pytest.mark.parametrize("stored_as", TYPES, ids=lambda found: found.name)
def test_type_has_the_numbers_of_gguf(stored_as: GGUFType) -> None:
    theirs = GGMLQuantizationType(stored_as.number)
    assert theirs.name == stored_as.name
    assert GGML_QUANT_SIZES[theirs] == (stored_as.elements, stored_as.nbytes)
    blocks = random_blocks(stored_as, (2, 5), 3)
    expected = gguf.dequantize(blocks.reshape(2, 5, -1), theirs)
    decoded = stored_as.weight(torch.from_numpy(blocks)).decode()
    assert np.array_equal(decoded.numpy(), expected)
    doubled = stored_as.weight(torch.from_numpy(blocks), scale=2.0).decode()
    assert np.array_equal(doubled.numpy(), 2 * expected)


@given(data=st.data())
def test_part_is_the_part_of_the_whole(data: st.DataObject) -> None:
    stored_as = data.draw(st.sampled_from(TYPES))
    blocks = torch.from_numpy(random_blocks(stored_as, (2, 8), 3))
    columns = 3 * stored_as.elements
    start = data.draw(st.integers(0, columns - 1))
    part = Slice(1, start, data.draw(st.integers(1, columns - start)))
    rows = data.draw(st.sampled_from([Slice(0, 1, 6), HeadRows(0, 2, 4, 4, interleaved=True)]))
    whole = stored_as.weight(blocks).decode()
    for stored, numbers, selection in (
        *((blocks[1], whole[1], s) for s in (None, rows, part, Narrowed(rows, part))),
        (blocks, whole, Narrowed(ExpertRows(1, 2, 3), part)),
    ):
        expected = numbers if selection is None else selection.read(numbers)
        found = stored_as.read(stored, selection, 1.0).decode()
        assert torch.equal(found, expected)
    width = columns // data.draw(st.sampled_from([1, 3, columns // 16, columns // 8, columns]))
    order = torch.tensor(data.draw(st.permutations(range(columns // width))))
    inputs = (order[:, None] * width + torch.arange(width)).flatten()
    found = stored_as.read(blocks[1], part, 1.0, inputs).decode()
    assert torch.equal(found, part.read(whole[1][:, inputs]))
