"""How long a row or a batch rests before it looks for drafts again. No torch."""

from __future__ import annotations

__all__ = ["MAX_PAUSE", "Pause"]

MAX_PAUSE = 32
"""Steps of the longest pause."""


class Pause:
    """Steps to rest, twice as many each time."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        """Begin with one step."""
        self._steps = 1

    def next_look(self, step: int, most: int) -> int:
        """Return the step to look at again, after a look in vain at `step`.

        It is a multiple of the pause, at most `most`, so that rows look before the same steps.
        """
        steps = min(self._steps, most)
        self._steps = min(2 * steps, MAX_PAUSE)
        return (step // steps + 1) * steps
