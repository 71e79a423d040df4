"""Which flags of the benchmark combine, their defaults by scenario, and which files they may name.

Every error is one line: what was given, what is allowed, what to do.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...profiling.atomic_write import check_writable
from ...profiling.kernel_names import SUFFIX as KERNELS_SUFFIX
from ...profiling.trace import SUFFIX as TRACE_SUFFIX

__all__ = ["SCENARIO_FLAGS", "StepRange", "kernels_path", "trace_path", "validate_args"]

_MODEL = ("model", "device", "dtype", "weight_dtype", "kv_dtype")
_ENGINE = (*_MODEL, "mode", "kernels", "model_impl", "prefill_chunk")
_FILES = ("scenario", "output_json", "seed")
_COMPARE = ("compare", "fail_above")
_PROFILE = ("profile", "profile_steps", "profile_output", "graph_trace")


def _accepts(*names: str, **defaults: Any) -> dict[str, Any]:
    """Return flags with their defaults; None: the parser's default."""
    return dict.fromkeys(names) | defaults


_REPEATED = {"num_warmup": 1, "num_iters": 3}

SCENARIO_FLAGS = {
    "steady": _accepts(
        *(*_FILES, *_ENGINE, *_COMPARE, "tensor_parallel", *_PROFILE),
        *("baseline", "steps_per_launch", "check"),
        **{"batch_size": [1, 8], "input_len": [128, 1024], "output_len": [64]},
        **_REPEATED,
    ),
    "interference": _accepts(
        *(*_FILES, *_ENGINE, "tensor_parallel", "max_itl_ms"),
        **{"batch_size": [8], "input_len": [1024], "num_steps": 200},
    ),
    "neighbours": _accepts(
        *(*_FILES, *_ENGINE, "batch_size", "input_len", "peer"),
        **{"num_steps": 32, "num_warmup": 1, "num_iters": 6, "neighbours": [0, 1, 2]},
    ),
    "serve": _accepts(
        *(*_FILES, *_ENGINE, "max_itl_ms", "slo_ttft", "slo_itl", "peer"),
        **{"batch_size": [8], "input_len": [128], "output_len": [32]},
        **{"arrivals": ["poisson"], "rates": [0.2, 0.5, 0.7, 1.0, 1.5, 2.0], "duration": 20.0},
        **{"http": True, "threads": -1},
    ),
    "host": _accepts(*_FILES, num_steps=400),
}
"""Flags that each scenario accepts, with the defaults that depend on it."""

_PROFILE_DEFAULTS: dict[str, Any] = {
    **{"batch_size": [1], "input_len": [1024], "output_len": [64]},
    **{"num_warmup": 1, "num_iters": 1},
}
_DEFAULT_PROFILE = "stepgraph-profile"
_DEFAULT_PROFILE_STEPS = 16
"""A trace of so many steps opens at once, and their mean hardly changes with more."""
_MAX_STEADY_SECONDS = 10.0
"""For the repetitions of a case in one mode, unless their number is given."""


@dataclass(frozen=True, slots=True)
class StepRange:
    """Decode steps of the whole batch, half open, counted from 0."""

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"

    @classmethod
    def of_run(cls, steps: int) -> StepRange:
        """Return some steps of a run, without the first ones, whose caches are cold."""
        first = steps // 4
        return cls(first, min(first + _DEFAULT_PROFILE_STEPS, steps))


def trace_path(options: argparse.Namespace) -> Path:
    """Return where torch's trace goes."""
    return Path(f"{options.profile_output}.trace{TRACE_SUFFIX}")


def kernels_path(options: argparse.Namespace) -> Path:
    """Return where the names of kernels go, next to the trace."""
    return Path(f"{options.profile_output}{KERNELS_SUFFIX}")


def validate_args(options: argparse.Namespace, given: Sequence[str]) -> None:
    """Check that flags combine, and fill in the defaults of the scenario or the profile.

    Adds `turn_seconds`: of the repetitions of a case in one mode, at most.

    Args:
        options: the parsed command line.
        given: names of the flags on it.

    Raises:
        ValueError: flags do not combine.
        WriteError: a file cannot be written.
    """
    _check_combination(options, given)
    _fill_in_defaults(options)
    _check_files(options)
    if options.profile != "none":
        _validate_profile(options, given)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_combination(options: argparse.Namespace, given: Sequence[str]) -> None:
    if "fail_above" in given and not options.compare:
        raise ValueError("--fail-above has no effect without --compare")
    compared = len(options.compare or ())
    if compared > 2:
        raise ValueError(
            f"--compare takes one file, or two to compare with each other: {compared} given"
        )
    accepted: Sequence[str] | dict[str, Any]
    if compared == 2:
        accepted = (*_COMPARE, "output_json")
        what = "--compare OLD.json NEW.json"
    else:
        accepted, what = SCENARIO_FLAGS[options.scenario], f"--scenario {options.scenario}"
    others = [_flag(name) for name in given if name not in accepted]
    if others:
        raise ValueError(f"{', '.join(others)}: no effect together with {what}")
    unused = [_flag(name) for name in given if name in _PROFILE[1:]]
    if unused and options.profile == "none":
        raise ValueError(f"{unused[0]} has no effect without --profile")


def _fill_in_defaults(options: argparse.Namespace) -> None:
    profiled = options.profile != "none"
    options.turn_seconds = _MAX_STEADY_SECONDS if options.num_iters is None else math.inf
    defaults = _PROFILE_DEFAULTS if profiled else SCENARIO_FLAGS[options.scenario]
    for name, value in vars(options).items():
        if value is None:
            setattr(options, name, defaults.get(name))
        elif isinstance(value, list) and name != "compare":  # a repeated value is one case
            setattr(options, name, list(dict.fromkeys(value)))


def _check_files(options: argparse.Namespace) -> None:
    path = options.output_json
    if path is not None:
        if any(_same_file(path, other) for other in options.compare or ()):
            raise ValueError(f"--output-json {path} is what --compare reads: write to another file")
        check_writable(path)


def _same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, which need not exist."""
    if os.path.exists(one) and os.path.exists(other):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def _validate_profile(options: argparse.Namespace, given: Sequence[str]) -> None:
    """Check that the command line has one case, and fill in the steps and files of the profile."""
    if options.graph_trace is not None and options.profile != "nsys":
        raise ValueError("--graph-trace has no effect without --profile nsys")
    for name in ("baseline", "compare"):
        if name in given:
            raise ValueError(f"--{name} cannot go with --profile: a profiled run is slower")
    sizes = ("batch_size", "input_len", "output_len")
    for name in (*_MODEL, "mode", "kernels", "model_impl", "tensor_parallel", *sizes):
        values = getattr(options, name)
        if isinstance(values, list) and len(values) > 1:
            listed = " ".join(map(str, values))
            raise ValueError(
                f"a profile is of one case: {_flag(name)} has {len(values)} values ({listed})"
            )
    if options.num_iters != 1:
        raise ValueError(f"a profile is of one repetition: --num-iters is {options.num_iters}")
    if options.steps_per_launch != 1:
        raise ValueError(
            "a profile counts single steps: --steps-per-launch is"
            f" {options.steps_per_launch}, it must be 1"
        )
    steps = options.output_len[0] - 1
    if options.profile_steps is None:
        options.profile_steps = StepRange.of_run(steps)
    elif options.profile_steps.end > steps:
        raise ValueError(
            f"--profile-steps {options.profile_steps} is outside of the run: with --output-len"
            f" {options.output_len[0]} it has {steps} steps of the whole batch (0:{steps})"
        )
    options.graph_trace = options.graph_trace or "graph"
    name = _DEFAULT_PROFILE if options.profile_output is None else options.profile_output
    if not name or name.endswith(("/", ".")):
        raise ValueError(
            f"--profile-output {name!r} names no file: the profile is NAME.trace.json.gz"
        )
    options.profile_output = Path(name)
    files = [trace_path(options)]
    if options.profile == "nsys":
        files = [Path(f"{name}.{end}") for end in ("nsys-rep", "sqlite")]
    for path in (*files, kernels_path(options)):
        check_writable(path)
