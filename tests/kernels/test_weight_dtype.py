"""Engines over 8-bit weights: the same model as over the numbers that the weights stand for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.errors import CheckpointError, ConfigError
from stepgraph.runtime.kernels import (
    have_compiler,
)
from stepgraph.runtime.kernels.ops.packed_parts import int8_inputs
from stepgraph.runtime.kernels.weights import STORAGES, dequantise, quantise_int4
from transformers import AutoModelForCausalLM

from ..rigs.engine_rig import Open, opened
from ..rigs.tiny_models import Tiny, TinyModel, changed_checkpoint

VARIANTS = ["base", "odd", "qwen3", "mistral", "gemma2", "gemma3", "deepseek_v2", "deepseek_v3"]
NATIVE = ["wide", "odd", "gemma2"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def as_stored(model: TinyModel, storage: str) -> torch.nn.Module:
    """The transformers model, with the numbers that its weights are stored as in their place."""
    exact = model.reload(torch.float32)
    with torch.no_grad():
        for name, weight in exact.named_parameters():
            # What latent attention projects from the latent stays as it is.
            if weight.dim() == 2 and "kv_b_proj" not in name:
                weight.copy_(dequantise(*STORAGES[storage].quantise(weight)))
    return exact


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("variant", "storage", "kernels"),
    [
        *((variant, "int8", "torch") for variant in VARIANTS),
        *((variant, "fp8", "torch") for variant in ("wide", "odd", "gemma2", "deepseek_v3")),
        *((variant, storage, "native") for variant in NATIVE for storage in ("int8", "fp8")),
    ],
)
def test_logits_are_those_of_the_dequantised_model(
    open_engine: Open, tiny: Tiny, variant: str, storage: str, kernels: Any
) -> None:
    options: Any = {"weight_dtype": storage, "kernels": kernels, "block_size": 4}
    engine = open_engine(variant, prefill_chunk=32, **options)
    (token_ids,) = tiny(variant).prompts(90, seed=5)
    with torch.no_grad():
        expected = as_stored(tiny(variant), storage)(torch.tensor([token_ids])).logits[0]
    for prompt_len in (1, 50, 90):
        logits = engine.score(token_ids, prompt_len)
        torch.testing.assert_close(logits, expected[prompt_len - 1 :], rtol=0, atol=2e-4)
    error = (expected - tiny(variant).logits(token_ids)).abs().max()
    assert error > 1e-3, "nothing was quantised"
    if storage == "int8" and kernels == "native" and int8_inputs():
        rounded = open_engine(variant, activation_dtype="int8", **options).score(token_ids, 1)
        assert 1e-3 < (rounded - expected).norm() / expected.norm() < 0.1


@pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("variant", "storage"),
    [
        ("odd", "int8"),
        pytest.param("deepseek_v3", "int8", marks=pytest.mark.slow),
        pytest.param("wide", "fp8", marks=pytest.mark.slow),  # one torch.compile of a step
    ],
)
def test_compiled_tokens_are_the_eager_ones(
    open_engine: Open, tiny: Tiny, variant: str, storage: str
) -> None:
    prompts = tiny(variant).prompts(3, 17, 1, 50, 9)
    engines = [
        open_engine(variant, mode=mode, weight_dtype=storage) for mode in ("compile", "eager")
    ]
    ours, theirs = (
        [output.token_ids for output in engine.generate(prompts, GREEDY)] for engine in engines
    )
    assert ours == theirs
    assert len({token for tokens in ours for token in tokens}) > 15
    memory = engines[0].stats()["memory"]["weights"]
    assert memory["planned"] == memory["measured"]


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_a_weight_that_is_no_number_is_refused(tiny: Tiny, tmp_path: Path, storage: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    changed_checkpoint(tiny("base").directory, tmp_path, lambda t: t[name][3, 5].fill_(torch.nan))
    config = EngineConfig(device="cpu", mode="eager", max_num_seqs=1)
    with pytest.raises(CheckpointError):
        Engine.from_pretrained(tmp_path, dataclasses.replace(config, weight_dtype=storage))
    Engine.from_pretrained(tmp_path, config).close()


def test_int4_is_the_nearest_level_of_each_group() -> None:
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight[3] = 0.0
    found = quantise_int4(weight.float())
    low, high = (
        torch.stack([bound(part, -1).values for part in weight.split(32, -1)], -1)
        for bound in (torch.min, torch.max)
    )
    step = (high.clamp(min=0) - low.clamp(max=0)) / 15
    of_column = torch.arange(100) // 32
    error = (found.decode().double() - weight).abs()
    assert bool((error <= 0.5 * step[:, of_column] + 1e-3 * weight.abs().max()).all())
    assert torch.equal(found.decode()[3], torch.zeros(100))
    with pytest.raises(ValueError, match="row 0"):
        quantise_int4(torch.full((1, 32), 1e6))


@pytest.mark.parametrize("variant", ["wide_groups", "qwen3_moe"])
def test_an_engine_in_int4_has_the_logits_of_its_levels(tiny: Tiny, variant: str) -> None:
    model = tiny(variant)
    (token_ids,) = model.prompts(24)
    reference = AutoModelForCausalLM.from_pretrained(
        model.directory, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for name, tensor in reference.state_dict().items():
        if tensor.dim() > 1 and "embed" not in name and "lm_head" not in name:
            if name.endswith("gate.weight"):  # a router
                continue
            matrix = tensor.view(-1, tensor.shape[-1])
            matrix.copy_(quantise_int4(matrix).decode())
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0, 9:]
    settings: Any = {"weight_dtype": "int4", "kernels": "native"}
    with opened(model.directory, **settings) as engine:
        torch.testing.assert_close(engine.score(token_ids, 10), expected, rtol=0, atol=1e-3)
        rounds = int8_inputs()
    with pytest.raises(ConfigError), opened(model.directory, weight_dtype="int4", kernels="torch"):
        pass
    if not rounds:
        return
    with opened(model.directory, **settings, activation_dtype="int8") as engine:
        logits = engine.score(token_ids, 10)
    assert 1e-3 < (logits - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("settings", [{}, {"weight_dtype": "int8"}, {"kernels": "torch"}])
def test_int8_activations_need_native_products_over_codes(
    tiny: Tiny, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as error:
        opened(tiny("base").directory, **settings, activation_dtype="int8").__enter__()
    assert error.value.field == "activation_dtype"
