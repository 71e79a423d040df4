"""Kernels run on the device of their tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.execution.step_functions import StepFunctions
from stepgraph.runtime.execution.step_key import StepKey
from stepgraph.runtime.kernels import Kernels
from stepgraph.runtime.kernels.ops.activation import Activate
from stepgraph.runtime.kernels.triton import kernel_calls
from stepgraph.runtime.kernels.triton.dependent import dependent_launch
from stepgraph.runtime.kernels.triton.rowwise import activate_rows


def test_a_step_runs_on_the_device_of_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, torch on that of the tensors."""
    seen: list[str] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        seen.append(f"enter {device}")
        yield
        seen.append(f"leave {device}")

    monkeypatch.setattr(torch.cuda, "device", current)
    steps = StepFunctions.__new__(StepFunctions)
    steps.model = SimpleNamespace(kernels=Kernels)  # type: ignore[assignment]
    steps.ragged = False
    monkeypatch.setattr(StepFunctions, "_decode", lambda self, key: seen.append("step"))
    for name in ("cuda:1", "cpu"):
        steps.arena = SimpleNamespace(device=torch.device(name))  # type: ignore[assignment]
        steps.bind(StepKey("decode", 1, 1, False))()
    assert seen == ["enter cuda:1", "step", "leave cuda:1", "step"]


def test_what_a_device_can_do_is_asked_of_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities, current = [(8, 0), (9, 0)], 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    kernel_calls._device_capability.cache_clear()
    try:
        for current in (0, 1, 0):
            assert kernel_calls.compute_capability() == (80, 90)[current]
    finally:
        kernel_calls._device_capability.cache_clear()


def test_dependent_launch_is_switched_off_where_a_launch_is_made() -> None:
    x, out = torch.ones(2, 8), torch.empty(2, 4)
    silu = Activate(name="activate", function="silu", features=4)
    with kernel_calls.record_kernel_calls() as calls:
        for outer, inner in ((True, True), (True, False), (False, True)):
            with dependent_launch(outer), dependent_launch(inner):
                activate_rows(x, out, silu)
        activate_rows(x, out, silu)
    assert [call.options["PDL"] for call in calls] == [True, False, False, True]
