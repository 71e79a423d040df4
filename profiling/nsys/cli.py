"""The command `stepgraph report`: its options, its tables and its output files."""

import argparse
import csv
import io
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..atomic_write import WriteError, write_files
from ..command_line import CommandParser
from ..kernel_names import NamesFileError
from ..markdown import aligned
from ..stats import Summary
from .export import ExportError
from .report import Change, Part, Report, compare, read_report
from .steps import STEP_COLUMNS

__all__ = ["diff_text", "main", "report_text"]

_PROGRAM = "stepgraph report"
_DESCRIPTION = """\
Report where the time of each step in an nsys profile went, on the host and on the device.

%(prog)s TRACE.sqlite
%(prog)s TRACE.sqlite --json report.json --csv steps.csv
%(prog)s NEW.sqlite --diff OLD.sqlite
"""

MOST_STEPS: Final = 100
"""Maximum rows of the printed table of steps; --csv and --json hold all."""

MOST_PARTS: Final = 40
"""Maximum rows per phase in the printed table of operations; --json holds all."""

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
    "graph": "CUDA graphs were traced whole (graph): step times are undisturbed",
    "node": "CUDA graphs were traced node by node (node): that perturbs the timing; take step"
    " times from a profile with --graph-trace graph",
    None: "no CUDA graph was traced",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        _require_distinct(options)
        report = read_report(options.trace, options.names)
        text, document = report_text(report), report.to_json()
        if options.diff is not None:
            old = read_report(options.diff)
            changes = compare(report, old)
            text = diff_text(report, old, changes)
            document["diff"] = {
                "trace": str(old.trace),
                "graph_trace": old.graph_trace,
                "changes": [change.to_json() for change in changes],
            }
        outputs = []
        if options.json is not None:
            outputs.append((options.json, json.dumps(document, indent=1, allow_nan=False) + "\n"))
        if options.csv is not None:
            outputs.append((options.csv, _csv(report)))
        write_files(outputs)
    except (ExportError, NamesFileError, WriteError) as error:
        print(f"{_PROGRAM}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack µ, or a path's bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE.sqlite", help="an export of nsys")
    add(
        "--names",
        type=Path,
        metavar="FILE",
        help="names of captured nodes (default: TRACE.kernels.json, if it exists)",
    )
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    add("--csv", type=Path, metavar="FILE", help="write the table of steps as CSV")
    add("--diff", type=Path, metavar="OLD.sqlite", help="compare with an earlier profile")
    return parser


def _require_distinct(options: argparse.Namespace) -> None:
    """Raise WriteError where an output would replace an input or the other output."""
    inputs = {path.resolve() for path in (options.trace, options.names, options.diff) if path}
    outputs = [path for path in (options.json, options.csv) if path is not None]
    for path in outputs:
        if path.resolve() in inputs:
            raise WriteError(path, "it is an input")
    if len(outputs) == 2 and outputs[0].resolve() == outputs[1].resolve():
        raise WriteError(outputs[0], "it would hold both --json and --csv")


def _csv(report: Report) -> str:
    """The table of steps; what the profile does not tell is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(STEP_COLUMNS)
    writer.writerows([getattr(step, name) for name in STEP_COLUMNS] for step in report.steps)
    return text.getvalue()


def report_text(report: Report) -> str:
    """Return the report as Markdown."""
    lines = [f"# {report.trace}", "", f"- {_TRACING[report.graph_trace]}"]
    totals = ", ".join(
        f"{name.removesuffix('_us')} {value:,.1f} µs"
        if name.endswith("_us")
        else f"{value:,} {name}"
        for name, value in report.totals.items()
    )
    lines.append(f"- {len(report.steps):,} steps, together {totals}")
    if report.names is not None:
        known = report.known
        read = "" if known.bandwidth_gb_s is None else f", {known.bandwidth_gb_s:,.0f} GB/s"
        lines.append(f"- names of nodes: {report.names} ({known.model}, {known.device}{read})")
    lines += [f"- note: {note}" for note in report.notes]
    cases = [
        _cells(
            case.phase,
            case.bucket,
            f"{case.n:,}",
            *map(_percentiles, (case.step_us, case.device_us, case.gap_us, case.host_us)),
        )
        for case in report.cases
    ]
    lines += ["", "## Steps by phase and bucket", "", *aligned(CASES, cases, 1)]
    if report.operations:
        lines += ["", "## Operations of a launch", "", *_operations(report.operations), ""]
        lines += [
            f"- {phase}: no activity ran in {share:.1%} of the device time"
            for phase, share in report.idle.items()
        ]
    if report.layers:
        layers = aligned(PARTS, list(map(_part, report.layers)), 2)
        lines += ["", "## Layers of a launch", "", *layers]
    return "\n".join([*lines, "", "## Steps", "", *_steps(report)])


def _part(part: Part) -> list[str]:
    fraction = None if part.fraction is None else f"{part.fraction:.1%}"
    count, n, share = f"{part.activities:.4g}", f"{part.us.n:,}", f"{part.share:.1%}"
    return _cells(part.phase, part.label, count, part.us.p50, part.us.p99, n, share, fraction)


def _operations(operations: Sequence[Part]) -> list[str]:
    cells: list[list[str]] = []
    for phase, group in itertools.groupby(operations, lambda part: part.phase):
        parts = list(group)
        cells += map(_part, parts[:MOST_PARTS])
        rest = parts[MOST_PARTS:]
        if rest:
            share = f"{sum(part.share for part in rest):.1%}"
            more = f"({len(rest)} more: --json)"
            cells.append(_cells(phase, more, None, None, None, None, share, None))
    return aligned(PARTS, cells, 2)


def _steps(report: Report) -> list[str]:
    head = ("thread", *STEPS) if any(step.thread for step in report.steps) else STEPS
    names = [name.replace(" µs", "_us") for name in head]
    rows = report.steps[:MOST_STEPS]
    lines = aligned(head, [_cells(*(getattr(step, name) for name in names)) for step in rows], 0)
    left = len(report.steps) - len(rows)
    return lines + (["", f"{left:,} more: --csv FILE holds them all"] if left else [])


def diff_text(new: Report, old: Report, changes: Sequence[Change]) -> str:
    """Return the comparison of two reports as Markdown."""
    lines = [f"# {new.trace} against {old.trace}", ""]
    if new.graph_trace != old.graph_trace:
        modes = " and ".join(str(report.graph_trace or "none") for report in (old, new))
        note = f"note: CUDA graphs were traced differently ({modes}): tracing changes times"
        lines.append(f"- {note}")
    else:
        lines.append(f"- {_TRACING[new.graph_trace]}")
    for what in ("model", "device"):
        was, now = (getattr(report.known, what) for report in (old, new))
        if was and now and was != now:
            lines.append(f"- note: of another {what}: {was}, now {now}")
    for which, report in (("old", old), ("new", new)):
        lines += [f"- note on the {which} one: {note}" for note in report.notes]
    cells = [
        _cells(
            change.what,
            change.phase,
            change.label,
            change.old_us,
            change.new_us,
            None if change.ratio is None else f"{change.ratio:.3f}",
            f"{change.old_n}/{change.new_n}",
        )
        for change in changes
        if change.old_us is not None and change.new_us is not None
    ]
    lines += ["", *(aligned(CHANGES, cells, 3) if cells else ["- the two have nothing in common"])]
    for report, name, other in ((old, "old_us", "new_us"), (new, "new_us", "old_us")):
        alone = [change for change in changes if getattr(change, other) is None]
        if alone:
            lines += ["", f"Only in {report.trace}:", ""]
            lines += [
                f"- {c.what} {c.label} ({c.phase}): {_cell(getattr(c, name))} µs" for c in alone
            ]
    return "\n".join(lines)


def _percentiles(summary: Summary | None) -> str:
    """Return p50 / p90 / p99, with a dash where there are too few samples."""
    if summary is None:
        return "-"
    return " / ".join(_cells(summary.p50, summary.p90, summary.p99))


def _cells(*values: float | str | None) -> list[str]:
    return list(map(_cell, values))


def _cell(value: float | str | None) -> str:
    """Return a time with one digit, integers and texts unchanged, a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
