"""Verify steps: what 1 + k tokens a row compute at once is what decode steps compute one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from stepgraph.cache.arena import Storage
from stepgraph.runtime import SamplingParams
from stepgraph.runtime.execution.inputs import write_decode_rows, write_drafts
from stepgraph.runtime.execution.step_key import StepKey, StepOutput
from stepgraph.runtime.kernels import have_compiler, select_kernels
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.loading.loader import random_weights

from ..rigs.step_rig import CPU, StepRig
from ..rigs.tiny_models import Tiny, TinyModel

BLOCK_SIZE, COLUMNS, ROWS, BUCKET = 4, 12, 3, 4
MOST_DRAFTS = 4
STARTS = (1, 14, 27)
"""Tokens that each row has in the cache at first, beside its newest: windows are of 10."""
TOKENS = 12
"""That each row gets."""
PARAMS = (
    SamplingParams(temperature=0.9, seed=1, logit_bias={4: 2.0}, min_p=0.01),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=9, seed=5),
)
Case = tuple[str, torch.dtype, Storage, str]
"""Variant of the tiny model, dtype, storage of the cache, and kernels."""
Run = list[tuple[torch.Tensor, torch.Tensor]]
"""Tokens `[ROWS]` and logits `[ROWS, V]` of each position."""


class Rig(StepRig):
    """Steps of a tiny model over poisoned memory, bound once as captured ones are."""

    def __init__(
        self, model: TinyModel, dtype: torch.dtype, storage: Storage, mode: str, full: bool
    ) -> None:
        torch.manual_seed(0)
        config = read_config(model.directory)
        super().__init__(
            config,
            select_kernels(CPU, "compile" if mode == "native" else "eager", dtype),
            dtype,
            rows=ROWS,
            columns=COLUMNS,
            block_size=BLOCK_SIZE,
            lanes=BUCKET,
            drafts=MOST_DRAFTS,
            kept_drafts=MOST_DRAFTS,
            params=PARAMS if full else (),
            storage=storage,
        )
        self.decoder.store(random_weights(config, dtype))
        vocab = config.vocab_size
        self.steps = {
            n: self.functions.bind(StepKey("decode", BUCKET, COLUMNS, full, tokens_per_row=n))
            for n in range(1, 2 + MOST_DRAFTS)
        }
        self._set_rows(list(range(ROWS)))
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(vocab, (max(STARTS) + 1, ROWS), generator=generator)
        for position, token_ids in enumerate(prompt):
            rows = [row for row in range(ROWS) if position < STARTS[row]]
            if rows:
                self._set_rows(rows)
                self.state.token_ids[:ROWS] = token_ids
                self.steps[1]()
                unread = [row for row in range(ROWS) if row not in rows]
                assert all(int(self.state.positions[row]) == STARTS[row] for row in unread)
        self._set_rows(list(range(ROWS)))
        self.state.token_ids[:ROWS] = prompt[-1]

    def _set_rows(self, rows: list[int]) -> None:
        write_decode_rows(rows, ROWS, self.input_arrays)

    def snapshot(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (self.arena, *self.state.tensors().values())]

    def restore(self, saved: Sequence[torch.Tensor]) -> None:
        for tensor, before in zip((self.arena, *self.state.tensors().values()), saved, strict=True):
            tensor.copy_(before)

    def decode(self, count: int) -> Run:
        outputs = [self.steps[1]() for _ in range(count)]
        return [(o.tokens[:ROWS].clone(), o.logits[:ROWS].clone()) for o in outputs]

    def verify(self, n: int, drafts: list[list[int]], *, own: bool = False) -> StepOutput:
        """Run a verify step; its logits by position. With `own`, the rows keep their drafts."""
        counts = [1 + len(tokens) for tokens in drafts]
        if own:
            assert self.state.drafts is not None
            for row, tokens in enumerate(drafts):
                self.state.drafts[row, : len(tokens)] = torch.tensor(tokens)
        write_drafts(counts, () if own else drafts, (), self.draft_arrays)
        output = self.steps[n]()
        lanes = self.drafts.device.counts.tolist() if self.functions.ragged else n
        logits = torch.nn.utils.rnn.pad_sequence(output.logits.split(lanes))
        return dataclasses.replace(output, logits=logits)


CASES = {
    "native": ("base", torch.bfloat16, "model", "native"),
    "native windows": ("gemma2", torch.float32, "model", "native"),
    "native int8": ("gemma3", torch.bfloat16, "int8", "native"),
    "native fp8": ("qwen3", torch.float32, "fp8", "native"),
    "reference": ("mistral", torch.float32, "model", "reference"),
    "reference int8": ("gemma3", torch.float32, "int8", "reference"),
    "reference latent": ("deepseek_v3", torch.float32, "model", "reference"),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys(), scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    if request.param[3] == "native" and not have_compiler():
        pytest.skip("needs a C++ compiler")
    return cast("Case", request.param)


def check_close(found: torch.Tensor, expected: torch.Tensor, mode: str) -> None:
    """Bitwise where kernels promise that a token's result does not depend on its batch."""
    if mode == "native":
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


def check_cache(rig: Rig, found: torch.Tensor, expected: torch.Tensor, mode: str) -> None:
    """Every block but the null block, whatever was never written included."""
    if mode == "native" or rig.decoder.storage != "model":
        assert torch.equal(found[:, :, 1:].view(torch.uint8), expected[:, :, 1:].view(torch.uint8))
    else:
        torch.testing.assert_close(
            found[:, :, 1:], expected[:, :, 1:], atol=2e-4, rtol=1e-3, equal_nan=True
        )


def check_rows(rig: Rig, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """The state of all rows but the null row, which counts what its lanes draw, and drafts."""
    names = ["arena", *rig.state.tensors()]
    for name, tensor, other in zip(names, found, expected, strict=True):
        if name not in ("arena", "block_tables", "drafts"):
            assert torch.equal(tensor[:ROWS], other[:ROWS]), name


@pytest.mark.parametrize("full", [False, True], ids=["greedy", "sampled"])
def test_verify_steps_are_decoding_at_once(case: Case, full: bool, tiny: Tiny) -> None:
    """Rows of other lengths, over blocks and windows, with right and wrong drafts."""
    variant, dtype, storage, mode = case
    rig = Rig(tiny(variant), dtype, storage, mode, full)
    begin = rig.snapshot()
    decoded = rig.decode(TOKENS)
    known, end = torch.stack([tokens for tokens, _ in decoded]), rig.snapshot()
    vocab = rig.decoder.config.vocab_size

    def verify(k: int, counts: list[int], wrong: list[int], *, own: bool = False) -> None:
        """Row r brings `counts[r] - 1` drafts; the one with index `wrong[r]`, if there is any, is
        another token, and so may be all that follow it."""
        done = [int(p) - start for p, start in zip(rig.state.positions, STARTS, strict=False)]
        rows = list(enumerate(zip(done, counts, strict=True)))
        drafts = [known[at : at + count - 1, r].tolist() for r, (at, count) in rows]
        for row, index in enumerate(wrong):
            if index < len(drafts[row]):
                drafts[row][index] = (drafts[row][index] + 1) % vocab
        output = rig.verify(1 + k, drafts, own=own)
        for row, (at, count) in rows:
            right = min(count, wrong[row] + 1)
            assert output.accepted is not None
            assert int(output.accepted[row]) == right
            assert output.tokens[:right, row].tolist() == known[at : at + right, row].tolist()
            for j in range(right):
                check_close(output.logits[j, row], decoded[at + j][1][row], mode)
            assert int(rig.state.positions[row]) == STARTS[row] + at + right

    def decode_rest() -> None:
        """One by one."""
        for row in range(ROWS):
            rig._set_rows([row])
            for at in range(int(rig.state.positions[row]) - STARTS[row], TOKENS):
                output = rig.steps[1]()
                assert int(output.tokens[0]) == int(known[at, row])
                check_close(output.logits[0], decoded[at][1][row], mode)
        rig._set_rows(list(range(ROWS)))
        found = rig.snapshot()
        check_cache(rig, found[0], end[0], mode)
        check_rows(rig, found, end)

    none = [MOST_DRAFTS] * ROWS
    for k in range(1, MOST_DRAFTS + 1):
        rig.restore(begin)
        left = [TOKENS] * ROWS
        while min(left):
            counts = [min(1 + k - row % 2, n) for row, n in enumerate(left)]
            verify(k, counts, none)
            left = [n - count for n, count in zip(left, counts, strict=True)]
        decode_rest()
    rig.restore(begin)
    verify(MOST_DRAFTS, [1 + MOST_DRAFTS] * ROWS, [0, 1, 2])
    verify(MOST_DRAFTS, [1 + MOST_DRAFTS] * ROWS, [3, 0, 1], own=True)
    decode_rest()
