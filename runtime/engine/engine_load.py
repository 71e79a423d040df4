"""`EngineLoad`: how many rows of an engine are taken. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["EngineLoad"]


class EngineLoad(NamedTuple):
    """Completions in an engine, each of which needs a row."""

    rows: int
    """`EngineConfig.max_num_seqs`."""
    running: int
    """Completions that have a row."""
    waiting: int
    """Completions that have none."""

    @property
    def free_rows(self) -> int:
        """Rows that no completion has or waits for; negative if more wait than are free."""
        return self.rows - self.running - self.waiting
