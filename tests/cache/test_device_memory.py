"""What a device says of its memory: limits, and what is free."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from stepgraph.cache.memory import device_memory

NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
Group = tuple[int, str, str, int]
"""Version of the cgroups, limit, bytes used, bytes of inactive files."""
NESTED: dict[str, Group] = {
    "service": (2, "1000", "700", 50),
    "service/worker": (2, "max", "600", 0),
}


def write_group(directory: Path, group: Group) -> None:
    version, limit, usage, inactive_file = group
    limit_name, usage_name, inactive_name = NAMES[version]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / limit_name).write_text(limit)
    (directory / usage_name).write_text(usage)
    (directory / "memory.stat").write_text(f"anon 12\n{inactive_name} {inactive_file}\n")


@pytest.mark.parametrize(
    ("groups", "membership", "headroom"),
    [
        (NESTED, "0::/service/worker\n", 350),
        (NESTED | {"service/worker": (2, "640\n", "600\n", 0)}, "0::/service/worker\n", 40),
        # In a container the path names a group of the host; what is mounted is its own.
        ({"memory": (1, "1000", "1200", 100)}, "4:cpu,cpuacct:/x\n3:memory:/docker/a\n0::/\n", 0),
        ({"a": (2, "max", "1", 0)}, "0::/a\n", None),
        ({"a": (2, "max", "1", 0)}, "2:cpu:/a\n", None),
        # Both versions are mounted.
        (
            {"unified/a": (2, "500", "100", 0), "memory/b": (1, "1000", "700", 0)},
            "4:memory:/b\n0::/a\n",
            300,
        ),
        # What cannot be read limits nothing.
        ({".": (2, "1000", "600", 0), "a": (2, "", "600", 0)}, "0::/a\n", 400),
        ({".": (2, "1000", "600", 0), "a": (2, "700", "", 0)}, "0::/a\n", 400),
    ],
)
def test_headroom(
    tmp_path: Path, groups: dict[str, Group], membership: str, headroom: int | None
) -> None:
    for directory, group in groups.items():
        write_group(tmp_path / directory, group)
    assert device_memory.cgroup_headroom(membership, tmp_path) == headroom


def test_the_kernel_slows_down_above_memory_high(tmp_path: Path) -> None:
    write_group(tmp_path, (2, "1000", "600", 0))
    for high, headroom in (("700\n", 100), ("max\n", 400)):
        (tmp_path / "memory.high").write_text(high)
        assert device_memory.cgroup_headroom("0::/\n", tmp_path) == headroom
    (tmp_path / "memory.stat").unlink()
    assert device_memory.cgroup_headroom("0::/\n", tmp_path) == 400


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("psutil reads limits on Linux only")
    unlimited = (psutil.RLIM_INFINITY,) * 2
    limits = {getattr(psutil, limit): (1500 << 10, psutil.RLIM_INFINITY)}
    process = SimpleNamespace(
        memory_info=lambda: SimpleNamespace(vms=1000 << 10, data=1000 << 10),
        rlimit=lambda kind: limits.get(kind, unlimited),
    )
    monkeypatch.setattr(psutil, "Process", lambda: process)
    assert device_memory.available_bytes(torch.device("cpu")) == 500 << 10


def test_limit_is_below_what_the_system_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    write_group(tmp_path, (2, "5000", "1000", 0))
    monkeypatch.setattr(device_memory, "_CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(device_memory, "_CGROUP_ROOT", tmp_path)
    assert device_memory.available_bytes(torch.device("cpu")) == 4000
    write_group(tmp_path, (2, str(1 << 80), "1000", 0))
    assert 4000 < device_memory.available_bytes(torch.device("cpu")) < 1 << 60
