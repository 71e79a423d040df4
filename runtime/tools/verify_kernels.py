"""Checks the kernels of a decode step against plain PyTorch, alone and in captured graphs.

    python -m stepgraph.runtime.tools.verify_kernels --model preset:llama-3.2-1b --rows 1 8 32

Each kernel runs with the arguments of a step with random weights, into poisoned outputs, with
dependent launch off and on. On a CUDA device each kernel, and all of them in the order of a layer
(`layer`), are also captured and replayed many times. Every replay must leave the same bits;
different bits mean a race. Before the first check all kernels are compiled in parallel threads.
Prints a line for each check; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...profiling.atomic_write import write_file
from ..config import MAX_ROWS, EngineConfig
from ..errors import StepgraphError
from ..kernels.result_check import relative_error
from ..kernels.triton.dependent import dependent_launch
from ..kernels.triton.fusion import fusion_obstacle
from ..kernels.triton.kernel_calls import INTERPRETED
from ..kernels.triton.operations import Operations
from ..kernels.triton.precompile import compile_kernels
from ..loading.loader import resolve_source
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..models.resolved_config import ResolvedConfig
from .kernel_cases import KernelCase, decode_cases

__all__ = ["TOLERANCE", "Verified", "check_operations", "launches", "main"]

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""||result - reference|| / ||reference|| that a kernel may have."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of checking one kernel."""

    kernel: str
    """As in `kernel_cases.py`; `layer` for all of them in order."""
    rows: int
    dependent: bool
    """With programmatic dependent launch."""
    error: float | None = None
    """The largest ||result - reference|| / ||reference||, captured or not; of `layer` the reference
    are the kernels one by one without dependent launch. None if it is not finite."""
    tolerance: float = 0.0
    replays: int = 0
    """Of the captured graph; 0 where nothing is captured."""
    different: int = 0
    """Replays whose results are not those of the first, bit by bit."""
    failure: str | None = None
    """The error of a kernel that did not compile or run."""
    lost: bool = False
    """The failure left the device unusable for this process."""

    @property
    def passed(self) -> bool:
        """Whether it ran, was right, and was so every time."""
        right = self.error is not None and self.error <= self.tolerance
        return self.failure is None and right and not self.different

    def __str__(self) -> str:
        name = f"{self.kernel:16} {self.rows:2} rows, dependent launch {_switch(self.dependent):3}"
        if self.failure is not None:
            return f"FAILED {name}: {self.failure}"
        off = "not finite" if self.error is None else f"off by {self.error:.1e}"
        replays = f", {self.different} of {self.replays} replays differ" if self.replays else ""
        return f"{'ok    ' if self.passed else 'FAILED'} {name}: {off}{replays}"


def launches(
    model: ModelConfig,
    config: ResolvedConfig,
    *,
    rows: int,
    context: int,
    kernels: Sequence[str] | None = None,
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield steps for `compile_kernels`: each kernel of `check_operations`, both its launches.

    The first step makes the arguments. The checks make their own: while kernels are compiled
    none is launched, so what torch operations between them compute is not what a step computes.
    """
    cases: list[KernelCase] = []

    def make() -> None:
        cases.extend(decode_cases(model, config, rows=rows, context=context))

    yield f"{rows} rows", make
    names = {case.name for case in cases} if kernels is None or "layer" in kernels else kernels
    for case, dependent in itertools.product(cases, (False, True)):
        if case.name in names:
            name = f"{case.name}, {rows} rows, dependent launch {_switch(dependent)}"
            yield name, partial(_launch, case, dependent)


def _launch(case: KernelCase, dependent: bool) -> None:
    with dependent_launch(dependent):
        case.run()


def check_operations(
    model: ModelConfig,
    config: ResolvedConfig,
    *,
    rows: int,
    context: int,
    replays: int = 1000,
    kernels: Sequence[str] | None = None,
    operations: Operations | None = None,
) -> Iterator[Verified]:
    """Yield a result for each kernel of a decode step, dependent launch off, then on (on CUDA).

    Stops after an error that makes the device unusable.

    Args:
        model: one that `fusion_obstacle` has nothing against.
        config: dtype, storage of weights and cache, block size, and the device: a CUDA device, or
            the CPU in Triton's interpreter, where nothing is captured.
        rows: that decode.
        context: tokens of each row, the newest included.
        replays: of each captured graph.
        kernels: names of those to check; None: all, and the layer.
        operations: to check; None: the Triton kernels.
    """
    device = config.device
    cases = decode_cases(model, config, rows=rows, context=context, operations=operations)
    tolerance = TOLERANCE[config.dtype]
    captured = replays if device.type == "cuda" else 0
    switches = (False, True) if device.type == "cuda" else (False,)

    def one_by_one() -> list[Tensor]:
        with dependent_launch(False):
            _run(cases)
        return [tensor.clone() for tensor in _results(cases)]

    checks = [(case.name, [case], case.reference) for case in cases]
    checks.append(("layer", cases, one_by_one))
    for (name, some, reference), dependent in itertools.product(checks, switches):
        if kernels is None or name in kernels:
            found = Verified(name, rows, dependent, tolerance=tolerance, replays=captured)
            found = _verify(found, some, reference, device)
            yield found
            if found.lost:
                return


def _verify(
    found: Verified,
    cases: Sequence[KernelCase],
    reference: Callable[[], Sequence[Tensor]],
    device: torch.device,
) -> Verified:
    """Return `found` with the outcome of running these cases in order; tensors stay as they are."""
    outputs = {id(t): t for case in cases for t in case.outputs()}
    saved = [(tensor, tensor.clone()) for tensor in outputs.values()]

    def prepare() -> None:
        """Poison what is only written."""
        for case in cases:
            for tensor in case.outputs():
                tensor.fill_(math.nan if tensor.is_floating_point() else 0)

    try:
        expected = reference()
        with dependent_launch(found.dependent):
            for _ in range(2):  # the second time in memory that the first one's results had
                prepare()
                _run(cases)
            error = _error(_results(cases), expected)
            different = 0
            if found.replays:
                first, different = _replayed(cases, prepare, found.replays)
                error = max(error, _error(first, expected), key=_nan_last)
        for tensor, before in saved:
            tensor.copy_(before)
    # Any error of the compiler, the driver or an assertion is a result of the check.
    except Exception as raised:
        message = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
        try:
            for tensor, before in saved:
                tensor.copy_(before)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError:  # again: of the device
            return dataclasses.replace(found, failure=message, lost=True)
        return dataclasses.replace(found, failure=message)
    finite = error if math.isfinite(error) else None
    return dataclasses.replace(found, error=finite, different=different)


def _replayed(
    cases: Sequence[KernelCase], prepare: Callable[[], None], replays: int
) -> tuple[list[Tensor], int]:
    """Capture the cases; return the results of the first replay, and how many others differ."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run(cases)

    def replay() -> list[Tensor]:
        prepare()
        graph.replay()
        return [tensor.contiguous().view(torch.uint8) for tensor in _results(cases)]

    replay()
    first = [tensor.clone() for tensor in _results(cases)]
    bits = [tensor.contiguous().view(torch.uint8) for tensor in first]
    different = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(replays):
        unequal = [(now != then).any() for now, then in zip(replay(), bits, strict=True)]
        different += torch.stack(unequal).any()
    return first, int(different)


def _run(cases: Sequence[KernelCase]) -> None:
    for case in cases:
        case.run()


def _results(cases: Sequence[KernelCase]) -> list[Tensor]:
    return [tensor for case in cases for tensor in case.results()]


def _error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error of the pairs; NaN if there is one."""
    errors = [float(relative_error(*pair)) for pair in zip(results, expected, strict=True)]
    return max(errors, key=_nan_last)


def _nan_last(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _switch(enabled: bool) -> str:
    return "on" if enabled else "off"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m stepgraph.runtime.tools.verify_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=["preset:llama-3.2-1b"],
        help="as in bench.py; only their shapes are used",
    )
    parser.add_argument("--dtype", default="auto", help="dtype (default: auto, as stored)")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each row")
    parser.add_argument("--replays", type=int, default=1000, help="replays of each captured graph")
    parser.add_argument("--kernel", nargs="+", help="names (default: all, and the layer)")
    parser.add_argument("--json", type=Path, help="write the results to this file after each check")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not INTERPRETED:
        return _refuse("no CUDA device: set TRITON_INTERPRET=1 to interpret the kernels on the CPU")
    if not 1 <= min(options.rows) <= max(options.rows) <= MAX_ROWS:
        return _refuse(f"--rows {options.rows}: a step has 1 to {MAX_ROWS} rows")
    models: dict[str, tuple[ModelConfig, ResolvedConfig]] = {}
    for source in options.model:
        try:
            model = resolve_source(source, config_only=True).native
            settings = EngineConfig(device=device.type, mode="eager", dtype=options.dtype)
            models[source] = model, ResolvedConfig.resolve(settings, model)
        except StepgraphError as error:
            return _refuse(str(error))
        if (obstacle := fusion_obstacle(model_plan(model))) is not None:
            return _refuse(f"{source} has {obstacle}, which these kernels do not compute")
    runs = list(itertools.product(models, options.rows))
    shapes = {"context": options.context, "kernels": options.kernel}
    if device.type == "cuda" and not INTERPRETED:
        compiled = compile_kernels(
            step for source, rows in runs for step in launches(*models[source], rows=rows, **shapes)
        )
        print(
            f"compiled {compiled.kernels} kernels in {compiled.threads} threads,"
            f" {compiled.seconds:.1f} s; {len(compiled.failures)} failed",
            flush=True,
        )
    found: list[dict[str, Any]] = []
    torch.manual_seed(0)
    for number, (source, rows) in enumerate(runs, 1):
        if len(models) > 1:
            print(f"{source}:", flush=True)
        for result in check_operations(
            *models[source], rows=rows, replays=options.replays, **shapes
        ):
            print(result, flush=True)
            entry = {"model": source, **dataclasses.asdict(result), "passed": result.passed}
            found.append(entry)
            if options.json is not None:
                write_file(options.json, json.dumps(found, indent=1) + "\n")
        if found and found[-1]["lost"]:
            left = ", ".join(f"{source} {rows} rows" for source, rows in runs[number:])
            print(f"the device is unusable, not run: {left or 'none'}", flush=True)
            break
    return int(not all(entry["passed"] for entry in found))


def _refuse(message: str) -> int:
    print(f"verify: error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
