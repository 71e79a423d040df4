"""The kernels of a decode step, one by one, with the arguments that the step calls them with.

For checking them against plain PyTorch (`verify_kernels.py`). A sample of the model runs one step
in plain PyTorch, which records the calls. Needs triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor

from ..execution.sample_steps import SampleCase, SampleSteps
from ..execution.step_key import StepKey
from ..kernels.ops.attention import AttentionForm
from ..kernels.ops.batch import LayerPlace, RaggedBatch
from ..kernels.ops.kv_storage import read_blocks
from ..kernels.triton.backend import gpu_kernels
from ..kernels.triton.decode_attention import reference_decode_attention
from ..kernels.triton.expert_routing import Routed, reference_routing
from ..kernels.triton.experts import reference_experts_of_choice
from ..kernels.triton.fusion import Fused, Mixture, fuse
from ..kernels.triton.linear import Pending
from ..kernels.triton.linear_kernels import (
    reference_gate_up,
    reference_norm_linear,
    reference_residual_linear,
)
from ..kernels.triton.operations import Operations
from ..kernels.triton.rotated_heads import HeadRotation
from ..kernels.triton.rowwise import reference_activate_rows, reference_norm_rows
from ..kernels.triton.split_attention import Partials
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..models.resolved_config import ResolvedConfig

__all__ = ["KernelCase", "decode_cases"]

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
        """Prepare the launches of an operation.

        Args:
            name: of the kernel, as in `step_costs.py`.
            operation: a field of `Operations`.
            operations: the version that runs.
            given: arguments of the operation.
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
