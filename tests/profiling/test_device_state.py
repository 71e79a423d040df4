"""Clocks and throttling through NVML: the right card, and None for unavailable values."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepgraph.profiling.device_state import DeviceMonitor, describe_throttling
from stepgraph.runtime.bench.options import parse_arguments
from stepgraph.runtime.bench.results import new_document

from ..rigs.bench_rig import measured

CUDA = torch.device("cuda", 0)


class NVMLError(Exception):
    """As in pynvml."""


@dataclasses.dataclass
class Card:
    """A card."""

    bus_id: str
    sm_mhz: int = 1980
    reasons: int = 0


ONE = Card("00000000:18:00.0", sm_mhz=345)
TWO = Card("00000001:9a:00.0")


def fake_nvml(*cards: Card) -> Any:
    """The functions of pynvml that are called, by their documented signatures."""

    def handle_of(pciBusId: str) -> Card:
        for card in cards:
            if card.bus_id == pciBusId.lower():
                return card
        raise NVMLError

    return SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetHandleByPciBusId=handle_of,
        nvmlDeviceGetClockInfo=lambda card, kind: {1: card.sm_mhz, 2: 3201}[kind],
        nvmlDeviceGetMaxClockInfo=lambda card, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetPowerUsage=lambda card: 412_345,
        nvmlDeviceGetEnforcedPowerLimit=lambda card: 700_000,
        nvmlDeviceGetTemperature=lambda card, sensor: 46 + sensor,
        nvmlDeviceGetCurrentClocksEventReasons=lambda card: card.reasons,
    )


def monitor_of(patch: pytest.MonkeyPatch, nvml: Any, bus: int = 0x9A) -> DeviceMonitor | None:
    """The monitor of the first card that torch sees, on a bus of domain 1."""
    patch.setitem(sys.modules, "pynvml", nvml)
    seen = SimpleNamespace(pci_domain_id=1, pci_bus_id=bus, pci_device_id=0)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    return DeviceMonitor.of(CUDA)


def test_the_state_is_that_of_the_card_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA_VISIBLE_DEVICES=1 the second card is `cuda:0`."""
    card = dataclasses.replace(TWO, reasons=0x4 | 0x40 | 0x8000)
    monitor = monitor_of(monkeypatch, fake_nvml(ONE, card))
    assert monitor is not None
    assert monitor.read() == {
        "sm_mhz": 1980,
        "memory_mhz": 3201,
        "power_w": 412.345,
        "power_limit_w": 700.0,
        "temperature_c": 46,
        "reasons": ["sw_power_cap", "hw_thermal_slowdown", "reason_0x8000"],
    }
    expected = {"driver": "580.65.06", "max_sm_mhz": 1980, "max_memory_mhz": 3201}
    assert monitor.describe() == expected


def test_without_device_driver_or_package_there_is_no_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise NVMLError

    nvml = fake_nvml(ONE, TWO)
    assert monitor_of(monkeypatch, nvml, bus=0x7) is None
    assert DeviceMonitor.of(torch.device("cpu")) is None
    nvml.nvmlInit = fail
    assert monitor_of(monkeypatch, nvml) is None
    assert monitor_of(monkeypatch, None) is None


def reading(sm_mhz: int | None, *reasons: str) -> dict[str, Any]:
    return {"sm_mhz": sm_mhz, "reasons": list(reasons)}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (reading(1980), reading(1980), None),
        (reading(1980, "applications_clocks_setting"), reading(1900), None),
        (reading(345, "gpu_idle"), reading(1980), None),
        (reading(None), reading(1980), None),
        (reading(2000), reading(1900), None),
        (reading(2000), reading(1899), "the SM clock went from 2000 to 1899 MHz"),
        (
            reading(1980, "sw_power_cap"),
            reading(1755, "hw_thermal_slowdown", "sw_power_cap"),
            "clocks were held down (sw_power_cap, hw_thermal_slowdown);"
            " the SM clock went from 1980 to 1755 MHz",
        ),
        (reading(345, "gpu_idle"), reading(1980, "board_limit"), "held down (board_limit)"),
    ],
)
def test_what_is_worth_a_warning(
    before: dict[str, Any], after: dict[str, Any], said: str | None
) -> None:
    found = describe_throttling(before, after)
    assert found is None if said is None else found is not None and found.endswith(said), found


def test_the_benchmark_reports_the_states_and_warns_of_throttling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = dataclasses.replace(TWO, reasons=0x8)
    monitor = DeviceMonitor(fake_nvml(card), card)
    monkeypatch.setattr(DeviceMonitor, "of", lambda device: monitor)
    case = "--mode eager --batch-size 1 --input-len 8 --output-len 4 --num-iters 1"
    document = measured(monkeypatch, tmp_path, case)
    (entry,) = document["cases"]
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "clocks were held down (hw_slowdown)" in printed
    state = entry["device_state"]
    assert [state[when]["sm_mhz"] for when in ("before", "after")] == [1980, 1980]
    assert state["before"]["reasons"] == ["hw_slowdown"]
    assert document["environment"]["max_sm_mhz"] == 1980


def test_the_commit_of_a_tree_without_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, options = torch.device("cpu"), parse_arguments([])
    monkeypatch.setenv("STEPGRAPH_COMMIT", "0123456789ab-dirty")
    assert new_document(cpu, 1e9, options)["environment"]["commit"] == "0123456789ab-dirty"
    monkeypatch.setenv("STEPGRAPH_COMMIT", "")
    assert new_document(cpu, 1e9, options)["environment"]["commit"] != ""
