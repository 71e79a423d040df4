"""The memory plan, term by term, and its comparison with measurements. All bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "HOST_TERMS",
    "TERMS",
    "MemoryPlan",
    "ReconciledTerm",
    "Reconciliation",
    "format_bytes",
]

TERMS = (
    "weights",
    "cache",
    "static_buffers",
    "activations",
    "logits",
    "attention_masks",
    "captured_graphs",
    "reserve",
    "host_cache",
    "host_buffers",
)
"""The terms of a plan, in the order they are shown."""

HOST_TERMS = ("host_cache", "host_buffers")
"""The terms in host memory, whatever the device."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The sizes that `plan_memory` chose, and the bytes of each term.

    Attributes:
        weights: parameters of the model, loaded already or not.
        cache: the arena, null block included.
        static_buffers: inputs, outputs and tables, allocated for the lifetime of the engine.
        activations: peak of the intermediate results of a step.
        logits: logits of `max_num_seqs` rows and the float32 copies that sampling makes.
        attention_masks: masks, and scores if a kernel stores them; 0 for kernels that need none.
        captured_graphs: memory of captured steps, without their buffers.
        reserve: bytes left free, for fragmentation and other processes.
        host_cache: blocks in host memory for swapped requests.
        host_buffers: host mirrors of static buffers, and host copies of outputs.
        host_shared: whether the host's memory is the device's, so that `total` counts it.
        num_blocks: blocks of the cache, null block included.
        host_blocks: blocks of the host cache.
        max_batch_tokens: maximum tokens of one step.
        block_size: slots of a block.
        context_tokens: tokens of context that the cache holds in requests of `max_model_len`, see
            `ModelFootprint.context_blocks`.
        longest_request: tokens of the longest request that fits if no other runs.
        budget_bytes: upper limit of `total`.
        available_bytes: free bytes of the device when the plan was made.
        weights_resident: whether the weights were loaded then, so that `available_bytes` did not
            include them.
        capped: whether more blocks would fit than `max_num_seqs` full requests can use.
    """

    weights: int
    cache: int
    static_buffers: int
    activations: int
    logits: int
    attention_masks: int
    captured_graphs: int
    reserve: int
    host_cache: int
    host_buffers: int
    host_shared: bool
    num_blocks: int
    host_blocks: int
    max_batch_tokens: int
    block_size: int
    context_tokens: int
    longest_request: int
    budget_bytes: int
    available_bytes: int
    weights_resident: bool
    capped: bool

    @property
    def total(self) -> int:
        """Sum of all terms in bytes; without the host terms if host and device memory differ."""
        return sum(self.terms().values()) - (0 if self.host_shared else self.host_total)

    @property
    def host_total(self) -> int:
        """Sum of the terms in host memory."""
        return sum(getattr(self, name) for name in HOST_TERMS)

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    def terms(self) -> dict[str, int]:
        """Bytes of each of `TERMS`."""
        return {name: getattr(self, name) for name in TERMS}

    def reconcile(
        self, measured: Mapping[str, int], notes: Mapping[str, str] | None = None
    ) -> Reconciliation:
        """Compare the plan with measured bytes by term; terms may be missing.

        `notes` explain for some terms how they were measured, or why they were not.

        Raises:
            ValueError: `measured` or `notes` has a name that is not one of `TERMS`.
        """
        notes = notes or {}
        unknown = sorted({*measured, *notes} - set(TERMS))
        if unknown:
            raise ValueError(
                f"unknown memory terms {', '.join(unknown)}; the terms are {', '.join(TERMS)}"
            )
        return Reconciliation(
            tuple(
                ReconciledTerm(name, planned, measured.get(name), notes.get(name))
                for name, planned in self.terms().items()
            )
        )

    def summary(self) -> str:
        """The plan on one line: its terms, and what the cache holds."""
        terms = ", ".join(
            f"{self._label(name)} {format_bytes(size)}"
            for name, size in self.terms().items()
            if size
        )
        return (
            f"{terms}; {format_bytes(self.total)} of a budget of {format_bytes(self.budget_bytes)};"
            f" {self.usable_blocks:,} blocks of {self.block_size} tokens"
        )

    def format(self) -> str:
        """The plan as an aligned table in plain text, without a trailing newline."""
        rows = [(self._label(name), format_bytes(size)) for name, size in self.terms().items()]
        rows.append(("total", format_bytes(self.total)))
        rows.append(("budget", format_bytes(self.budget_bytes)))
        rows.append(("available", format_bytes(self.available_bytes)))
        blocks = (
            f"{self.num_blocks:,} blocks of {self.block_size} slots"
            f"{', limited by max_num_seqs and max_model_len' if self.capped else ''}: "
            f"{self.context_tokens:,} tokens of context, {self.longest_request:,} in one request; "
            f"{self.max_batch_tokens:,} tokens per step"
        )
        return f"{_align(rows)}\n{blocks}"

    def _label(self, name: str) -> str:
        label = name.replace("_", " ")
        if name == "weights" and self.weights_resident:
            return f"{label} (loaded)"
        if name in HOST_TERMS and not self.host_shared:
            return f"{label} (not in the total)"
        return label


@dataclass(frozen=True)
class ReconciledTerm:
    """One term of a plan and its measurement, in bytes; None if it was not measured."""

    name: str
    planned: int
    measured: int | None
    note: str | None = None
    """How it was measured, or why it was not."""

    @property
    def difference(self) -> int | None:
        """Measured minus planned bytes: positive if the plan was too low."""
        return None if self.measured is None else self.measured - self.planned


@dataclass(frozen=True)
class Reconciliation:
    """A plan compared with measurements, one entry for each of `TERMS`."""

    terms: tuple[ReconciledTerm, ...]

    @property
    def difference(self) -> int:
        """Measured minus planned bytes, over the terms that were measured."""
        return sum(term.difference or 0 for term in self.terms)

    def format(self) -> str:
        """The comparison as an aligned table in plain text, without a trailing newline."""
        rows = [("", "planned", "measured", "difference")]
        for term in self.terms:
            measured = "-" if term.measured is None else format_bytes(term.measured)
            rows.append(
                (
                    term.name.replace("_", " "),
                    format_bytes(term.planned),
                    measured,
                    _signed(term.difference),
                )
            )
        rows.append(("over the measured terms", "", "", _signed(self.difference)))
        notes = [f"{t.name.replace('_', ' ')}: {t.note}" for t in self.terms if t.note is not None]
        return "\n".join([_align(rows), *notes])


def format_bytes(size: int) -> str:
    """Format bytes in the largest binary unit not larger than `size`: `1536` is `1.50 KiB`."""
    if abs(size) < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"


def _signed(size: int | None) -> str:
    if size is None:
        return "-"
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def _align(rows: Sequence[tuple[str, ...]]) -> str:
    """Lines of columns, the first one left-aligned and the others right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
