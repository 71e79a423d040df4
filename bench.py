"""How fast does this model decode on this machine, and how far is that from the limit?

python bench.py                                       the demo model, every mode the device has
python bench.py --model preset:smollm2-135m --batch-size 1 8 --input-len 128 1024
python bench.py --explain-memory --model preset:llama-3.1-8b --device-memory 24GB
python bench.py --scenario cache                      what the bookkeeping of blocks costs
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from stepgraph.cache.benchmark import measure_cache
from stepgraph.profiling.bandwidth import measure_read_bandwidth
from stepgraph.runtime import (
    Engine,
    EngineConfig,
    KernelBuildError,
    MemoryBudgetError,
    StepgraphError,
    StepPreparationError,
)
from stepgraph.runtime.benchmark import (
    BenchmarkCase,
    Measurement,
    longest_sequence,
    measure,
    to_json,
)
from stepgraph.runtime.benchmark_report import cache_table, markdown_table, rich_table
from stepgraph.runtime.config import resolve_device
from stepgraph.runtime.environment import describe_environment
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.memory_report import explain_memory, parse_bytes

SCHEMA_VERSION = 1
MODES = ("eager", "compile", "graph")
ERRORS = (StepgraphError, MemoryBudgetError, StepPreparationError, KernelBuildError)
FLAGS_OF_EXPLAIN_MEMORY = (
    "explain_memory",
    "device_memory",
    "model",
    "device",
    "dtype",
    "weight_dtype",
    "kv_dtype",
    "mode",
    "batch_size",
)
FLAGS_OF_CACHE_SCENARIO = ("scenario", "output_json", "output_md", "seed")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; exits with one clear line if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=["demo"],
        help="checkpoint directory, hub id, preset:NAME (random weights) or demo (default: demo)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: auto)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["auto"],
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of weights and activations (default: auto, as stored)",
    )
    parser.add_argument(
        "--weight-dtype",
        nargs="+",
        default=["auto"],
        choices=("auto", "int8"),
        help="dtype of the weights of linear layers (default: auto, as --dtype)",
    )
    parser.add_argument(
        "--kv-dtype",
        nargs="+",
        default=["auto"],
        choices=("auto", "int8", "fp8"),
        help="dtype of the cache (default: auto, as --dtype)",
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=MODES,
        help="how steps run (default: every mode that the device has)",
    )
    parser.add_argument(
        "--scenario",
        default="steady",
        choices=("steady", "cache"),
        help="steady: decode steps of a whole batch; cache: what the bookkeeping of blocks costs,"
        " for pools of 1,000 and of 1,000,000 blocks (no model runs) (default: steady)",
    )
    parser.add_argument("--batch-size", nargs="+", type=_positive, default=[1, 8])
    parser.add_argument("--input-len", nargs="+", type=_positive, default=[128, 1024])
    parser.add_argument("--output-len", nargs="+", type=_at_least_two, default=[64])
    parser.add_argument(
        "--num-warmup", type=_not_negative, default=1, help="runs of a case that are not counted"
    )
    parser.add_argument("--num-iters", type=_positive, default=3, help="runs of a case that are")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write all results here")
    parser.add_argument("--output-md", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--seed", type=_not_negative, default=0, help="seed of prompts and presets")
    parser.add_argument(
        "--explain-memory",
        action="store_true",
        help="print what each model would take and what fits in each mode (default: auto), and"
        " measure nothing; rows are the largest --batch-size",
    )
    parser.add_argument(
        "--device-memory",
        type=_bytes,
        metavar="SIZE",
        help="for --explain-memory: of a card that need not be there, as 80GB, 512MB or 40GiB"
        " (default: this machine)",
    )
    options = parser.parse_args(arguments)
    blank = argparse.Namespace(**dict.fromkeys(vars(options)))  # keeps defaults out
    given = [
        name
        for name, value in vars(parser.parse_args(arguments, blank)).items()
        if value is not None
    ]
    if options.explain_memory:
        _refuse_others(parser, given, FLAGS_OF_EXPLAIN_MEMORY, "--explain-memory")
    elif options.device_memory is not None:
        parser.error("--device-memory has no effect without --explain-memory")
    elif options.scenario == "cache":
        _refuse_others(parser, given, FLAGS_OF_CACHE_SCENARIO, "--scenario cache")
    for path in (options.output_json, options.output_md):
        if path is not None and not path.parent.is_dir():
            parser.error(f"cannot write {path}: {path.parent} is not a directory")
        if path is not None and path.is_dir():
            parser.error(f"cannot write {path}: it is a directory")
    return options


def _refuse_others(
    parser: argparse.ArgumentParser, given: Sequence[str], known: Sequence[str], what: str
) -> None:
    """End with an error if a flag was given that does nothing together with `what`."""
    others = [f"--{name.replace('_', '-')}" for name in given if name not in known]
    if others:
        parser.error(f"{', '.join(others)}: no effect together with {what}")


def _positive(text: str) -> int:
    return _integer(text, 1)


def _at_least_two(text: str) -> int:
    return _integer(text, 2)  # the first token is the prefill's, a decode step makes the second


def _not_negative(text: str) -> int:
    return _integer(text, 0)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return value


def modes_of(device: torch.device) -> tuple[str, ...]:
    """Return the modes that a device has."""
    if device.type != "cpu":
        return MODES
    return ("eager", "compile") if have_compiler() else ("eager",)


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
        """Measure every case; return the document that `--output-json` writes."""
        options = self.options
        cases: list[dict[str, Any]] = []
        with Progress(
            console=self.console, transient=True, disable=not self.console.is_terminal
        ) as progress:
            kinds = list(
                itertools.product(
                    options.model, options.dtype, options.weight_dtype, options.kv_dtype
                )
            )
            engines = len(kinds) * len(self.modes)
            task = progress.add_task("starting", total=engines * len(self.grid))
            for kind in kinds:
                eager: dict[BenchmarkCase, Measurement] = {}
                for mode in self.modes:
                    for case, measured, document in self.run_engine(*kind, mode, eager):
                        if mode == "eager":
                            eager[case] = measured
                        cases.append(document)
                        progress.update(task, advance=1, description=" ".join((*kind, mode)))
        return {
            "schema_version": SCHEMA_VERSION,
            "environment": describe_environment(self.device, self.bandwidth),
            "cases": cases,
        }

    def run_engine(
        self,
        model: str,
        dtype: str,
        weight_dtype: str,
        kv_dtype: str,
        mode: str,
        eager: Mapping[BenchmarkCase, Measurement],
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
            max_rows=max(options.batch_size),
            buckets=tuple(options.batch_size),
            seed=options.seed,
        )
        cases = [BenchmarkCase(model, *point) for point in self.grid]
        longest = max(longest_sequence(case, config.prefill_chunk) for case in cases)
        config = dataclasses.replace(config, max_model_len=longest)
        began = time.perf_counter()
        with Engine.from_pretrained(model, config, progress=False) as engine:
            seconds, prepared = time.perf_counter() - began, engine.stats()["prepared"]
            self.say(
                f"{model} {dtype} weights {weight_dtype} KV {kv_dtype} {mode}\n"
                + engine.memory_plan.format()
            )
            self.say(
                f"started in {seconds:.1f} s, of which {prepared['seconds']:.1f} s for making"
                f" {prepared['steps']} steps ready"
            )
            for case in cases:
                measured = measure(
                    engine,
                    case,
                    num_warmup=options.num_warmup,
                    num_iters=options.num_iters,
                    seed=options.seed,
                )
                reference = measured if mode == "eager" else eager.get(case)
                yield (
                    case,
                    measured,
                    to_json(engine, measured, bandwidth=self.bandwidth, eager=reference),
                )


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


def run_cache_scenario(options: argparse.Namespace) -> int:
    """Measure the bookkeeping of blocks; print and write the results."""
    costs = measure_cache(seed=options.seed)
    table = cache_table(costs)
    print(table)
    if options.output_md is not None:
        options.output_md.write_text(table + "\n")
    if options.output_json is not None:
        device = torch.device("cpu")  # where the bookkeeping is done
        document = {
            "schema_version": SCHEMA_VERSION,
            "environment": describe_environment(device, measure_read_bandwidth(device)),
            "cases": [],
            "cache_operations": [dataclasses.asdict(cost) for cost in costs],
        }
        options.output_json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def main() -> int:
    """Run the command line; return the exit status."""
    options = parse_arguments()
    if options.explain_memory:
        return run_explain_memory(options)
    if options.scenario == "cache":
        return run_cache_scenario(options)
    try:
        document = Bench(options).run()
    except ERRORS as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 1
    stdout = Console(soft_wrap=True)
    stdout.print(
        rich_table(document) if stdout.is_terminal else markdown_table(document), markup=False
    )
    if options.output_md is not None:
        options.output_md.write_text(markdown_table(document) + "\n")
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
