"""The kernels of a decode step, one by one, with the arguments that the step calls them with.

For checking them against their plain versions (`verify_kernels.py`). A sample of the model runs one
step in plain PyTorch, which records the calls. Needs triton.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor

from ..execution.sample_steps import SampleCase, SampleSteps
from ..execution.step_key import StepKey
from ..kernels.ops.kv_storage import read_blocks
from ..kernels.triton.backend import gpu_kernels
from ..kernels.triton.expert_routing import Routed
from ..kernels.triton.fusion import Fused, Mixture, fuse
from ..kernels.triton.linear import Pending
from ..kernels.triton.operation_check import WRITES, OutputCopies, written_tensors
from ..kernels.triton.operations import Operations
from ..kernels.triton.split_attention import Partials
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..resolved_config import ResolvedConfig

__all__ = ["KernelCase", "decode_cases"]

_PLAIN = Operations.reference()


class KernelCase:
    """A kernel, its arguments in one layer, and its plain version."""

    def __init__(
        self, name: str, operation: str, operations: Operations, given: BoundArguments
    ) -> None:
        """Prepare the launches of an operation.

        Args:
            name: of the kernel, as in `step_costs.py`.
            operation: a field of `Operations`.
            operations: the version that runs.
            given: arguments of the plain version.
        """
        self.name = name
        self._kernel, self._plain = getattr(operations, operation), getattr(_PLAIN, operation)
        self._writes, self._given = WRITES[operation], given
        self._returned: Sequence[Tensor] = ()

    def run(self) -> None:
        """Launch it."""
        self._returned = ()  # its memory can be reused
        self._returned = self._kernel(*self._given.args, **self._given.kwargs) or ()

    def outputs(self) -> list[Tensor]:
        """Return the tensors that the last call wrote, besides the cache."""
        found = [*self._returned]
        for parameter in self._writes.outputs:
            match self._given.arguments.get(parameter):
                case Tensor() as out:
                    found.append(out)
                case Pending() as pending:
                    found.append(pending.out)
                case Partials() as partials:
                    found += partials
        return found

    def results(self) -> list[Tensor]:
        """Return the results of the last call."""
        return self._results_of(self._given, self._returned)

    def reference(self) -> list[Tensor]:
        """Return the same results in plain PyTorch, from the current inputs, unchanged."""
        given = OutputCopies(self._given, self._writes).given
        return self._results_of(given, self._plain(*given.args, **given.kwargs) or ())

    def _results_of(self, given: BoundArguments, returned: Sequence[Tensor]) -> list[Tensor]:
        """What is written; of the head the logits and that of the best chunk's token, of a router
        the logits and the weights."""

        def newest(arena: Tensor) -> Tensor:
            """Keys and values that a decode step writes, dequantised."""
            place, batch, form = (given.arguments[name] for name in ("place", "batch", "form"))
            columns = batch.positions[:, None] // batch.block_size
            tables = batch.block_tables[place.group][batch.rows].gather(1, columns)
            rows = torch.arange(len(tables), device=tables.device)
            sides = (
                read_blocks(side, tables, batch.block_size, form.storage)
                for side in arena[place.position]
            )
            offsets = batch.positions % batch.block_size
            return torch.stack([side[rows, :, offsets] for side in sides])

        written = written_tensors(given, self._writes, newest)
        found = [tensor for parameter, tensor in written if parameter != "counters"]
        if isinstance(returned, Routed):  # experts with equal scores may be chosen for others
            found += [returned.logits, returned.weights]
        elif returned:
            logits_TV, maxima_TC, ids_TC = returned
            id_T1 = ids_TC.gather(1, maxima_TC.argmax(1, keepdim=True)).long()
            found += [logits_TV, logits_TV.gather(1, id_T1)]
        return found


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
        rows: that decode, at most `linear.ROW_CLASSES[-1]`.
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
    _begin, *of_layers, (_, head), _pick = recorded
    for _, call in of_layers:
        # The plain version leaves everything to the first split.
        if isinstance(partials := call.arguments.get("partials"), Partials):
            partials.acc.normal_()
            partials.m.normal_()
            partials.l.uniform_(0.5, 1.5)
    native = operations or Operations.native()
    names = [name for fused in fuse(model_plan(model).layers[0]) for name in _names(fused)]
    cases = [
        KernelCase(name, operation, native, given)
        for name, (operation, given) in zip(names, of_layers[len(names) :], strict=True)
    ]
    return [*cases, KernelCase("head", "head", native, head)]


def _names(fused: Fused) -> tuple[str, ...]:
    """The names of the operations that compute a part of a layer, in order."""
    return fused.operations if isinstance(fused, Mixture) else (fused.name,)


def _recording(calls: list[tuple[str, BoundArguments]]) -> Operations:
    """Plain operations that record the name and the arguments of each call."""

    def recording(name: str) -> Callable[..., Any]:
        function = getattr(_PLAIN, name)
        signature = inspect.signature(function)

        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append((name, signature.bind(*arguments, **keywords)))
            return function(*arguments, **keywords)

        return call

    names = (field.name for field in dataclasses.fields(Operations))
    return Operations(**{name: recording(name) for name in names})
