"""How fast does this model decode on this machine, and how far is that from the limit?

python bench.py                                       the demo model, every mode the device has
python bench.py --model preset:smollm2-135m --batch-size 1 8 --input-len 128 1024
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from stepgraph.profiling.bandwidth import measure_read_bandwidth
from stepgraph.runtime import (
    Engine,
    EngineConfig,
    MemoryBudgetError,
    StepgraphError,
    StepPreparationError,
)
from stepgraph.runtime.benchmark import BenchmarkCase, Measurement, measure, to_json
from stepgraph.runtime.benchmark_report import markdown_table, rich_table
from stepgraph.runtime.environment import describe_environment

SCHEMA_VERSION = 1


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
        help="dtype of weights, activations and cache (default: auto, as stored)",
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=("eager", "compile", "graph"),
        help="how steps run (default: every mode that the device has)",
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
    options = parser.parse_args(arguments)
    for path in (options.output_json, options.output_md):
        if path is not None and not path.parent.is_dir():
            parser.error(f"cannot write {path}: {path.parent} is not a directory")
        if path is not None and path.is_dir():
            parser.error(f"cannot write {path}: it is a directory")
    return options


def _positive(text: str) -> int:
    return _integer(text, 1)


def _at_least_two(text: str) -> int:
    return _integer(text, 2)  # the first token is the prefill's, a decode step makes the second


def _not_negative(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return value


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every case; return the document that `--output-json` writes."""
    console = Console(stderr=True)
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    modes = options.mode or (["eager", "compile"] + (["graph"] if name != "cpu" else []))
    # Eager first: it is what the other modes' tokens and logits are compared with.
    modes = sorted(set(modes), key=["eager", "compile", "graph"].index)
    console.print("measuring the read bandwidth of the device", style="dim")
    bandwidth = measure_read_bandwidth(name)
    cases: list[dict[str, Any]] = []
    grid = [
        (b, i, o) for o in options.output_len for i in options.input_len for b in options.batch_size
    ]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(
            "", total=len(options.model) * len(options.dtype) * len(modes) * len(grid)
        )
        for model in options.model:
            for dtype in options.dtype:
                eager: dict[BenchmarkCase, Measurement] = {}
                for mode in modes:
                    label = f"{model} {dtype} {mode}"
                    progress.update(task, description=f"{label}: starting")
                    config = EngineConfig(
                        device=name,
                        dtype=dtype,
                        mode=mode,
                        max_rows=max(options.batch_size),
                        buckets=tuple(sorted(set(options.batch_size))),
                        max_model_len=max(options.input_len) + max(options.output_len) + 1,
                        seed=options.seed,
                    )
                    began = time.perf_counter()
                    with Engine.from_pretrained(model, config) as engine:
                        prepared = engine.stats()["prepared"]
                        console.print(
                            f"{label}: started in {time.perf_counter() - began:.1f} s, of which"
                            f" {prepared['seconds']:.1f} s for {prepared['steps']} steps",
                            style="dim",
                        )
                        for batch_size, input_len, output_len in grid:
                            case = BenchmarkCase(model, batch_size, input_len, output_len)
                            progress.update(
                                task, description=f"{label}: batch {batch_size}, input {input_len}"
                            )
                            measured = measure(
                                engine,
                                case,
                                num_warmup=options.num_warmup,
                                num_iters=options.num_iters,
                                seed=options.seed,
                            )
                            if mode == "eager":
                                eager[case] = measured
                            cases.append(
                                to_json(
                                    engine, measured, bandwidth=bandwidth, eager=eager.get(case)
                                )
                            )
                            progress.advance(task)
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": describe_environment(torch.device(name), bandwidth),
        "cases": cases,
    }


def main() -> int:
    """Run the command line; return the exit status."""
    options = parse_arguments()
    try:
        document = run(options)
    except (StepgraphError, MemoryBudgetError, StepPreparationError) as error:
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
