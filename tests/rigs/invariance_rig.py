"""Logits of known sequences, computed by steps of any shape, to be compared bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from stepgraph.cache.arena import Storage
from stepgraph.runtime.execution.inputs import (
    PrefillChunk,
    write_decode_rows,
    write_drafts,
    write_prefill,
)
from stepgraph.runtime.execution.step_key import StepKey
from stepgraph.runtime.kernels import Kernels, kernels_for
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.models.plan import plan_of

from .step_rig import CPU, StepRig
from .tiny_models import load_weights

__all__ = ["BUCKET", "Forced", "Step", "decode_steps", "random_steps", "same_bits"]

BUCKET = 6
"""Rows of the largest decode step; one is always padding."""
PROMPT = 9
"""The rope length of every row."""
CHUNK = 200
WIDTHS = (1, 2, 3, 5, 8, 16)
"""Tokens of a row in decode and verify steps."""


class Step(NamedTuple):
    """A step that is given the next tokens of some rows."""

    kind: Literal["decode", "prefill"]
    counts: dict[int, int]
    """Tokens of each row, in the order of the batch."""
    size: int
    """Bucket: rows, or tokens of a prefill step."""


class Forced(StepRig):
    """A model over poisoned memory, and the rows' sequences."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        kernels: Kernels,
        lengths: Sequence[int],
        *,
        storage: Storage = "model",
        compiled: bool = False,
        block_size: int = 8,
        device: torch.device = CPU,
    ) -> None:
        """Make the model; `lengths` are those of the sequences, at most `BUCKET - 1` of them."""
        config, rows = read_config(directory), len(lengths)
        self._columns = -(-max(lengths) // block_size)
        super().__init__(
            config,
            kernels_for(kernels, plan_of(config)),
            dtype,
            rows=rows,
            columns=self._columns,
            block_size=block_size,
            lanes=BUCKET,
            drafts=max(WIDTHS) - 1,
            prefill_tokens=CHUNK,
            hidden=CHUNK + 1,
            storage=storage,
            compiled=compiled,
            device=device,
        )
        load_weights(self.decoder, directory)
        if self.state.rope_lengths is not None:
            self.state.rope_lengths[:rows] = PROMPT
        vocab = config.vocab_size
        generator = torch.Generator().manual_seed(1)
        self.sequences = [torch.randint(vocab, (n,), generator=generator) for n in lengths]
        self.null_row = rows

    def close(self) -> None:
        """Release what the steps hold."""
        self.functions.close()
        if self.decoder.stack is not None:
            self.decoder.stack.close()

    def run(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """Return the logits `[tokens that the steps were given, V]` of each row, from scratch."""
        self.poison()
        self.state.positions.zero_()
        self.state.token_ids.zero_()
        done = [0] * len(self.sequences)
        found: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        for step in steps:
            run = self._decode if step.kind == "decode" else self._prefill
            for row, logits in run(step, done).items():
                found[row].append(logits.to(CPU, copy=True))
                done[row] += step.counts[row]
        empty = torch.empty(0, self.decoder.config.vocab_size, dtype=self.decoder.dtype)
        return [torch.cat([empty, *parts]) for parts in found]

    def _decode(self, step: Step, done: list[int]) -> dict[int, torch.Tensor]:
        width = max(step.counts.values())
        for buffers in (self.inputs, self.drafts):
            buffers.begin_write()
        write_decode_rows(list(step.counts), self.null_row, self.input_arrays)
        drafts = [
            self.sequences[row][done[row] + 1 : done[row] + count].tolist()
            for row, count in step.counts.items()
        ]
        write_drafts([*step.counts.values()], drafts, (), self.draft_arrays)
        for buffers in (self.inputs, self.drafts):
            buffers.copy_to_device()
        for row in step.counts:
            self.state.token_ids[row] = self.sequences[row][done[row]]
            self.state.positions[row] = done[row]
        key = StepKey("decode", step.size, self._columns, False, tokens_per_row=width)
        logits = self.functions.bind(key)().logits
        ragged = width > 1 and self.functions.ragged
        parts = logits.split(self.drafts.host.counts[: step.size].tolist() if ragged else width)
        rows = zip(step.counts.items(), parts, strict=False)
        return {row: part[:count] for (row, count), part in rows}

    def _prefill(self, step: Step, done: list[int]) -> dict[int, torch.Tensor]:
        self.inputs.begin_write()
        chunks = [
            PrefillChunk(row, done[row], self.sequences[row][done[row] :][:count].tolist())
            for row, count in step.counts.items()
        ]
        write_prefill(chunks, self.null_row, step.size, self.input_arrays)
        self.inputs.copy_to_device()
        key = StepKey("prefill", step.size, self._columns, False)
        last = self.functions.bind(key)().logits
        counts = [*step.counts.values()]
        with torch.no_grad():
            parts = self.decoder.logits(self.hidden[: sum(counts)]).split(counts)
        for part, own in zip(parts, last, strict=False):  # the step's logits, of its last tokens
            part[-1] = own
        return dict(zip(step.counts, parts, strict=True))


def decode_steps(row: int, length: int) -> list[Step]:
    """Return steps that decode a row alone, token by token."""
    return [Step("decode", {row: 1}, 1)] * length


def random_steps(lengths: Sequence[int], seed: int) -> list[Step]:
    """Return steps of random shapes that are given each sequence once."""
    rng = random.Random(seed)
    left, steps = list(lengths), []
    while live := [row for row, count in enumerate(left) if count]:
        rows = rng.sample(live, rng.randint(1, len(live)))
        if rng.random() < 0.4:
            most = rng.choice((3, 20, CHUNK))
            counts: dict[int, int] = {}
            for row in rows:
                room = min(left[row], most - sum(counts.values()))
                if room > 0:
                    counts[row] = rng.randint(1, room)
            size = min(sum(counts.values()) + rng.choice((0, 1, 13)), CHUNK)
            steps.append(Step("prefill", counts, size))
        else:
            width = rng.choice(WIDTHS)
            counts = {row: rng.randint(1, min(width, left[row])) for row in rows}
            steps.append(Step("decode", counts, rng.randint(len(rows), BUCKET)))
        for row, count in steps[-1].counts.items():
            left[row] -= count
    return steps


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all elements have the same bits; a NaN may be any."""
    assert not expected.isnan().any(), "the comparison says nothing of NaN"
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
