"""The NVTX tool of the process, if there is one, as a listener. See `ranges.py`.

The package `nvtx` carries ranges to a tool and does nothing else here: without it everything runs,
and ranges reach no tool.
"""

import os
import struct
import threading
import warnings
from typing import Any, Final, Protocol

import numpy as np

try:
    import nvtx
except ImportError as error:
    _import_error: ImportError | None = error
else:
    _import_error = None

from .dictionary import COUNTERS, DOMAIN, MARKS, RANGES, FieldInfo, MarkInfo, RangeInfo
from .emitters import Payload, StepNumbers

__all__ = ["NvtxDomain", "NvtxMissingError", "NvtxTool", "attached_domain", "require_nvtx"]

_TOOL_VARIABLES: Final = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Set for a process that an NVTX tool is loaded into: by NVTX's convention, and by nsys."""

_EVENTS: Final[tuple[RangeInfo | MarkInfo, ...]] = (*RANGES.values(), *MARKS.values())


class NvtxMissingError(RuntimeError):
    """The Python package `nvtx` cannot be imported, and a command needs its ranges."""


class NvtxDomain(Protocol):
    """What `ranges` needs of an NVTX domain; `nvtx.Domain` has it, and so has a test's recorder."""

    def get_event_attributes(self, message: str, color: int, category: str) -> Any:
        """Register `message` and return an object whose `payload` can be set again and again."""

    def push_range(self, attributes: Any) -> None:
        """Begin a range on the calling thread."""

    def pop_range(self) -> None:
        """End the innermost range of the calling thread."""

    def mark(self, attributes: Any) -> None:
        """Emit an event without a duration."""

    def get_counter(self, name: str, dtype: Any, *, description: str) -> Any:
        """Register a group of counters and return an object with `sample(record)`."""


class _Record:
    """A payload of several fields, at one address for good: NVTX reads it there at each event."""

    __slots__ = ("_bytes", "_layout", "array")

    def __init__(self, fields: tuple[FieldInfo, ...]) -> None:
        self._layout = struct.Struct(f"@{len(fields)}q")
        self._bytes = bytearray(self._layout.size)
        dtype = _dtype(fields)
        self.array = np.frombuffer(self._bytes, dtype).reshape(())

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

    def __init__(self, domain: NvtxDomain) -> None:
        plain, records = {}, {}
        for info in _EVENTS:
            event = domain.get_event_attributes(info.name, info.color, info.category)
            if len(info.fields) > 1:
                record = _Record(info.fields)
                event.payload = record.array
                records[info.name] = (event, record)
            else:
                plain[info.name] = event
        self.plain, self.records = plain, records


class NvtxTool:
    """The NVTX tool of the process as a listener."""

    def __init__(self, domain: NvtxDomain) -> None:
        self._domain = domain
        self._events = _Events(domain)
        (counters,) = COUNTERS.values()
        self._counters = domain.get_counter(
            counters.name, _dtype(counters.fields), description=counters.description
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
        else:  # the collector ran in the very moment in which this thread's events were built
            return
        self._domain.mark(event)


def attached_domain(name: str = DOMAIN) -> NvtxDomain | None:
    """The project's domain, or another one, if a tool takes it in, else None.

    nvtx answers with a stand-in that is no `nvtx.Domain` where no tool is attached or the tool
    leaves the domain out. `NVTX_DISABLE` in the environment switches ranges off under a tool too.
    Under a tool but without the package `nvtx` a `RuntimeWarning` says that ranges are missing.
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
    domain = nvtx.get_domain(name)
    return domain if nvtx.enabled() and isinstance(domain, nvtx.Domain) else None


def require_nvtx(purpose: str) -> None:
    """Raise NvtxMissingError where the package `nvtx` is missing.

    Args:
        purpose: what needs them, as the subject of the error's sentence.

    Raises:
        NvtxMissingError: the package `nvtx` cannot be imported; says how to install it.
    """
    if _import_error is not None:
        raise NvtxMissingError(
            f"{purpose} needs NVTX ranges: {_reason(_import_error)}"
        ) from _import_error


def _reason(error: ImportError) -> str:
    return f"the package nvtx cannot be imported ({error}); pip install 'nvtx>=0.2.16'"
