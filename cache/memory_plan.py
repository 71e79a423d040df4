"""The terms of memory: what a model needs, what a plan grants, what was measured. All bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

__all__ = [
    "TERMS",
    "MemoryPlan",
    "ModelFootprint",
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
)
"""The terms of a plan, in the order they are shown."""


@dataclass(frozen=True, kw_only=True)
class ModelFootprint:
    """What a model needs, as coefficients. Everything is known before a weight is loaded.

    Attributes:
        weight_bytes: all parameters.
        block_bytes: one block over all layers of a layer group.
        activation_bytes_per_token: peak activations of a step, per token of the step.
        activation_bytes_fixed: peak activations that do not depend on the step.
        logits_bytes_per_row: logits of one row, with the float32 copies that sampling makes.
        max_rows: rows of the decode batch.
        max_model_len: tokens of the longest request.
        static_bytes_fixed: static buffers whose size is given by `max_rows` and the like.
        static_bytes_per_batch_token: static buffers, per token of the largest step.
        static_bytes_per_block: static buffers, per block of the cache (a read index).
        mask_bytes_per_token_slot: one element of an attention mask.
        masks: masks a step holds, 0 for kernels that need none, 2 for hybrid models.
        graph_bytes: what captured steps keep beside their buffers.

    Raises:
        ValueError: a field is out of range.
    """

    weight_bytes: int
    block_bytes: int
    activation_bytes_per_token: int
    activation_bytes_fixed: int
    logits_bytes_per_row: int
    max_rows: int
    max_model_len: int
    static_bytes_fixed: int = 0
    static_bytes_per_batch_token: int = 0
    static_bytes_per_block: int = 0
    mask_bytes_per_token_slot: int = 0
    masks: int = 0
    graph_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 1 if field.name in ("block_bytes", "max_rows", "max_model_len") else 0
            if getattr(self, field.name) < least:
                raise ValueError(
                    f"{field.name} must be at least {least}, got {getattr(self, field.name)}"
                )
        if self.masks > 2:
            raise ValueError(f"masks must be 0, 1 or 2, got {self.masks}")

    @property
    def most_batch_tokens(self) -> int:
        """Tokens that a step could ever process: every row prefills its whole context."""
        return self.max_rows * self.max_model_len

    def most_blocks(self, block_size: int) -> int:
        """Blocks that the context of a full batch can use, and the null block."""
        return self.max_rows * -(-self.max_model_len // block_size) + 1

    def terms(self, num_blocks: int, max_batch_tokens: int, block_size: int) -> dict[str, int]:
        """Bytes of each term of a plan but the reserve."""
        return {
            "weights": self.weight_bytes,
            "cache": self.block_bytes * num_blocks,
            "static_buffers": self.static_bytes_fixed
            + self.static_bytes_per_batch_token * max_batch_tokens
            + self.static_bytes_per_block * num_blocks,
            "activations": self.activation_bytes_fixed
            + self.activation_bytes_per_token * max_batch_tokens,
            "logits": self.logits_bytes_per_row * self.max_rows,
            "attention_masks": self.masks
            * self.mask_bytes_per_token_slot
            * max_batch_tokens
            * num_blocks
            * block_size,
            "captured_graphs": self.graph_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What `plan_memory` decided, and what it costs. All terms are bytes.

    Attributes:
        weights: parameters of the model, loaded already or not.
        cache: the arena, null block included.
        static_buffers: inputs, outputs and tables that live as long as the engine.
        activations: the most a step holds at once between its layers.
        logits: logits of `max_rows` rows and the float32 copies that sampling makes.
        attention_masks: 0 for kernels that need none.
        captured_graphs: what captured steps keep beside their buffers.
        reserve: left alone, for fragmentation and for others on the device.
        num_blocks: blocks of the cache, null block included.
        max_batch_tokens: the most tokens one step processes.
        block_size: slots of a block.
        budget_bytes: what `total` must not exceed.
        available_bytes: free bytes of the device when the plan was made.
        weights_resident: whether the weights were loaded then, and so were no longer part of
            `available_bytes`.
        capped: whether more blocks would have fitted than the model's context can use.
    """

    weights: int
    cache: int
    static_buffers: int
    activations: int
    logits: int
    attention_masks: int
    captured_graphs: int
    reserve: int
    num_blocks: int
    max_batch_tokens: int
    block_size: int
    budget_bytes: int
    available_bytes: int
    weights_resident: bool
    capped: bool

    @property
    def total(self) -> int:
        """Sum of all terms in bytes."""
        return sum(self.terms().values())

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def usable_slots(self) -> int:
        """Tokens of context that a single layer group can hold over all requests."""
        return self.usable_blocks * self.block_size

    def terms(self) -> dict[str, int]:
        """Bytes of each of `TERMS`."""
        return {name: getattr(self, name) for name in TERMS}

    def reconcile(self, measured: Mapping[str, int]) -> Reconciliation:
        """Compare the plan with measured bytes, given by the names of `TERMS`; some may be absent.

        Raises:
            ValueError: `measured` has a name that is not one of `TERMS`.
        """
        unknown = sorted(set(measured) - set(TERMS))
        if unknown:
            raise ValueError(
                f"unknown memory terms {', '.join(unknown)}; the terms are {', '.join(TERMS)}"
            )
        return Reconciliation(
            tuple(
                ReconciledTerm(name, planned, measured.get(name))
                for name, planned in self.terms().items()
            )
        )

    def format(self) -> str:
        """The plan as an aligned table in plain text, without a trailing newline."""
        rows = [(name.replace("_", " "), format_bytes(size)) for name, size in self.terms().items()]
        if self.weights_resident:
            rows[0] = ("weights (loaded)", rows[0][1])
        rows.append(("total", format_bytes(self.total)))
        rows.append(("budget", format_bytes(self.budget_bytes)))
        rows.append(("available", format_bytes(self.available_bytes)))
        blocks = (
            f"{self.num_blocks:,} blocks of {self.block_size} slots"
            f"{', all that the context can use' if self.capped else ''}: "
            f"{self.usable_slots:,} tokens of context; "
            f"{self.max_batch_tokens:,} tokens a step"
        )
        return f"{_align(rows)}\n{blocks}"


@dataclass(frozen=True)
class ReconciledTerm:
    """One term of a plan beside its measurement, in bytes; `measured` is None if nobody did."""

    name: str
    planned: int
    measured: int | None

    @property
    def difference(self) -> int | None:
        """Measured minus planned bytes: positive if the plan promised too little."""
        return None if self.measured is None else self.measured - self.planned


@dataclass(frozen=True)
class Reconciliation:
    """A plan beside what was measured, one entry for each of `TERMS`."""

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
        return _align(rows)


def format_bytes(size: int) -> str:
    """`size` bytes in the largest binary unit that keeps it at 1 or more: `1536` is `1.50 KiB`."""
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
