"""Clocks, power and throttling of a CUDA device, through NVML.

NVML is the driver's own library; Python reaches it through `pynvml` (nvidia-ml-py, the extra
"nvml"), which is imported when a device is first asked for. Nothing here is an error: what is not
there (the package, the driver, a query that a card does not answer) is None.

CUDA numbers the devices that `CUDA_VISIBLE_DEVICES` leaves, NVML all of them: a device is found by
its UUID, else by its place on the PCI bus (a slice of a card has a UUID of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMonitor", "DeviceState", "describe_throttling", "watch"]

CLOCK_TOLERANCE: Final = 0.05
"""By which the SM clock may differ before and after what is measured."""

_REASONS: Final = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of NVML's clocks event reasons (`nvmlClocksEventReasons` of nvml.h)."""
_IDLE: Final = "gpu_idle"
_HARMLESS: Final = frozenset({_IDLE, "applications_clocks_setting"})
"""Clocks that are low because nothing runs, or as the user set them."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device at one moment; None for what it does not tell.

    Attributes:
        sm_mhz: clock of the multiprocessors.
        memory_mhz: clock of the memory.
        power_w: power drawn, as the driver averages it.
        power_limit_w: the limit that is enforced.
        temperature_c: of the GPU, degrees Celsius.
        reasons: why clocks are not higher, by name; empty if nothing holds them down.
        persistence: whether the driver stays loaded where nobody uses the device.
    """

    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None
    reasons: tuple[str, ...] | None
    persistence: bool | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        fields = asdict(self)
        return fields | {"reasons": None if self.reasons is None else list(self.reasons)}


class DeviceMonitor:
    """Reads the state of one device. Reading takes some hundred microseconds."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml` is the module `pynvml`, initialised; `handle` one of its devices."""
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def of(cls, device: torch.device) -> DeviceMonitor | None:
        """Return what reads a device; None where it has no NVML."""
        if device.type != "cuda":
            return None
        import torch

        if torch.version.hip is not None:
            return None
        try:
            import pynvml as nvml
        except ImportError:
            return None
        try:
            nvml.nvmlInit()  # counts its callers; the library stays as long as the process
        except nvml.NVMLError:  # no driver, or no library
            return None
        handle = _find(nvml, torch.cuda.get_device_properties(device))
        return None if handle is None else cls(nvml, handle)

    def read(self) -> DeviceState:
        """Return the state now."""
        nvml = self._nvml
        persistence = self._ask("nvmlDeviceGetPersistenceMode")
        return DeviceState(
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            power_w=_watts(self._ask("nvmlDeviceGetPowerUsage")),
            power_limit_w=_watts(self._ask("nvmlDeviceGetEnforcedPowerLimit")),
            temperature_c=self._temperature(),
            reasons=self._reasons(),
            persistence=None if persistence is None else bool(persistence),
        )

    def describe(self) -> dict[str, Any]:
        """Return what stays as it is: the driver, and the highest clocks in MHz."""
        nvml = self._nvml
        return {
            "driver": _ask(nvml, "nvmlSystemGetDriverVersion"),
            "max_sm_mhz": self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            "max_memory_mhz": self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        }

    def _temperature(self) -> int | None:
        # The older query is deprecated, but all that older drivers have.
        found: int | None = self._ask("nvmlDeviceGetTemperatureV", self._nvml.NVML_TEMPERATURE_GPU)
        if found is None:
            found = self._ask("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU)
        return found

    def _reasons(self) -> tuple[str, ...] | None:
        # The name that these had before drivers 535.
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else tuple(_names(bits))

    def _ask(self, query: str, *arguments: Any) -> Any:
        return _ask(self._nvml, query, self._handle, *arguments)


def watch(monitor: DeviceMonitor | None) -> Callable[[], dict[str, Any] | None]:
    """Read the state now; what is returned reads it again, and returns both for the JSON.

    Without a monitor there is nothing to read, and it returns None.
    """
    if monitor is None:
        return lambda: None
    before = monitor.read()
    return lambda: {"before": before.to_json(), "after": monitor.read().to_json()}


def describe_throttling(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return what may have held back what was measured between two states, as in the JSON.

    Clocks of a moment at which the device idled say nothing of those under load, and are not
    compared.
    """
    states = (before, after)
    reasons = dict.fromkeys(name for state in states for name in state["reasons"] or ())
    found = [name for name in reasons if name not in _HARMLESS]
    said = [f"clocks were held down ({', '.join(found)})"] if found else []
    first, last = before["sm_mhz"], after["sm_mhz"]
    if first and last and _IDLE not in reasons and abs(last - first) > CLOCK_TOLERANCE * first:
        said.append(f"the SM clock went from {first} to {last} MHz")
    return "; ".join(said) or None


def _find(nvml: Any, properties: Any) -> Any:
    """Return NVML's handle of a device by torch's properties of it, or None."""
    handle = None
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    place = [getattr(properties, name, None) for name in names]
    if handle is None and None not in place:
        domain, bus, device = place
        bus_id = f"{domain:08x}:{bus:02x}:{device:02x}.0"
        handle = _ask(nvml, "nvmlDeviceGetHandleByPciBusId", bus_id)
    return handle


def _ask(nvml: Any, query: str, *arguments: Any) -> Any:
    """Return NVML's answer, or None where the package, the driver or the card has none."""
    function = getattr(nvml, query, None)
    if function is None:  # a package older than the query
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _names(bits: int) -> Iterator[str]:
    """Yield the name of each bit that is set, from the lowest; its number where it has none."""
    for position in range(bits.bit_length()):
        bit = 1 << position
        if bits & bit:
            yield _REASONS.get(bit, f"reason_{bit:#x}")


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3
