"""Tune the products and experts of a model for the CUDA device of this machine, once.

python -m stepgraph.runtime.tools.tune --model preset:llama-3.2-1b --rows 1 2 4

A decode step of a few layers with random weights is captured with each configuration of each
product, one product after the other, and replayed. The captured steps are timed interleaved, so
that disturbances affect all of them, and compared by their medians. A configuration whose logits
differ from the default's is rejected. The fastest are stored in the user's cache, where later
engine starts look them up (`tuning.py`).
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...graphs.steps import CudaGraphCapturer
from ...profiling.bandwidth import seconds_of
from ..config import EngineConfig
from ..errors import ConfigError, StepgraphError
from ..execution.sample_steps import SampleCase, SampleSteps
from ..execution.step_key import StepKey
from ..kernels.result_check import relative_error, require_usable_device
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..models.resolved_config import ResolvedConfig
from .arguments import DTYPES, STORED_DTYPES, integer
from .step_costs import resolve_fused

if TYPE_CHECKING:
    from ..kernels.triton.linear import LinearConfig
    from ..kernels.triton.tuning import Product, Tuned

logger = logging.getLogger("stepgraph.runtime")

LAYERS = 4
"""Layers of each kind in the step: their weights are together larger than the L2 cache."""
CONTEXT = 1024
"""Tokens of each row."""
ROUNDS = 25
"""Times that each configuration is timed."""
TOLERANCE = 0.05
"""||logits - default logits|| / ||default logits|| that a configuration may have."""
MOST_ROWS = 256

Timer = Callable[[Sequence[Callable[[], Tensor]], Callable[[], None]], Sequence[float]]
"""Microseconds of each step. The second argument resets what a step changes; it is called before
each run."""


def tune(
    model: ModelConfig, config: ResolvedConfig, rows: int, timer: Timer
) -> Iterator[tuple[Product, Tuned]]:
    """Yield the fastest configuration of each product of a decode step of `rows` rows.

    Raises KernelSelfTestError where a configuration left the device unusable.
    """
    from ..kernels.triton.backend import gpu_kernels
    from ..kernels.triton.precompile import compile_kernels
    from ..kernels.triton.tuning import Tuned, trial

    plans = model_plan(model).layers
    kinds = [plans.index(plan) for plan in dict.fromkeys(plans)]
    key = StepKey("decode", rows, -(-CONTEXT // config.user.block_size), False)
    case = SampleCase(key, ((CONTEXT - 1, 1),) * rows)
    cut = model.with_layers(kinds * LAYERS)
    steps = SampleSteps(cut, config, gpu_kernels(config.weights), [case], seed=0)
    steps.prepare(case)
    changed = [steps.state.token_ids, steps.state.positions]
    saved = [tensor.clone() for tensor in changed]
    bound = steps.functions.bind(key)

    def reset() -> None:
        for tensor, before in zip(changed, saved, strict=True):
            tensor.copy_(before)

    def run(choices: dict[Product, LinearConfig]) -> Tensor:
        reset()
        with trial(choices):
            return bound().logits

    best: dict[Product, LinearConfig] = {}
    with trial(best) as asked:
        expected = bound().logits.clone()
    for product in list(asked):
        reset()
        with trial(best) as asked:  # a choice for one product changes the candidates of others
            bound()
        candidates = asked.get(product, [])
        tried = [partial(run, {**best, product: candidate}) for candidate in candidates]
        compile_kernels([(str(one.args), one) for one in tried])
        right: dict[LinearConfig, Callable[[], Tensor]] = {}
        for candidate, one in zip(candidates, tried, strict=True):
            try:
                off = float(relative_error(one(), expected))
            except Exception as error:  # of a compiler or the device
                require_usable_device(f"{product.kernel} ({candidate})", config.device, error)
                logger.warning("%s cannot run with %s: %s", product.kernel, candidate, error)
                continue
            if off <= TOLERANCE:
                right[candidate] = one
            else:  # NaN too
                logger.warning("%s is wrong with %s: off by %g", product.kernel, candidate, off)
        if right:
            times = dict(zip(right, timer([*right.values()], reset), strict=True))
            best[product] = min(times, key=times.__getitem__)
            fastest = times[best[product]]
            yield product, Tuned(best[product], fastest, times.get(candidates[0], fastest))
    steps.close()


def time_captured(
    steps: Sequence[Callable[[], Tensor]], reset: Callable[[], None], device: torch.device
) -> list[float]:
    """Capture steps on a CUDA device and return the median microseconds of their replays."""
    capturer = CudaGraphCapturer(device)
    captures = []
    for step in steps:
        reset()
        capturer.warm_up(step)
        captures.append(capturer.capture(step))
    times: list[list[float]] = [[] for _ in captures]
    for _ in range(ROUNDS):
        for capture, measured in zip(captures, times, strict=True):
            reset()
            measured.append(1e6 * seconds_of(capture.replay, device))
    return [statistics.median(measured) for measured in times]


def main(
    arguments: Sequence[str] | None = None,
    *,
    timer: Timer | None = None,
    device: torch.device | None = None,
) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: None: `sys.argv`.
        timer: None: `time_captured`.
        device: where steps run; None: the current CUDA device.
    """
    parser = argparse.ArgumentParser(
        prog="python -m stepgraph.runtime.tools.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="checkpoint directory, hub id or preset:NAME")
    help_rows = "rows of decode steps (default: 1 2 4 8 16 32); above 4 only experts are tuned"
    sizes = [1, 2, 4, 8, 16, 32]
    add("--rows", nargs="+", type=integer(1, MOST_ROWS), default=sizes, help=help_rows)
    add("--dtype", default="auto", choices=DTYPES)
    add("--weight-dtype", default="auto", choices=STORED_DTYPES)
    options = parser.parse_args(arguments)
    found = set()
    try:
        if device is None and not torch.cuda.is_available():
            raise ConfigError("tuning times kernels on a CUDA device, and torch sees none")
        if device is None and os.environ.get("TRITON_INTERPRET") == "1":
            raise ConfigError("TRITON_INTERPRET=1 keeps kernels from the device: unset it")
        # After the check: a machine without a device may lack Triton.
        from ..kernels.triton.tuning import store, tuning_file

        device = device or torch.device("cuda", torch.cuda.current_device())
        timer = timer or partial(time_captured, device=device)
        settings = EngineConfig(
            device=device.type,
            mode="eager",
            dtype=options.dtype,
            weight_dtype=options.weight_dtype,
        )
        model, config = resolve_fused(options.model, settings)
        for rows in options.rows:
            with torch.no_grad():
                for key, tuned in tune(model, config, rows, timer):
                    store({key: tuned})  # an interrupted run keeps what it found
                    found.add(key)
                    stored = str(key.weight_dtype).removeprefix("torch.")
                    print(
                        f"{key.kernel:15} {rows:3} rows, {key.n} x {key.k} {stored}:"
                        f" step {tuned.microseconds:.1f} µs (default"
                        f" {tuned.default_microseconds:.1f} µs): {tuned.config}",
                        flush=True,
                    )
    except StepgraphError as error:
        print(f"tune: error: {error}", file=sys.stderr)
        return 1
    print(f"{len(found)} choices are in {tuning_file()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
