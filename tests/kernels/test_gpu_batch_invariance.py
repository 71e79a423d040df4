"""`EngineConfig.batch_invariant` on the kernels for GPUs: the same bits in any step.

Without a CUDA device the kernels run in Triton's interpreter, which multiplies tiles as they are:
sums in another order have other bits there too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stepgraph.cache.arena import Storage
from stepgraph.runtime import ConfigError, EngineConfig
from stepgraph.runtime.engine.self_test import check_kernels
from stepgraph.runtime.kernels import LayerPlace, Routing
from stepgraph.runtime.kernels.weights import INT8, MODEL, WeightStorage
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.models.resolved_config import ResolvedConfig, check_batch_invariant
from stepgraph.runtime.tools.memory_report import resolve_absent
from torch import Tensor

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton import kernel_calls
from stepgraph.runtime.kernels.triton import prefill_attention as prefill_module
from stepgraph.runtime.kernels.triton import stack as stack_module
from stepgraph.runtime.kernels.triton.backend import gpu_kernels
from stepgraph.runtime.kernels.triton.expert_routing import route
from stepgraph.runtime.kernels.triton.experts import experts
from stepgraph.runtime.kernels.triton.kernel_calls import (
    INTERPRETED,
    KernelCall,
    record_kernel_calls,
)
from stepgraph.runtime.kernels.triton.prefill_attention import (
    any_tiling,
    prefill_attention,
    prefill_tiles,
)

from ..rigs.attention_cases import Case, make_case
from ..rigs.expert_cases import make_mixture
from ..rigs.gpu_references import reference_store
from ..rigs.invariance_rig import Forced, Step, decode_steps, random_steps, same_bits
from ..rigs.sharding_rig import tiny_config
from ..rigs.tiny_models import VARIANTS, Tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
TOLERANCE = {F32: 1e-5, F16: 4e-3, BF16: 3e-2}


# Operations --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (F32, {"window": 9, "sinks": True}),
        (BF16, {"chunk": 16, "softcap": 2.0}),
        (F16, {"storage": "int8"}),
    ],
    ids=str,
)
def test_attention_of_a_token_does_not_depend_on_the_others(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, form: dict[str, Any]
) -> None:
    """Alone as in a decode step, with the tokens before it, and with those that follow; parts of
    the context by a program each, or all by one."""
    case = make_case([(0, 37), (75, 3)], (4, 2, 34), 8, dtype, 2, **form).to(str(DEVICE))
    arena, place = case.arena.clone(), LayerPlace(0, case.layer)
    slots, storage = case.batch.slots[0], case.form.storage
    reference_store(case.k, case.v, arena, case.layer, slots, case.batch.block_size, storage)
    tiling = any_tiling(34, dtype, storage)._replace(split=64)

    def attend(one: Case) -> Tensor:
        tiles = prefill_tiles(one.batch.token_rows, len(one.batch.rows), tiling.tokens(2))
        return prefill_attention(one.q, arena, place, one.batch, one.form, tiles, tiling)

    valid, apart = case.valid_tokens, attend(case)
    monkeypatch.setattr(prefill_module, "_MOST_PART_BYTES", 10_000)
    with record_kernel_calls() as calls:
        attend(case)
    assert calls[-1].name == "_attention_kernel"  # which summed all parts
    together = attend(case)
    assert same_bits(apart[:valid], together[:valid])
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(
        together[:valid].double(), case.expected[:valid].double(), rtol=limit, atol=limit
    )
    for tokens in ([36], [5, 6, 7, 38], [*range(20, 37), 39]):
        assert same_bits(attend(case.select(tokens)), together[tokens])


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F32, marks=pytest.mark.slow)])
def test_experts_of_a_token_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    mixture = make_mixture(Routing(top_k=3, normalised=True), biases=True, dtype=dtype)
    op, tensors, _ = mixture.to(DEVICE)
    x = torch.randn(37, 12, device=DEVICE).to(dtype)

    def mix(rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        routed = route(op, rows, tensors, any_tokens=True)
        experts(op, rows, tensors, routed, rows, out, any_tokens=True)
        return out

    together = mix(x)
    for count in (1, 9):
        some = torch.randperm(37, device=DEVICE)[:count]
        assert same_bits(mix(x[some]), together[some])


# Steps -------------------------------------------------------------------------------------------

LENGTHS = (14, 5, 9)


def open_model(
    tiny: Tiny,
    variant: str,
    dtype: torch.dtype,
    storage: Storage = "model",
    weights: WeightStorage = MODEL,
    lengths: Sequence[int] = LENGTHS,
) -> Forced:
    kernels = gpu_kernels(weights, batch_invariant=True)
    directory = tiny(variant).directory
    return Forced(directory, dtype, kernels, lengths, storage=storage, device=DEVICE)


QUICK = "micro"


@pytest.mark.parametrize(
    "variant",
    [QUICK, *(pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS if v != QUICK)],
)
def test_a_token_has_the_same_logits_in_any_step(tiny: Tiny, variant: str) -> None:
    """The bits of decoding each row alone."""
    config = EngineConfig(device="cuda", batch_invariant=True)
    try:
        resolve_absent(config, read_config(tiny(variant).directory))
    except ConfigError as refused:
        pytest.skip(str(refused))
    rng = random.Random(variant)
    dtype = rng.choice((BF16, F32))
    storage: Storage = rng.choice(("model", "int8", "fp8"))
    model = open_model(tiny, variant, dtype, storage, rng.choice((MODEL, INT8)))
    alone = [model.run(decode_steps(row, n))[row] for row, n in enumerate(LENGTHS)]
    for seed in range(2):
        for found, expected in zip(model.run(random_steps(LENGTHS, seed)), alone, strict=True):
            assert found.shape == expected.shape
            assert same_bits(found, expected)
    model.close()


INDIVIDUAL = {"_tiles_kernel", "pairs_of_experts", "_best_of_chunks", "_pick_greedy"}
"""Kernels of numbers that no sum is made of, and of greedy sampling."""


def compiled_as(call: KernelCall) -> tuple[Any, ...]:
    """Return what Triton chooses the compiled code of a call by."""
    runtime = call.kernel.kwargs if INTERPRETED else {}
    unspecialised = runtime.get("do_not_specialize") or getattr(
        call.kernel, "do_not_specialize", ()
    )
    arguments: list[Any] = []
    for name, value in zip(call.kernel.arg_names, call.args, strict=False):
        if isinstance(value, Tensor):
            arguments.append((value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and not isinstance(value, bool):
            arguments.append(None if name in unspecialised else (value == 1, value % 16 == 0))
        else:
            arguments.append(type(value))
    return (call.name, tuple(sorted((k, str(v)) for k, v in call.options.items())), *arguments)


@pytest.mark.skipif(not INTERPRETED, reason="addresses of recorded calls are those of a CPU")
@pytest.mark.parametrize("variant", ["odd", "gemma3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(("processors", "split"), [(1, 1024), (132, 64)])
def test_every_step_runs_the_same_compiled_kernels(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, variant: str, processors: int, split: int
) -> None:
    """Decode, verify and prefill of any number of tokens: nothing but grids depends on it, and
    whether one program adds all parts of the context."""
    monkeypatch.setattr(kernel_calls, "MULTIPROCESSORS", processors)
    monkeypatch.setattr(stack_module, "SPLIT", split)
    monkeypatch.setattr(prefill_module, "_MOST_PART_BYTES", 8_000)
    model = open_model(tiny, variant, BF16, lengths=(130,) * 5)
    steps = [
        *(Step("decode", dict.fromkeys(range(rows), 1), size)
          for rows, size in ((1, 1), (1, 2), (2, 3), (4, 5), (5, 6))),
        *(Step("decode", {0: width, 1: 1}, 3) for width in (2, 5, 16)),
        *(Step("prefill", {0: count, 2: 1}, count + 1 + extra)
          for count, extra in ((1, 0), (6, 1), (15, 0), (30, 2))),
    ]  # fmt: skip
    expected: set[tuple[Any, ...]] = set()
    combining: list[set[tuple[Any, ...]]] = []
    for step in steps:
        with record_kernel_calls() as calls:
            model.run([step])
        found = {compiled_as(call) for call in calls if call.name not in INDIVIDUAL}
        combining.append({kernel for kernel in found if kernel[0] == "_combine_parts"})
        found -= combining[-1]
        expected = expected or found
        assert found == expected, step
    assert len({name for name, *_ in expected}) >= 5
    apart = [kernels for kernels in combining if kernels]
    assert all(kernels == apart[0] for kernels in apart)
    assert 0 < len(apart) < len(steps) if split == 64 else not apart
    model.close()


# Self-test ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_operations_pass_the_self_test() -> None:
    settings: dict[str, Any] = {
        **{"mode": "eager", "max_num_seqs": 2, "block_size": 4, "max_model_len": 40},
        **{"device": DEVICE.type, "prefill_chunk": 8},
    }
    model = tiny_config("base", 1)
    config = ResolvedConfig.resolve(EngineConfig(**settings), model)
    kernels = gpu_kernels(MODEL, batch_invariant=True)
    assert kernels.make_decode_step is None
    assert check_kernels(kernels, model, config, required=True, seed=3) is kernels


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("base", {"kernels": "torch"}),
        ("deepseek_v3", {}),
        ("glm4_dynamic", {}),
        ("base", {"tensor_parallel": 2}),
    ],
)
def test_what_cannot_be_invariant_on_cuda_is_refused(
    tiny: Tiny, variant: str, settings: dict[str, Any]
) -> None:
    config = EngineConfig(device="cuda", batch_invariant=True, **settings)
    model = read_config(tiny(variant).directory)
    with pytest.raises(ConfigError, check=lambda error: error.field == "batch_invariant"):
        check_batch_invariant(config, torch.device("cuda", 0), BF16, MODEL, model)
