"""How Triton kernels are called: on the device, in the interpreter, or only recorded.

Every kernel of this package is called by `call_kernel`. It takes the tensors and numbers of the
kernel in order, then its constants by name. A kernel that reads what an earlier one wrote has a
constant `PDL`: programmatic dependent launch, which lets it begin while its predecessor still runs.
Such a kernel calls `wait_for_inputs(PDL)` once, outside of loops, before it first touches what
others wrote (weights may be loaded earlier), and `let_dependents_start(PDL)` as early as it has the
processor's resources. Source: CUDA Programming Guide, "Programmatic Dependent Launch and
Synchronization".

With TRITON_INTERPRET=1 in the environment before this module is imported, kernels run on the CPU
in Triton's interpreter. Inside `record_kernel_calls` nothing runs: the calls are returned, so that
they can be compiled ahead of time without a device. Inside `divert_kernel_calls` nothing runs
either: each call is passed to a receiver with the arguments that it would have on this device.
Inside `dependent.dependent_launch(False)` no kernel begins early.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .dependent import is_dependent_launch_enabled

__all__ = [
    "CAPABILITY",
    "INTERPRETED",
    "KernelCall",
    "call_kernel",
    "compute_capability",
    "divert_kernel_calls",
    "let_dependents_start",
    "num_multiprocessors",
    "record_kernel_calls",
    "supports_dependent_launch",
    "wait_for_inputs",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in the interpreter; read once, as Triton does."""

MULTIPROCESSORS = 1 if INTERPRETED else 132
"""What sizes are chosen for where there is no device: an H100 or H200 (SXM), or the interpreter,
which takes its time for each program."""


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all that earlier kernels wrote is visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_dependents_start(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel be set up; it still waits for this one's writes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a kernel with its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    """Tensors (None where there is none) and numbers, in the order of the kernel's parameters."""
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """The kernel's."""
        name: str = self.kernel.__name__
        return name


CAPABILITY = 90
"""Compute capability, times ten, of the device that sizes are chosen for where there is none."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """Where calls are collected, and the device that they are for."""

    calls: list[KernelCall]
    capability: int


_recorded: ContextVar[_Recording | None] = ContextVar("recorded kernel calls", default=None)


@contextmanager
def record_kernel_calls(capability: int = CAPABILITY) -> Iterator[list[KernelCall]]:
    """Collect the kernel calls of this block instead of carrying them out.

    Their sizes are chosen for a device of this compute capability (times ten).
    """
    calls: list[KernelCall] = []
    token = _recorded.set(_Recording(calls, capability))
    try:
        yield calls
    finally:
        _recorded.reset(token)


Receiver = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
"""Gets the kernel, the grid, the arguments in order, and constants and options by name."""

_receiver: ContextVar[Receiver | None] = ContextVar("receiver of kernel calls", default=None)


@contextmanager
def divert_kernel_calls(receiver: Receiver) -> Iterator[None]:
    """Call `receiver` with each kernel call of this block and thread instead of carrying it out."""
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


def call_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 1,
    **constants: Any,
) -> None:
    """Launch `kernel` on the current stream of the current device, where its tensors must be.

    Args:
        kernel: a `triton.jit` function; its constants come last and have upper-case names.
        grid: programs along each axis.
        args: its tensors and numbers, in order.
        num_warps: of a program.
        num_stages: of software pipelines in its loops.
        constants: by name, without `PDL`, which is added where the kernel has it.
    """
    dependent = "PDL" in kernel.arg_names
    recorded = _recorded.get()
    if recorded is not None:
        if dependent:
            constants["PDL"] = is_dependent_launch_enabled()
        recorded.calls.append(KernelCall(kernel, grid, args, constants, num_warps, num_stages))
        return
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if dependent:
        enabled = is_dependent_launch_enabled() and not INTERPRETED
        constants["PDL"] = enabled and supports_dependent_launch()
        if constants["PDL"]:
            options["launch_pdl"] = True
    options |= constants
    receiver = _receiver.get()
    if receiver is not None:
        receiver(kernel, grid, args, options)
        return
    kernel[grid](*args, **options)


def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; `MULTIPROCESSORS` for any other."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return _device_multiprocessors(device)


@cache
def _device_multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def compute_capability() -> int:
    """Times ten: of what calls are recorded for, else of the current CUDA device.

    That of the device that sizes are chosen for where there is none.
    """
    recorded = _recorded.get()
    if recorded is not None:
        return recorded.capability
    if not torch.cuda.is_available():
        return CAPABILITY
    return _device_capability(torch.cuda.current_device())


@cache
def _device_capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def supports_dependent_launch() -> bool:
    """Whether the current device has programmatic dependent launch (compute capability 9.0)."""
    return _device_capability(torch.cuda.current_device()) >= 90
