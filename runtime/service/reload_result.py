"""`ReloadResult`: how an `AsyncEngine` took another model. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReloadResult"]


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What `AsyncEngine.reload` did."""

    in_place: bool
    """Whether the running engine took the weights; else a new engine was started."""
    seconds: float
    """Duration without the drain."""
    reason: str | None = None
    """Why a new engine was started."""
