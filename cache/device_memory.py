"""What a device has free and what this process holds of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

__all__ = ["available_bytes", "cgroup_headroom", "is_shared_with_os", "resident_bytes"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`.

    For CUDA what the driver reports as free. For the CPU what the operating system can give without
    swapping, or the headroom of the control group of this process where that is less.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    _require_cpu(device)
    available = int(psutil.virtual_memory().available)
    if _CGROUP_MEMBERSHIP.exists():
        headroom = cgroup_headroom(_CGROUP_MEMBERSHIP.read_text(), _CGROUP_ROOT)
        if headroom is not None:
            available = min(available, headroom)
    return available


def is_shared_with_os(device: torch.device) -> bool:
    """Whether what is taken on `device` is taken from the operating system: CPU or unified memory.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
    """
    if device.type == "cuda":
        return bool(torch.cuda.get_device_properties(device).is_integrated)
    _require_cpu(device)
    return True


def resident_bytes(device: torch.device) -> int:
    """Bytes this process holds: tensors on a CUDA device, the resident set on the CPU.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    _require_cpu(device)
    return int(psutil.Process().memory_info().rss)


def cgroup_headroom(membership: str, root: Path) -> int | None:
    """Bytes that a process may still take before a control group stops it; None without a limit.

    A limit holds for all groups below it, so the least headroom from the process's group up to the
    root counts. File pages that nobody used lately are given back under pressure and do not count
    as taken (`inactive_file`; Linux, admin-guide/cgroup-v2 and cgroup-v1/memory).

    Args:
        membership: contents of `/proc/self/cgroup`: lines `id:controllers:path`.
        root: where the control groups are mounted, `/sys/fs/cgroup`.
    """
    headrooms: list[int] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, one hierarchy for all controllers
            mount, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        headrooms.extend(_headrooms(mount, path, *names))
    return min(headrooms, default=None)


def _headrooms(
    mount: Path, path: str, limit_name: str, usage_name: str, reclaimable_name: str
) -> Iterator[int]:
    """Headroom of each group with a limit, from `path` up to the mount."""
    # In a container the path may be that of the host and not exist; its own group is the mount.
    group = mount / path.lstrip("/")
    for directory in (group, *group.parents):
        if (directory / limit_name).exists():
            limit = (directory / limit_name).read_text().strip()
            if limit != "max":
                usage = int((directory / usage_name).read_text())
                stat = dict(
                    line.split() for line in (directory / "memory.stat").read_text().splitlines()
                )
                yield max(0, int(limit) - usage + int(stat.get(reclaimable_name, 0)))
        if directory == mount:
            return


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise ValueError(f"memory of device {device} cannot be read: use a cpu or a cuda device")
