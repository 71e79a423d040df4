"""Tune the linear layers and experts of models for the CUDA device of this machine, once.

python -m stepgraph.runtime.tools.tune --model preset:llama-3.2-1b --rows 1 2 4 8 16 32

Results are stored in the user's cache, where later engine starts look them up (`tuning.py`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..config import EngineConfig
from ..errors import ConfigError, StepgraphError
from ..kernels.triton.fusion import fusion_obstacle
from ..loading.loader import resolve_source
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..resolved_config import ResolvedConfig
from .arguments import DTYPES, STORED_DTYPES, positive_int

if TYPE_CHECKING:
    from ..kernels.triton.tuning import Tuned
    from .linear_problems import Problem
    from .linear_timing import Timer

__all__ = ["main"]


def main(
    arguments: Sequence[str] | None = None,
    *,
    timer: Timer | None = None,
    device: torch.device | None = None,
) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: None: those of the process.
        timer: times kernels in the place of the device.
        device: what `timer` times; None: the current CUDA device.
    """
    options = _parser().parse_args(arguments)
    if timer is None:
        if not torch.cuda.is_available():
            return _error("tuning times kernels on a CUDA device, and torch sees none")
        if os.environ.get("TRITON_INTERPRET") == "1":
            return _error("TRITON_INTERPRET=1 keeps kernels from the device: unset it")
        device = torch.device("cuda", torch.cuda.current_device())
    assert device is not None
    # After the checks: where there is no device there need not be a Triton.
    from ..kernels.triton.kernel_calls import num_multiprocessors
    from ..kernels.triton.linear import ROW_CLASSES
    from ..kernels.triton.tuning import MOST_EXPERT_ROWS, store, tuning_file
    from .expert_problems import expert_problems
    from .linear_problems import problems_of
    from .linear_timing import time_on_device, tune

    if max(options.rows) > MOST_EXPERT_ROWS:
        return _error(f"--rows {max(options.rows)}: at most {MOST_EXPERT_ROWS}")
    timer = timer or partial(time_on_device, device=device)
    multiprocessors = num_multiprocessors(device)
    done = set()
    for source in options.model:
        for weight_dtype in options.weight_dtype:
            try:
                model, config = _resolve(source, options.dtype, weight_dtype)
            except StepgraphError as error:
                return _error(f"{source}: {error}")
            of_model = (model, config.dtype, config.weights)
            few = [rows for rows in options.rows if rows <= ROW_CLASSES[-1]]
            problems: Iterator[Problem] = itertools.chain(
                problems_of(*of_model, few, multiprocessors),
                expert_problems(*of_model, options.rows),
            )
            for problem in problems:
                key = problem.key(device)
                if key in done:  # models share shapes
                    continue
                done.add(key)
                tuned = tune(problem, timer, multiprocessors)
                if tuned is None:
                    return _error(f"{problem.title} runs with none of its configurations")
                store({key: tuned})  # at once: an interrupted run keeps what it found
                print(_line(problem, tuned), flush=True)
    print(f"{len(done)} choices are in {tuning_file()}")
    return 0


def _resolve(source: str, dtype: str, weight_dtype: str) -> tuple[ModelConfig, ResolvedConfig]:
    """The model, and the dtypes of its weights. Raises StepgraphError for what cannot be tuned."""
    model = resolve_source(source, config_only=True).native
    config = EngineConfig(device="cpu", mode="eager", dtype=dtype, weight_dtype=weight_dtype)
    if (obstacle := fusion_obstacle(model_plan(model))) is not None:
        raise ConfigError(f"layers with {obstacle} are not made of the kernels tuned here")
    return model, ResolvedConfig.resolve(config, model)


def _line(problem: Problem, tuned: Tuned) -> str:
    return (
        f"{problem.title}: {tuned.microseconds:.2f} µs,"
        f" {problem.weight_bytes / tuned.microseconds / 1e3:,.0f} GB/s"
        f" (default {tuned.default_microseconds:.2f} µs): {tuned.config}"
    )


def _error(message: str) -> int:
    print(f"tune: error: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stepgraph.runtime.tools.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", nargs="+", required=True, help="checkpoint directory, hub id or preset:NAME"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        type=positive_int,
        default=[1, 2, 4, 8, 16, 32],
        help="rows of decode steps (default: 1 2 4 8 16 32); above 32 only experts are tuned",
    )
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--weight-dtype", nargs="+", default=["auto"], choices=STORED_DTYPES)
    return parser


if __name__ == "__main__":
    sys.exit(main())
