"""Ranks as forked processes whose kernels, interpreted, exchange data in memory that they share."""

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
from stepgraph.runtime.kernels.triton.peer_exchange import (
    PROGRAMS,
    PeerRegions,
    flag_bytes,
    new_control,
    region_bytes,
)

_PATIENCE = 120.0
SLOT_BYTES = 8192


class PeerRanks:
    """Processes of a group. What their slots hold at first is NaN of any dtype."""

    def __init__(self, ranks: int, slot_bytes: int = SLOT_BYTES) -> None:
        self.ranks, self.slot_bytes = ranks, slot_bytes
        size = region_bytes(ranks, slot_bytes)
        self.memory = mmap.mmap(-1, ranks * size + 4096)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.regions = [whole[rank * size : (rank + 1) * size] for rank in range(ranks)]
        for region in self.regions:
            region[flag_bytes(ranks) :] = 255
        self.controls = whole[ranks * size :].view(torch.int64)[: ranks * 3].view(ranks, 3)
        self.processes: list[Any] = []
        self._results: list[Connection] = []

    def of_rank(self, rank: int, limit_seconds: float = 60.0) -> PeerRegions:
        """The regions as a rank sees them."""
        self.controls[rank] = new_control(limit_seconds, torch.device("cpu"))
        return PeerRegions(
            rank=rank,
            ranks=self.ranks,
            slot_bytes=self.slot_bytes,
            region=self.regions[rank],
            bases=torch.tensor([region.data_ptr() for region in self.regions]),
            epochs=torch.zeros(PROGRAMS, dtype=torch.int32),
            control=self.controls[rank],
        )

    def start(self, body: Callable[[PeerRegions], Any], limit_seconds: float = 60.0) -> None:
        """Run `body` on each rank."""
        context = multiprocessing.get_context("fork")
        for rank in range(self.ranks):
            read, write = context.Pipe(duplex=False)
            process = context.Process(
                target=self._run, args=(body, rank, limit_seconds, write), daemon=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads
                process.start()
            write.close()
            self.processes.append(process)
            self._results.append(read)

    def _run(
        self, body: Callable[[PeerRegions], Any], rank: int, limit: float, write: Connection
    ) -> None:
        torch.set_num_threads(1)  # the threads of the parent do not exist here
        try:
            result = body(self.of_rank(rank, limit))
        except BaseException as error:
            error.add_note(traceback.format_exc())
            result = error
        write.send(result)
        write.close()
        os._exit(0)  # the parent's exit handlers are not for this process

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
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.join()
        return results


def run_peers(ranks: int, body: Callable[[PeerRegions], Any], **sizes: int) -> list[Any]:
    """Return what `body` returns on each rank; raises what a rank raised."""
    group = PeerRanks(ranks, **sizes)
    group.start(body)
    results = group.results()
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise BaseExceptionGroup(f"of {ranks} ranks", errors)
    return results
