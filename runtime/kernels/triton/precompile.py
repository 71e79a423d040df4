"""Compiles the kernels of all steps in parallel threads, before the first of them runs.

A step that runs compiles its kernels one after the other. Here each step is called once with its
kernel calls diverted: torch operations run, and Triton kernels are compiled in threads but not
launched. Most of Triton's compiler runs without Python's lock (measured in
docs/gpu-predictions.md). Later calls find the compiled kernels, because they are the same but
for `warmup=True`: Triton specialises on the same tensors and numbers and uses the same caches, in
memory and on disk.

Memory that a kernel would have written is zero meanwhile, so that an index read from it is valid.
The contract of warm-up holds (`graphs/steps.py`): what the steps write, they write for padding.

A kernel that does not compile raises nothing here. It is logged and reported by name, and its first
call raises the same error, in the self-test or in the preparation of the step.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import triton

from .filled_memory import FilledMemory
from .kernel_calls import INTERPRETED, KernelCall, divert_kernel_calls

logger = logging.getLogger("stepgraph.runtime")

_MOST_THREADS = 8
"""About a quarter of compiling holds Python's lock, so more threads than this would only wait."""


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """What compiling the kernels of all steps took."""

    kernels: int
    """Distinct specialisations of the kernels that the steps launch."""
    threads: int
    seconds: float
    """Wall-clock time; short where Triton's cache on disk has the kernels."""
    failures: tuple[str, ...]
    """Kernels that were not compiled and steps that could not be called, each with its error."""


def compile_kernels(
    steps: Iterable[tuple[str, Callable[[], object]]],
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> CompiledKernels:
    """Compile what the steps launch on the current device.

    Args:
        steps: name and callable of each step; called in this thread, on the current stream.
        report: called in these threads with the number of kernels that are compiled, and of all.

    As many threads compile as the process has processors, at most 8. Where kernels are interpreted
    nothing is compiled, and no step is called.
    """
    began = time.perf_counter()
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))  # Triton is for Linux
    if INTERPRETED:
        return CompiledKernels(0, threads, 0.0, ())
    titles: dict[Any, str] = {}  # of kernels that are compiled or under way
    failures: list[str] = []
    refused: dict[str, None] = {}

    def compile_call(call: KernelCall) -> None:
        """Compile the kernel of a call; keeps no reference to its tensors."""
        try:
            compiled = call.kernel.run(*call.args, grid=call.grid, warmup=True, **call.options)
        except Exception as error:  # its first call raises it again
            refused[_failure(_title(call), error)] = None
        else:  # calls with the same specialisation get the same object
            titles.setdefault(compiled, _title(call))

    with (
        ThreadPoolExecutor(threads, thread_name_prefix="stepgraph-compile") as executor,
        # Errors are kept with the kernels, and read from there.
        triton.AsyncCompileMode(_WithLauncher(executor, report), ignore_errors=True),
    ):
        for name, step in steps:
            try:
                with divert_kernel_calls(compile_call), FilledMemory(torch.Tensor.zero_):
                    step()
            except Exception as error:
                failures.append(f"step {name}: {type(error).__name__}: {error}")
    failures += refused
    for compiled, title in titles.items():
        future = compiled.future if isinstance(compiled, triton.FutureKernel) else None
        if future is not None and (raised := future.exception()) is not None:
            failures.append(_failure(title, raised))
    for failure in failures:
        logger.warning("not compiled ahead of the first launch: %s", failure)
    return CompiledKernels(len(titles), threads, time.perf_counter() - began, tuple(failures))


class _WithLauncher:
    """An executor for Triton that also builds the C launcher of each kernel.

    Triton would build it at the first call, one kernel after the other.
    """

    def __init__(self, executor: ThreadPoolExecutor, report: Callable[[int, int], None]) -> None:
        self._executor, self._report = executor, report
        self._submitted, self._finished = 0, count(1)

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        """Run in a thread."""
        self._submitted += 1
        return self._executor.submit(self._build, compile_kernel)

    def _build(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        self._report(next(self._finished), self._submitted)
        return kernel


def _title(call: KernelCall) -> str:
    """Name a call: its operation where it has one, and the constants that choose its code."""
    name = str(call.options.get("NAME", call.name.strip("_")))
    choices = [f"{key}={value}" for key, value in call.options.items() if key != "NAME"]
    return f"{name} ({' '.join(choices)})"


def _failure(title: str, error: BaseException) -> str:
    return f"kernel {title}: {type(error).__name__}: {error}"
