"""`StepReader`: the times of the steps of an engine as columns, each step once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...profiling.timeline import RECORD_FIELDS, Timeline

Columns = dict[str, NDArray[np.int64]]
"""Values of steps, oldest first, by the names of `RECORD_FIELDS`; and `taken_ns`, the time from the
plan phase until the outputs are ready."""


class StepReader:
    """Reads the timeline of an engine while the engine runs steps."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None
        self._num_steps = 0

    def read(self, timeline: Timeline | None, most: int | None = None) -> Columns:
        """Return the steps since the last call, at most the last `most`; of a new timeline all."""
        if timeline is not self._timeline:
            self._timeline, self._num_steps = timeline, 0
        copied = b""
        if timeline is not None:
            if most is not None:
                self._num_steps = max(self._num_steps, timeline.recorded - most)
            self._num_steps, copied = timeline.copy_since(self._num_steps)
        steps = np.frombuffer(copied, np.int64).reshape(-1, len(RECORD_FIELDS))
        column = {name: steps[:, number] for number, name in enumerate(RECORD_FIELDS)}
        taken_ns = column["plan_ns"] + column["launch_ns"] + column["commit_ns"] + column["wait_ns"]
        if timeline is not None and not timeline.is_async_device:
            taken_ns += np.maximum(column["device_ns"], 0)
        return {**column, "taken_ns": taken_ns}
