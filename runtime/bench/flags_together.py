"""Which flags of the benchmark go together, what they default to, and which files may be named."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ...profiling.atomic_write import WriteError, check_writable
from ...profiling.plot import PlotError, check_plot
from .outputs import same_file
from .profile_options import PROFILE_DEFAULTS, PROFILE_FLAGS

__all__ = ["FLAGS_OF_SCENARIO", "check_files", "check_together", "fill_in_defaults"]

_OUTPUTS = ("output_json", "output_md", "seed")
_COMPARE = ("compare", "fail_above")
_ENGINE = (
    "model",
    "device",
    "dtype",
    "weight_dtype",
    "kv_dtype",
    "mode",
    "kernels",
    "prefill_chunk",
)

FLAGS_OF_EXPLAIN_MEMORY: tuple[str, ...] = (
    "explain_memory",
    "device_memory",
    *_ENGINE,
    "batch_size",
)
FLAGS_OF_EXPLAIN_STEP = (
    *("explain_step", "bandwidth_gb_s", "device", "batch_size", "input_len"),
    *("model", "dtype", "weight_dtype", "kv_dtype"),
)
FLAGS_OF_TWO_FILES = (*_COMPARE, "output_json", "output_md")
FLAGS_OF_SCENARIO = {
    "steady": (
        *("scenario", *_ENGINE, *_OUTPUTS),
        *("batch_size", "input_len", "output_len", "num_warmup", "num_iters", "baseline"),
        *("steps_per_launch", "check", "plot", *_COMPARE, *PROFILE_FLAGS),
    ),
    "cache": ("scenario", *_OUTPUTS),
    "host": ("scenario", *_OUTPUTS, "num_steps"),
    "start": ("scenario", *_ENGINE, *_OUTPUTS, "batch_size"),
    "kernels": (
        *("scenario", *_ENGINE[:-3], *_OUTPUTS),
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
    "neighbours": (
        *("scenario", *_ENGINE, *_OUTPUTS, "batch_size", "input_len", "num_steps"),
        *("num_warmup", "num_iters", "neighbours", "peer", *_COMPARE),
    ),
}

TURN_SECONDS = 10.0
"""Of the repetitions of a case in one mode, where their number is not given."""

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
    "neighbours": {"num_steps": 32, "num_warmup": 1, "num_iters": 6, "neighbours": [0, 1, 2]},
}
"""Of flags whose default depends on the scenario."""


def check_together(
    parser: argparse.ArgumentParser, options: argparse.Namespace, given: Sequence[str]
) -> None:
    """End with an error if a flag was given that does nothing beside the others.

    Args:
        parser: reports.
        options: the command line, without the defaults that depend on the scenario.
        given: names of the flags that were given.
    """
    if options.explain_memory:
        known, what = FLAGS_OF_EXPLAIN_MEMORY, "--explain-memory"
    elif options.device_memory is not None:
        parser.error("--device-memory has no effect without --explain-memory")
    elif options.explain_step:
        known, what = FLAGS_OF_EXPLAIN_STEP, "--explain-step"
    elif options.bandwidth_gb_s is not None:
        parser.error("--bandwidth-gb-s has no effect without --explain-step")
    elif options.compare is not None and len(options.compare) == 2:
        known, what = FLAGS_OF_TWO_FILES, "--compare OLD.json NEW.json"
    else:
        known, what = FLAGS_OF_SCENARIO[options.scenario], f"--scenario {options.scenario}"
    others = [f"--{name.replace('_', '-')}" for name in given if name not in known]
    if others:
        parser.error(f"{', '.join(others)}: no effect together with {what}")


def fill_in_defaults(options: argparse.Namespace) -> None:
    """Give flags that were not given their default in this scenario, or in a profile.

    What a list has twice is one case, and measured once.
    """
    defaults = DEFAULTS[options.scenario] if options.profile == "none" else PROFILE_DEFAULTS
    options.turn_seconds = TURN_SECONDS if options.num_iters is None else math.inf
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name, value in vars(options).items():
        if isinstance(value, list) and name not in _COMPARE:
            setattr(options, name, list(dict.fromkeys(value)))


def check_files(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
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
            check_writable(path)
        except WriteError as error:
            parser.error(str(error))
    for (flag, path), (other, its_path) in itertools.combinations(outputs, 2):
        if same_file(path, its_path):
            parser.error(f"{flag} and {other} are one file: {path}")
    if options.plot is not None:
        try:
            check_plot(options.plot)
        except PlotError as error:
            parser.error(str(error))
