"""The command `stepgraph bench` (`bench.py` in a checkout): measures, prints and compares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...profiling import bandwidth
from ...profiling.command_line import INTERRUPTED
from ...profiling.nsys import inside_nsys
from .console import (
    REPORTED_ERRORS,
    exit_status,
    print_error,
    print_text,
    program_name,
    rerun_arguments,
)
from .options import parse_arguments
from .results.caveats import failed_checks, warnings
from .results.result_comparison import compare, comparison_text, failure, read_results
from .results.result_tables import host_table, markdown_table

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
        return _run(options)
    except KeyboardInterrupt:
        print(f"{program_name()}: interrupted; results so far are kept", file=sys.stderr)
        return INTERRUPTED
    except REPORTED_ERRORS as error:
        print_error(error)
        return exit_status(error)


def _run(options: argparse.Namespace) -> int:
    if options.compare is not None and len(options.compare) == 2:
        return _compare_files(options)
    if options.scenario == "host":
        return _measure_host(options)
    from .scenarios.registry import ScenarioRun
    from .scenarios.steady_run import SteadyRun
    from .step_profile import ProfileRun, run_nsys

    if options.profile == "nsys" and not inside_nsys():
        return run_nsys(options, rerun_arguments())
    if options.profile != "none":
        return _measure(options, ProfileRun)
    return _measure(options, SteadyRun if options.scenario == "steady" else ScenarioRun)


def _measure_host(options: argparse.Namespace) -> int:
    """Measure the host time of a step, without a model; print and write the table."""
    import torch

    from .results.result_document import new_document, write_json
    from .scenarios.host_overhead import measure_host

    print("measuring --scenario host", file=sys.stderr)
    try:
        measured = measure_host(num_steps=options.num_steps, seed=options.seed)
    except ValueError as error:  # more steps than the cache has room for
        print_error(error)
        return 1
    costs = [asdict(cost) for cost in measured]
    if options.output_json is not None:
        device = torch.device("cpu")
        document = new_document(device, bandwidth.measure_read_bandwidth(device))
        write_json(options, document | {"host": costs})
    print_text(host_table(costs))
    return 0


def _compare_files(options: argparse.Namespace) -> int:
    """Compare two files; print and write the comparison."""
    old, new = options.compare
    before, document = read_results(old), read_results(new)
    _add_comparison(options, document, before, str(new))
    print_text(comparison_text(document["comparison"]))
    return _judge(document)


def _measure(options: argparse.Namespace, kind: type[BenchmarkRun]) -> int:
    """Measure with engines; print and write the results, also if an error ends the measurement."""
    from .step_profile import ProfileRun

    before = None
    if options.compare is not None:
        before = read_results(options.compare[0])
    run = kind(options)
    document = run.document
    try:
        run.run()
    except BaseException:
        if any(isinstance(value, list) and value for value in document.values()):
            _report(run)
        raise
    if before is not None:
        _add_comparison(options, document, before, None)
    _report(run)
    if isinstance(run, ProfileRun):
        print_text(run.report())
    return max(int(bool(failed_checks(document))), _judge(document))


def _add_comparison(
    options: argparse.Namespace,
    document: dict[str, Any],
    before: dict[str, Any],
    new_name: str | None,
) -> None:
    """Compare a document with an earlier one, and write it with the comparison."""
    from .results.result_document import write_json

    document["comparison"] = compare(
        before,
        document,
        old_name=str(options.compare[0]),
        new_name=new_name,
        fail_above=options.fail_above,
    )
    write_json(options, document)


def _report(run: BenchmarkRun) -> None:
    """Print the table; print warnings to stderr."""
    print_text(markdown_table(run.document))
    for warning in warnings(run.document):
        print(f"{program_name()}: {warning}", file=sys.stderr)


def _judge(document: dict[str, Any]) -> int:
    """Print why a comparison fails its limit; return the exit status."""
    reason = failure(document["comparison"]) if "comparison" in document else None
    if reason is not None:
        print_error(reason)
    return int(reason is not None)
