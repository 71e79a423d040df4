"""Clocks and throttling through NVML: the right card, and None for unavailable values."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepgraph.profiling.device_state import describe_throttling, driver_version, watch
from stepgraph.runtime.bench.options import parse_arguments
from stepgraph.runtime.bench.results import new_document

from ..rigs.bench_rig import measured

CUDA = torch.device("cuda", 0)


class NVMLError(Exception):
    """As in pynvml."""


def fake_nvml(bus_id: str = "00000001:9a:00.0", reasons: int = 0) -> Any:
    """The functions of pynvml that are called, by their documented signatures, of one card."""

    def handle_of(pciBusId: str) -> str:
        if pciBusId.lower() != bus_id:
            raise NVMLError
        return bus_id

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetHandleByPciBusId=handle_of,
        nvmlDeviceGetClockInfo=lambda card, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetPowerUsage=lambda card: 412_345,
        nvmlDeviceGetEnforcedPowerLimit=lambda card: 700_000,
        nvmlDeviceGetTemperature=lambda card, sensor: 46 + sensor,
        nvmlDeviceGetCurrentClocksEventReasons=lambda card: reasons,
    )


def use(patch: pytest.MonkeyPatch, nvml: Any) -> None:
    """Let torch see the second card only, as with CUDA_VISIBLE_DEVICES=1."""
    patch.setitem(sys.modules, "pynvml", nvml)
    seen = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x9A, pci_device_id=0)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: seen)


def test_device_state_is_of_the_card_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fake_nvml(reasons=0x4 | 0x40 | 0x8000))
    state = {
        "sm_mhz": 1980,
        "memory_mhz": 3201,
        "power_w": 412.345,
        "power_limit_w": 700.0,
        "temperature_c": 46,
        "reasons": ["sw_power_cap", "hw_thermal_slowdown", "reason_0x8000"],
    }
    assert watch(CUDA)() == {"before": state, "after": state}
    assert driver_version(CUDA) == "580.65.06"


def test_device_state_needs_a_device_a_driver_and_a_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise NVMLError

    broken = fake_nvml()
    broken.nvmlInit = fail
    for nvml in (fake_nvml("00000000:18:00.0"), broken, None):
        use(monkeypatch, nvml)
        assert watch(CUDA)() is driver_version(CUDA) is None
    assert watch(torch.device("cpu"))() is None


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
    use(monkeypatch, fake_nvml(reasons=0x8))
    real = watch
    monkeypatch.setattr("stepgraph.runtime.bench.steady.watch", lambda device: real(CUDA))
    case = "--mode eager --batch-size 1 --input-len 8 --output-len 4 --num-iters 1"
    document = measured(monkeypatch, tmp_path, case)
    (entry,) = document["cases"]
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "clocks were held down (hw_slowdown)" in printed
    state = entry["device_state"]
    assert [state[when]["sm_mhz"] for when in ("before", "after")] == [1980, 1980]
    assert state["before"]["reasons"] == ["hw_slowdown"]


def test_the_commit_of_a_tree_without_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, options = torch.device("cpu"), parse_arguments([])
    monkeypatch.setenv("STEPGRAPH_COMMIT", "0123456789ab-dirty")
    assert new_document(cpu, 1e9, options)["environment"]["commit"] == "0123456789ab-dirty"
    monkeypatch.setenv("STEPGRAPH_COMMIT", "")
    assert new_document(cpu, 1e9, options)["environment"]["commit"] != ""
