"""The command `stepgraph bench` (`bench.py` in a checkout): measures, prints and compares."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ...profiling import bandwidth
from ...profiling.atomic_write import write_file
from ...profiling.command_line import INTERRUPTED
from ...profiling.nsys import inside_nsys
from .cache_bookkeeping import CacheTiming, measure_cache
from .caveats import failed_checks, warnings
from .compared import read_results
from .comparison import compare, slower_than
from .comparison_table import comparison_text, describe_case
from .cost_tables import cache_table, host_table
from .document import new_document, write_json
from .explain import run_explain_memory, run_explain_step
from .host import HostCost, measure_host
from .options import parse_arguments
from .outputs import print_error, print_text
from .profile import ProfileRun, run_nsys
from .program import REPORTED_ERRORS, program_name, status_of, to_run_again
from .run_scenarios import ScenarioRun
from .run_steady import SteadyRun
from .tables import markdown_table

__all__ = ["main"]

_DESCRIPTION = """\
How fast does this model decode on this machine, and how far is that from the limit?

%(prog)s                                       the demo model, every mode the device has
%(prog)s --model preset:smollm2-135m --batch-size 1 8 --input-len 128 1024
%(prog)s --baseline transformers               beside transformers, same weights
%(prog)s --explain-memory --model preset:llama-3.1-8b --device-memory 24GB
%(prog)s --explain-step --model preset:llama-3.2-1b --bandwidth-gb-s 4300
%(prog)s --output-json new.json --compare old.json --fail-above 1.05
%(prog)s --compare old.json new.json           two files, and measure nothing
%(prog)s --profile torch                       a trace of some steps, for Perfetto
%(prog)s --profile nsys                        the command for nsys, run where it is
%(prog)s --scenario churn --plot steps.png     gaps between tokens over time, drawn
%(prog)s --scenario cache                      what the bookkeeping of blocks costs
%(prog)s --scenario host                       what plan, launch and commit cost
%(prog)s --scenario interference               prompts that come while others decode
%(prog)s --scenario churn                      requests that come and leave at random
%(prog)s --scenario neighbours                 decode steps on busy processors
%(prog)s --scenario prefix                     prompts that begin alike
%(prog)s --scenario memory                     what an engine takes, and a full cache costs
%(prog)s --scenario start                      the first start of an engine, and the second
%(prog)s --scenario kernels                    each kernel of a step on CUDA, and forecasts
"""


def run_cache_scenario(options: argparse.Namespace) -> int:
    """Measure the bookkeeping of blocks; print and write the results."""
    print("measuring the bookkeeping of blocks", file=sys.stderr)
    costs = measure_cache(seed=options.seed)
    _write_costs(options, cache_table(costs), "cache_operations", costs)
    return 0


def run_host_scenario(options: argparse.Namespace) -> int:
    """Measure the host's part of a step; print and write the results."""
    print("measuring what the host does in a step", file=sys.stderr)
    try:
        costs = measure_host(num_steps=options.num_steps, seed=options.seed)
    except ValueError as error:  # more steps than the cache has room for
        print_error(error)
        return 1
    _write_costs(options, host_table(costs), "host", costs)
    return 0


def _write_costs(
    options: argparse.Namespace, table: str, name: str, costs: Sequence[CacheTiming | HostCost]
) -> None:
    """Print the table of what runs on the host alone, and write it where it was asked for."""
    if options.output_json is not None:
        device = torch.device("cpu")
        document = new_document(device, bandwidth.measure_read_bandwidth(device))
        document[name] = [dataclasses.asdict(cost) for cost in costs]
        write_json(options, document)
    if options.output_md is not None:
        write_file(options.output_md, table + "\n")
    print_text(table)


def run_compare(options: argparse.Namespace) -> int:
    """Compare two files; print and write what comes of it, and return the exit status."""
    old, new = options.compare
    scenario, before = read_results(old, None)
    _, document = read_results(new, scenario)
    document["comparison"] = compare(
        before,
        document,
        scenario=scenario,
        old_name=str(old),
        new_name=str(new),
        fail_above=options.fail_above,
    )
    text = comparison_text(document["comparison"])
    write_json(options, document)
    if options.output_md is not None:
        write_file(options.output_md, text + "\n")
    print_text(text)
    return judge(document["comparison"])


def run_engines(options: argparse.Namespace) -> int:
    """Measure engines; print and write the results, and return the exit status.

    Whatever ends it, what was measured before is told.
    """
    before = None
    if options.compare is not None:
        _, before = read_results(options.compare[0], options.scenario)
    run = SteadyRun(options) if options.scenario == "steady" else ScenarioRun(options)
    try:
        run.run()
    except BaseException:
        if any(isinstance(value, list) and value for value in run.document.values()):
            _tell(options, run.document)
            run.steps.write(run.document)
        raise
    failed = int(bool(failed_checks(run.document)))
    if before is None:
        _tell(options, run.document)
        run.steps.write(run.document)
        return failed
    run.document["comparison"] = compare(
        before,
        run.document,
        scenario=options.scenario,
        old_name=str(options.compare[0]),
        new_name=None,
        fail_above=options.fail_above,
    )
    write_json(options, run.document)
    _tell(options, run.document)
    run.steps.write(run.document)
    return max(failed, judge(run.document["comparison"]))


def run_profile(options: argparse.Namespace) -> int:
    """Take a profile of a case, or have nsys take it; return the exit status."""
    if options.profile == "nsys" and not inside_nsys():
        return run_nsys(options, to_run_again())
    run = ProfileRun(options)
    run.run()
    _tell(options, run.document)
    print_text(run.report())
    return int(bool(failed_checks(run.document)))


def _tell(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the table where it was asked for; print it, and what is to be said of it."""
    text = markdown_table(document)
    if options.output_md is not None:
        write_file(options.output_md, text + "\n")
    print_text(text)
    for warning in warnings(document):
        print(f"{program_name()}: {warning}", file=sys.stderr)


def judge(comparison: dict[str, Any]) -> int:
    """Say on stderr what is slower than it may be; return the exit status."""
    limit = comparison["fail_above"]
    if limit is None:
        return 0
    slower = slower_than(comparison)
    if slower:
        worst = max(slower, key=lambda entry: entry["ratio"])
        reason = (
            f"{len(slower)} of {len(comparison['entries'])} ratios are above {limit:g}, the largest"
            f" is {worst['ratio']:.3f}: {describe_case(worst['case'])}"
        )
    elif not comparison["entries"]:
        reason = f"no case is in {comparison['old']} too: nothing was compared"
    else:
        return 0
    print_error(reason)
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parse_arguments(arguments, _DESCRIPTION)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print(f"{program_name()}: interrupted; what was measured before is kept", file=sys.stderr)
        return INTERRUPTED
    except REPORTED_ERRORS as error:
        print_error(error)
        return status_of(error)


def _run(options: argparse.Namespace) -> int:
    if options.explain_memory:
        return run_explain_memory(options, program_name())
    if options.explain_step:
        return run_explain_step(options, program_name())
    if options.compare is not None and len(options.compare) == 2:
        return run_compare(options)
    if options.scenario == "cache":
        return run_cache_scenario(options)
    if options.scenario == "host":
        return run_host_scenario(options)
    if options.profile != "none":
        return run_profile(options)
    return run_engines(options)
