"""The benchmark's command line: its flags, which of them go together, and what they default to."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...profiling.plot import PlotError, check_plot
from ..config import EngineConfig
from ..memory_report import parse_bytes
from .compared import COMPARED
from .outputs import OutputError, check_output, same_file
from .profile_options import PROFILE_DEFAULTS, PROFILE_FLAGS, add_profile_flags, check_profile

__all__ = ["MODES", "parse_arguments"]

MODES = ("eager", "compile", "graph")
_OUTPUTS = ("output_json", "output_md", "seed")
_COMPARE = ("compare", "fail_above")
_ENGINE = ("model", "device", "dtype", "weight_dtype", "kv_dtype", "mode", "prefill_chunk")

FLAGS_OF_EXPLAIN_MEMORY = ("explain_memory", "device_memory", *_ENGINE, "batch_size")
FLAGS_OF_EXPLAIN_STEP = (
    *("explain_step", "bandwidth_gb_s", "device", "batch_size", "input_len"),
    *("model", "dtype", "weight_dtype", "kv_dtype"),
)
FLAGS_OF_TWO_FILES = (*_COMPARE, "output_json", "output_md")
FLAGS_OF_SCENARIO = {
    "steady": (
        *("scenario", *_ENGINE, *_OUTPUTS),
        *("batch_size", "input_len", "output_len", "num_warmup", "num_iters", "baseline"),
        *("steps_per_launch", "plot", *_COMPARE, *PROFILE_FLAGS),
    ),
    "cache": ("scenario", *_OUTPUTS),
    "host": ("scenario", *_OUTPUTS, "num_steps"),
    "start": ("scenario", *_ENGINE, *_OUTPUTS, "batch_size"),
    "kernels": (
        *("scenario", *_ENGINE[:-2], *_OUTPUTS),
        *("batch_size", "input_len"),
    ),
    "interference": (
        *("scenario", *_ENGINE, *_OUTPUTS),
        *("batch_size", "input_len", "num_steps", "max_itl_ms", "plot", *_COMPARE),
    ),
    "churn": (
        *("scenario", *_ENGINE, *_OUTPUTS),
        *("batch_size", "input_len", "output_len", "num_steps", "max_itl_ms", "plot", *_COMPARE),
    ),
    "prefix": (
        *("scenario", *_ENGINE, *_OUTPUTS),
        *("batch_size", "input_len", "output_len", "num_warmup", "num_iters", *_COMPARE),
    ),
    "memory": (
        *("scenario", *_ENGINE, *_OUTPUTS),
        *("batch_size", "input_len", "output_len", "num_steps", "num_warmup", "num_iters"),
    ),
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "steady": {
        "batch_size": [1, 8],
        "input_len": [128, 1024],
        "output_len": [64],
        "num_warmup": 1,
        "num_iters": 3,
    },
    "cache": {},
    "host": {"num_steps": 400},
    "start": {"batch_size": [1, 2, 4, 8]},
    "kernels": {"batch_size": [1], "input_len": [1024]},
    "interference": {"batch_size": [8], "input_len": [1024], "num_steps": 200},
    "churn": {"batch_size": [8], "input_len": [256], "output_len": [32], "num_steps": 400},
    "prefix": {
        "batch_size": [8],
        "input_len": [512],
        "output_len": [32],
        "num_warmup": 1,
        "num_iters": 3,
    },
    "memory": {
        "batch_size": [8],
        "input_len": [128, 512, 1024],
        "output_len": [128],
        "num_steps": 100,
        "num_warmup": 1,
        "num_iters": 3,
    },
}
"""Of flags whose default depends on the scenario."""

LEAST_STEPS = 30

_EPILOG = """\
The table goes to stdout (Markdown where that is no terminal), progress to stderr. Each combination
of the lists is a case, or an engine of its own. Exit status: 0; 1 if something cannot be measured
or is above --fail-above; 2 for a wrong command line; 130 after an interrupt, which keeps what was
measured. What is in the numbers: docs/benchmarking.md
"""


def parse_arguments(
    arguments: Sequence[str] | None = None, description: str | None = None
) -> argparse.Namespace:
    """Return the checked command line; exits with one clear line if it is wrong.

    Args:
        arguments: None: those of the process.
        description: what `--help` begins with.
    """
    parser = _parser(description)
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
    elif options.explain_step:
        _refuse_others(parser, given, FLAGS_OF_EXPLAIN_STEP, "--explain-step")
    elif options.bandwidth_gb_s is not None:
        parser.error("--bandwidth-gb-s has no effect without --explain-step")
    elif options.compare is not None and len(options.compare) == 2:
        _refuse_others(parser, given, FLAGS_OF_TWO_FILES, "--compare OLD.json NEW.json")
    else:
        known = FLAGS_OF_SCENARIO[options.scenario]
        _refuse_others(parser, given, known, f"--scenario {options.scenario}")
    defaults = DEFAULTS[options.scenario] if options.profile == "none" else PROFILE_DEFAULTS
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    _check_files(parser, options)
    check_profile(parser, options, given)
    return options


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
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
        choices=("auto", "int8", "fp8"),
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
        help="how steps run (default: every mode that the device has, taking turns; with other"
        " scenarios the fastest)",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=_positive,
        default=EngineConfig().prefill_chunk,
        metavar="TOKENS",
        help="prompt tokens of one step at most (default: %(default)s)",
    )
    parser.add_argument(
        "--steps-per-launch",
        type=_positive,
        default=EngineConfig().steps_per_launch,
        metavar="STEPS",
        help="decode steps that one launch runs, for steady; a step of the table is then a launch"
        " divided by them (default: %(default)s)",
    )
    parser.add_argument(
        "--scenario",
        default="steady",
        choices=tuple(FLAGS_OF_SCENARIO),
        help="steady: decode steps of a whole batch; cache: what the bookkeeping of blocks costs,"
        " for pools of 1,000 and of 1,000,000 blocks (no model runs); host: what plan, launch and"
        " commit cost around a model that does nothing; interference: rows decode while a long"
        " prompt comes every 10 steps; churn: requests come and leave at random; start: an engine"
        " with a bucket for each batch size is started twice, at first with nothing built or"
        " compiled before; kernels: each kernel of a decode step on CUDA beside what is predicted;"
        " prefix: prompts that begin alike, with and without a prefix cache; memory: what an engine"
        " takes, what a full cache costs a step, and what too few blocks cost"
        " (default: steady)",
    )
    parser.add_argument(
        "--batch-size",
        nargs="+",
        type=_positive,
        help="rows that decode (default: 1 8; start 1 2 4 8; others 8)",
    )
    parser.add_argument(
        "--input-len",
        nargs="+",
        type=_positive,
        help="tokens of a prompt (default: 128 1024; interference 1024; prefix 512; memory 128 512"
        " 1024; churn 256 at most)",
    )
    parser.add_argument(
        "--output-len",
        nargs="+",
        type=_at_least_two,
        help="tokens that a request decodes (default: 64; prefix 32; memory 128, where blocks are"
        " scarce; churn 32 on average)",
    )
    parser.add_argument(
        "--num-warmup", type=_not_negative, help="runs of a case that are not counted (default: 1)"
    )
    parser.add_argument(
        "--num-iters",
        type=_positive,
        help="runs of a case that are counted, and take turns with other modes; 6 or more for"
        " --compare (default: 3)",
    )
    parser.add_argument(
        "--num-steps",
        type=_steps,
        help="steps of interference (default: 200), churn and host (default: 400), and of memory"
        " behind each prompt length (default: 100)",
    )
    parser.add_argument(
        "--max-itl-ms",
        nargs="+",
        type=_milliseconds,
        metavar="MS",
        help="time budgets of a step that prefills beside rows that decode; interference runs"
        " without one first (default: then with eight times its decode step; churn: none)",
    )
    parser.add_argument(
        "--baseline",
        choices=("transformers",),
        help="run the same cases in turn with transformers (continuous batching, and generate with"
        " a static cache), and say how many times faster a step is and which share of the tokens"
        " is equal (needs the extra `baseline`)",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="OLD.json: an earlier --output-json of the same scenario; its times and those of this"
        f" run are set against each other ({', '.join(COMPARED)}). OLD.json NEW.json: compare the"
        " two, and measure nothing",
    )
    parser.add_argument(
        "--fail-above",
        type=_ratio,
        metavar="RATIO",
        help="for --compare: exit with 1 if a ratio new / old is above this, as 1.05, or if no"
        " case is in both",
    )
    add_profile_flags(parser)
    parser.add_argument(
        "--output-json",
        type=Path,
        metavar="FILE",
        help="write all results here, after each case (docs/benchmark.schema.json)",
    )
    parser.add_argument("--output-md", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the gaps between tokens over time, their histogram, and the roofline or where"
        " the time of a step goes, as .png, .svg or .pdf (needs the extra `plot`)",
    )
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
    parser.add_argument(
        "--explain-step",
        action="store_true",
        help="print what each kernel of a decode step on a GPU must move and how long that takes,"
        " for each --batch-size and --input-len, and run nothing",
    )
    parser.add_argument(
        "--bandwidth-gb-s",
        type=_bandwidth,
        metavar="GB/S",
        help="for --explain-step: what a card reads that need not be there (default: as measured"
        " on the CUDA device)",
    )
    return parser


def _check_files(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with an error if a file cannot be written, or would be written over another one."""
    compare = options.compare or []
    if len(compare) > 2:
        parser.error(f"--compare takes one file, or two to compare with each other: {len(compare)}")
    if options.fail_above is not None and not compare:
        parser.error("--fail-above has no effect without --compare")
    outputs = [
        (flag, path)
        for flag, path in (
            ("--output-json", options.output_json),
            ("--output-md", options.output_md),
            ("--plot", options.plot),
        )
        if path is not None
    ]
    for flag, path in outputs:
        if any(same_file(path, other) for other in compare):
            parser.error(f"{flag} {path} is what --compare reads: write to another file")
        try:
            check_output(path)
        except OutputError as error:
            parser.error(str(error))
    for (flag, path), (other, its_path) in itertools.combinations(outputs, 2):
        if same_file(path, its_path):
            parser.error(f"{flag} and {other} are one file: {path}")
    if options.plot is not None:
        try:
            check_plot(options.plot)
        except PlotError as error:
            parser.error(str(error))


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


def _steps(text: str) -> int:
    return _integer(text, LEAST_STEPS)


def _milliseconds(text: str) -> float:
    return _positive_float(text, "milliseconds")


def _bandwidth(text: str) -> float:
    return _positive_float(text, "gigabytes per second")


def _positive_float(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of {unit}")
    return value


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a ratio of at least 1, which is what as fast as before has"
        )
    return value


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
