"""How fast does this model decode on this machine, and how far is that from the limit?

python bench.py                                       the demo model, every mode the device has
python bench.py --model preset:smollm2-135m --batch-size 1 8 --input-len 128 1024
python bench.py --baseline transformers               beside continuous batching of transformers
python bench.py --explain-memory --model preset:llama-3.1-8b --device-memory 24GB
python bench.py --explain-step --model preset:llama-3.2-1b --bandwidth-gb-s 4300
python bench.py --scenario cache                      what the bookkeeping of blocks costs
python bench.py --scenario host                       what plan, launch and commit cost
python bench.py --scenario interference               prompts that come while others decode
python bench.py --scenario churn                      requests that come and leave at random
python bench.py --scenario start                      the first start of an engine, and the second
python bench.py --scenario kernels                    each kernel of a step on CUDA, and forecasts
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from stepgraph.cache.benchmark import OperationCost, measure_cache
from stepgraph.profiling.bandwidth import measure_read_bandwidth
from stepgraph.runtime import (
    Engine,
    EngineConfig,
    KernelBuildError,
    MemoryBudgetError,
    StepgraphError,
    StepPreparationError,
)
from stepgraph.runtime.baseline import BaselineCase, TransformersBaseline
from stepgraph.runtime.benchmark import (
    BenchmarkCase,
    Measurement,
    longest_sequence,
    measure,
    random_prompts,
    to_json,
)
from stepgraph.runtime.benchmark_options import MODES, parse_arguments
from stepgraph.runtime.benchmark_report import (
    cache_table,
    describe_start,
    host_table,
    markdown_table,
    rich_table,
)
from stepgraph.runtime.config import DTYPES, ResolvedConfig, resolve_device
from stepgraph.runtime.environment import describe_environment
from stepgraph.runtime.host_benchmark import HostCost, measure_host
from stepgraph.runtime.kernel_benchmark import measure_kernels
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.loading import resolve_source
from stepgraph.runtime.memory_report import explain_memory
from stepgraph.runtime.scenarios import (
    ChurnCase,
    InterferenceCase,
    churn_to_json,
    interference_to_json,
    measure_churn,
    measure_interference,
)
from stepgraph.runtime.start_benchmark import measure_starts
from stepgraph.runtime.step_report import explain_step

SCHEMA_VERSION = 1
ERRORS = (StepgraphError, MemoryBudgetError, StepPreparationError, KernelBuildError)
Dtypes = tuple[str, str, str]
"""Of the model, its weights and its cache, as flags name them."""
SHARED_MEMORY_FRACTION = 0.5
"""Of the memory that is free, for an engine beside which another runtime needs some."""
AUTOMATIC_BUDGET = 8.0
"""Decode steps that fit the budget which interference is measured with when none is given."""


def modes_of(device: torch.device) -> tuple[str, ...]:
    """Return the modes that a device has."""
    if device.type != "cpu":
        return MODES
    return ("eager", "compile") if have_compiler() else ("eager",)


def write_json(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write what there is so far where it was asked for."""
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(document, indent=1) + "\n")


class Bench:
    """One run of the command line: which engines to start, what to measure on each."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the device and measure its bandwidth."""
        self.options = options
        self.console = Console(stderr=True)
        self.device = resolve_device(options.device)
        # Eager first: it is what the other modes' tokens and logits are compared with.
        self.modes = [m for m in MODES if m in (options.mode or modes_of(self.device))]
        self.grid = [
            (batch_size, input_len, output_len)
            for output_len in options.output_len
            for input_len in options.input_len
            for batch_size in options.batch_size
        ]
        self.say("measuring the read bandwidth of the device")
        self.bandwidth = measure_read_bandwidth(self.device)

    def say(self, text: str) -> None:
        """Tell on stderr what is going on."""
        self.console.print(text, style="dim", highlight=False)

    def run(self) -> dict[str, Any]:
        """Measure every case; return the document that `--output-json` writes after each."""
        options = self.options
        cases: list[dict[str, Any]] = []
        document = {
            "schema_version": SCHEMA_VERSION,
            "environment": describe_environment(self.device, self.bandwidth),
            "cases": cases,
        }
        with Progress(
            console=self.console, transient=True, disable=not self.console.is_terminal
        ) as progress:
            models = list(itertools.product(options.model, options.dtype))
            stored = list(itertools.product(options.weight_dtype, options.kv_dtype))
            engines = len(models) * len(stored) * len(self.modes)
            task = progress.add_task("starting", total=engines * len(self.grid))
            for model, dtype in models:
                with self.baseline(model, dtype) as baseline:
                    for weight_dtype, kv_dtype in stored:
                        kind = (model, dtype, weight_dtype, kv_dtype)
                        eager: dict[BenchmarkCase, Measurement] = {}
                        for mode in self.modes:
                            run = self.run_engine(*kind, mode, eager, baseline)
                            for case, measured, entry in run:
                                if mode == "eager":
                                    eager[case] = measured
                                cases.append(entry)
                                write_json(options, document)
                                name = " ".join((*kind, mode))
                                progress.update(task, advance=1, description=name)
        return document

    @contextmanager
    def baseline(self, model: str, dtype: str) -> Iterator[TransformersBaseline | None]:
        """Load the model in the runtime to compare with, if there is one."""
        if self.options.baseline is None:
            yield None
            return
        self.say(f"loading {model} in transformers")
        source = resolve_source(model)
        with TransformersBaseline(
            source.config,
            source.directory,
            dtype=DTYPES[source.config.torch_dtype if dtype == "auto" else dtype],
            device=self.device,
            seed=self.options.seed,
        ) as baseline:
            yield baseline

    def run_engine(
        self,
        model: str,
        dtype: str,
        weight_dtype: str,
        kv_dtype: str,
        mode: str,
        eager: Mapping[BenchmarkCase, Measurement],
        baseline: TransformersBaseline | None,
    ) -> Iterator[tuple[BenchmarkCase, Measurement, dict[str, Any]]]:
        """Start an engine and yield each of its cases as it is measured."""
        options = self.options
        config = EngineConfig(
            device=str(self.device),
            dtype=dtype,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            mode=mode,
            prefix_cache=False,  # every repetition prefills its prompts
            # The other runtime's cache is on the device as well.
            memory_fraction=None if baseline is None else SHARED_MEMORY_FRACTION,
            max_rows=max(options.batch_size),
            buckets=tuple(options.batch_size),
            prefill_chunk=options.prefill_chunk,
            steps_per_launch=options.steps_per_launch,
            seed=options.seed,
        )
        cases = [BenchmarkCase(model, *point) for point in self.grid]
        longest = max(
            longest_sequence(case, config.prefill_chunk, config.steps_per_launch) for case in cases
        )
        config = dataclasses.replace(config, max_model_len=longest)
        with Engine.from_pretrained(model, config, progress=False) as engine:
            self.say(
                f"{model} {dtype} weights {weight_dtype} KV {kv_dtype} {mode}\n"
                + engine.memory_plan.format()
            )
            self.say(describe_start(engine.stats()))
            for case in cases:
                turns: BaselineCase | None = None
                if baseline is not None:
                    self.say(f"{case.batch_size} rows after {case.input_len} in transformers")
                    prompts = random_prompts(
                        engine.model_config, case.batch_size, case.input_len, options.seed
                    )
                    turns = baseline.prepare(prompts, case.output_len - 1, config.prefill_chunk)
                measured = measure(
                    engine,
                    case,
                    num_warmup=options.num_warmup,
                    num_iters=options.num_iters,
                    seed=options.seed,
                    after_each=None if turns is None else turns.run,
                )
                reference = measured if mode == "eager" else eager.get(case)
                document = to_json(
                    engine,
                    measured,
                    bandwidth=self.bandwidth,
                    eager=reference,
                    baseline=None if turns is None else turns.to_json(measured.step_ms),
                )
                yield case, measured, document


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
            print(f"bench.py: error: {model}: {error}", file=sys.stderr)
            status = 1
        else:
            print(separator + text, flush=True)
            separator = "\n"
    return status


def run_explain_step(options: argparse.Namespace) -> int:
    """Print the kernels of a decode step for every point asked for; return the exit status.

    What cannot be told is an error on stderr in its place; the others are printed anyway.
    """
    if options.bandwidth_gb_s is not None:
        bandwidth = 1e9 * options.bandwidth_gb_s
    else:
        try:
            device = resolve_device(options.device)
        except ERRORS as error:
            print(f"bench.py: error: {error}", file=sys.stderr)
            return 1
        if device.type != "cuda":
            print(
                "bench.py: error: --explain-step is about a GPU, and the device is"
                f" {str(device)!r}: give its --bandwidth-gb-s",
                file=sys.stderr,
            )
            return 1
        bandwidth = measure_read_bandwidth(device)
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
            text = explain_step(model, config, rows=rows, context=context, bandwidth=bandwidth)
        except ERRORS as error:
            print(f"bench.py: error: {model}: {error}", file=sys.stderr)
            status = 1
        else:
            print(separator + text, flush=True)
            separator = "\n"
    return status


def run_cache_scenario(options: argparse.Namespace) -> int:
    """Measure the bookkeeping of blocks; print and write the results."""
    costs = measure_cache(seed=options.seed)
    _write_costs(options, cache_table(costs), "cache_operations", costs)
    return 0


def run_host_scenario(options: argparse.Namespace) -> int:
    """Measure the host's part of a step; print and write the results."""
    try:
        costs = measure_host(num_steps=options.num_steps, seed=options.seed)
    except ValueError as error:  # more steps than the cache has room for
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 1
    _write_costs(options, host_table(costs), "host", costs)
    return 0


def _write_costs(
    options: argparse.Namespace, table: str, name: str, costs: Sequence[OperationCost | HostCost]
) -> None:
    """Print the table of what runs on the host alone, and write it where it was asked for."""
    print(table)
    if options.output_md is not None:
        options.output_md.write_text(table + "\n")
    if options.output_json is not None:
        device = torch.device("cpu")
        document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "environment": describe_environment(device, measure_read_bandwidth(device)),
            "cases": [],
            name: [dataclasses.asdict(cost) for cost in costs],
        }
        write_json(options, document)


class Scenarios:
    """Interference, churn and starts: each point of the grid on an engine of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the device and choose the modes."""
        self.options = options
        self.console = Console(stderr=True)
        self.device = resolve_device(options.device)
        self.modes = options.mode or [modes_of(self.device)[-1]]

    def say(self, text: str) -> None:
        """Tell on stderr what is going on."""
        self.console.print(text, style="dim", highlight=False)

    def run(self) -> dict[str, Any]:
        """Measure; return the document that `--output-json` writes after each entry."""
        options = self.options
        measure = getattr(self, options.scenario)
        dtypes = itertools.product(options.dtype, options.weight_dtype, options.kv_dtype)
        engines = itertools.product(options.model, dtypes, self.modes)
        entries: list[dict[str, Any]] = []
        document = {
            "schema_version": SCHEMA_VERSION,
            "environment": describe_environment(self.device, measure_read_bandwidth(self.device)),
            "cases": [],
            options.scenario: entries,
        }
        for engine in engines:
            for entry in measure(*engine):
                entries.append(entry)
                write_json(options, document)
        return document

    def interference(self, model: str, dtypes: Dtypes, mode: str) -> Iterator[dict[str, Any]]:
        """Yield the results without a budget, and with each."""
        options = self.options
        for input_len, batch_size in itertools.product(options.input_len, options.batch_size):
            case = InterferenceCase(model, batch_size, input_len, options.num_steps)
            rows = range(batch_size, batch_size + 3)  # nobody is timed in a far larger bucket
            config = EngineConfig(
                **self._choices(dtypes, mode),
                max_rows=case.max_rows,
                buckets=tuple(rows),
                max_model_len=case.longest_sequence,
            )
            budgets: list[float | None] = [None, *(options.max_itl_ms or ())]
            for max_itl_ms in budgets:
                with self._engine(case, dataclasses.replace(config, max_itl_ms=max_itl_ms)) as e:
                    measured = measure_interference(e, case, seed=options.seed)
                    entry = interference_to_json(e, measured, max_itl_ms)
                if max_itl_ms is None and not options.max_itl_ms:  # one that the next run takes
                    budgets.append(round(AUTOMATIC_BUDGET * entry["decode_step_ms"]["p50"], 2))
                yield entry

    def churn(self, model: str, dtypes: Dtypes, mode: str) -> Iterator[dict[str, Any]]:
        """Yield the results with each budget, or without one."""
        options = self.options
        points = itertools.product(options.output_len, options.input_len, options.batch_size)
        for output_len, input_len, batch_size in points:
            case = ChurnCase(model, batch_size, input_len, output_len, options.num_steps)
            for max_itl_ms in options.max_itl_ms or (None,):
                config = EngineConfig(
                    **self._choices(dtypes, mode),
                    max_rows=batch_size,
                    max_model_len=case.longest_sequence,
                    max_itl_ms=max_itl_ms,
                )
                with self._engine(case, config) as engine:
                    measured = measure_churn(engine, case, seed=options.seed)
                    yield churn_to_json(engine, measured, max_itl_ms)

    def start(self, model: str, dtypes: Dtypes, mode: str) -> Iterator[dict[str, Any]]:
        """Yield the first start and the second one."""
        buckets = sorted(set(self.options.batch_size))
        config = self._choices(dtypes, mode)
        config |= {"max_rows": buckets[-1], "buckets": buckets}
        self.say(f"{model} {' '.join(dtypes)} {mode}: two starts, the first with empty caches")
        for number, measured in enumerate(measure_starts(model, config), start=1):
            yield {"model": model, "mode": mode, "buckets": buckets, "number": number, **measured}

    def kernels(self, model: str, dtypes: Dtypes, mode: str) -> Iterator[dict[str, Any]]:
        """Yield what each kernel of a decode step takes, beside what is predicted."""
        config = EngineConfig(**self._choices(dtypes, mode))
        model_config = resolve_source(model, config_only=True).config
        resolved = ResolvedConfig.resolve(config, model_config)
        bandwidth = measure_read_bandwidth(self.device)
        for context, rows in itertools.product(self.options.input_len, self.options.batch_size):
            self.say(f"{model} {' '.join(dtypes)}: kernels of {rows} rows of {context} tokens")
            names = dict(zip(("dtype", "weight_dtype", "kv_dtype"), dtypes, strict=True))
            for entry in measure_kernels(
                model_config,
                resolved,
                self.device,
                rows=rows,
                context=context,
                bandwidth=bandwidth,
            ):
                yield {"model": model, **names, "rows": rows, "context": context, **entry}

    def _choices(self, dtypes: Dtypes, mode: str) -> dict[str, Any]:
        dtype, weight_dtype, kv_dtype = dtypes
        return {
            "device": str(self.device),
            "dtype": dtype,
            "weight_dtype": weight_dtype,
            "kv_dtype": kv_dtype,
            "mode": mode,
            "prefill_chunk": self.options.prefill_chunk,
            "prefix_cache": False,
            "seed": self.options.seed,
        }

    def _engine(self, case: InterferenceCase | ChurnCase, config: EngineConfig) -> Engine:
        budget = "no budget" if config.max_itl_ms is None else f"{config.max_itl_ms:g} ms"
        self.say(
            f"{case.model} {config.dtype} weights {config.weight_dtype} KV {config.kv_dtype}"
            f" {config.mode}, {case.batch_size} rows, prompts of {case.input_len}, {budget}"
        )
        return Engine.from_pretrained(case.model, config, progress=False)


def main() -> int:
    """Run the command line; return the exit status."""
    options = parse_arguments(description=__doc__)
    if options.explain_memory:
        return run_explain_memory(options)
    if options.explain_step:
        return run_explain_step(options)
    if options.scenario == "cache":
        return run_cache_scenario(options)
    if options.scenario == "host":
        return run_host_scenario(options)
    try:
        run = Bench(options) if options.scenario == "steady" else Scenarios(options)
        document = run.run()
    except ERRORS as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 1
    stdout = Console(soft_wrap=True)
    stdout.print(
        rich_table(document) if stdout.is_terminal else markdown_table(document), markup=False
    )
    if options.output_md is not None:
        options.output_md.write_text(markdown_table(document) + "\n")
    write_json(options, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
