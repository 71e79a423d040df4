"""Recurrences and convolutions: the same results however a sequence is cut into steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.cache.spec import RowState, StatePart
from stepgraph.runtime.kernels.ops.convolution import causal_conv
from stepgraph.runtime.kernels.ops.recurrence import recurrence, recurrent_state
from torch.nn import functional as F

from tests.rigs.row_states import Span, StateRig

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 8, 6
ROWS, LENGTH = 3, 23


def exact(x: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The recurrence in float64, one token after the other."""
    q, k, v, g, *beta = (part.double() for part in x if part is not None)
    state = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
    out = []
    for t in range(len(v)):
        key, query = (part[t].repeat_interleave(HEADS // KEY_HEADS, 0) for part in (k, q))
        state = g[t].exp()[:, :, None] * state
        update = v[t]
        if beta:
            update = beta[0][t, :, None] * (v[t] - (key[:, :, None] * state).sum(1))
        state = state + key[:, :, None] * update[:, None]
        out.append((query[:, :, None] * state).sum(1))
    return torch.stack(out)


def sequence(
    generator: torch.Generator, *, delta: bool, decays: int
) -> tuple[torch.Tensor | None, ...]:
    """q, k, v, g and beta of a sequence."""
    q = torch.randn(LENGTH, KEY_HEADS, KEY, generator=generator)
    k = F.normalize(torch.randn(LENGTH, KEY_HEADS, KEY, generator=generator), dim=-1)
    v = torch.randn(LENGTH, HEADS, VALUE, generator=generator)
    g = -4 * torch.rand(LENGTH, HEADS, decays, generator=generator)
    beta = torch.rand(LENGTH, HEADS, generator=generator) if delta else None
    return q, k, v, g, beta


def cuts(draws: st.DataObject) -> list[list[int]]:
    """How each row is cut into steps."""
    found = []
    for _ in range(ROWS):
        counts: list[int] = []
        while sum(counts) < LENGTH:
            counts.append(min(draws.draw(st.integers(1, 9)), LENGTH - sum(counts)))
        found.append(counts)
    return found


@given(st.data(), st.booleans(), st.booleans(), st.sampled_from([1, 4, 16]))
@settings(max_examples=25, deadline=None)
def test_recurrence_does_not_depend_on_steps(
    draws: st.DataObject, delta: bool, by_channel: bool, block_size: int
) -> None:
    generator = torch.Generator().manual_seed(draws.draw(st.integers(0, 1000)))
    decays = KEY if by_channel else 1
    rig = StateRig(
        [RowState((StatePart((3,)),), (StatePart((5,)),)),
         recurrent_state(KEY_HEADS, HEADS, KEY, VALUE, decays)],
        rows=ROWS, columns=LENGTH + 1, block_size=block_size, itemsize=4, generator=generator,
    )  # fmt: skip
    rows = [sequence(generator, delta=delta, decays=decays) for _ in range(ROWS)]
    results: list[list[torch.Tensor]] = [[] for _ in range(ROWS)]
    done = [0] * ROWS
    counts = cuts(draws)
    while any(counts):
        spans: list[Span] = [(row, done[row], own.pop(0)) for row, own in enumerate(counts) if own]
        decodes = all(count == 1 for _, _, count in spans)
        batch = rig.batch(
            spans, tokens_per_row=1 if decodes else None, lanes=ROWS + 1,
            size=sum(count for _, _, count in spans) + 2,
        )  # fmt: skip
        padding = len(batch.positions) - sum(count for _, _, count in spans)
        inputs = [
            None if part is None else torch.cat(
                [rows[row][index][start : start + count] for row, start, count in spans]
                + [torch.full((padding, *part.shape[1:]), torch.nan)]
            )
            for index, part in enumerate(rows[0])
        ]  # fmt: skip
        out = recurrence(*inputs, batch, rig.places[1])
        rig.advance(spans, decodes=decodes)
        for row, _, count in spans:
            results[row].append(out[:count])
            out = out[count:]
            done[row] += count
    for row, found in zip(rows, results, strict=True):
        torch.testing.assert_close(torch.cat(found).double(), exact(row), rtol=1e-5, atol=1e-5)


def test_rejected_drafts_leave_no_trace() -> None:
    """A verify step whose drafts are rejected, across a block boundary, then other tokens."""
    generator = torch.Generator().manual_seed(1)
    state = recurrent_state(KEY_HEADS, HEADS, KEY, VALUE, 1)
    rig = StateRig([state], rows=1, columns=8, block_size=4, itemsize=4, generator=generator)
    own = sequence(generator, delta=True, decays=1)
    other = sequence(generator, delta=True, decays=1)

    def run(source: tuple[torch.Tensor | None, ...], start: int, count: int) -> torch.Tensor:
        parts = [None if x is None else x[start : start + count] for x in source]
        batch = rig.batch([(0, start, count)], tokens_per_row=count)
        out = recurrence(*parts, batch, rig.places[0])
        rig.advance([(0, start, count)], decodes=True)
        return out

    found, at = [], 0
    while at + 3 <= LENGTH:
        run(
            tuple(torch.cat((a[: at + 1], b[at + 1 :])) for a, b in zip(own, other, strict=True)),
            at,
            3,
        )
        found.append(run(own, at, 1))
        at += 1
    torch.testing.assert_close(torch.cat(found).double(), exact(own)[:at], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_convolution_equals_a_padded_one(silu: bool, taps: int) -> None:
    generator = torch.Generator().manual_seed(taps)
    features = 10
    state = RowState((StatePart((taps - 1, features)),), (StatePart((features,)),))
    x = torch.randn(LENGTH, features, generator=generator)
    weight = torch.randn(features, 1, taps, generator=generator)
    bias = torch.randn(features, generator=generator)
    expected = F.conv1d(F.pad(x.T, (taps - 1, 0)), weight, bias, groups=features).T
    expected = F.silu(expected) if silu else expected
    for counts in ([LENGTH], [1] * LENGTH, [5, 1, 1, 9, 1, 6]):
        rig = StateRig([state], rows=1, columns=8, block_size=4, itemsize=4, generator=generator)
        found, at = [], 0
        for count in counts:
            span = (0, at, count)
            batch = rig.batch([span], tokens_per_row=1 if count == 1 else None)
            own = x[at : at + count]
            found.append(causal_conv(own, weight, bias, silu, batch, rig.places[0]))
            rig.advance([span], decodes=count == 1)
            at += count
        torch.testing.assert_close(torch.cat(found), expected)
