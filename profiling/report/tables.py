"""The report of a profile as text: aligned Markdown tables. Standard library only."""

from collections.abc import Mapping, Sequence
from typing import Final

from ..markdown import aligned
from ..stats import Summary
from .comparison import Change
from .document import Report
from .parts import Part

__all__ = ["diff_text", "report_text"]

MOST_STEPS: Final = 100
"""Rows of the table of steps; --csv and --json hold all."""

MOST_PARTS: Final = 40
"""Rows of the table of operations in a phase; --json holds all."""

STEPS: Final = (
    "step", "phase", "rows", "bucket", "tokens", "padding", "host µs", "wait µs", "device µs",
    "gap µs", "step µs", "launches",
)  # fmt: skip
CASES: Final = (
    "phase", "bucket", "steps", "step µs p50/p90/p99", "device µs p50/p90/p99",
    "gap µs p50/p90/p99", "host µs p50/p90/p99",
)  # fmt: skip
PARTS: Final = (
    "phase", "what", "activities", "µs p50", "µs p99", "n", "share", "of roofline",
)  # fmt: skip
CHANGES: Final = ("what", "phase", "name", "old µs p50", "new µs p50", "ratio", "n old/new")

_TRACING: Final = {
    "graph": "CUDA graphs were traced whole (graph): times of steps are as they are",
    "node": "CUDA graphs were traced node by node (node): that perturbs what it times; take times"
    " of steps from a profile with --graph-trace graph",
    None: "no CUDA graph was traced",
}


def report_text(report: Report) -> str:
    """Return the whole report."""
    lines = [f"# {report.trace}", "", f"- {_TRACING[report.graph_trace]}"]
    lines.append(f"- {len(report.steps):,} steps, together {_totals(report.totals)}")
    if report.names is not None:
        bandwidth = report.bandwidth_gb_s
        read = f", {bandwidth:,.0f} GB/s" if bandwidth is not None else ""
        lines.append(f"- names of nodes: {report.names} ({report.model}, {report.device}{read})")
    lines += [f"- note: {note}" for note in report.notes]
    lines += ["", "## Steps by phase and bucket", "", *_cases(report)]
    if report.parts.operations:
        lines += ["", "## Operations of a launch", "", *_parts(report.parts.operations)]
        lines += [""]
        lines += [
            f"- {phase}: no activity ran in {share:.1%} of the device time"
            for phase, share in report.parts.idle.items()
        ]
    if report.parts.layers:
        lines += ["", "## Layers of a launch", "", *_parts(report.parts.layers)]
    lines += ["", "## Steps", "", *_steps(report)]
    return "\n".join(lines)


def diff_text(new: Report, old: Report, changes: Sequence[Change]) -> str:
    """Return the comparison of two reports."""
    lines = [f"# {new.trace} against {old.trace}", ""]
    if new.graph_trace != old.graph_trace:
        modes = " and ".join(str(report.graph_trace or "none") for report in (old, new))
        lines.append(
            f"- note: CUDA graphs were traced differently ({modes}): tracing changes times"
        )
    else:
        lines.append(f"- {_TRACING[new.graph_trace]}")
    for what in ("model", "device"):
        values = [getattr(report, what) for report in (old, new)]
        if all(values) and values[0] != values[1]:
            lines.append(f"- note: of another {what}: {values[0]}, now {values[1]}")
    for which, report in (("old", old), ("new", new)):
        lines += [f"- note on the {which} one: {note}" for note in report.notes]
    lines.append("")
    both = [c for c in changes if c.old_us is not None and c.new_us is not None]
    cells = [
        (
            change.what,
            change.phase,
            change.label,
            _number(change.old_us),
            _number(change.new_us),
            "-" if change.ratio is None else f"{change.ratio:.3f}",
            f"{change.old_n}/{change.new_n}",
        )
        for change in both
    ]
    lines += aligned(CHANGES, cells, 3) if cells else ["- the two have nothing in common"]
    for where, report in (("old", old), ("new", new)):
        alone = [c for c in changes if (c.new_us if where == "old" else c.old_us) is None]
        if alone:
            lines += ["", f"Only in {report.trace}:", ""]
            lines += [
                f"- {c.what} {c.label} ({c.phase}):"
                f" {_number(c.old_us if where == 'old' else c.new_us)} µs"
                for c in alone
            ]
    return "\n".join(lines)


def _totals(totals: Mapping[str, float]) -> str:
    """The sums over all steps."""
    return ", ".join(
        f"{name.removesuffix('_us')} {value:,.1f} µs"
        if name.endswith("_us")
        else f"{value:,} {name}"
        for name, value in totals.items()
    )


def _cases(report: Report) -> list[str]:
    cells = [
        (
            case.phase,
            _whole(case.bucket),
            f"{case.n:,}",
            *(map(_percentiles, (case.step_us, case.device_us, case.gap_us, case.host_us))),
        )
        for case in report.cases
    ]
    return aligned(CASES, cells, 1)


def _parts(parts: Sequence[Part]) -> list[str]:
    cells: list[tuple[str, ...]] = []
    for phase in dict.fromkeys(part.phase for part in parts):
        rows = [part for part in parts if part.phase == phase]
        # Operations begin with the most expensive; layers are all shown, in their order.
        shown = rows if rows[0].layer is not None else rows[:MOST_PARTS]
        cells += [
            (
                part.phase,
                part.label,
                f"{part.activities:.4g}",
                _number(part.us.p50),
                _number(part.us.p99),
                f"{part.us.n:,}",
                f"{part.share:.1%}",
                "-" if part.fraction is None else f"{part.fraction:.1%}",
            )
            for part in shown
        ]
        if len(rows) > len(shown):
            rest = sum(part.share for part in rows[len(shown) :])
            more = f"({len(rows) - len(shown)} more: --json)"
            cells.append((phase, more, "-", "-", "-", "-", f"{rest:.1%}", "-"))
    return aligned(PARTS, cells, 2)


def _steps(report: Report) -> list[str]:
    rows = report.steps[:MOST_STEPS]
    cells: list[tuple[str, ...]] = [
        (
            _whole(row.step),
            row.phase,
            _whole(row.rows),
            _whole(row.bucket),
            _whole(row.tokens),
            _whole(row.padding),
            _number(row.host_us),
            _number(row.wait_us),
            _number(row.device_us),
            _number(row.gap_us),
            _number(row.step_us),
            str(row.launches),
        )
        for row in rows
    ]
    head: tuple[str, ...] = STEPS
    if len({row.thread for row in report.steps}) > 1:
        head = ("thread", *head)
        cells = [(str(row.thread), *line) for row, line in zip(rows, cells, strict=True)]
    lines = aligned(head, cells, 0)
    left = len(report.steps) - len(rows)
    return lines + (["", f"{left:,} more: --csv FILE holds them all"] if left else [])


def _percentiles(summary: Summary | None) -> str:
    """p50 / p90 / p99, with a dash where there are too few samples to tell."""
    if summary is None:
        return "-"
    return " / ".join(map(_number, (summary.p50, summary.p90, summary.p99)))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)
