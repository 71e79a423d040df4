"""Ranks of every family together compute what the whole model computes, in all kinds of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from stepgraph.runtime.execution.inputs import MaskState
from stepgraph.runtime.execution.step_key import StepKey
from stepgraph.runtime.kernels import have_compiler, load_cpu_ops
from stepgraph.runtime.kernels.cpu.sampling import fused_greedy, fused_most_likely
from stepgraph.runtime.kernels.ops.layer_plan import Shard
from stepgraph.runtime.kernels.weights import FP8, INT8, WeightStorage, dequantise
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import fused_layout
from stepgraph.runtime.models.sharding import ShardedVocabulary
from stepgraph.runtime.sampling.reference_sampler import sample_greedy
from stepgraph.runtime.sampling_params import SamplingParams

from ..rigs.hybrid_models import HYBRID_VARIANTS
from ..rigs.sharding_rig import (
    COLUMNS,
    PROMPTS,
    RankSteps,
    ThreadCollectives,
    on_ranks,
    plain_kernels,
    rank_steps,
    sharded_runs,
    stored_weights,
    tiny_config,
    whole_run,
    write_checkpoint,
)
from ..rigs.tiny_models import VARIANTS

REPEATED = (  # of parts that others have
    *("micro", "one_kv_head", "sharded", "text", "llama3_rope", "linear_rope", "qwen3_yarn"),
    *("mistral_full", "smollm3_listed", "phi3_quarter", "granite4_nope", "glm", "glm4_dynamic"),
    *("llama_longrope", "llama_dynamic", "phi3_longrope", "olmo3_lengths", "mixtral_all"),
    *("qwen3_moe_sliding", "gpt_oss_odd", "deepseek_v2_greedy", "deepseek_v3_scaled"),
    *("qwen3_next_odd", "qwen3_5_moe", "olmo_hybrid_rotated", "lfm2_moe_unbiased"),
)
GATED_DELTA_NET = ("qwen3_next", "qwen3_5", "olmo_hybrid")
BY_LAYER = ("gemma3n", "gemma4")
"""Heads differ by layer: `test_gemma_layers.py` splits these."""
SPLIT = [  # other recurrences are not
    variant
    for variant in VARIANTS
    if variant not in HYBRID_VARIANTS or variant.startswith(GATED_DELTA_NET)
    if not variant.startswith(BY_LAYER)
]
QUICK = [variant for variant in SPLIT if variant not in REPEATED]
CASES = [  # quick: two or four ranks by turns
    (variant, ranks)
    if variant in QUICK and QUICK.index(variant) % 2 == (ranks == 4)
    else pytest.param(variant, ranks, marks=pytest.mark.slow)
    for variant in SPLIT
    for ranks in (2, 4)
]


@pytest.mark.parametrize(("variant", "ranks"), CASES)
def test_ranks_compute_what_the_whole_model_computes(
    variant: str, ranks: int, tmp_path: Path
) -> None:
    """Prompts and decode steps, from the checkpoint of which each rank loads its part."""
    config = tiny_config(variant, ranks)
    write_checkpoint(config, tmp_path)
    expected = whole_run(config, tmp_path)
    runs = sharded_runs(config, tmp_path, ranks)
    for run in runs:
        for logits, wanted in zip(run.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
        assert torch.equal(run.tokens, expected.tokens)
        assert all(torch.equal(a, b) for a, b in zip(run.logits, runs[0].logits, strict=True))
    assert len(set(expected.tokens.flatten().tolist())) > 4, "a model that repeats itself"


# Samplers, launches, kernels, dtypes --------------------------------------------------------------


SAMPLED = SamplingParams(temperature=1.3, top_p=0.9, top_k=40, presence_penalty=0.5)
MostLikely = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")


def reference_most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top = logits.softmax(-1).max(-1)
    return top.indices, top.values


@pytest.fixture
def base(tmp_path: Path) -> ModelConfig:
    """A model whose checkpoint is in `tmp_path`."""
    config = tiny_config("base", 4)
    write_checkpoint(config, tmp_path)
    return config


@pytest.mark.parametrize("params", [None, SAMPLED])
def test_decode_and_verify_steps(
    base: ModelConfig, tmp_path: Path, params: SamplingParams | None
) -> None:
    drafts = [[5, 9]] * len(PROMPTS)

    def run(steps: RankSteps) -> list[torch.Tensor]:
        steps.prefill()
        decoded = torch.stack([steps.decode().tokens.clone() for _ in range(3)])
        verified = steps.verify(drafts)
        return [decoded, verified.tokens.clone(), steps.full_logits(verified)]

    with torch.no_grad():
        weights = stored_weights(base, tmp_path)
        tokens, verified, logits = run(RankSteps(base, weights, plain_kernels(), params=params))
    for found in on_ranks(2, lambda group: run(rank_steps(base, tmp_path, group, params=params))):
        assert torch.equal(found[0], tokens)
        assert torch.equal(found[1], verified)
        torch.testing.assert_close(found[2], logits, rtol=0, atol=1e-4)


SPECIAL = st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, 1.0, 2.0, 2.0])


@pytest.mark.parametrize(
    "sample", [sample_greedy, pytest.param(fused_greedy, marks=needs_compiler)]
)
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_greedy_tokens_of_any_logits(
    sample: Callable[[torch.Tensor], torch.Tensor], data: st.DataObject, ranks: int, rows: int
) -> None:
    """NaN and infinities, equal logits, and parts of any size."""
    if sample is fused_greedy:
        load_cpu_ops()
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=ranks, max_size=ranks))
    starts = [sum(sizes[:rank]) for rank in range(ranks)]
    row = st.lists(SPECIAL, min_size=sum(sizes), max_size=sum(sizes))
    logits = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    expected = sample_greedy(logits)

    def greedy(group: ThreadCollectives) -> tuple[torch.Tensor, torch.Tensor]:
        own = range(starts[group.rank], starts[group.rank] + sizes[group.rank])
        shard = Shard(group.rank, ranks, own, tuple(sizes))
        vocabulary = ShardedVocabulary(shard, group)
        part = logits[:, own.start : own.stop]
        return vocabulary.greedy(part, sample), vocabulary.gather(part)

    for tokens, gathered in on_ranks(ranks, greedy):
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(gathered, logits, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "own", [reference_most_likely, pytest.param(fused_most_likely, marks=needs_compiler)]
)
def test_most_likely_tokens_and_their_probabilities(own: MostLikely) -> None:
    """Of parts of different sizes; the likeliest token is on any rank."""
    if own is fused_most_likely:
        load_cpu_ops()
    sizes, starts = (5, 31, 1), (0, 5, 36)
    logits = 6 * torch.randn(40, sum(sizes), generator=torch.Generator().manual_seed(2))
    logits[:2] -= 300.0
    expected = logits.softmax(-1).max(-1)

    def find(group: ThreadCollectives) -> tuple[torch.Tensor, torch.Tensor]:
        first = starts[group.rank]
        held = range(first, first + sizes[group.rank])
        vocabulary = ShardedVocabulary(Shard(group.rank, 3, held, sizes), group)
        return vocabulary.most_likely(logits[:, first : held.stop], own)

    for ids, probabilities in on_ranks(3, find):
        assert ids.equal(expected.indices)
        torch.testing.assert_close(probabilities, expected.values, rtol=1e-5, atol=1e-6)


class FollowedPrefill:
    """In place of a drafter's step: keeps the tokens after the chunks."""

    tokens = torch.empty(0)

    def after_prefill(self, inputs: object, key: StepKey, tokens: torch.Tensor, *_: object) -> None:
        self.tokens = tokens


def test_drafters_follow_masked_prompts_by_the_tokens_of_all_ranks(
    base: ModelConfig, tmp_path: Path
) -> None:
    """Where masks come between the parts of a step, the drafter goes by the largest logits."""
    expected = whole_run(base, tmp_path).tokens[0]

    def follow(group: ThreadCollectives) -> torch.Tensor:
        steps = rank_steps(base, tmp_path, group)
        lanes, vocabulary = len(PROMPTS), steps.decoder.vocabulary
        assert vocabulary is not None
        steps.functions.state = dataclasses.replace(
            steps.state,
            masks=MaskState(
                torch.full((lanes + 1, -(-base.vocab_size // 32)), -1, dtype=torch.int32),
                torch.zeros(lanes, len(vocabulary.shard.vocab)),
                *torch.zeros(2, lanes, dtype=torch.int64),
            ),
        )
        steps.functions._drafting = followed = FollowedPrefill()  # type: ignore[assignment]
        key = StepKey("prefill", steps.tokens, COLUMNS, False, masked=True)
        steps.functions.bind(key)()
        return followed.tokens

    for tokens in on_ranks(2, follow):
        assert tokens.equal(expected)


def test_greedy_steps_do_not_gather_logits(base: ModelConfig, tmp_path: Path) -> None:
    """A decode step: the embedding, two sums a layer, and the largest logits."""

    def calls(group: ThreadCollectives) -> list[tuple[str, tuple[int, ...]]]:
        steps = rank_steps(base, tmp_path, group)
        steps.prefill()
        group.calls.clear()
        steps.decode()
        return group.calls

    rows, hidden = len(PROMPTS), base.hidden_size
    expected = [("all_reduce", (rows, hidden))] * (1 + 2 * base.num_layers)
    assert on_ranks(2, calls) == [[*expected, ("gather", (rows, 4))]] * 2


@pytest.mark.parametrize("variant", ["base", "olmo2", "deepseek_v3_moe"])
def test_bfloat16_is_as_near_to_float32_as_the_whole_model_is(variant: str, tmp_path: Path) -> None:
    config = tiny_config(variant, 2)
    write_checkpoint(config, tmp_path)
    exact = whole_run(config, tmp_path).logits[0]
    whole = whole_run(config, tmp_path, dtype=torch.bfloat16).logits[0].float() - exact
    for run in sharded_runs(config, tmp_path, 2, dtype=torch.bfloat16):
        error = run.logits[0].float() - exact
        assert error.square().mean().sqrt() < 1.5 * whole.square().mean().sqrt()


@pytest.mark.parametrize(
    ("variant", "storage"),
    [("base", INT8), ("wide", FP8), ("mixtral", INT8), ("phi3", FP8), ("gpt_oss", INT8)],
)
def test_quantised_weights_of_ranks(variant: str, storage: WeightStorage, tmp_path: Path) -> None:
    """Each rank quantises its part of a weight; the parts together make the weight below."""
    config = tiny_config(variant, 2)
    write_checkpoint(config, tmp_path)

    def rounded() -> Iterator[tuple[str, torch.Tensor]]:
        parts = [
            dict(stored_weights(dataclasses.replace(config, shard=(rank, 2)), tmp_path))
            for rank in range(2)
        ]
        layouts = [fused_layout(dataclasses.replace(config, shard=(r, 2))) for r in range(2)]
        for name, whole in stored_weights(config, tmp_path):
            for part, layout in zip(parts, layouts, strict=True):
                if not layout[name].is_matrix:
                    continue
                values = dequantise(*storage.quantise(part[name]))
                cut = layout[name].cut
                if cut is None:
                    whole.copy_(values)
                    continue
                rows = torch.cat([torch.arange(r.start, r.stop) for r in cut.rows])
                columns = cut.columns or range(whole.shape[1])
                whole[rows, columns.start : columns.stop] = values
            yield name, whole

    with torch.no_grad():
        expected = RankSteps(config, rounded(), plain_kernels()).run()
    for run in sharded_runs(config, tmp_path, 2, plain_kernels(storage)):
        torch.testing.assert_close(run.logits, expected.logits, rtol=0, atol=2e-4)
        assert torch.equal(run.tokens, expected.tokens)
