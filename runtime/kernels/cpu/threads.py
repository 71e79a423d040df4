"""How many threads the C++ operators of a process use, and how many it may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil
import torch

from ....cache.memory.device_memory import control_groups

_CGROUP = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"

torch.library.define("stepgraph::set_thread_limit", "(int threads) -> ()")

limit = 0
"""The threads that operators may use; 0: `limit_threads` has not been called."""


def limit_threads(threads: int) -> None:
    """Let operators use `threads` threads of the pool from now on, the calling one included.

    The pool is one for the process: it has as many threads as any engine asked for, and an operator
    leaves one of them out for every other thread that runs an operator at the same time.
    """
    global limit
    torch.ops.stepgraph.set_thread_limit.default(threads)
    limit = threads


class TorchThreads:
    """A block in which torch's own operations, called by its thread, use this many threads.

    Can be entered again after it was left.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._before = threads, threads

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def resolve_threads(threads: int | None) -> int:
    """Return the number of threads that `EngineConfig.threads` stands for, at least 1."""
    if threads is None:
        return usable_cores()
    return threads if threads > 0 else max(usable_cores() + threads, 1)


def usable_cores() -> int:
    """Return the physical cores that this process may use, at least 1.

    Counted are cores of which a CPU is in the affinity mask; a cgroup's CPU quota, rounded down, is
    the limit if it is lower (cgroup v2 `cpu.max`, v1 `cpu.cfs_quota_us`), and so is
    `OMP_NUM_THREADS`.
    """
    cores = _affine_cores()
    quota = _cgroup_quota()
    if quota is not None:
        cores = min(cores, math.floor(quota))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        cores = min(cores, int(asked))
    return max(cores, 1)


def _affine_cores() -> int:
    """Physical cores with a CPU in the affinity mask; all of them without such a mask."""
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return len(affine_cores())


def affine_cores() -> list[list[int]]:
    """Return the CPUs in the affinity mask, in a list for each physical core, ordered."""
    cores: dict[tuple[str, str], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            package, core = (
                Path(_TOPOLOGY.format(cpu, name)).read_text().strip()
                for name in ("physical_package_id", "core_id")
            )
        except OSError:
            package, core = "cpu", str(cpu)  # unknown: a core of its own
        cores.setdefault((package, core), []).append(cpu)
    return list(cores.values())


def _cgroup_quota() -> float | None:
    """CPUs that the cgroup of this process, or one around it, is limited to; None without limit."""
    try:
        membership = _GROUPS.read_text()
    except OSError:
        return None
    quotas = (_quota_of(*group) for group in control_groups(membership, _CGROUP, "cpu"))
    return min(filter(None, quotas), default=None)


def _quota_of(is_version_2: bool, group: Path) -> float | None:
    names = ["cpu.max"] if is_version_2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    try:
        quota, period = " ".join((group / name).read_text() for name in names).split()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
