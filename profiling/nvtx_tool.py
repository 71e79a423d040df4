"""The NVTX tool of the process as a listener. See `ranges.py`.

The package `nvtx` carries ranges to a tool; without it everything runs, and ranges reach no tool.
"""

import os
import struct
import threading
import warnings
from typing import Any, Final

import numpy as np

try:
    import nvtx
except ImportError as error:
    _import_error: ImportError | None = error
else:
    _import_error = None

from .dictionary import COUNTERS, DOMAIN, MARKS, RANGES, STEP_NUMBERS, FieldInfo
from .listeners import Payload, StepNumbers

__all__ = ["NvtxMissingError", "NvtxTool", "attached_domain", "require_nvtx"]

_TOOL_VARIABLES: Final = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Set for a process that an NVTX tool is loaded into: by NVTX's convention, and by nsys."""


class NvtxMissingError(RuntimeError):
    """The Python package `nvtx` cannot be imported, and a command needs its ranges."""


class _Record:
    """A payload of several fields at a fixed address, where NVTX reads it at each event."""

    __slots__ = ("_bytes", "_layout", "array")

    def __init__(self, fields: tuple[FieldInfo, ...]) -> None:
        self._layout = struct.Struct(f"@{len(fields)}q")
        self._bytes = bytearray(self._layout.size)
        self.array = np.frombuffer(self._bytes, _dtype(fields)).reshape(())

    def write(self, values: tuple[int, ...]) -> None:
        self._layout.pack_into(self._bytes, 0, *values)


def _dtype(fields: tuple[FieldInfo, ...]) -> "np.dtype[np.void]":
    return np.dtype([(field.name, np.int64) for field in fields])


class _Events(threading.local):
    """The event attributes of one thread, built at its first range.

    Setting the payload and pushing are two calls: threads that shared one object could push each
    other's payload.
    """

    plain: dict[str, Any] = {}  # noqa: RUF012  what a thread has while its own are being built
    records: dict[str, tuple[Any, _Record]] = {}  # noqa: RUF012

    def __init__(self, domain: Any) -> None:
        plain, records = {}, {}
        for info in (*RANGES.values(), *MARKS.values()):
            event = domain.get_event_attributes(info.name, info.color, info.category)
            if len(info.fields) > 1:
                record = _Record(info.fields)
                event.payload = record.array
                records[info.name] = (event, record)
            else:
                plain[info.name] = event
        self.plain, self.records = plain, records


class NvtxTool:
    """Sends ranges, marks and counters to an `nvtx.Domain`."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._events = _Events(domain)
        self._counters = domain.get_counter(
            COUNTERS, _dtype(STEP_NUMBERS), description="sampled at each `replay` and `prefill`"
        )

    def push(self, name: str, payload: Payload) -> None:
        if isinstance(payload, StepNumbers):
            event, record = self._events.records[name]
            record.write(payload)
            self._domain.push_range(event)
            self._counters.sample(record.array)
        else:
            event = self._events.plain[name]
            event.payload = payload
            self._domain.push_range(event)

    def pop(self) -> None:
        self._domain.pop_range()

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        events = self._events
        if name in events.plain:
            event = events.plain[name]
            event.payload = int(payload[0])
        elif name in events.records:
            event, record = events.records[name]
            record.write(payload)
        else:  # the collector ran while this thread's events were being built
            return
        self._domain.mark(event)


def attached_domain() -> Any:
    """Return the `nvtx.Domain` of stepgraph if a tool receives it, else None.

    nvtx returns a stand-in that is no `nvtx.Domain` where no tool is attached or the tool leaves
    the domain out. `NVTX_DISABLE` in the environment switches ranges off under a tool too. Under a
    tool but without the package `nvtx` a `RuntimeWarning` says that ranges are missing.
    """
    if _import_error is not None:
        if any(map(os.environ.get, _TOOL_VARIABLES)) and not os.environ.get("NVTX_DISABLE"):
            warnings.warn(
                f"this process runs under a profiler, and its trace will have no stepgraph ranges:"
                f" {_reason(_import_error)}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
    domain = nvtx.get_domain(DOMAIN)
    return domain if nvtx.enabled() and isinstance(domain, nvtx.Domain) else None


def require_nvtx(purpose: str) -> None:
    """Raise an error where the package `nvtx` is missing.

    Args:
        purpose: what needs it, as the subject of the error's sentence.

    Raises:
        NvtxMissingError: the package `nvtx` cannot be imported; says how to install it.
    """
    if _import_error is not None:
        raise NvtxMissingError(
            f"{purpose} needs NVTX ranges: {_reason(_import_error)}"
        ) from _import_error


def _reason(error: ImportError) -> str:
    return f"the package nvtx cannot be imported ({error}); pip install 'nvtx>=0.2.16'"
