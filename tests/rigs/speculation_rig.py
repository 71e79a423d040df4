"""Speculators for tests: they draft what is known to follow, and tokens that do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from stepgraph.graphs.buckets import Buckets
from stepgraph.runtime import Engine
from stepgraph.runtime.config import Speculation
from stepgraph.runtime.request import Request
from stepgraph.runtime.scheduling.plan import StepPlan
from stepgraph.runtime.scheduling.speculator import DrafterSpeculator
from stepgraph.runtime.scheduling.step_times import calibrate

from .engine_rig import loop_of

Known = Callable[[Request], Sequence[int]]
"""Returns the output tokens of a request, those to come included."""


class Guesses:
    """A speculator that drafts the tokens to come, each of which is right by chance.

    It drafts for rows whose newest tokens are unknown too, as a proposer on the device would.
    """

    waits = False
    proposes = 0
    unread = ()
    accepted_by_position = ()

    def __init__(
        self, sizes: Callable[[int], Sequence[int]], vocab: int, known: Known, right: float = 0.8
    ) -> None:
        self.sizes = sizes
        self.accepted = self.rejected = 0
        self._vocab, self._known, self._right = vocab, known, right
        self._rng = random.Random(vocab)

    def begin_plan(self, requests: object) -> None:
        pass

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        sizes = self.sizes(len(requests))
        if not sizes or self._rng.random() < 0.2:  # a decode step
            return []
        return [self._drafts(request, sizes[-1]) for request in requests]

    def _drafts(self, request: Request, most: int) -> list[int]:
        count = self._rng.randrange(most)
        at = request.num_output + request.num_pending
        drafts = [max(token, 0) for token in self._known(request)[at : at + count]]
        draw = self._rng.random
        return [t if draw() < self._right else self._rng.randrange(self._vocab) for t in drafts]

    def prompt_drafts(self, chunks: object) -> int:
        return 0

    def launched(self, plan: StepPlan) -> None:
        assert bool(plan.decode_counts) == bool(plan.drafts)
        sizes = self.sizes(len(plan.decode) or 1)
        assert max(plan.decode_counts, default=1) <= max(sizes, default=1)

    def committed(self, plan: StepPlan, advanced: list[int] | None, took: float) -> None:
        assert (advanced is None) == (not plan.drafts)
        for drafts, count in zip(plan.drafts, advanced or (), strict=True):
            self.accepted += count - 1
            self.rejected += 1 + len(drafts) - count

    def stats(self) -> dict[str, int]:
        return {"accepted": self.accepted, "rejected": self.rejected}


class DeviceDrafts(DrafterSpeculator):
    """The speculator of an engine with a drafter, which verifies and proposes by chance."""

    def __init__(self, tokens_per_row: int, max_num_seqs: int, *, is_async_device: bool) -> None:
        times = calibrate(
            lambda point: 1.0,
            rows=Buckets([max_num_seqs]),
            reach=lambda context: context,
            context=1,
            useful_seconds=1.0,
            verifying=lambda rows: range(2, 1 + tokens_per_row),
        )
        super().__init__(
            Speculation(
                method="eagle3",
                model="x",
                num_speculative_tokens=tokens_per_row - 1,
                adaptive=False,
            ),
            times,
            is_async_device=is_async_device,
        )
        self.steady = False
        """Whether each step verifies all drafts and proposes."""
        self._rng = random.Random(tokens_per_row)

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        drafts, draw = super().propose(requests), self._rng.random()
        if self.steady or draw < 0.6:
            return drafts
        if draw < 0.7:  # a decode step
            self.begin_plan(requests)
        if draw < 0.8:
            self.unread = ()
            return ()
        self.unread = [self._rng.randrange(1 + count) for count in self.unread]
        return [own[: self._rng.randrange(1 + len(own))] for own in drafts]


class OutputGuesses:
    """Drafts that a device proposes, each of which is right by chance."""

    def __init__(self, vocab: int, known: Known, right: float = 0.8) -> None:
        self._vocab, self._known, self._right = vocab, known, right
        self._rng = random.Random(vocab)

    def __call__(self, request: Request, at: int, count: int) -> list[int]:
        """Return `count` drafts to follow `at` output tokens of a request."""
        tokens = [*self._known(request)[at : at + count], *[0] * count][:count]
        draw = self._rng.random
        return [
            max(t, 0) if draw() < self._right else self._rng.randrange(self._vocab) for t in tokens
        ]


def guess(engine: Engine, outputs: dict[str, list[int]], right: float = 0.8) -> Guesses:
    """Let an engine verify guesses of the outputs of its requests, by id."""
    sizes, vocab = loop_of(engine).runner.sizes.verifying, engine.model_config.vocab_size
    guesses = Guesses(sizes, vocab, lambda request: outputs[request.id], right)
    loop_of(engine).speculator = guesses  # type: ignore[assignment]
    return guesses
