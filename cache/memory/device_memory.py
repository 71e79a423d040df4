"""Free memory of a device, and memory that this process holds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import psutil
import torch

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a real or a hypothetical device, as a plan needs it."""

    available: int
    """Bytes that can be allocated on it."""
    shared_with_os: bool
    """Whether the operating system uses the same memory: a CPU, or unified memory."""
    host_available: int
    """Bytes that can be allocated on the host."""

    def of_rank(self, ranks: int) -> DeviceMemory:
        """Return the memory of one rank: ranks divide what they all use, such as the host's."""
        available = self.available // ranks if self.shared_with_os else self.available
        return replace(self, available=available, host_available=self.host_available // ranks)

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Read a device; see `available_bytes`."""
        on_cuda = device.type == "cuda"
        shared = not on_cuda or bool(torch.cuda.get_device_properties(device).is_integrated)
        return cls(available_bytes(device), shared, available_bytes(torch.device("cpu")))


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`.

    On CUDA, the free memory that the driver reports. On a CPU, the smallest of: the memory that
    the operating system has available without swapping, the headroom of the control groups, and
    the headroom of the resource limits of this process.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    headrooms = [int(psutil.virtual_memory().available), *_rlimit_headrooms()]
    with contextlib.suppress(OSError):  # no Linux, or /proc is not mounted
        headroom = cgroup_headroom(_CGROUP_MEMBERSHIP.read_text(), _CGROUP_ROOT)
        if headroom is not None:
            headrooms.append(headroom)
    return min(headrooms)


def _rlimit_headrooms() -> Iterator[int]:
    """Bytes below the soft limits of address space (`ulimit -v`) and of data (`ulimit -d`)."""
    if sys.platform != "linux":
        return
    process = psutil.Process()
    held = process.memory_info()
    for limit, used in ((psutil.RLIMIT_AS, held.vms), (psutil.RLIMIT_DATA, held.data)):
        most, _ = process.rlimit(limit)
        if most != psutil.RLIM_INFINITY:
            yield max(0, most - used)


def resident_bytes(device: torch.device) -> int:
    """Bytes this process holds: tensors on a CUDA device, the resident set on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def cgroup_headroom(membership: str, root: Path) -> int | None:
    """Bytes that the control groups of a process let it allocate; None without a limit.

    A limit applies to all groups below it, so the result is the minimum headroom from the process's
    group up to the root. Inactive file pages are reclaimed under pressure and do not count as used
    (`inactive_file`; Linux, admin-guide/cgroup-v2 and cgroup-v1/memory). Above `memory.high` of
    version 2 the kernel throttles a process, so that is a limit too. Files that cannot be read or
    do not contain a number are ignored.

    Args:
        membership: contents of `/proc/self/cgroup`: lines `id:controllers:path`.
        root: mount point of the control groups, `/sys/fs/cgroup`.
    """
    headrooms: list[int] = []
    mounts: tuple[Path, ...]
    limits: tuple[str, ...]
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, one hierarchy for all controllers
            mounts, limits = (root, root / "unified"), ("memory.max", "memory.high")
            usage, reclaimable = "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mounts, limits = (root / "memory",), ("memory.limit_in_bytes",)
            usage, reclaimable = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        for mount in mounts:
            headrooms.extend(_headrooms(mount, path, limits, usage, reclaimable))
    return min(headrooms, default=None)


def _headrooms(
    mount: Path, path: str, limit_names: Sequence[str], usage_name: str, reclaimable_name: str
) -> Iterator[int]:
    """Headroom of each group with a limit, from `path` up to the mount."""
    # In a container the path may be the host's and not exist; its own group is the mount.
    group = mount / path.lstrip("/")
    for directory in (group, *group.parents):
        for limit_name in limit_names:
            # OSError: no such group, or it cannot be read. ValueError: "max", or no number.
            with contextlib.suppress(OSError, ValueError):
                limit = int((directory / limit_name).read_text())
                usage = int((directory / usage_name).read_text())
                yield max(0, limit - usage + _reclaimable(directory, reclaimable_name))
        if directory == mount:
            return


def _reclaimable(directory: Path, name: str) -> int:
    """Bytes of file pages that the kernel reclaims first; 0 if it does not report them."""
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
