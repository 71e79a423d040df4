"""`EngineConfig.batch_invariant`: the bits of logits do not depend on what else is in a step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from stepgraph.cache.arena import Storage
from stepgraph.runtime import ConfigError, RequestOutput, SamplingParams
from stepgraph.runtime.kernels import (
    KernelChoice,
    have_compiler,
    limit_threads,
    select_kernels,
)
from stepgraph.runtime.kernels.weights import INT8, MODEL, WeightStorage

from ..rigs.engine_rig import Open
from ..rigs.invariance_rig import Forced, decode_steps, random_steps, same_bits
from ..rigs.tiny_models import Tiny

pytestmark = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32
LENGTHS = (290, 30, 61)
"""Of sequences: attention adds up chunks of 128 positions, windows are of about 10."""
SHORT = (40, 9, 21)
"""For models of which many operations run token by token."""


@pytest.fixture(autouse=True)
def threads_are_restored() -> Iterator[None]:
    yield
    limit_threads(1)


def count_unequal(model: Forced, lengths: Sequence[int], seeds: Sequence[int]) -> int:
    """Tokens of which a step of some shape gives other logits than decoding a row alone."""
    alone = [model.run(decode_steps(row, n))[row] for row, n in enumerate(lengths)]
    unequal = 0
    for seed in seeds:
        limit_threads(1 + seed % 2)
        found = model.run(random_steps(lengths, seed))
        for row, expected in zip(found, alone, strict=True):
            assert row.shape == expected.shape
            if not same_bits(row, expected):
                unequal += int((row != expected).any(-1).sum())
    return unequal


class Case(NamedTuple):
    variant: str
    dtype: torch.dtype
    storage: Storage = "model"
    weights: WeightStorage = MODEL
    lengths: tuple[int, ...] = LENGTHS


CASES = [
    Case("base", BF16),
    Case("odd", F32),
    Case("odd", BF16, "fp8", INT8),
    Case("gemma2", F32),
    Case("gemma3", BF16, "int8"),
    Case("qwen3_moe", F32, "int8", INT8),
    Case("gpt_oss", BF16),
    Case("glm4_dynamic", BF16, lengths=(80, 30, 61)),
    Case("deepseek_v3_moe", F32, lengths=SHORT),
    Case("deepseek_v2_moe", BF16, "int8", INT8, SHORT),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:4])))
def test_a_token_has_the_same_logits_in_any_step(tiny: Tiny, case: Case) -> None:
    """Decode, verify and prefill steps of random rows, counts, buckets and threads."""
    kernels = select_kernels(CPU, "eager", case.dtype, case.weights, "native")
    kernels = dataclasses.replace(kernels, batch_invariant=True)
    directory = tiny(case.variant).directory
    model = Forced(directory, case.dtype, kernels, case.lengths, storage=case.storage)
    assert count_unequal(model, case.lengths, range(3)) == 0
    model.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variant", "dtype", "choice"),
    [("base", F32, "torch"), ("glm4_dynamic", F32, "native"), ("deepseek_v3", F32, "native")],
)
def test_without_the_option_some_logits_depend_on_the_step(
    tiny: Tiny, variant: str, dtype: torch.dtype, choice: KernelChoice
) -> None:
    """PyTorch's products, sums and vectorised functions: docs/batch-invariance.md."""
    kernels = select_kernels(CPU, "eager", dtype, MODEL, choice)
    model = Forced(tiny(variant).directory, dtype, kernels, (90, 30, 61))
    assert count_unequal(model, (90, 30, 61), range(2)) > 0
    model.close()


# Engines -----------------------------------------------------------------------------------------

PARAMS = SamplingParams(
    max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=3
)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True, logprobs=5)
COUNTED = ("preemptions", "swapped_in", "hit_tokens")
"""What must have happened to the engines, in their statistics."""
SHAPES: list[dict[str, Any]] = [
    {"max_num_seqs": 8, "prefill_chunk": 5},
    {"max_num_seqs": 2, "prefill_chunk": 64, "block_size": 4, "threads": 2},
    {"max_num_seqs": 6, "prefill_chunk": 16, "block_size": 4},
    {"max_num_seqs": 6, "prefill_chunk": 16, "block_size": 4, "host_cache_bytes": 1 << 20},
    {"max_num_seqs": 5, "buckets": (3,)},
]


def bits(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities, which are floats that a comparison does not round."""
    return [
        (output.prompt_logprobs, [(c.token_ids, c.logprobs) for c in output.completions])
        for output in outputs
    ]


@pytest.mark.filterwarnings("ignore:no native decoder layers")
@pytest.mark.parametrize(
    ("variant", "dtype", "kv_dtype", "few_blocks", "shapes"),
    [
        ("odd", "bfloat16", "auto", 30, SHAPES),
        ("gemma2", "float32", "int8", 28, SHAPES[3:]),
        pytest.param("deepseek_v3", "float32", "auto", 30, SHAPES[3:4], marks=pytest.mark.slow),
    ],
    ids=["odd", "gemma2", "deepseek_v3"],
)
def test_log_probabilities_do_not_depend_on_the_engine(
    open_engine: Open,
    tiny: Tiny,
    variant: str,
    dtype: str,
    kv_dtype: str,
    few_blocks: int,
    shapes: list[dict[str, Any]],
) -> None:
    """Neighbours, chunks, buckets, preemption by swapping and recomputing, and cached prefixes."""
    settings = {"batch_invariant": True, "mode": "auto", "dtype": dtype, "kv_dtype": kv_dtype}
    model = tiny(variant)
    shared = model.prompts(24, seed=5)[0]
    prompts = [*model.prompts(1, 9, 50, 33), *(shared + p for p in model.prompts(3, 11, seed=6))]
    params = [PARAMS, SAMPLED, PARAMS, PARAMS, SAMPLED, PARAMS]
    engine = open_engine(variant, max_num_seqs=1, prefix_cache=False, **settings)
    alone = bits([engine.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)])
    engine.close()
    counts: Counter[str] = Counter()
    for shape in shapes:
        few = {"num_blocks": few_blocks} if "block_size" in shape else {}
        engine = open_engine(variant, **(settings | shape | few))
        assert bits(engine.generate(prompts, params)) == alone
        assert bits(engine.generate(prompts[::-1], params[::-1])) == alone[::-1]  # by prefixes
        stats = engine.stats()
        counts.update({name: (stats | stats["cache"])[name] for name in COUNTED})
        engine.check_integrity()
        engine.close()
    assert all(counts[name] > 0 for name in COUNTED), counts


# What is refused ---------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("base", {"kernels": "torch"}),
    ("base", {"dtype": "float16"}),
    ("base", {"model_impl": "transformers"}),
    ("deepseek_v3", {"mode": "compile"}),
    ("base", {"mode": "graph"}),
    ("nemotron_h", {}),
]


@pytest.mark.parametrize(("variant", "settings"), REFUSED, ids=str)
def test_what_cannot_be_invariant_is_refused(
    open_engine: Open, variant: str, settings: dict[str, Any]
) -> None:
    field = "mode" if settings.get("mode") == "graph" else "batch_invariant"
    with pytest.raises(ConfigError, check=lambda error: error.field == field):
        open_engine(variant, **({"mode": "auto", "batch_invariant": True} | settings))
