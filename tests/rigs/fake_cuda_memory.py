"""A CUDA device as its memory functions show it: an allocator with a cache and a pool, in bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TOTAL = 1 << 30
GRAPH_NODES = 100
"""Bytes of an instantiated graph, which no allocator counts."""


class FakeDevice:
    """Memory that is free, allocated, kept by the allocator, and reserved by the pool of graphs."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocated = 0
        self.kept = 0  # free blocks of the allocator
        self.pool = 0
        self.nodes = 0
        self.peak = 0
        self.capturing = False

    @property
    def free(self) -> int:
        return TOTAL - self.allocated - self.kept - self.pool - self.nodes

    def run(self, size: int) -> None:
        """A step that needs scratch memory."""
        if self.capturing:
            self.pool = max(self.pool, size)
            return
        self.kept = max(self.kept, size)
        self.peak = max(self.peak, self.allocated + size)

    def keep(self, size: int) -> None:
        """A library takes memory for good."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def empty_cache(self) -> None:
        assert not self.capturing
        self.log.append("empty cache")
        self.kept = 0

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def reserved(self) -> int:
        return self.allocated + self.kept + self.pool


class FakeCudaGraph:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert pool == "pool"
        assert capture_error_mode == "thread_local"
        self._device.log.append("capture")
        self._device.capturing = True

    def capture_end(self) -> None:
        self._device.capturing = False
        self._device.nodes += GRAPH_NODES

    def replay(self) -> None:
        self._device.log.append("replay")


@pytest.fixture(name="fake_device")
def make_fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()

    @contextlib.contextmanager
    def current(_: object) -> Iterator[None]:
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    functions: dict[str, Any] = {
        "Stream": lambda _: stream,
        "current_stream": lambda *_: stream,
        "stream": current,
        "device": current,
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": lambda: FakeCudaGraph(device),
        "synchronize": lambda _: None,
        "empty_cache": device.empty_cache,
        "mem_get_info": lambda _: (device.free, TOTAL),
        "memory_allocated": lambda _: device.allocated,
        "memory_reserved": lambda _: device.reserved(),
        "max_memory_allocated": lambda _: device.peak,
        "reset_peak_memory_stats": lambda _: device.reset_peak(),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return device
