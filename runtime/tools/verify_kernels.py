"""Checks the kernels of a decode step against plain PyTorch, alone and in captured graphs.

    python -m stepgraph.runtime.tools.verify_kernels --model preset:llama-3.2-1b --rows 1 8 32

Each kernel runs with the arguments of a step with random weights, into poisoned outputs, with
dependent launch off and on. On a CUDA device each kernel, and all of them in the order of a layer
(`layer`), are also captured and replayed many times. Every replay must leave the same bits;
different bits mean a race. Before the first check of a number of rows its kernels are compiled in
parallel threads.
Prints a line for each check; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import BoundArguments
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...profiling.atomic_write import write_file
from ..config import MAX_ROWS, EngineConfig
from ..errors import StepgraphError
from ..execution.sample_steps import SampleCase, SampleSteps
from ..execution.step_key import StepKey
from ..kernels.ops.attention import AttentionForm
from ..kernels.ops.batch import LayerPlace, RaggedBatch
from ..kernels.ops.kv_storage import read_blocks
from ..kernels.result_check import relative_error
from ..kernels.triton.backend import gpu_kernels
from ..kernels.triton.decode_attention import reference_decode_attention
from ..kernels.triton.dependent import dependent_launch
from ..kernels.triton.expert_routing import Routed, reference_routing
from ..kernels.triton.experts import reference_experts_of_choice
from ..kernels.triton.fusion import Fused, Mixture, fuse, fusion_obstacle
from ..kernels.triton.kernel_calls import INTERPRETED
from ..kernels.triton.linear import Pending
from ..kernels.triton.linear_kernels import (
    reference_gate_up,
    reference_norm_linear,
    reference_residual_linear,
)
from ..kernels.triton.operations import Operations
from ..kernels.triton.precompile import compile_kernels
from ..kernels.triton.rotated_heads import HeadRotation
from ..kernels.triton.rowwise import reference_activate_rows, reference_norm_rows
from ..kernels.triton.split_attention import Partials
from ..loading.loader import resolve_source
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..models.resolved_config import ResolvedConfig

__all__ = ["TOLERANCE", "Verified", "check_operations", "main"]

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


_OUTPUTS = ("out_TN", "out_TF", "out_TD", "attended_TN", "pending")
"""Parameters that operations write as a whole."""
_UPDATES = ("arena", "counters")
"""Parameters that they write in part."""


def _attend(
    qkv_TN: Tensor,
    arena: Tensor,
    place: LayerPlace,
    rotation: HeadRotation,
    batch: RaggedBatch,
    form: AttentionForm,
    partials: Partials,
    counters: Tensor | None,
    attended_TN: Tensor,
    **_: Any,
) -> None:
    out_TN = reference_decode_attention(qkv_TN, arena, place, rotation, batch, form)
    attended_TN.copy_(out_TN)


def _writing(reference: Callable[..., Tensor], out: str) -> Callable[..., None]:
    """Return a function that writes the result of `reference` into its argument `out`."""

    def write(**arguments: Any) -> None:
        target = arguments.pop(out)
        target.copy_(reference(**arguments))

    return write


_REFERENCES: dict[str, Callable[..., Any]] = {
    "norm_linear": _writing(reference_norm_linear, "out_TN"),
    "decode_attention": _attend,
    "residual_linear": _writing(reference_residual_linear, "out_TN"),
    "gate_up": _writing(reference_gate_up, "out_TF"),
    "norm_rows": _writing(reference_norm_rows, "out_TD"),
    "activate_rows": _writing(reference_activate_rows, "out_TF"),
    "route": reference_routing,
    "experts": reference_experts_of_choice,
}
"""Of each operation that a layer or the head consists of, with the arguments of its kernel."""


def _plain(operation: str, given: BoundArguments) -> Any:
    """Run the reference of an operation."""
    chosen_by_kernel = ("config", "configs", "tile")
    named = {k: v for k, v in given.arguments.items() if k not in chosen_by_kernel}
    return _REFERENCES[operation](**named)


class KernelCase:
    """A kernel, its arguments in one layer, and its reference."""

    def __init__(
        self, name: str, operation: str, operations: Operations, given: BoundArguments
    ) -> None:
        """Prepare the launches of `operation`, a field of `operations`, with these arguments.

        `name` is the kernel's in `step_costs.py`.
        """
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
        found = [*self._returned]
        for parameter in _OUTPUTS:
            match self._given.arguments.get(parameter):
                case Tensor() as out:
                    found.append(out)
                case Pending() as pending:
                    found.append(pending.out)
        return found

    def results(self) -> list[Tensor]:
        """Return the results of the last call."""
        return _results_of(self._given.arguments, self._returned)

    def reference(self) -> list[Tensor]:
        """Return the same results in plain PyTorch, from the current inputs, unchanged."""
        given = BoundArguments(self._given.signature, self._given.arguments.copy())
        for parameter in (*_OUTPUTS, *_UPDATES):
            match given.arguments.get(parameter):
                case Tensor() as tensor:
                    given.arguments[parameter] = tensor.clone()
                case Pending() as pending:
                    given.arguments[parameter] = pending._replace(out=pending.out.clone())
        returned = _plain(self._operation, given) or ()
        return _results_of(given.arguments, returned)


def _results_of(arguments: dict[str, Any], returned: Sequence[Tensor]) -> list[Tensor]:
    """Return what is written and comes from the inputs alone; of a router logits and weights."""
    found = []
    for parameter in _OUTPUTS:
        match arguments.get(parameter):
            case Pending() as pending:
                found.append(pending.out)
            case Tensor() as tensor:
                found.append(tensor)
    if "arena" in arguments:
        found.append(_newest(**{k: arguments[k] for k in ("arena", "place", "batch", "form")}))
    if isinstance(returned, Routed):  # experts with equal scores may be chosen for others
        found += [returned.logits, returned.weights]
    return found


def _newest(arena: Tensor, place: LayerPlace, batch: RaggedBatch, form: AttentionForm) -> Tensor:
    """Return the keys and values that a decode step writes, dequantised."""
    columns = batch.positions[:, None] // batch.block_size
    tables = batch.block_tables[place.group][batch.rows].gather(1, columns)
    rows = torch.arange(len(tables), device=tables.device)
    sides = (
        read_blocks(side, tables, batch.block_size, form.storage) for side in arena[place.position]
    )
    offsets = batch.positions % batch.block_size
    return torch.stack([side[rows, :, offsets] for side in sides])


def decode_cases(
    model: ModelConfig,
    config: ResolvedConfig,
    *,
    rows: int,
    context: int,
    operations: Operations | None = None,
) -> list[KernelCase]:
    """Return the kernels of a layer that decodes, and the projection to the vocabulary.

    Args:
        model: one that `fusion_obstacle` has nothing against.
        config: device, dtype, storage of weights and cache, block size.
        rows: that decode.
        context: tokens of each row, the newest included.
        operations: that run; None: the Triton kernels.
    """
    # The first layer has no output of the one before it to norm and add.
    model = model.with_layers([0, 0])
    recorded: list[tuple[str, BoundArguments]] = []
    kernels = gpu_kernels(config.weights, _recording(recorded))
    key = StepKey("decode", rows, -(-context // config.block_size), False)
    case = SampleCase(key, ((context - 1, 1),) * rows)
    steps = SampleSteps(model, config, kernels, [case], seed=0)
    steps.prepare(case)
    steps.functions.bind(key)()
    chosen, plan = operations or Operations(), model_plan(model)
    names = [name for fused in fuse(plan.layers[0]) for name in _names(fused)]
    second = recorded[len(names) :]
    return [
        KernelCase(name, operation, chosen, given)
        for name, (operation, given) in zip([*names, plan.norm.name, "head"], second, strict=True)
    ]


def _names(fused: Fused) -> tuple[str, ...]:
    """The names of the operations that compute a part of a layer, in order."""
    return fused.operations if isinstance(fused, Mixture) else (fused.name,)


def _recording(calls: list[tuple[str, BoundArguments]]) -> Operations:
    """Return operations in plain PyTorch that record the name and the arguments of each call."""
    native = Operations()

    def recording(name: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(native, name))

        def call(*arguments: Any, **keywords: Any) -> Any:
            given = signature.bind(*arguments, **keywords)
            calls.append((name, given))
            return _plain(name, given)

        return call

    return Operations(**{name: recording(name) for name in _REFERENCES})


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
        _launch(cases, False)
        return [tensor.clone() for tensor in _results(cases)]

    checks = [(case.name, [case], case.reference) for case in cases]
    checks.append(("layer", cases, one_by_one))
    checks = [check for check in checks if kernels is None or check[0] in kernels]
    runs = [partial(_launch, some, on) for _, some, _ in checks for on in switches]
    compile_kernels((f"{rows} rows", run) for run in runs)
    for (name, some, reference), dependent in itertools.product(checks, switches):
        found = Verified(name, rows, dependent, tolerance=tolerance, replays=captured)
        found = _verify(found, some, reference, device)
        yield found
        if found.lost:
            return


def _launch(cases: Sequence[KernelCase], dependent: bool) -> None:
    with dependent_launch(dependent):
        _run(cases)


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
