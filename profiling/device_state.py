"""Clocks, power and throttling of a CUDA device, through NVML.

NVML is the driver's own library; `pynvml` (nvidia-ml-py, the extra "nvml") is imported when a
device is first read. Values that are unavailable (no package, no driver, a query that the card
does not support) are None, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

CLOCK_TOLERANCE: Final = 0.05
"""Relative change of the SM clock that a measurement tolerates without a warning."""
_QUERIES: Final[dict[str, tuple[str, tuple[int, ...], float]]] = {
    "sm_mhz": ("nvmlDeviceGetClockInfo", (1,), 1),  # NVML_CLOCK_SM
    "memory_mhz": ("nvmlDeviceGetClockInfo", (2,), 1),  # NVML_CLOCK_MEM
    "power_w": ("nvmlDeviceGetPowerUsage", (), 1e3),
    "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", (), 1e3),
    "temperature_c": ("nvmlDeviceGetTemperature", (0,), 1),  # NVML_TEMPERATURE_GPU
    "reasons": ("nvmlDeviceGetCurrentClocksEventReasons", (), 1),
}
"""Value -> function of NVML, its arguments after the device, and the divisor to the unit."""
_IDLE: Final = "gpu_idle"
_REASONS: Final = (
    *(_IDLE, "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost"),
    *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
    *("display_clock_setting", "board_limit", "reliability"),
)
"""Bits of NVML's clocks event reasons (`nvmlClocksEventReasons` of nvml.h), from the lowest."""
_HARMLESS: Final = frozenset({_IDLE, "applications_clocks_setting"})
"""Clocks that are low because nothing runs, or as the user set them."""


def _nvml(device: torch.device) -> tuple[Any, Any]:
    """Return the module, initialised, and the handle of a device; None where NVML has none."""
    import torch

    try:
        import pynvml as nvml
    except ImportError:
        return None, None
    # CUDA numbers the devices that CUDA_VISIBLE_DEVICES leaves, NVML all of them; slices of a card
    # share its address on the PCI bus.
    properties: Any = torch.cuda.get_device_properties(device)  # stubs lack the PCI address
    place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    try:
        nvml.nvmlInit()  # counts its callers; the library stays as long as the process
        return nvml, nvml.nvmlDeviceGetHandleByPciBusId("{:08x}:{:02x}:{:02x}.0".format(*place))
    except nvml.NVMLError:  # no driver, no library, or a card that NVML does not list
        return None, None


def driver_version(device: torch.device) -> str | None:
    """Return the version of a CUDA device's driver."""
    nvml, _ = _nvml(device) if device.type == "cuda" else (None, None)
    return None if nvml is None else nvml.nvmlSystemGetDriverVersion()


def watch(device: torch.device) -> Callable[[], dict[str, Any] | None]:
    """Read the state now; the returned function reads it again, and returns both for the JSON.

    A state has the clocks, the power that the driver reports and its limit, the temperature, and
    the names of NVML's reasons for lower clocks. Without NVML both are None.
    """
    nvml, handle = _nvml(device) if device.type == "cuda" else (None, None)
    if nvml is None:
        return lambda: None

    def read() -> dict[str, Any]:
        state: dict[str, Any] = dict.fromkeys(_QUERIES)
        for name, (function, arguments, divisor) in _QUERIES.items():
            with suppress(AttributeError, nvml.NVMLError):  # the driver or the card has it not
                value = getattr(nvml, function)(handle, *arguments)
                state[name] = value if divisor == 1 else value / divisor
        bits, names = state["reasons"], dict(enumerate(_REASONS))
        if bits is not None:
            on = [bit for bit in range(64) if bits >> bit & 1]
            state["reasons"] = [names.get(bit, f"reason_{1 << bit:#x}") for bit in on]
        return state

    before = read()
    return lambda: {"before": before, "after": read()}


def describe_throttling(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return what may have slowed a measurement between two states, as in the JSON.

    The clocks of an idle device say nothing of those under load, and are not compared.
    """
    reasons = dict.fromkeys(name for state in (before, after) for name in state["reasons"] or ())
    found = [name for name in reasons if name not in _HARMLESS]
    parts = [f"clocks were held down ({', '.join(found)})"] if found else []
    first, last = before["sm_mhz"], after["sm_mhz"]
    if first and last and _IDLE not in reasons and abs(last - first) > CLOCK_TOLERANCE * first:
        parts.append(f"the SM clock went from {first} to {last} MHz")
    return "; ".join(parts) or None
