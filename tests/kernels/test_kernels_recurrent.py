"""Recurrences and convolutions in C++: the results of the reference, whatever the cuts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from stepgraph.cache.spec import RowState, StatePart
from stepgraph.runtime.kernels.cpu.build import load_cpu_ops
from stepgraph.runtime.kernels.cpu.recurrent import cpu_causal_conv, cpu_recurrence
from stepgraph.runtime.kernels.ops.batch import RaggedBatch
from stepgraph.runtime.kernels.ops.convolution import causal_conv
from stepgraph.runtime.kernels.ops.recurrence import recurrence, recurrent_state
from torch import Tensor
from torch.nn import functional as F

from ..rigs.row_states import StateRig
from ..rigs.thread_rig import kernel_threads

LENGTH, ROWS = 53, 3
CUTS = ([53], [1] * 53, [5, 1, 1, 30, 1, 1, 14], [16, 16, 16, 5], [17, 3, 1, 1, 31])
"""How a sequence is cut into steps."""
Run = Callable[[list[Tensor | None], RaggedBatch, StateRig], Tensor]
"""Computes a batch of a sequence's inputs with the memory of a rig."""


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    load_cpu_ops()


class Sizes(NamedTuple):
    key_heads: int
    heads: int
    key: int
    value: int
    delta: bool
    by_channel: bool = False


SIZES = (
    Sizes(1, 2, 128, 128, delta=True),  # GatedDeltaNet
    Sizes(2, 2, 24, 40, delta=True, by_channel=True),  # KDA
    Sizes(1, 4, 64, 32, delta=False),  # Mamba-2
    Sizes(1, 80, 16, 1, delta=False, by_channel=True),  # Mamba-1
    Sizes(2, 4, 8, 6, delta=True),
)


def sequence(sizes: Sizes, seed: int, length: int = LENGTH) -> list[Tensor | None]:
    """q, k, v, g and beta."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(length, *shape, generator=generator)

    q = normal(sizes.key_heads, sizes.key)
    k = F.normalize(normal(sizes.key_heads, sizes.key), dim=-1)
    v = normal(sizes.heads, sizes.value)
    decays = sizes.key if sizes.by_channel else 1
    g = -4 * torch.rand(length, sizes.heads, decays, generator=generator)
    beta = torch.rand(length, sizes.heads, generator=generator) if sizes.delta else None
    return [q, k, v, g, beta]


def exact(parts: list[Tensor | None], sizes: Sizes) -> Tensor:
    """The recurrence in float64, one token after the other."""
    q, k, v, g, beta = (None if part is None else part.double() for part in parts)
    assert q is not None
    assert k is not None
    assert v is not None
    assert g is not None
    state = torch.zeros(sizes.heads, sizes.key, sizes.value, dtype=torch.float64)
    out = []
    for t in range(len(v)):
        key, query = (
            part[t].repeat_interleave(sizes.heads // sizes.key_heads, 0) for part in (k, q)
        )
        state = g[t].exp()[:, :, None] * state
        update = v[t]
        if beta is not None:
            update = beta[t, :, None] * (v[t] - (key[:, :, None] * state).sum(1))
        state = state + key[:, :, None] * update[:, None]
        out.append((query[:, :, None] * state).sum(1))
    return torch.stack(out)


def in_steps(
    rig: StateRig, sequences: list[list[Tensor | None]], cuts: list[list[int]], run: Run
) -> list[Tensor]:
    """Run the sequences of some rows step by step; return their results."""
    done = [0] * len(cuts)
    results: list[list[Tensor]] = [[] for _ in cuts]
    for step in itertools.zip_longest(*cuts):
        spans = [(row, done[row], count) for row, count in enumerate(step) if count]
        decodes = all(count == 1 for _, _, count in spans)
        tokens = sum(count for _, _, count in spans)
        batch = rig.batch(
            spans, tokens_per_row=1 if decodes else None, lanes=len(cuts) + 1, size=tokens + 2
        )
        inputs: list[Tensor | None] = []
        for parts in zip(*sequences, strict=True):
            if parts[0] is None:
                inputs.append(None)
                continue
            own = torch.cat([parts[row][at : at + count] for row, at, count in spans])
            padding = len(batch.positions) - tokens
            inputs.append(torch.cat((own, own.new_full((padding, *own.shape[1:]), torch.nan))))
        out = run(inputs, batch, rig)
        rig.advance(spans, decodes=decodes)
        for row, _, count in spans:
            results[row].append(out[:count])
            out = out[count:]
            done[row] += count
    return [torch.cat(parts) for parts in results]


def rig_of(state: RowState, block_size: int, itemsize: int = 4, seed: int = 0) -> StateRig:
    before = RowState((StatePart((3,)),), (StatePart((5,)),))
    return StateRig(
        [before, state],
        rows=ROWS,
        columns=LENGTH // block_size + 2,
        block_size=block_size,
        itemsize=itemsize,
        generator=torch.Generator().manual_seed(seed),
    )


def run_recurrence(inputs: list[Tensor | None], batch: RaggedBatch, rig: StateRig) -> Tensor:
    out = cpu_recurrence(*inputs, batch, rig.places[1])
    assert not out[batch.token_rows == rig.null_row].any()
    return out


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_recurrence_is_exact_and_independent_of_cuts(sizes: Sizes, block_size: int) -> None:
    state = recurrent_state(
        sizes.key_heads, sizes.heads, sizes.key, sizes.value, sizes.key if sizes.by_channel else 1
    )
    rows = [sequence(sizes, seed) for seed in range(ROWS)]
    found = [
        in_steps(rig_of(state, block_size), rows, [cuts, [53], [1] * 53], run_recurrence)
        for cuts in CUTS
    ]
    for row, first in zip(rows, found[0], strict=True):
        torch.testing.assert_close(first.double(), exact(row, sizes), rtol=1e-5, atol=2e-5)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


def test_recurrence_has_equal_bits_with_any_number_of_threads() -> None:
    sizes = SIZES[0]
    state = recurrent_state(sizes.key_heads, sizes.heads, sizes.key, sizes.value, 1)
    rows = [sequence(sizes, seed) for seed in range(ROWS)]
    found = []
    for threads in (1, 2, 5):
        with kernel_threads(threads):
            found.append(in_steps(rig_of(state, 16), rows, [[40, 1, 12]] * 3, run_recurrence))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[3]], ids=str)
def test_memory_is_the_same_as_of_the_reference(sizes: Sizes) -> None:
    """Snapshots and inputs, where the tables have a place for them."""
    decays = sizes.key if sizes.by_channel else 1
    state = recurrent_state(sizes.key_heads, sizes.heads, sizes.key, sizes.value, decays)
    rows = [sequence(sizes, seed) for seed in range(ROWS)]
    cuts = [[20, 1, 1, 1, 30], [53], [15, 1, 1, 1, 35]]
    rigs = [rig_of(state, 16), rig_of(state, 16)]
    for rig in rigs:
        rig.states.snapshot_tables[1, 2] = 0
        rig.states.input_tables[1, :3] = 0

    def reference(inputs: list[Tensor | None], batch: RaggedBatch, rig: StateRig) -> Tensor:
        return recurrence(*inputs, batch, rig.places[1])

    for a, b in zip(
        in_steps(rigs[0], rows, cuts, run_recurrence),
        in_steps(rigs[1], rows, cuts, reference),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for own, other in zip(rigs[0].states[:2], rigs[1].states[:2], strict=True):
        a, b = own.view(torch.float32), other.view(torch.float32)
        assert torch.equal(a.isnan(), b.isnan())  # poisoned memory
        torch.testing.assert_close(a.nan_to_num(), b.nan_to_num(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_rejected_drafts_leave_no_trace(drafts: int) -> None:
    """Verify steps of several rows whose drafts are wrong, some beyond the drafts of their row."""
    sizes = SIZES[4]
    state = recurrent_state(sizes.key_heads, sizes.heads, sizes.key, sizes.value, 1)
    rig = rig_of(state, 4)
    rows = [sequence(sizes, seed) for seed in range(ROWS)]
    wrong = sequence(sizes, 99)
    found: list[Tensor] = []
    for at in range(LENGTH - drafts):
        counts = [drafts + 1, max(1, drafts - 1), 1]
        spans = [(row, at, count) for row, count in enumerate(counts)]
        batch = rig.batch(spans, tokens_per_row=drafts + 1, lanes=ROWS + 1)
        lanes = torch.arange(drafts + 1)
        inputs = [
            None
            if parts[0] is None
            else torch.cat(
                [torch.cat((own[at : at + 1], other[lanes[1:]])) for own in parts]
                + [other[lanes] * torch.nan]
            )
            for *parts, other in zip(*rows, wrong, strict=True)
        ]
        out = cpu_recurrence(*inputs, batch, rig.places[1])
        rig.advance(spans, decodes=True)
        found.append(out.view(ROWS + 1, drafts + 1, *out.shape[1:])[:ROWS, 0])
    for row, own in zip(rows, torch.stack(found, 1), strict=True):
        expected = exact(row, sizes)[: len(own)]
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("taps", "silu", "bias"), [(3, False, False), (4, True, True)])
def test_convolution(
    taps: int, silu: bool, bias: bool, dtype: torch.dtype, block_size: int
) -> None:
    features = 300
    generator = torch.Generator().manual_seed(taps)
    state = RowState((StatePart((taps - 1, features)),), (StatePart((features,)),))
    rows: list[list[Tensor | None]] = [
        [torch.randn(LENGTH, features, generator=generator).to(dtype)] for _ in range(ROWS)
    ]
    weight = torch.randn(features, 1, taps, generator=generator).to(dtype)
    bias_F = torch.randn(features, generator=generator).to(dtype) if bias else None

    def run(inputs: list[Tensor | None], batch: RaggedBatch, rig: StateRig) -> Tensor:
        return cpu_causal_conv(inputs[0], weight, bias_F, silu, batch, rig.places[1])

    def reference(inputs: list[Tensor | None], batch: RaggedBatch, rig: StateRig) -> Tensor:
        return causal_conv(inputs[0], weight, bias_F, silu, batch, rig.places[1])

    rigs = [rig_of(state, block_size, dtype.itemsize) for _ in range(len(CUTS) + 1)]
    expected = in_steps(rigs[-1], rows, [CUTS[2], [53], [1] * 53], reference)
    found = [
        in_steps(rig, rows, [cuts, [53], [1] * 53], run)
        for cuts, rig in zip(CUTS, rigs, strict=False)
    ]
    for own in found:
        for a, b, c in zip(own, expected, found[0], strict=True):
            assert torch.equal(a, c)
            torch.testing.assert_close(a, b)


def test_entries_out_of_range_are_refused() -> None:
    sizes = SIZES[4]
    state = recurrent_state(sizes.key_heads, sizes.heads, sizes.key, sizes.value, 1)
    rig = rig_of(state, 16)
    rig.states.input_tables[0, 1] = 10_000
    batch = rig.batch([(0, 0, LENGTH)])
    with pytest.raises(IndexError):
        cpu_recurrence(*sequence(sizes, 0), batch, rig.places[1])
