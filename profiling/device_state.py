"""Clocks, power and throttling of a CUDA device, through NVML.

NVML is the driver's own library; `pynvml` (nvidia-ml-py, the extra "nvml") is imported when a
device is first read. Values that are unavailable (no package, no driver, a query that the card
does not support) are None, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

__all__ = ["CLOCKS", "DeviceMonitor", "describe_throttling", "watch"]

CLOCKS: Final = ("driver", "max_sm_mhz", "max_memory_mhz")
"""What `DeviceMonitor.describe` returns."""
CLOCK_TOLERANCE: Final = 0.05
"""Relative change of the SM clock that a measurement tolerates without a warning."""
_IDLE: Final = "gpu_idle"
_REASONS: Final = (
    *(_IDLE, "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost"),
    *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
    *("display_clock_setting", "board_limit", "reliability"),
)
"""Bits of NVML's clocks event reasons (`nvmlClocksEventReasons` of nvml.h), from the lowest."""
_HARMLESS: Final = frozenset({_IDLE, "applications_clocks_setting"})
"""Clocks that are low because nothing runs, or as the user set them."""


class DeviceMonitor:
    """Reads the state of one device. Reading takes some hundred microseconds."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml` is the module `pynvml`, initialised; `handle` one of its devices."""
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def of(cls, device: torch.device) -> DeviceMonitor | None:
        """Return the monitor of a device; None where NVML does not know it."""
        if device.type != "cuda":
            return None
        import torch

        try:
            import pynvml as nvml
        except ImportError:
            return None
        # CUDA numbers the devices that CUDA_VISIBLE_DEVICES leaves, NVML all of them; slices of a
        # card share its address on the PCI bus.
        properties: Any = torch.cuda.get_device_properties(device)  # stubs lack the PCI address
        place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        try:
            nvml.nvmlInit()  # counts its callers; the library stays as long as the process
            handle = nvml.nvmlDeviceGetHandleByPciBusId("{:08x}:{:02x}:{:02x}.0".format(*place))
        except nvml.NVMLError:  # no driver, no library, or a card that NVML does not list
            return None
        return cls(nvml, handle)

    def read(self) -> dict[str, Any]:
        """Return the state now; None for unavailable values.

        `sm_mhz` and `memory_mhz`: clocks; `power_w` and `power_limit_w`: average draw as reported
        by the driver, and enforced limit; `temperature_c`; `reasons`: names of NVML's reasons for
        lower clocks, or the number of a bit without a name.
        """
        nvml, query = self._nvml, self._query
        power = query("nvmlDeviceGetPowerUsage")
        limit = query("nvmlDeviceGetEnforcedPowerLimit")
        bits = query("nvmlDeviceGetCurrentClocksEventReasons")
        names = dict(enumerate(_REASONS))
        return {
            "sm_mhz": query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "memory_mhz": query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            "power_w": None if power is None else power / 1e3,
            "power_limit_w": None if limit is None else limit / 1e3,
            "temperature_c": query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            "reasons": None
            if bits is None
            else [names.get(i, f"reason_{1 << i:#x}") for i in range(64) if bits >> i & 1],
        }

    def describe(self) -> dict[str, Any]:
        """Return the driver version, and the highest clocks in MHz."""
        nvml = self._nvml
        clocks = (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)
        highest = [self._query("nvmlDeviceGetMaxClockInfo", clock) for clock in clocks]
        return dict(zip(CLOCKS, (nvml.nvmlSystemGetDriverVersion(), *highest), strict=True))

    def _query(self, name: str, *arguments: Any) -> Any:
        """Return NVML's answer; None where the package, the driver or the card has none."""
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None


def watch(monitor: DeviceMonitor | None) -> Callable[[], dict[str, Any] | None]:
    """Read the state now; the returned function reads it again, and returns both for the JSON.

    Without a monitor it returns None.
    """
    if monitor is None:
        return lambda: None
    before = monitor.read()
    return lambda: {"before": before, "after": monitor.read()}


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
