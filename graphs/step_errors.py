"""The errors of this package. Imports no torch."""

from __future__ import annotations

__all__ = ["StepCompilationError", "StepPreparationError"]


class StepPreparationError(RuntimeError):
    """A step could not be warmed up, compiled or captured. `__cause__` is the failure."""

    def __init__(self, name: str, kind: str | None, cause: Exception) -> None:
        """Name the step, its kind (None if it could not be created) and the cause."""
        how = "could not be made" if kind is None else f"could not be prepared (kind {kind!r})"
        reason = f"{type(cause).__name__}: {cause}"
        # Ending a failed capture raises another error; the first one has the reason.
        first: BaseException = cause
        while first.__context__ is not None:
            first = first.__context__
        if first is not cause:
            reason += f" (first came {type(first).__name__}: {first})"
        super().__init__(f"step {name} {how}: {reason}")
        self.name = name
        self.kind = kind


class StepCompilationError(RuntimeError):
    """torch.compile does not compile a part of a step, or compiles it in every run."""
