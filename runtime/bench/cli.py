"""The command `stepgraph bench` (`bench.py` in a checkout): measures, prints and compares."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...profiling.command_line import INTERRUPTED, print_text
from ...profiling.nsys import inside_nsys
from .comparison import compare, comparison_text, failure, read_results
from .console import PROGRAM, REPORTED_ERRORS, print_error
from .options import parse_arguments

if TYPE_CHECKING:  # it needs torch
    from .benchmark_run import BenchmarkRun

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. Loads torch once it has checked the flags."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--speculate" in arguments:  # its flags are its own
        from . import speculation

        return speculation.main(arguments)
    options = parse_arguments(arguments)
    try:
        if options.compare is not None:
            return _compare_files(options)
        if options.profile == "nsys" and not inside_nsys():
            from .step_profile import nsys_commands

            print_text(nsys_commands(options))
            return 0
        return _measure(options)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; results so far are kept", file=sys.stderr)
        return INTERRUPTED
    except REPORTED_ERRORS as error:
        return print_error(error)


def _compare_files(options: argparse.Namespace) -> int:
    """Compare two files; return 1 if they fail the limit."""
    old, new = map(read_results, options.compare)
    print_text(comparison_text(old, new, options.compare, options.fail_above))
    if options.fail_above is None:
        return 0
    reason = failure(compare(old, new), options.fail_above)
    return 0 if reason is None else print_error(reason)


def _measure(options: argparse.Namespace) -> int:
    """Measure with engines; print and write the results, also if an error ends the measurement."""
    from .results import failed_checks

    run = _new_run(options)
    try:
        run.run()
        run.settle()
    finally:
        if any(isinstance(value, list) and value for value in run.document.values()):
            _report(run)
    if options.profile != "none":
        print_text(run.profile_report())
    return int(bool(failed_checks(run.document)))


def _new_run(options: argparse.Namespace) -> Any:
    """Return what measures: a `BenchmarkRun` that has checked the device and all engines."""
    if options.profile != "none":
        from .step_profile import ProfileRun

        return ProfileRun(options)
    if options.scenario == "steady":
        from .scenarios.steady import SteadyRun

        return SteadyRun(options)
    from .benchmark_run import BenchmarkRun

    scenario = import_module(f".scenarios.{options.scenario}", __package__)
    return BenchmarkRun(options, scenario.measure)


def _report(run: BenchmarkRun) -> None:
    """Print the results; print warnings to stderr."""
    from .results import report, warnings

    print_text(report(run.document, verbose=run.options.verbose))
    for warning in warnings(run.document):
        line = f"{PROGRAM}: {warning}"
        print(textwrap.fill(line, 100, subsequent_indent="  "), file=sys.stderr)
