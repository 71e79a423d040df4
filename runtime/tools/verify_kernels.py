"""Checks the kernels of a decode step against plain PyTorch, alone and in captured graphs.

    python -m stepgraph.runtime.tools.verify_kernels --model preset:llama-3.2-1b --rows 1 8 32

Each kernel runs with the arguments of a step with random weights, into poisoned outputs, with
dependent launch off and on. On a CUDA device each kernel, and all of them in the order of a layer
(`layer`), are also captured and replayed many times. Every replay must leave the same bits;
different bits mean a race. Prints a line for each check; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import BoundArguments
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...profiling.atomic_write import write_file
from ..config import MAX_ROWS, EngineConfig
from ..errors import ConfigError, StepgraphError
from ..execution.sample_steps import SampleCase, SampleSteps
from ..execution.step_key import StepKey
from ..kernels.ops.kv_storage import read_blocks
from ..kernels.result_check import brief, relative_error, require_usable_device
from ..kernels.triton.backend import gpu_kernels
from ..kernels.triton.decode_attention import reference_decode_attention
from ..kernels.triton.dependent import dependent_launch
from ..kernels.triton.expert_routing import Routed, reference_routing
from ..kernels.triton.experts import reference_experts_of_choice
from ..kernels.triton.filled_memory import poison
from ..kernels.triton.fusion import fuse
from ..kernels.triton.kernel_calls import INTERPRETED
from ..kernels.triton.linear import Pending
from ..kernels.triton.linear_kernels import reference_product
from ..kernels.triton.precompile import compile_kernels
from ..kernels.triton.rowwise import reference_activate_rows, reference_norm_rows
from ..kernels.triton.stack import Operations
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..models.resolved_config import ResolvedConfig
from .arguments import integer
from .step_costs import resolve_fused

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""||result - reference|| / ||reference|| that a kernel may have."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of checking one kernel."""

    kernel: str
    """As `step_costs.py` names it; `layer` for all of them in order."""
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
    """Replays whose results differ from the first in any bit."""
    failure: str | None = None
    """The error of a kernel that did not compile or run."""

    @property
    def passed(self) -> bool:
        """Whether it ran, was right, and was so every time."""
        right = self.error is not None and self.error <= self.tolerance
        return self.failure is None and right and not self.different

    def __str__(self) -> str:
        switch = "on" if self.dependent else "off"
        name = f"{self.kernel:16} {self.rows:2} rows, dependent launch {switch:3}"
        off = "not finite" if self.error is None else f"off by {self.error:.1e}"
        replays = f", {self.different} of {self.replays} replays differ" if self.replays else ""
        found = f"{off}{replays}" if self.failure is None else self.failure
        return f"{'ok    ' if self.passed else 'FAILED'} {name}: {found}"


_OUTPUTS = ("out_TN", "out_TF", "out_TD", "attended_TN", "pending")
"""Parameters that operations write as a whole; `arena` and `counters` they write in part."""
_REFERENCES: dict[str, tuple[Callable[..., Any], str | None]] = {
    "norm_linear": (reference_product, "out_TN"),
    "decode_attention": (reference_decode_attention, "attended_TN"),
    "residual_linear": (reference_product, "out_TN"),
    "gate_up": (reference_product, "out_TN"),
    "norm_rows": (reference_norm_rows, "out_TD"),
    "activate_rows": (reference_activate_rows, "out_TF"),
    "route": (reference_routing, None),
    "experts": (reference_experts_of_choice, "out_TD"),
}
"""Of each operation that a layer or the head consists of: a function of some of the arguments of
its kernel, and the parameter that its result is written to."""


def _run_reference(operation: str, arguments: Mapping[str, Any]) -> Sequence[Tensor]:
    """Run the reference of an operation; return what the operation returns."""
    reference, out = _REFERENCES[operation]
    taken = arguments.keys() & inspect.signature(reference).parameters
    found: Any = reference(**{name: arguments[name] for name in taken})
    if out is None:
        return found  # type: ignore[no-any-return]
    arguments[out].copy_(found)
    return ()


def _copied(argument: Any) -> Any:
    if isinstance(argument, Pending):
        return argument._replace(out=argument.out.clone())
    return argument.clone() if isinstance(argument, Tensor) else argument


class KernelCase:
    """A kernel, its arguments in one layer, and its reference."""

    def __init__(
        self, name: str, operation: str, operations: Operations, given: BoundArguments
    ) -> None:
        """Prepare the launches of a field of `operations`; `name` is as in `step_costs.py`."""
        self.name = name
        self._operation, self._kernel = operation, getattr(operations, operation)
        self._given = given
        self._returned: Sequence[Tensor] = ()

    def run(self) -> None:
        """Launch it."""
        self._returned = ()  # its memory can be reused
        self._returned = self._kernel(*self._given.args, **self._given.kwargs) or ()

    def outputs(self) -> list[Tensor]:
        """Return the tensors that the last call wrote, besides the cache."""
        return [*self._returned, *_written(self._given.arguments)]

    def results(self) -> list[Tensor]:
        """Return the results of the last call."""
        return _results_of(self._given.arguments, self._returned)

    def reference(self) -> list[Tensor]:
        """Return the same results in plain PyTorch, from the current inputs, unchanged."""
        arguments = {
            name: _copied(value) if name in (*_OUTPUTS, "arena", "counters") else value
            for name, value in self._given.arguments.items()
        }
        return _results_of(arguments, _run_reference(self._operation, arguments))


def _written(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that are written as a whole."""
    found = [arguments[name] for name in _OUTPUTS if arguments.get(name) is not None]
    return [one.out if isinstance(one, Pending) else one for one in found]


def _results_of(arguments: Mapping[str, Any], returned: Sequence[Tensor]) -> list[Tensor]:
    """Return what is written and comes from the inputs alone; of a router logits and weights."""
    found = _written(arguments)
    if "arena" in arguments:  # the keys and values that a decode step writes, dequantised
        place, batch = arguments["place"], arguments["batch"]
        columns = batch.positions[:, None] // batch.block_size
        tables = batch.block_tables[place.group][batch.rows].gather(1, columns)
        rows = torch.arange(len(tables), device=tables.device)
        offsets = batch.positions % batch.block_size
        sides = [
            read_blocks(side, tables, batch.block_size, arguments["form"].storage)
            for side in arguments["arena"][place.position]
        ]
        found.append(torch.stack([side[rows, :, offsets] for side in sides]))
    if isinstance(returned, Routed):  # experts with equal scores may be chosen for others
        found += [returned.logits, returned.weights]
    return found


def decode_cases(
    model: ModelConfig, config: ResolvedConfig, operations: Operations, *, rows: int, context: int
) -> list[KernelCase]:
    """Return the kernels of a layer that decodes, and the projection to the vocabulary.

    Arguments as for `check_operations`.
    """
    # The first layer has no output of the one before it to norm and add.
    model = model.with_layers([0, 0])
    recorded: list[tuple[str, BoundArguments]] = []
    native = Operations()

    def recording(name: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(native, name))

        def call(*arguments: Any, **keywords: Any) -> Any:
            given = signature.bind(*arguments, **keywords)
            recorded.append((name, given))
            return _run_reference(name, given.arguments)

        return call

    plain = Operations(**{name: recording(name) for name in _REFERENCES})
    key = StepKey("decode", rows, -(-context // config.user.block_size), False)
    case = SampleCase(key, ((context - 1, 1),) * rows)
    steps = SampleSteps(model, config, gpu_kernels(config.weights, plain), [case], seed=0)
    steps.prepare(case)
    steps.functions.bind(key)()
    plan = model_plan(model)
    names = [kernel.name for kernel in fuse(plan.layers[0])]
    second = recorded[len(names) :]
    return [
        KernelCase(name, operation, operations, given)
        for name, (operation, given) in zip([*names, plan.norm.name, "head"], second, strict=True)
    ]


def check_operations(
    model: ModelConfig,
    config: ResolvedConfig,
    operations: Operations,
    *,
    rows: int,
    context: int,
    replays: int = 1000,
    kernels: Sequence[str] | None = None,
) -> Iterator[Verified]:
    """Yield a result for each kernel of a decode step, dependent launch off, then on (on CUDA).

    Args:
        model: one that `fusion_obstacle` has nothing against.
        config: dtype, storage of weights and cache, block size, and the device: a CUDA device, or
            the CPU in Triton's interpreter, where nothing is captured.
        operations: to check.
        rows: that decode.
        context: tokens of each row, the newest included.
        replays: of each captured graph.
        kernels: names of those to check; None: all, and the layer.

    Raises KernelSelfTestError after an error that made the device unusable.
    """
    device = config.device
    cases = decode_cases(model, config, operations, rows=rows, context=context)
    captured, switches = (replays, (False, True)) if device.type == "cuda" else (0, (False,))

    def one_by_one() -> list[Tensor]:
        _launch(cases, False)
        return [tensor.clone() for case in cases for tensor in case.results()]

    checks = [(case.name, [case], case.reference) for case in cases]
    checks.append(("layer", cases, one_by_one))
    checks = [check for check in checks if kernels is None or check[0] in kernels]
    runs = [partial(_launch, some, on) for _, some, _ in checks for on in switches]
    compile_kernels((f"{rows} rows", run) for run in runs)
    for (name, some, reference), dependent in itertools.product(checks, switches):
        saved = [(tensor, tensor.clone()) for case in some for tensor in case.outputs()]
        found = Verified(name, rows, dependent, tolerance=TOLERANCE[config.dtype], replays=captured)
        try:
            error, different = _verify(some, reference, dependent, captured)
        # Any error of the compiler, the driver or an assertion is a result of the check.
        except Exception as raised:
            yield dataclasses.replace(found, failure=brief(raised))
            require_usable_device(name, device, raised)
        else:
            finite = error if math.isfinite(error) else None
            yield dataclasses.replace(found, error=finite, different=different)
        for tensor, before in saved:
            tensor.copy_(before)


def _launch(cases: Sequence[KernelCase], dependent: bool) -> None:
    with dependent_launch(dependent):
        for case in cases:
            case.run()


def _verify(
    cases: Sequence[KernelCase],
    reference: Callable[[], Sequence[Tensor]],
    dependent: bool,
    replays: int,
) -> tuple[float, int]:
    """Run cases in order; return the largest error, and the replays that differ from the first."""

    def results_of(run: Callable[[], None]) -> list[Tensor]:
        for case in cases:
            for tensor in case.outputs():
                poison(tensor)
        run()
        return [tensor for case in cases for tensor in case.results()]

    def error_of(found: Sequence[Tensor]) -> float:
        """The largest relative error; infinite if one is NaN."""
        errors = [float(relative_error(*pair)) for pair in zip(found, expected, strict=True)]
        return max(math.inf if math.isnan(error) else error for error in errors)

    expected = reference()
    for _ in range(2):  # the second time in memory that the first one's results had
        found = results_of(partial(_launch, cases, dependent))
    error = error_of(found)
    if not replays:
        return error, 0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _launch(cases, dependent)
    first = [tensor.clone() for tensor in results_of(graph.replay)]
    different = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(replays):
        pairs = zip(results_of(graph.replay), first, strict=True)
        different += torch.stack([(_bits(now) != _bits(then)).any() for now, then in pairs]).any()
    return max(error, error_of(first)), int(different)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m stepgraph.runtime.tools.verify_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    shapes = "as in bench.py; only its shapes are used"
    add("--model", default="preset:llama-3.2-1b", help=shapes)
    add("--dtype", default="auto", help="dtype (default: auto, as stored)")
    add("--rows", nargs="+", type=integer(1, MAX_ROWS), default=[1, 8, 32])
    add("--context", type=int, default=1024, help="tokens of each row")
    add("--replays", type=int, default=1000, help="replays of each captured graph")
    add("--kernel", nargs="+", help="names (default: all, and the layer)")
    add("--json", type=Path, help="write the results to this file after each check")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: list[dict[str, Any]] = []
    torch.manual_seed(0)
    try:
        if device == "cpu" and not INTERPRETED:
            raise ConfigError("no CUDA device found: set TRITON_INTERPRET=1 to run on the CPU")
        settings = EngineConfig(device=device, mode="eager", dtype=options.dtype)
        model, config = resolve_fused(options.model, settings)
        for rows in options.rows:
            for result in check_operations(
                model,
                config,
                Operations(),
                rows=rows,
                context=options.context,
                replays=options.replays,
                kernels=options.kernel,
            ):
                print(result, flush=True)
                entry = dataclasses.asdict(result) | {"passed": result.passed}
                found.append({"model": options.model} | entry)
                if options.json is not None:
                    write_file(options.json, json.dumps(found, indent=1) + "\n")
    except StepgraphError as error:
        print(f"verify: error: {error}", file=sys.stderr)
        return 1
    return int(not all(entry["passed"] for entry in found))


if __name__ == "__main__":
    sys.exit(main())
