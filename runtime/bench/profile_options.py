"""The flags of a profile, and what they refuse: a profile is of a few steps of one case."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...profiling.atomic_write import WriteError, check_writable
from ...profiling.kernel_names import SUFFIX as KERNELS_SUFFIX
from ...profiling.trace import SUFFIX as TRACE_SUFFIX

__all__ = [
    "PROFILE_DEFAULTS",
    "PROFILE_FLAGS",
    "StepRange",
    "add_profile_flags",
    "check_profile",
    "kernels_path",
    "trace_path",
]

PROFILE_FLAGS = ("profile", "profile_steps", "profile_output", "graph_trace")

PROFILE_DEFAULTS: dict[str, Any] = {
    "batch_size": [1],
    "input_len": [1024],
    "output_len": [64],
    "num_warmup": 1,
    "num_iters": 1,
}
"""Of flags whose default is another one without a profile."""

DEFAULT_OUTPUT = "stepgraph-profile"
DEFAULT_STEPS = 16
"""As many steps are a trace that opens at once, and mean times that hardly move any more."""

_LISTS = (
    *("model", "dtype", "weight_dtype", "kv_dtype", "mode"),
    *("batch_size", "input_len", "output_len"),
)


@dataclass(frozen=True, slots=True)
class StepRange:
    """Decode steps of the whole batch, half open, counted from 0."""

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"

    @classmethod
    def of_run(cls, steps: int) -> StepRange:
        """Return some steps of a run, none of them among the first, which find caches cold."""
        first = steps // 4
        return cls(first, min(first + DEFAULT_STEPS, steps))


def add_profile_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a profile to those of `bench.py`."""
    parser.add_argument(
        "--profile",
        default="none",
        choices=("none", "nsys", "torch"),
        help="take a profile of some decode steps of one case (one batch of 1 after 1024 tokens in"
        " the fastest mode, unless told otherwise): nsys prints the command, and runs it where nsys"
        " is on the PATH; torch writes a trace for Perfetto, and prints where the time of a step"
        " went (default: %(default)s)",
    )
    parser.add_argument(
        "--profile-steps",
        type=_step_range,
        metavar="A:B",
        help="steps A to B - 1 of the whole batch, counted from 0 (default: 16 of them, from a"
        " quarter of the run)",
    )
    parser.add_argument(
        "--profile-output",
        metavar="NAME",
        help="the profile is NAME.trace.json.gz (torch), or NAME.nsys-rep and NAME.sqlite beside"
        f" NAME.kernels.json (nsys); others of that name are replaced (default: {DEFAULT_OUTPUT})",
    )
    parser.add_argument(
        "--graph-trace",
        choices=("graph", "node"),
        help="what nsys records of a captured step: graph, its begin and end; node, every kernel in"
        " it, which perturbs its time (default: graph)",
    )


def check_profile(
    parser: argparse.ArgumentParser, options: argparse.Namespace, given: Sequence[str]
) -> None:
    """Fill in defaults of a profile; exits with one clear line if it cannot be taken.

    Args:
        parser: reports.
        options: the command line, all defaults but those of the profile filled in.
        given: names of the flags that were given.
    """
    if options.profile == "none":
        for name in PROFILE_FLAGS[1:]:
            if name in given:
                parser.error(f"--{name.replace('_', '-')} has no effect without --profile")
        return
    if options.graph_trace is not None and options.profile != "nsys":
        parser.error("--graph-trace has no effect without --profile nsys")
    for name in ("baseline", "compare", "plot"):
        if name in given:
            parser.error(f"--{name} cannot go with --profile: a profiled run is slower")
    for name in _LISTS:
        values = getattr(options, name)
        if values is not None and len(values) > 1:
            flag, listed = name.replace("_", "-"), " ".join(map(str, values))
            parser.error(f"a profile is of one case: --{flag} has {len(values)} values ({listed})")
    if options.num_iters != 1:
        parser.error(f"a profile is of one repetition: --num-iters is {options.num_iters}")
    if options.steps_per_launch != 1:
        parser.error(
            "a profile counts single steps: --steps-per-launch is"
            f" {options.steps_per_launch}, it must be 1"
        )
    steps = options.output_len[0] - 1
    if options.profile_steps is None:
        options.profile_steps = StepRange.of_run(steps)
    elif options.profile_steps.end > steps:
        parser.error(
            f"--profile-steps {options.profile_steps} is outside of the run: with --output-len"
            f" {options.output_len[0]} it has {steps} steps of the whole batch (0:{steps})"
        )
    options.graph_trace = options.graph_trace or "graph"
    name = DEFAULT_OUTPUT if options.profile_output is None else options.profile_output
    if not name or name.endswith(("/", ".")):
        parser.error(f"--profile-output {name!r} names no file: the profile is NAME.trace.json.gz")
    options.profile_output = Path(name)
    traces = [trace_path(options)]
    if options.profile == "nsys":
        traces = [Path(f"{name}.{end}") for end in ("nsys-rep", "sqlite")]
    try:
        for path in (*traces, kernels_path(options)):
            check_writable(path)
    except WriteError as error:
        parser.error(str(error))


def trace_path(options: argparse.Namespace) -> Path:
    """Return where torch's trace goes."""
    return Path(f"{options.profile_output}.trace{TRACE_SUFFIX}")


def kernels_path(options: argparse.Namespace) -> Path:
    """Return where the names of kernels go, beside the trace."""
    return Path(f"{options.profile_output}{KERNELS_SUFFIX}")


def _step_range(text: str) -> StepRange:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and text.isascii()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form A:B, two numbers of steps such as 8:24"
        )
    found = StepRange(int(first), int(end))
    if found.first >= found.end:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no steps: B must be larger than A, as in 8:24"
        )
    return found
