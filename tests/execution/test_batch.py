"""Plans become arrays: against a plain list of what every token is, over poisoned arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.runtime.execution.inputs import (
    EmbedInputs,
    Int64Array,
    PrefillChunk,
    StepInputs,
    write_embeds,
    write_prefill,
)
from stepgraph.runtime.prompt_embeds import EmbeddedSpan, EncodedContent
from stepgraph.runtime.scheduling.plan import RowSpan

from ..rigs.scheduler_rig import make_request

POISON = -(2**40) - 7


def poisoned(*, rows: int = 9, tokens: int = 16, prompts: int = 4, updates: int = 5):
    layout = StepInputs.layout(
        max_num_seqs=rows, prefill_tokens=tokens, prefill_rows=prompts, table_updates=updates
    )
    arrays = {name: np.full(spec.shape, POISON, np.int64) for name, spec in layout.items()}
    return StepInputs[Int64Array](**arrays)


@st.composite
def prefills(draw: st.DrawFn) -> tuple[list[RowSpan], int]:
    """Chunks of several rows in any order, and a bucket that they fit in."""
    rows = draw(st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True))
    chunks = []
    for row in rows:
        tokens = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=12))
        prompt_len = draw(st.integers(1, len(tokens)))
        start = draw(st.integers(0, len(tokens) - 1))
        count = draw(st.integers(1, min(len(tokens) - start, 4)))
        chunks.append(
            RowSpan(
                make_request(tokens[:prompt_len], tokens[prompt_len:]),
                row,
                start,
                count,
                samples=start + count == len(tokens),
            )
        )
    bucket = draw(st.integers(sum(chunk.count for chunk in chunks), 16))
    return chunks, bucket


def tokens_of(chunks: list[RowSpan]) -> Iterator[tuple[int, int, int]]:
    """(row, position, token) of every token."""
    for chunk in chunks:
        known = chunk.request.prompt_ids + chunk.request.output_ids
        for position in range(chunk.start, chunk.start + chunk.count):
            yield chunk.row, position, known[position]


@given(prefills())
def test_prefill(prefill: tuple[list[RowSpan], int]) -> None:
    chunks, bucket = prefill
    null_row = 9
    host = poisoned()
    chunks = [replace(chunk, draft_stop=1000 + chunk.row) for chunk in chunks]
    write_prefill([PrefillChunk.of(chunk) for chunk in chunks], null_row, bucket, host)

    expected = list(tokens_of(chunks))
    lanes = np.stack([host.token_rows, host.positions, host.token_ids], axis=1)
    assert [tuple(lane) for lane in lanes[: len(expected)].tolist()] == expected
    padding = lanes[len(expected) : bucket]
    assert (padding == (null_row, 0, 0)).all()
    assert (lanes[bucket:] == POISON).all()  # no step of this bucket reads there

    assert host.prefill_rows[: len(chunks)].tolist() == [chunk.row for chunk in chunks]
    assert (host.prefill_rows[len(chunks) :] == null_row).all()
    assert host.query_start_loc[0] == 0
    for lane in range(len(host.sample_rows)):
        index = host.query_start_loc[lane + 1] - 1
        assert 0 <= index < bucket  # padded lanes too: they are gathered all the same
        if lane >= len(chunks):
            assert host.sample_rows[lane] == null_row
            continue
        chunk = chunks[lane]
        end = chunk.start + chunk.count
        assert expected[index][:2] == (chunk.row, end - 1)
        reaches_the_end = end == len(chunk.request.prompt_ids) + len(chunk.request.output_ids)
        assert host.sample_rows[lane] == (chunk.row if reaches_the_end else null_row)
        following = chunk.request.tokens(chunk.start + 1, end + 1) + [0] * reaches_the_end
        assert host.next_ids[host.query_start_loc[lane] : index + 1].tolist() == following
    assert host.draft_stops[: len(chunks)].tolist() == [1000 + chunk.row for chunk in chunks]
    assert (host.draft_stops[len(chunks) :] == 1).all()
    assert (host.query_start_loc[len(chunks) :] == len(expected)).all()
    assert (host.decode_rows == POISON).all()
    assert (host.table_updates == POISON).all()


@given(prefills(), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=3))
def test_embeds(prefill: tuple[list[RowSpan], int], places: list[tuple[int, int]]) -> None:
    """Each token of a chunk shows the vector of its position, if a span covers it."""
    chunks, _ = prefill
    layout = EmbedInputs.layout(prefill_tokens=16, hidden_size=2)
    buffers = StaticBuffers(EmbedInputs[torch.Tensor], layout, "cpu")
    host = buffers.arrays(EmbedInputs[npt.NDArray[Any]])
    host.embeds.fill(float("nan"))
    host.mask.fill(True)  # of the step before
    spans, position = [], 0
    for gap, length in places:
        position += gap
        spans.append(EmbeddedSpan(position, EncodedContent.of(torch.randn(length, 2))))
        position += length
    for chunk in chunks:
        chunk.request.embeds = tuple(spans)
    write_embeds([PrefillChunk.of(chunk) for chunk in chunks], host)
    shown = {s.position + i: row for s in spans for i, row in enumerate(s.content.embeds)}
    expected = [shown.get(position) for _, position, _ in tokens_of(chunks)]
    assert host.mask.tolist() == [row is not None for row in expected] + [False] * (
        16 - len(expected)
    )
    for index, row in enumerate(expected):
        assert row is None or np.array_equal(host.embeds[index], row)
