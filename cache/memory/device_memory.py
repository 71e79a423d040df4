"""Free memory of a device, and memory that this process holds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
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


def control_groups(membership: str, root: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Yield the folders of the control groups of a process, and whether each is of version 2.

    From the process's group up to the root: a limit applies to all groups below it. In a container
    the group may be the host's and not exist; its own group is the mount.

    Args:
        membership: contents of `/proc/self/cgroup`: lines `id:controllers:path`.
        root: mount point of the control groups, `/sys/fs/cgroup`.
        controller: such as `memory`.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, one hierarchy for all controllers
            mounts = [root, root / "unified"]
        else:
            mounts = [root / controller] if controller in controllers.split(",") else []
        for mount in mounts:
            group = mount / path.lstrip("/")
            for folder in (group, *group.parents):
                yield not controllers, folder
                if folder == mount:
                    break


_FILES = {
    False: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    True: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
"""Of version 1 and of version 2: files of limits and of usage, and the field of inactive pages."""


def cgroup_headroom(membership: str, root: Path) -> int | None:
    """Bytes that the control groups of a process let it allocate; None without a limit.

    Inactive file pages are reclaimed under pressure and do not count as used
    (`inactive_file`; Linux, admin-guide/cgroup-v2 and cgroup-v1/memory). Above `memory.high` of
    version 2 the kernel throttles a process, so that is a limit too. Files that cannot be read or
    do not contain a number are ignored. Arguments are as for `control_groups`.
    """
    headrooms: list[int] = []
    for is_version_2, group in control_groups(membership, root, "memory"):
        limits, usage, reclaimable = _FILES[is_version_2]
        for limit in limits:
            # OSError: no such group, or it cannot be read. ValueError: "max", or no number.
            with contextlib.suppress(OSError, ValueError):
                unused = int((group / limit).read_text()) - int((group / usage).read_text())
                headrooms.append(max(0, unused + _reclaimable(group, reclaimable)))
    return min(headrooms, default=None)


def _reclaimable(directory: Path, name: str) -> int:
    """Bytes of file pages that the kernel reclaims first; 0 if it does not report them."""
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
