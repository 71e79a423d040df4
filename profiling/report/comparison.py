"""Two reports of profiles compared. Standard library only."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..stats import Summary
from .document import Report
from .parts import Part

__all__ = ["Change", "compare"]


@dataclass(frozen=True, slots=True)
class Change:
    """A median in two profiles; None where one of them does not have it.

    Attributes:
        what: "step", "operation" or "layer".
        phase: of the steps.
        label: the time and the bucket; or the operation; or the layer.
        old_us, new_us: medians.
        old_n, new_n: samples that they rest on.
    """

    what: str
    phase: str
    label: str
    old_us: float | None
    new_us: float | None
    old_n: int
    new_n: int

    @property
    def ratio(self) -> float | None:
        """New over old; None where one is missing or the old one is 0."""
        if self.old_us is None or self.new_us is None or self.old_us == 0:
            return None
        return self.new_us / self.old_us

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the ratio by name."""
        return {**asdict(self), "ratio": self.ratio}


def compare(new: Report, old: Report) -> tuple[Change, ...]:
    """Return what changed from `old` to `new`: steps, operations, then layers."""
    changes: list[Change] = []
    for name in ("step_us", "device_us", "gap_us", "host_us"):
        label = name.removesuffix("_us")
        changes += _changes(
            "step",
            {(c.phase, _in_bucket(label, c.bucket)): getattr(c, name) for c in old.cases},
            {(c.phase, _in_bucket(label, c.bucket)): getattr(c, name) for c in new.cases},
        )
    tables: tuple[tuple[str, Sequence[Part], Sequence[Part]], ...] = (
        ("operation", old.parts.operations, new.parts.operations),
        ("layer", old.parts.layers, new.parts.layers),
    )
    for what, before, after in tables:
        changes += _changes(what, _medians(before), _medians(after))
    return tuple(changes)


def _in_bucket(label: str, bucket: int | None) -> str:
    return label if bucket is None else f"{label}, bucket {bucket}"


def _medians(parts: Iterable[Part]) -> dict[tuple[str, str], Summary | None]:
    return {(part.phase, part.label): part.us for part in parts}


def _changes(
    what: str,
    old: dict[tuple[str, str], Summary | None],
    new: dict[tuple[str, str], Summary | None],
) -> Iterable[Change]:
    for phase, name in [*new, *(key for key in old if key not in new)]:
        before, after = old.get((phase, name)), new.get((phase, name))
        if before is None and after is None:
            continue
        yield Change(
            what,
            phase,
            name,
            None if before is None else before.p50,
            None if after is None else after.p50,
            0 if before is None else before.n,
            0 if after is None else after.n,
        )
