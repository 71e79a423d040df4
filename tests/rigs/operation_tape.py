"""A tape of the operations that torch runs, which can be run again into the same tensors.

It keeps the scalars and the tensors that an operation was given, so whatever was decided on the
host stays decided. What a capture on a device cannot record (a wait for the device, a tensor made
of numbers of the host) fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
}
FROM_HOST = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class NotCapturableError(RuntimeError):
    """What would have made a capture fail on a device."""


def tensors_of(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def poison(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(-1 if tensor.dtype.is_signed else 255)


@dataclass(frozen=True)
class Operation:
    func: Any
    args: Any
    kwargs: Any
    outputs: list[torch.Tensor]
    made: list[torch.Tensor]
    """The outputs in memory that the operation took."""
    is_view: bool

    @property
    def computes(self) -> bool:
        """False for views, and for memory that may hold anything."""
        return not (self.is_view or self.func in UNWRITTEN)

    def run(self) -> None:
        """Compute the outputs anew; only of an operation that `computes`."""
        result = self.func(*self.args, **self.kwargs)
        results = [result] if isinstance(result, torch.Tensor) else tensors_of(result)
        for output, result in zip(self.outputs, results, strict=True):
            if result.data_ptr() != output.data_ptr():  # else an argument, changed in place
                output.copy_(result)


class Tape(TorchDispatchMode):
    """Records operations, and refuses those that a capture cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if func in WAITS or func in FROM_HOST:
            raise NotCapturableError(f"{func} in a capture")
        if func is aten.index.Tensor and any(t.dtype is torch.bool for t in given[1:]):
            raise NotCapturableError("an index by a mask waits for the device")
        result = func(*args, **kwargs)
        known = {storage_of(tensor) for tensor in given}
        outputs = tensors_of(result)
        made = [tensor for tensor in outputs if storage_of(tensor) not in known]
        is_view = bool(outputs) and not made and not func._schema.is_mutable
        self.operations.append(Operation(func, args, kwargs, outputs, made, is_view))
        return result
