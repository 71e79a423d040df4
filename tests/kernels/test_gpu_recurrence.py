"""Triton kernels of recurrences and convolutions do what the reference operators do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepgraph.cache.spec import RowState, StatePart
from stepgraph.runtime.kernels import select_kernels
from stepgraph.runtime.kernels.ops.batch import RaggedBatch
from stepgraph.runtime.kernels.ops.convolution import causal_conv
from stepgraph.runtime.kernels.ops.delta_rule import DeltaRule
from stepgraph.runtime.kernels.ops.operation import Binding, LayerStep
from stepgraph.runtime.kernels.ops.parameter import Parameter
from stepgraph.runtime.kernels.ops.recurrence import recurrence, recurrent_state
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton.causal_conv import triton_causal_conv
from stepgraph.runtime.kernels.triton.recurrence import triton_delta_rule, triton_recurrence

from ..rigs.gpu_references import DEVICE
from ..rigs.row_states import Span, StateRig

Inputs = tuple[Tensor | None, ...]
Operator = Callable[..., Tensor]
Step = tuple[list[Span], int | None]
"""Tokens of rows, and the tokens per row of a uniform step, from which those of a row may be left
out. A row that goes back computes rejected drafts again."""

LENGTH = 48
STEPS: list[Step] = [
    ([(0, 0, 1)], None),
    ([(0, 1, 1)], 1),
    ([(0, 2, 20)], None),
    ([(0, 22, 1), (1, 0, 1)], 1),
    ([(0, 23, 4), (1, 1, 2)], 4),
    ([(0, 25, 3), (1, 2, 4)], 4),
    ([(1, 6, 27), (0, 28, 3)], None),
    ([(0, 31, 4), (1, 33, 1)], 4),
    ([(0, 33, 1)], 1),
    ([(0, 34, 4), (1, 34, 4)], 4),
    ([(0, 38, 10), (1, 35, 1)], None),
]
ONE_BY_ONE: list[Step] = [([(0, at, 1)], 1) for at in range(19)]
CHUNKS: list[Step] = [([(0, 0, 7)], None), ([(0, 7, 4)], 4), ([(0, 11, 8)], None)]


def recurrent_inputs(
    seed: int, groups: int, heads: int, key: int, value: int, decays: int, delta: bool
) -> Inputs:
    """q, k, v, g and beta of a sequence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(LENGTH, *shape, generator=generator).to(DEVICE)

    q, k = normal(groups, key), F.normalize(normal(groups, key), dim=-1)
    v, beta = normal(heads, value), normal(heads).sigmoid()
    g = -4 * normal(heads, decays).sigmoid()
    g[20] = -300.0  # after which nothing of the state is left
    return q, k, v, g, beta if delta else None


def state_rig(state: RowState, block_size: int, itemsize: int = 4) -> StateRig:
    """Memory for two rows, the state of another operation first; equal in every call."""
    other = RowState((StatePart((3,), "float32"),), (StatePart((5,), "float32"),))
    return StateRig(
        [other, state], rows=2, columns=LENGTH // block_size + 2, block_size=block_size,
        itemsize=itemsize, generator=torch.Generator().manual_seed(1), device=DEVICE,
    )  # fmt: skip


def run(
    operator: Operator, rig: StateRig, steps: Iterable[Step], rows: list[Inputs],
    constants: tuple[Any, ...] = (),
) -> list[Tensor]:  # fmt: skip
    """Results of steps over the inputs of two rows; inputs of padding are not finite."""
    results = []
    for spans, tokens_per_row in steps:
        batch = rig.batch(
            spans, tokens_per_row=tokens_per_row, lanes=3,
            size=0 if tokens_per_row else sum(count for *_, count in spans) + 2,
        )  # fmt: skip
        results.append(operator(*_gathered(batch, spans, rows), *constants, batch, rig.places[1]))
        rig.advance(spans, decodes=tokens_per_row is not None)
    return results


def _gathered(batch: RaggedBatch, spans: list[Span], rows: list[Inputs]) -> Iterable[Tensor | None]:
    width = batch.tokens_per_row
    for parts in zip(*rows, strict=True):
        if parts[0] is None:
            yield None
            continue
        found = torch.full((len(batch.positions), *parts[0].shape[1:]), torch.nan, device=DEVICE)
        found = found.to(parts[0].dtype)
        at = 0
        for row, start, count in spans:
            found[at : at + count] = parts[row][start : start + count]
            at += width or count
        yield found


def by_position(results: list[Tensor], steps: Iterable[Step]) -> Tensor:
    """Results of row 0, alone in its steps, in the order of its tokens."""
    return torch.cat(
        [found[: spans[0][2]] for found, (spans, _) in zip(results, steps, strict=True)]
    )


def memory(rig: StateRig) -> tuple[Tensor, Tensor]:
    """All that is kept, as numbers."""
    return rig.states.snapshots.view(torch.float32), rig.states.inputs.view(torch.float32)


SHAPES = [  # key heads, value heads, K, V, decays, delta rule
    (1, 2, 8, 6, 1, True),
    (2, 2, 20, 6, 20, True),
    (1, 2, 16, 33, 1, False),
    (1, 3, 5, 1, 5, False),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("block_size", [1, 6, 16, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_recurrence_equals_the_reference(
    shape: tuple[int, int, int, int, int, bool], block_size: int, batch_invariant: bool
) -> None:
    """Results, and everything that is kept; some blocks have no place for it."""
    rows = [recurrent_inputs(seed, *shape) for seed in range(2)]
    operators = (partial(triton_recurrence, batch_invariant=batch_invariant), recurrence)
    rigs = [state_rig(recurrent_state(*shape[:5]), block_size) for _ in operators]
    for rig in rigs:
        rig.states.snapshot_tables[0, 20 // block_size] = 0
        rig.states.input_tables[1, 4 // block_size] = 0
    found, expected = (
        run(operator, rig, STEPS, rows) for operator, rig in zip(operators, rigs, strict=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    for kept, right in zip(memory(rigs[0]), memory(rigs[1]), strict=True):
        torch.testing.assert_close(kept, right, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_recurrence_has_the_same_bits_however_a_sequence_is_cut(
    shape: tuple[int, int, int, int, int, bool],
) -> None:
    rows = [recurrent_inputs(0, *shape)]
    state = recurrent_state(*shape[:5])
    operator = partial(triton_recurrence, batch_invariant=True)
    results = [
        by_position(run(operator, state_rig(state, 4), steps, rows), steps)
        for steps in (ONE_BY_ONE, CHUNKS)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_token_that_is_not_finite_does_not_reach_earlier_ones(batch_invariant: bool) -> None:
    rows = [recurrent_inputs(0, *SHAPES[0])]
    state = recurrent_state(*SHAPES[0][:5])
    steps: list[Step] = [([(0, 0, 5)], None), ([(0, 5, 4)], 4)]
    operator = partial(triton_recurrence, batch_invariant=batch_invariant)
    expected = run(operator, state_rig(state, 16), steps, rows)[1]
    for part in rows[0][:4]:
        assert part is not None
        part[7] = torch.nan
    found = run(operator, state_rig(state, 16), steps, rows)[1]
    assert torch.equal(found[:2], expected[:2])
    assert found[2:4].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("decays", [1, 8])
def test_gates_of_the_delta_rule_are_part_of_its_kernel(decays: int, dtype: torch.dtype) -> None:
    groups, heads, key, value, tokens = 2, 4, 8, 6, 3
    generator = torch.Generator().manual_seed(decays)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    weights = {"a_log": normal(heads), "dt_bias": 9 * normal(heads * decays)}
    operation = DeltaRule(
        name="delta_rule", key_heads=groups, key_dim=key, value_dim=value, beta_scale=2.0,
        **{name: Parameter(name, (name,), tuple(x.shape), torch.float32)
           for name, x in weights.items()},
    )  # fmt: skip
    features = 2 * groups * key + heads * value
    values = torch.cat((normal(tokens, features), 9 * normal(tokens, heads * (decays + 1))), 1)
    x, a, b = values.to(dtype).split((features, heads * decays, heads), 1)
    found = []
    for fused in (triton_delta_rule, None):
        rig = state_rig(operation.row_state, 4)
        kernels = select_kernels(DEVICE, "eager", dtype, kernels="torch")
        binding = Binding(
            module=lambda parameter, _: SimpleNamespace(weight=weights[parameter.name]),
            kernels=dataclasses.replace(kernels, delta_rule=fused),
            places=(), storage="model", row_place=rig.places[1],
        )  # fmt: skip
        batch = rig.batch([(0, 0, tokens)], tokens_per_row=tokens)
        step = LayerStep(x, x, (), batch)
        found.append(operation.bind(binding)((x, None, a, b), step)[0])
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(*found, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("block_size", "taps"), [(1, 4), (2, 3), (6, 4), (16, 2)])
def test_convolution_equals_the_reference(
    block_size: int, taps: int, silu: bool, dtype: torch.dtype
) -> None:
    generator, features = torch.Generator().manual_seed(taps), 10
    state = RowState((StatePart((taps - 1, features)),), (StatePart((features,)),))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    rows: list[Inputs] = [(normal(LENGTH, features),) for _ in range(2)]
    constants = normal(features, 1, taps), normal(features) if silu else None, silu
    rigs = [state_rig(state, block_size, dtype.itemsize) for _ in range(2)]
    for rig in rigs:
        rig.states.snapshot_tables[0, 20 // block_size] = 0
    found, expected = (
        run(operator, rig, STEPS, rows, constants)
        for operator, rig in zip((triton_causal_conv, causal_conv), rigs, strict=True)
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
    for name in ("snapshots", "inputs"):
        assert torch.equal(*(getattr(rig.states, name) for rig in rigs))
