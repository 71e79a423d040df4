"""The command `stepgraph bench` (`bench.py` in a checkout): measures, prints and compares."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext

from ...profiling.command_line import INTERRUPTED, print_text
from ...profiling.nsys import inside_nsys
from .comparison import compare, comparison_text, failure, read_results
from .options import PROGRAM, REPORTED_ERRORS, parse_arguments, print_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. Loads torch once it has checked the flags."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--speculate" in arguments:  # its flags are its own
        from . import speculation

        return speculation.main(arguments)
    options = parse_arguments(arguments)
    try:
        if options.compare is not None:
            old, new = map(read_results, options.compare)
            print_text(comparison_text(old, new, options.compare, options.fail_above))
            reason = options.fail_above and failure(compare(old, new), options.fail_above)
            return print_error(reason) if reason else 0
        if options.from_json is not None:
            from .html_report import write_report

            write_report(options.html, read_results(options.from_json))
            return 0
        if options.profile == "nsys" and not inside_nsys():
            from .steady import nsys_commands

            print_text(nsys_commands(options))
            return 0
        return _measure(options)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; results so far are kept", file=sys.stderr)
        return INTERRUPTED
    except REPORTED_ERRORS as error:
        return print_error(error)


def _measure(options: argparse.Namespace) -> int:
    """Measure with engines; print and write the results, also if an error ends the measurement."""
    from . import serve, steady
    from .benchmark_run import BenchmarkRun
    from .results import failed_checks, report, warnings

    profile = None if options.profile == "none" else steady.StepProfile(options)
    if options.scenario == "serve":
        run = BenchmarkRun(options, {})
    else:
        scenario = steady.SteadyScenario(options, profile)
        run = scenario.run
    try:
        with nullcontext() if profile is None else profile.open():
            serve.measure(run) if options.scenario == "serve" else scenario.measure()
        run.settle()
    finally:
        if any(isinstance(value, list) and value for value in run.document.values()):
            print_text(report(run.document, verbose=options.verbose))
            for warning in warnings(run.document):
                line = f"{PROGRAM}: {warning}"
                print(textwrap.fill(line, 100, subsequent_indent="  "), file=sys.stderr)
    if profile is not None:
        print_text(profile.finish(run))
    return int(bool(failed_checks(run.document)))
