"""A record of the throughput every 10 seconds, while an engine is busy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..health import ServiceSnapshot

__all__ = ["ThroughputLog"]

logger = logging.getLogger("stepgraph.serve")

LOG_SECONDS = 10.0


class ThroughputLog:
    """Compares the counters of an engine with the last ones."""

    def __init__(
        self,
        snapshot: Callable[[], ServiceSnapshot],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count from now on; `clock` returns seconds."""
        self._snapshot = snapshot
        self._clock = clock
        self._counted = snapshot().counters
        self._began = clock()

    def tick(self) -> None:
        """Log the throughput since the last record, if that is due. Call it about every second."""
        now = self._clock()
        seconds = now - self._began
        if seconds < LOG_SECONDS:
            return
        state, before = self._snapshot(), self._counted
        self._counted, self._began = state.counters, now
        prompt = state.counters.prompt_tokens - before.prompt_tokens
        output = state.counters.output_tokens - before.output_tokens
        if state.gauges is None or not (prompt or output or state.open_requests):
            return
        gauges = state.gauges
        logger.info(
            "%d running, %d waiting; %.1f prompt and %.1f output tokens/s; %.1f %% of the KV cache"
            " in use",
            gauges.running,
            gauges.waiting + state.queued_requests,
            prompt / seconds,
            output / seconds,
            100 * gauges.held_blocks / gauges.usable_blocks,
        )
