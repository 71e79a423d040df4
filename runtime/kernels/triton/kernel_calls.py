"""How Triton kernels are called: on the device, in the interpreter, or only recorded.

Every kernel of this package is called by `call_kernel`. It takes the tensors and numbers of the
kernel in order, then its constants by name. A kernel that reads what an earlier one wrote has a
constant `PDL`: programmatic dependent launch, which lets it begin while its predecessor still runs.
Such a kernel calls `wait_for_inputs(PDL)` once, outside of loops, before it first touches what
others wrote (weights may be loaded earlier), and `let_dependents_start(PDL)` as early as it has the
processor's resources. Source: CUDA Programming Guide, "Programmatic Dependent Launch and
Synchronization".

With TRITON_INTERPRET=1 in the environment before this module is imported, kernels run on the CPU
in Triton's interpreter. Inside `divert_kernel_calls` nothing runs: calls are received instead, so
that they can be compiled ahead of time, with `record_kernel_calls` without a device. Inside
`dependent.dependent_launch(False)` no kernel begins early.
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
from torch import Tensor

from .dependent import is_dependent_launch_enabled

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in the interpreter; read once, as Triton does."""
MULTIPROCESSORS = 1 if INTERPRETED else 132
"""What sizes are chosen for where there is no device: an H100 or H200 (SXM), or the interpreter,
which takes its time for each program."""
CAPABILITY = 90
"""Compute capability, times ten, of the device that sizes are chosen for where there is none."""


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


@triton.jit
def prefetch(address, size, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for `size` bytes to be brought to the L2 cache: one request of one thread.

    Address and size are multiples of 16. Nothing is kept in registers and nothing waits. Processors
    have this from compute capability 9 on, as they have dependent launch.
    """
    if PDL:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .u32 t;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [address, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def arrives_last(counter_ptr, programs):  # type: ignore[no-untyped-def]
    """Count this program at `counter_ptr`; whether it is the last of `programs`.

    What a program stored is visible to the last one: the barrier puts the stores of its threads
    before the count, which releases them and acquires the stores of programs counted earlier
    (PTX ISA, "Memory Consistency Model"); the second barrier holds back the other threads.
    Loads must not be served by L1 (use `.cg`), which other processors do not write to.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before == programs - 1


def is_aligned(tensor: Tensor) -> bool:
    """Whether `prefetch` may begin at a tensor; "meta" has no addresses."""
    return tensor.is_meta or tensor.data_ptr() % 16 == 0


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a kernel with its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    """Tensors (None where there is none) and numbers, in the order of the kernel's parameters."""
    options: dict[str, Any]
    """Constants and options of the launch, by name."""

    @property
    def name(self) -> str:
        """The kernel's."""
        name: str = self.kernel.__name__
        return name


_Receiver = Callable[[KernelCall], object]
_diversion: ContextVar[tuple[_Receiver, int | None] | None]
_diversion = ContextVar("who receives kernel calls, and the device they are for", default=None)


@contextmanager
def divert_kernel_calls(receive: _Receiver, capability: int | None = None) -> Iterator[None]:
    """Call `receive` with each kernel call of this block and thread instead of carrying it out.

    Sizes are chosen for a device of this compute capability (times ten); None: the current device.
    """
    token = _diversion.set((receive, capability))
    try:
        yield
    finally:
        _diversion.reset(token)


@contextmanager
def record_kernel_calls(capability: int = CAPABILITY) -> Iterator[list[KernelCall]]:
    """Collect the kernel calls of this block; see `divert_kernel_calls`."""
    calls: list[KernelCall] = []
    with divert_kernel_calls(calls.append, capability):
        yield calls


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
    diversion = _diversion.get()
    options = {"num_warps": num_warps, "num_stages": num_stages, **constants}
    if "PDL" in kernel.arg_names:
        runs_on_a_device = diversion is not None or not INTERPRETED
        enabled = is_dependent_launch_enabled() and runs_on_a_device
        options["PDL"] = enabled and compute_capability() >= 90
        if options["PDL"]:
            options["launch_pdl"] = True
    if diversion is not None:
        diversion[0](KernelCall(kernel, grid, args, options))
    else:
        kernel[grid](*args, **options)


def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; `MULTIPROCESSORS` for any other."""
    return _multiprocessors(device) if device.type == "cuda" else MULTIPROCESSORS


@cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def compute_capability() -> int:
    """Times ten: of what calls are diverted for, else of the current CUDA device.

    `CAPABILITY` where there is none.
    """
    diversion = _diversion.get()
    if diversion is not None and diversion[1] is not None:
        return diversion[1]
    if not torch.cuda.is_available():
        return CAPABILITY
    return _device_capability(torch.cuda.current_device())


@cache
def _device_capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
