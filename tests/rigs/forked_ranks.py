"""Ranks as forked processes, which return what they computed."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from stepgraph.runtime.distributed.shared_memory_collectives import SharedMemoryCollectives
from stepgraph.runtime.kernels import limit_threads, load_cpu_ops

_PATIENCE = 120.0
_ABORT_BYTES = 128
"""Of shared memory, of which the first four are the abort word; what follows is aligned."""


class ForkedRanks:
    """Processes of a group."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self._results: list[Connection] = []

    def fork(self, ranks: int, body: Callable[[int], Any]) -> None:
        """Run `body` with each rank in a process of its own."""
        context = multiprocessing.get_context("fork")
        for rank in range(ranks):
            read, write = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(body, rank, write), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads
                process.start()
            write.close()
            self.processes.append(process)
            self._results.append(read)

    def results(self) -> list[Any]:
        """What each rank returned or raised; None where it was killed."""
        deadline = time.monotonic() + _PATIENCE
        results: list[Any] = []
        try:
            for read in self._results:
                if not read.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {len(results)} does not end")
                try:
                    results.append(read.recv())
                except EOFError:
                    results.append(None)
        finally:
            self.close()
        return results

    def returned(self) -> list[Any]:
        """What each rank returned; raises what a rank raised."""
        results = self.results()
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise BaseExceptionGroup(f"of {len(results)} ranks", errors)
        return results

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join()


def _run(body: Callable[[int], Any], rank: int, write: Connection) -> None:
    torch.set_num_threads(1)  # the threads of the parent do not exist here
    try:
        result = body(rank)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        result = error
    write.send(result)
    write.close()
    os._exit(0)  # the parent's exit handlers are not for this process


class ForkedGroup(ForkedRanks):
    """Processes of a group, with memory of their own; they exchange `part_bytes` at once."""

    def __init__(self, ranks: int, part_bytes: int = 1 << 16) -> None:
        super().__init__()
        load_cpu_ops()
        self.ranks = ranks
        lines = ranks * 128
        self.memory = mmap.mmap(-1, _ABORT_BYTES + lines + 2 * ranks * part_bytes)
        poisoned = memoryview(self.memory)[_ABORT_BYTES + lines :]
        poisoned[:] = b"\xff" * len(poisoned)

    def start(
        self,
        body: Callable[[SharedMemoryCollectives], Any],
        *,
        timeout: float = 60.0,
        threads: int = 1,
    ) -> None:
        """Run `body` on each rank, with so many threads."""

        def run(rank: int) -> Any:
            limit_threads(threads)
            return body(SharedMemoryCollectives(self.memory, rank, self.ranks, timeout))

        self.fork(self.ranks, run)

    def abort_word(self) -> int:
        return int.from_bytes(self.memory[:4], "little")


def run_ranks(
    ranks: int,
    body: Callable[[SharedMemoryCollectives], Any],
    *,
    part_bytes: int = 1 << 16,
    threads: int = 1,
) -> list[Any]:
    """Return what `body` returns on each rank; raises what a rank raised."""
    group = ForkedGroup(ranks, part_bytes)
    group.start(body, threads=threads)
    return group.returned()
