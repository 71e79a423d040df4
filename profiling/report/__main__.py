"""The command `stepgraph report`; `python -m stepgraph.profiling.report` is the same."""

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from ..command_line import CommandParser
from ..kernel_names import NamesFileError
from ..whole_files import WriteError, write_files
from .comparison import compare
from .document import STEP_COLUMNS, Report, read_report
from .export import ExportError
from .tables import diff_text, report_text

__all__ = ["main"]

_PROGRAM = "stepgraph report"
_DESCRIPTION = """\
Reports a profile of nsys: where the time of each step went, on the host and on the device.

%(prog)s TRACE.sqlite
%(prog)s TRACE.sqlite --json report.json --csv steps.csv
%(prog)s NEW.sqlite --diff OLD.sqlite
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        _require_distinct(options)
        report = read_report(options.trace, options.names)
        text = report_text(report)
        document = report.to_json()
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
        return _fail(str(error))
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may have no µ, and a path any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:  # of `| head`: what it read is all that it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE.sqlite", help="what nsys exported")
    add(
        "--names",
        type=Path,
        metavar="FILE",
        help="names of captured nodes; by default TRACE.kernels.json, if that is there",
    )
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    add("--csv", type=Path, metavar="FILE", help="write the table of steps as CSV")
    add("--diff", type=Path, metavar="OLD.sqlite", help="compare with an earlier profile")
    return parser


def _csv(report: Report) -> str:
    """The table of steps; what the profile does not tell is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(STEP_COLUMNS)
    writer.writerows(astuple(row) for row in report.steps)
    return text.getvalue()


def _require_distinct(options: argparse.Namespace) -> None:
    """Raise WriteError where an output would replace an input or the other output."""
    inputs = {path.resolve() for path in (options.trace, options.names, options.diff) if path}
    outputs = [path for path in (options.json, options.csv) if path is not None]
    for path in outputs:
        if path.resolve() in inputs:
            raise WriteError(path, "it is what is read")
    if len(outputs) == 2 and outputs[0].resolve() == outputs[1].resolve():
        raise WriteError(outputs[0], "it would hold both --json and --csv")


def _fail(message: str) -> int:
    print(f"{_PROGRAM}: error: {' '.join(message.splitlines())}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
