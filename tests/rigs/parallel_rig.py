"""Engines of several processes on the CPU, and their processes."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
from stepgraph.runtime import Engine
from stepgraph.runtime.distributed.rank_group import WORKER

from . import engine_rig
from .service_rig import wait_until

SIZES: dict[str, Any] = {
    "device": "cpu",
    "mode": "eager",
    "kernels": "torch",
    "dtype": "float32",
    "max_num_seqs": 4,
    "block_size": 8,
    "prefill_chunk": 16,
    "max_model_len": 96,
    "num_blocks": 96,
}
"""Small, and with chunks shorter than most prompts."""
PROMPTS = [[5, 1, 19, 7, 30, 2, 11, 23, 3, 8] * 3, [9, 4, 2], [21] * 17, [1]]


def opened(source: Path | str, ranks: int = 1, **config: Any) -> AbstractContextManager[Engine]:
    return engine_rig.opened(source, **SIZES | {"tensor_parallel": ranks} | config)


def children() -> list[psutil.Process]:
    """The processes of ranks that this process has started, and that run."""
    return ranks_of(os.getpid())


def ranks_of(process: int) -> list[psutil.Process]:
    """The processes of ranks that another process has started, and that run."""
    found = []
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and WORKER in child.cmdline():
                found.append(child)
    return found


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> None:
    """Wait for the end of processes, which may not be children of this one."""
    wait_until(
        lambda: all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes),
        seconds,
    )
