"""Key -> step: all steps of an engine, prepared before the first request.

A key is a frozen dataclass. It contains the size of the step and every other host scalar that is
constant in a capture, such as the read width and the sampler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from ..profiling import ranges
from .steps import Step

__all__ = ["PreparationWatcher", "StepLibrary"]

logger = logging.getLogger("stepgraph.graphs")

K = TypeVar("K", bound=Hashable)
K_contra = TypeVar("K_contra", contravariant=True)
O = TypeVar("O")  # noqa: E741  what a step returns


class PreparationWatcher(Protocol[K_contra]):
    """Callbacks of `StepLibrary.prepare` that measure memory."""

    def warmed_up(self, key: K_contra) -> None:
        """Called after each warm-up, with the key of the step."""

    def begin_captures(self) -> None:
        """Called once, after all warm-ups and before the first capture."""

    def end_captures(self) -> None:
        """Called once, after the last capture."""


class StepLibrary(Generic[K, O]):
    """All steps of an engine by key.

    For a key that was not prepared, a slower fallback step runs; no step is prepared while requests
    are served. Each miss is counted, and the first one of a key is logged as a warning.
    """

    def __init__(
        self,
        make_step: Callable[[K], Step[O]],
        keys: Iterable[K],
        size_of: Callable[[K], int],
        make_fallback: Callable[[K], Step[O]],
    ) -> None:
        """Make a library; `prepare` does the work.

        Args:
            make_step: creates the step of a key, unprepared.
            keys: steps to prepare; duplicates are ignored.
            size_of: returns rows or tokens of a key's step; the largest is prepared first.
            make_fallback: creates a step that needs no preparation (an `EagerStep`), for all other
                keys.
        """
        self._make_step = make_step
        self._make_fallback = make_fallback
        # Largest first: smaller captures reuse its memory; otherwise the pool would grow with each.
        self._keys = sorted(dict.fromkeys(keys), key=size_of, reverse=True)
        self._size_of = size_of
        self.steps: dict[K, Step[O]] = {}
        """The prepared steps, in the order of preparation.

        Captures share a memory pool: the bytes of one are the growth of the pool.
        """
        self.hits = 0
        """Lookups of a prepared step."""
        self.misses = 0
        """Lookups that fell back to a slower step."""
        self.used_lanes = 0
        """Rows or tokens of requests that steps computed."""
        self.padded_lanes = 0
        """Rows or tokens of padding that steps computed."""
        self._fallbacks: dict[K, Step[O]] = {}
        self._open = False

    @property
    def padding_fraction(self) -> float:
        """Padding as a fraction of all rows and tokens computed; 0.0 before the first step."""
        lanes = self.used_lanes + self.padded_lanes
        return self.padded_lanes / lanes if lanes else 0.0

    def prepare(
        self,
        progress: Callable[[int, int, K], None] | None = None,
        watcher: PreparationWatcher[K] | None = None,
    ) -> None:
        """Create and warm up every step, then capture every step, largest first.

        Args:
            progress: called after each stage of a step with (finished stages, all stages, key).
            watcher: measures the memory of the stages.

        Raises:
            StepPreparationError: a step failed, with its cause. All steps are dropped.
        """
        assert not self._open, "the library is prepared already"
        try:
            self.steps = {key: self._make_step(key) for key in self._keys}
            captured = [key for key, step in self.steps.items() if step.kind == "graph"]
            stages = [
                *((key, self.steps[key].warm_up) for key in self._keys),
                *((key, self.steps[key].record) for key in captured),
            ]
            with ranges.span(ranges.WARMUP, len(self._keys)):
                for done, (key, stage) in enumerate(stages, start=1):
                    with ranges.span(ranges.CAPTURE, self._size_of(key)):
                        stage()
                    if progress is not None:
                        progress(done, len(stages), key)
                    if watcher is None:
                        continue
                    if done <= len(self._keys):
                        watcher.warmed_up(key)
                    if done == len(self._keys):
                        watcher.begin_captures()
            if watcher is not None:
                watcher.end_captures()
        except BaseException:
            self.close()
            raise
        self._open = True
        logger.info(
            "prepared %d steps in %.1f s, %.1f MiB: sizes %s",
            len(self.steps),
            sum(step.seconds for step in self.steps.values()),
            sum(step.bytes for step in self.steps.values()) / 2**20,
            sorted({self._size_of(key) for key in self.steps}),
        )

    def run(self, key: K) -> O:
        """Run the step for `key`, or the fallback, and return its output (see `Step.run`).

        Counts a hit or a miss.
        """
        step = self.steps.get(key)
        if step is None:
            return self._miss(key).run()
        self.hits += 1
        return step.run()

    def record_padding(self, used: int, bucket: int) -> None:
        """Count a step of `bucket` rows or tokens, of which `used` belong to requests."""
        assert 0 <= used <= bucket, f"{used} lanes used of a bucket of {bucket}"
        self.used_lanes += used
        self.padded_lanes += bucket - used

    def close(self) -> None:
        """Release all steps and their memory. The counters remain."""
        self.steps.clear()
        self._fallbacks.clear()
        self._open = False

    def _miss(self, key: K) -> Step[O]:
        assert self._open, f"step {key} is looked up in a library that is not prepared"
        self.misses += 1
        step = self._fallbacks.get(key)
        if step is None:
            step = self._fallbacks[key] = self._make_fallback(key)
            logger.warning(
                "no step was prepared for %s: a slower %r step runs instead (logged once per key)",
                key,
                step.kind,
            )
        return step
