"""How fast does this model decode on this machine, and how far is that from the limit?

python bench.py                                       the demo model, every mode the device has
python bench.py --model preset:smollm2-135m --batch-size 1 8 --input-len 128 1024
python bench.py --baseline transformers               beside transformers, same weights
python bench.py --explain-memory --model preset:llama-3.1-8b --device-memory 24GB
python bench.py --explain-step --model preset:llama-3.2-1b --bandwidth-gb-s 4300
python bench.py --output-json new.json --compare old.json --fail-above 1.05
python bench.py --compare old.json new.json           two files, and measure nothing
python bench.py --profile torch                       a trace of some steps, for Perfetto
python bench.py --profile nsys                        the command for nsys, run where it is
python bench.py --scenario churn --plot steps.png     gaps between tokens over time, drawn
python bench.py --scenario cache                      what the bookkeeping of blocks costs
python bench.py --scenario host                       what plan, launch and commit cost
python bench.py --scenario interference               prompts that come while others decode
python bench.py --scenario churn                      requests that come and leave at random
python bench.py --scenario neighbours                 decode steps on busy processors
python bench.py --scenario prefix                     prompts that begin alike
python bench.py --scenario memory                     what an engine takes, and a full cache costs
python bench.py --scenario start                      the first start of an engine, and the second
python bench.py --scenario kernels                    each kernel of a step on CUDA, and forecasts
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from stepgraph.cache.benchmark import OperationCost, measure_cache
from stepgraph.profiling import bandwidth
from stepgraph.profiling.kernel_names import NamesFileError
from stepgraph.profiling.nsys import inside_nsys
from stepgraph.profiling.nvtx_tool import NvtxMissingError
from stepgraph.profiling.plot import PlotError
from stepgraph.profiling.trace import TraceError
from stepgraph.profiling.whole_files import WriteError, write_file
from stepgraph.runtime import (
    ConfigError,
    EngineConfig,
    KernelBuildError,
    MemoryBudgetError,
    StepgraphError,
    StepPreparationError,
)
from stepgraph.runtime.benchmarks.caveats import failed_checks, warnings
from stepgraph.runtime.benchmarks.compared import read_results
from stepgraph.runtime.benchmarks.comparison import compare, slower_than
from stepgraph.runtime.benchmarks.comparison_table import comparison_text, describe_case
from stepgraph.runtime.benchmarks.cost_tables import cache_table, host_table
from stepgraph.runtime.benchmarks.document import new_document, write_json
from stepgraph.runtime.benchmarks.host import HostCost, measure_host
from stepgraph.runtime.benchmarks.options import parse_arguments
from stepgraph.runtime.benchmarks.outputs import print_error, print_text
from stepgraph.runtime.benchmarks.profile import ProfileRun, run_nsys
from stepgraph.runtime.benchmarks.run_scenarios import ScenarioRun
from stepgraph.runtime.benchmarks.run_steady import SteadyRun
from stepgraph.runtime.benchmarks.tables import markdown_table
from stepgraph.runtime.config import resolve_device
from stepgraph.runtime.memory_report import explain_memory
from stepgraph.runtime.step_report import explain_step

INTERRUPTED = 130
"""The exit status of what SIGINT ended: 128 + 2, as of a shell."""
USAGE = 2
"""The exit status of a command line that cannot be run, as of argparse."""
ERRORS = (
    *(StepgraphError, MemoryBudgetError, StepPreparationError, KernelBuildError),
    *(NamesFileError, NvtxMissingError, PlotError, TraceError, WriteError),
)


def status_of(error: Exception) -> int:
    """Return the exit status of a run that an error of `ERRORS` ended."""
    return USAGE if isinstance(error, ConfigError) else 1


def run_explain_memory(options: argparse.Namespace) -> int:
    """Print the memory plan of every model, dtype and mode; return the exit status.

    What does not fit is an error on stderr where the plan would be; the others are printed anyway.
    """
    status, separator = 0, ""
    kinds = itertools.product(
        options.model,
        options.dtype,
        options.weight_dtype,
        options.kv_dtype,
        options.mode or ["auto"],
    )
    for model, dtype, weight_dtype, kv_dtype, mode in kinds:
        config = EngineConfig(
            device=options.device,
            dtype=dtype,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            mode=mode,
            max_rows=max(options.batch_size),
            prefill_chunk=options.prefill_chunk,
        )
        try:
            text = explain_memory(model, config, options.device_memory)
        except ERRORS as error:
            print_error(error, model)
            status = max(status, status_of(error))
        else:
            print_text(separator + text)
            separator = "\n"
    return status


def run_explain_step(options: argparse.Namespace) -> int:
    """Print the kernels of a decode step for every point asked for; return the exit status.

    What cannot be told is an error on stderr in its place; the others are printed anyway.
    """
    if options.bandwidth_gb_s is not None:
        reads = 1e9 * options.bandwidth_gb_s
    else:
        try:
            device = resolve_device(options.device)
        except ERRORS as error:
            print_error(error)
            return status_of(error)
        if device.type != "cuda":
            print_error(
                f"--explain-step is about a GPU, and the device is {str(device)!r}: give its"
                " --bandwidth-gb-s"
            )
            return 1
        reads = bandwidth.measure_read_bandwidth(device)
    status, separator = 0, ""
    points = itertools.product(
        options.model,
        options.dtype,
        options.weight_dtype,
        options.kv_dtype,
        options.input_len,
        options.batch_size,
    )
    for model, dtype, weight_dtype, kv_dtype, context, rows in points:
        config = EngineConfig(dtype=dtype, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
        try:
            text = explain_step(model, config, rows=rows, context=context, bandwidth=reads)
        except ERRORS as error:
            print_error(error, model)
            status = max(status, status_of(error))
        else:
            print_text(separator + text)
            separator = "\n"
    return status


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
    options: argparse.Namespace, table: str, name: str, costs: Sequence[OperationCost | HostCost]
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
        return run_nsys(options, sys.argv)
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
        print(f"bench.py: {warning}", file=sys.stderr)


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


def main() -> int:
    """Run the command line; return the exit status."""
    options = parse_arguments(description=__doc__)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("bench.py: interrupted; what was measured before is kept", file=sys.stderr)
        return INTERRUPTED
    except ERRORS as error:
        print_error(error)
        return status_of(error)


def _run(options: argparse.Namespace) -> int:
    if options.explain_memory:
        return run_explain_memory(options)
    if options.explain_step:
        return run_explain_step(options)
    if options.compare is not None and len(options.compare) == 2:
        return run_compare(options)
    if options.scenario == "cache":
        return run_cache_scenario(options)
    if options.scenario == "host":
        return run_host_scenario(options)
    if options.profile != "none":
        return run_profile(options)
    return run_engines(options)


if __name__ == "__main__":
    sys.exit(main())
