"""Fixed buffers for a dataclass of tensors: one device allocation, one host mirror, one copy.

A captured step reads its inputs from the addresses it was captured with, so inputs are written
into buffers that are allocated once and never move. All fields lie in one allocation:

    bytes 0          256        512               768
          | token_ids |positions | token_rows ...  |      each field starts on an aligned boundary

so that one transfer copies all inputs of a step to the device. The mirror is the pinned host copy
that the host writes. On a CPU it is the device buffer itself, and nothing is copied.

Tensors that a step writes (newest tokens, positions) must not be fields: the next copy would
overwrite them with the mirror's old values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
A = TypeVar("A")

CPU_ALIGNMENT = 64
"""Alignment of fields on a CPU, in bytes: a cache line, and the widest vector register."""

CUDA_ALIGNMENT = 256
"""Alignment of fields on CUDA, in bytes: guaranteed by cudaMalloc, assumed by vector loads and
TMA."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and padding value of one field.

    `fill` is the padding value, such as the null row, position 0 or a slot of the null block. All
    elements have it after allocation.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int | float | bool = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take, without alignment."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _offsets(
    specs: Mapping[str, TensorSpec], device: torch.device
) -> tuple[dict[str, int], int, int]:
    """Return the first byte of each field, the bytes of all fields, and their alignment."""
    alignment = CUDA_ALIGNMENT if device.type == "cuda" else CPU_ALIGNMENT
    offsets: dict[str, int] = {}
    end = 0
    for name, spec in specs.items():
        offsets[name] = -(-end // alignment) * alignment
        end = offsets[name] + spec.nbytes
    return offsets, end, alignment


def allocated_bytes(specs: Mapping[str, TensorSpec], device: torch.device) -> int:
    """Return the bytes of one allocation of `StaticBuffers`, alignment included."""
    return _offsets(specs, device)[1]


class StaticBuffers(Generic[T]):
    """Device tensors of fixed address, and the host mirror that is copied to them.

    For each step::

        buffers.begin_write()           # the mirror may be overwritten now
        arrays.token_ids[:n] = ...      # write `arrays(...)` or `host`
        buffers.copy_to_device()        # one asynchronous transfer on the current stream
        step.run()                      # on the same stream, so it reads the new values

    Attributes:
        device: the dataclass with each field a view of the device allocation.
        host: the same fields as views of the mirror (pinned where the device is CUDA).
    """

    def __init__(
        self,
        layout: type[T],
        specs: Mapping[str, TensorSpec],
        device: torch.device | str,
        *,
        mirrored: bool | None = None,
    ) -> None:
        """Allocate buffers for `layout`, a dataclass with one tensor field for each spec.

        `layout` may be a parametrised generic dataclass (`StepInputs[Tensor]`). Its constructor
        gets one keyword argument per field. Every field is initialised to its `fill`, on the device
        too, so that steps can be warmed up before the first write. `mirrored`: whether the mirror
        has memory of its own; None: unless the device is the CPU.
        """
        device = torch.device(device)
        self._specs = dict(specs)
        self._offsets, size, alignment = _offsets(specs, device)
        self._device_bytes = torch.empty(size, dtype=torch.uint8, device=device)
        assert self._device_bytes.data_ptr() % alignment == 0, "the allocator aligns too little"
        self._host_bytes, on_cuda = self._device_bytes, device.type == "cuda"
        if device.type != "cpu" if mirrored is None else mirrored:
            self._host_bytes = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None
        self.device: T = layout(**self._views(self._device_bytes))
        self.host: T = layout(**self._views(self._host_bytes))
        for name, spec in specs.items():
            getattr(self.host, name).fill_(spec.fill)
        self.copy_to_device()

    @property
    def nbytes(self) -> int:
        """Bytes of the device allocation, alignment included."""
        return self._device_bytes.numel()

    def arrays(self, layout: type[A]) -> A:
        """Return `layout`, of the same fields, filled with numpy views of the mirror.

        Assigning to a slice of an array is several times faster than to a slice of a tensor. numpy
        does not have bfloat16. A dataclass that is generic in its array type works for both
        (`StepInputs[Tensor]` on the device, `StepInputs[NDArray]` here).
        """
        arrays: dict[str, Any] = {n: getattr(self.host, n).numpy() for n in self._specs}
        return layout(**arrays)

    def begin_write(self) -> None:
        """Wait until the last copy has read the mirror. Call it before writing the next inputs.

        `copy_to_device` returns before the copy has run, and an earlier write would mix the inputs
        of two steps. Waits for that copy, not for later work; does not wait on a CPU.
        """
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to_device(self) -> None:
        """Copy the whole mirror to the device: one asynchronous transfer on the current stream.

        On a CPU nothing is copied.
        """
        if self._host_bytes is not self._device_bytes:
            self._device_bytes.copy_(self._host_bytes, non_blocking=self._copied is not None)
            if self._copied is not None:
                self._copied.record(torch.cuda.current_stream(self._device_bytes.device))

    def addresses(self) -> dict[str, int]:
        """Return the device address of each field, which must never change."""
        return {name: getattr(self.device, name).data_ptr() for name in self._specs}

    def _views(self, base: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a typed view of `base` (`uint8 [nbytes]`) for each field."""
        return {
            name: base.narrow(0, self._offsets[name], spec.nbytes).view(spec.dtype).view(spec.shape)
            for name, spec in self._specs.items()
        }
