"""Kernels run on the device of their tensors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton import launch as launching
from stepgraph.runtime.kernels.triton.activation import activate_rows
from stepgraph.runtime.kernels.triton.dependent import dependent_launch


def test_what_a_device_can_do_is_asked_of_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities, current = [(8, 0), (9, 0)], 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    launching._device_capability.cache_clear()
    try:
        for current in (0, 1, 0):
            assert launching.compute_capability() == (80, 90)[current]
            assert launching.can_launch_dependently() == bool(current)
    finally:
        launching._device_capability.cache_clear()


def test_dependent_launch_is_switched_off_where_a_launch_is_made() -> None:
    x, out = torch.ones(2, 8), torch.empty(2, 4)
    with launching.record_launches() as launches:
        for outer, inner in ((True, True), (True, False), (False, True)):
            with dependent_launch(outer), dependent_launch(inner):
                activate_rows(x, out, gelu=False)
        activate_rows(x, out, gelu=False)
    assert [launch.constants["PDL"] for launch in launches] == [True, False, False, True]
