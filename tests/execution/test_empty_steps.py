"""Steps without rows or tokens, which engines run while they start, on every kind of code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stepgraph.cache.arena import SCALE_BYTES, Arena, Storage
from stepgraph.cache.spec import group_layers
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.kernels import have_compiler, load_cpu_ops, select_kernels
from stepgraph.runtime.kernels.choice import SamplerName
from stepgraph.runtime.kernels.ops.batch import RaggedBatch
from stepgraph.runtime.loading.checkpoint import CheckpointReader, read_config
from stepgraph.runtime.loading.drafter_source import find_drafter
from stepgraph.runtime.loading.loader import iter_weights
from stepgraph.runtime.models.decoder import Decoder, attention_specs
from stepgraph.runtime.models.drafters.drafter import FollowedTokens, NewestTokens
from stepgraph.runtime.sampling.samplers import SAMPLERS
from stepgraph.runtime.sampling.sampling_state import SamplingState

from ..rigs.drafter_rig import CPU, GROUPS, DrafterRig, load_target
from ..rigs.mtp_models import write as write_mtp
from ..rigs.tiny_models import VARIANTS, TinyModel
from ..speculation import test_block_drafter, test_eagle3

needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")
KERNELS = [pytest.param("compile", marks=needs_compiler), "eager"]
DEFAULT = ("base", "gemma2", "deepseek_v3", "qwen3_moe", "gpt_oss")
SHAPES = {"decode": (0, 1), "verify": (0, 3), "prefill": (0, None), "padded": (4, None)}
"""Rows, and tokens of each; None: ragged."""


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def empty_batch(rows: int, per_row: int | None, groups: int) -> RaggedBatch:
    """A batch without a token."""
    starts = None if per_row else integers(rows + 1)
    tables = torch.zeros(groups, 5, 8, dtype=torch.int32)
    places = integers(0), integers(groups, 0), integers(0), integers(rows)
    return RaggedBatch(*places, tables, 8, 8, per_row, starts)


@pytest.mark.parametrize("mode", KERNELS)
@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v in DEFAULT else pytest.mark.slow) for v in VARIANTS]
)
def test_empty_steps_of_models(tiny: Callable[[str], TinyModel], variant: str, mode: str) -> None:
    directory = tiny(variant).directory
    config, dtype = read_config(directory), torch.float32
    kernels = select_kernels(CPU, mode, dtype, "model")  # type: ignore[arg-type]
    storages: tuple[Storage, ...] = ("model", "int8")
    for storage in storages:
        element = dtype.itemsize if storage == "model" else 1
        groups = group_layers(attention_specs(config, element, SCALE_BYTES[storage]))
        model = Decoder(config, kernels, dtype, CPU, groups, storage)
        with CheckpointReader(directory) as reader:
            model.store(iter_weights(reader, config, dtype))
        arena = Arena(groups, 2, 8, dtype, CPU, storage).tensor
        for rows, per_row in SHAPES.values():
            with torch.inference_mode():
                hidden_TD = model(integers(0), arena, empty_batch(rows, per_row, len(groups)))
                logits_TV = model.logits(hidden_TD)
            assert hidden_TD.shape == (0, config.hidden_size)
            assert logits_TV.shape == (0, config.vocab_size)


@pytest.mark.parametrize("mode", KERNELS)
@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "dflash", "mimo", "deepseek_v3"])
def test_empty_steps_of_drafters(base: TinyModel, tmp_path: Path, kind: str, mode: str) -> None:
    directory, head = base.directory, tmp_path / "drafter"
    match kind:
        case "draft_model":
            head = directory
        case "eagle3":
            test_eagle3.write(head)
        case "dflash":
            test_block_drafter.write(head)
        case _:
            write_mtp(tmp_path, kind)
            directory = head = tmp_path
    target, kernels = load_target(directory, torch.float32, mode)
    if directory == head:
        found = find_drafter(head, target.config, target_directory=directory)
    else:
        found = find_drafter(head, target.config, kind)
    rig = DrafterRig(found, target, kernels)
    features = torch.zeros(0, rig.features) if rig.features else None
    batch = empty_batch(0, 1, GROUPS)
    tokens = FollowedTokens(integers(0), integers(0), features, batch)
    newest = NewestTokens(
        *(integers(0) for _ in range(3)), lambda _, count: empty_batch(0, count, GROUPS)
    )
    with torch.inference_mode():
        rig.drafter.follow(tokens, rig.arena)
        for count in (1, 3):
            drafts = rig.drafter.propose(tokens, newest, rig.arena, count)
            assert drafts.token_ids.shape == drafts.probabilities.shape == (0, count)
    rig.drafter.close()


@pytest.mark.parametrize("name", [pytest.param("cpu", marks=needs_compiler), "torch"])
def test_empty_steps_of_samplers(name: SamplerName) -> None:
    if name == "cpu":
        load_cpu_ops()
    sampler, logits_BV = SAMPLERS[name], torch.zeros(0, 97)
    lanes = SamplingState.allocate(2, 97, CPU), integers(0), integers(0)
    assert sampler.greedy(logits_BV).shape == (0,)
    outputs = [sampler.full(logits_BV, *lanes)]
    outputs += [sampler.drafted(logits_BV, *lanes, integers(0, n)) for n in (1, 4)]
    for output in outputs:
        assert output.tokens.shape == output.logprob.shape == (0,)
        assert output.top_ids.shape == output.top_logprobs.shape == (0, 20)


@needs_compiler
@pytest.mark.native_kernels
def test_empty_steps_start_an_engine_with_a_block_drafter(
    open_engine: Callable[..., Engine], base: TinyModel, tmp_path: Path
) -> None:
    directory, *_ = test_block_drafter.write(tmp_path / "drafter")
    speculation = {"method": "dflash", "model": str(directory), "num_speculative_tokens": 3}
    engine = open_engine("base", mode="compile", dtype="float32", speculation=speculation)
    assert engine.stats()["fallbacks"] == 0
    (prompt,) = base.prompts(9)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    assert [list(engine.generate([prompt], params)[0].token_ids)] == base.greedy([prompt], 6)
