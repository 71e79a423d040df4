"""A trace of steps for Perfetto by torch's profiler, with the same names on host and device.

    with torch_trace("steps.trace.json.gz"):
        ...  # steps of an engine

The host's rows hold the ranges of `ranges` with their payloads, and torch's operators; on the
device's rows each kernel of a captured step has the name of the layer and the operation that it
was captured in (`attribution`). Importing this module imports no torch.
"""

import contextlib
import gzip
import itertools
import json
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import attribution, ranges
from .atomic_write import WriteError, check_writable, write_file
from .trace_events import Recorded, TraceError, annotate, event_name
from .trace_table import SCHEMA_VERSION, read_trace, trace_operations

if TYPE_CHECKING:
    from .kernel_names import KernelNames

__all__ = ["SUFFIX", "TraceError", "read_trace", "torch_trace", "trace_operations"]

SUFFIX = ".json.gz"
"""Suffix of a trace; viewers need it."""


@contextlib.contextmanager
def torch_trace(path: Path | str, names: "KernelNames | None" = None) -> Iterator[None]:
    """Record what runs inside, and write it as a compressed trace in the Chrome format.

    The device is synchronised at both ends, so that the trace holds the work that was launched
    inside. Recording costs some microseconds for each operator and range: a trace shows where the
    time goes, not how much of it there is.

    Args:
        path: a name that ends in `.json.gz`; another trace of that name is replaced
            atomically. Where the body raises nothing is written.
        names: the nodes of captured steps, recorded while the engine was made
            (`attribution.recording`); without them kernels keep the names of their functions.

    Raises:
        TraceError: the file cannot be written, or torch's profiler is already running.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIX):
        raise TraceError(f"cannot write {path}: the name of a trace ends in {SUFFIX}")
    try:
        check_writable(path)
    except WriteError as error:
        raise TraceError(str(error)) from error
    import torch
    from torch.profiler import ProfilerActivity, profile

    if torch.autograd.profiler._is_profiler_enabled:  # a second one would silently replace it
        raise TraceError(f"cannot write {path}: torch's profiler is already running")
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    # An engine may run in another thread.
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=activities, acc_events=True, experimental_config=config)
    if on_cuda:
        torch.cuda.synchronize()
    profiler.start()
    recorder = _Recorder()
    try:
        with ranges.listening(recorder), attribution.listening(recorder):
            yield
        if on_cuda:
            torch.cuda.synchronize()
    finally:
        profiler.stop()
    _write(path, profiler, recorder, names)


class _Recorder:
    """Forwards ranges, marks and scopes to torch's profiler, and logs their payloads.

    torch's events have only a name. Until the trace is written, it is an index into the log.
    """

    def __init__(self) -> None:
        from torch.profiler import record_function

        self.log: dict[int, Recorded] = {}
        self._record = record_function
        self._index = itertools.count()
        self._open = _Open()

    def push(self, name: str, payload: ranges.Payload) -> None:
        """A range began on the calling thread."""
        fields = {"payload": payload} if isinstance(payload, int) else payload._asdict()
        self._begin(Recorded(name, fields))

    def pop(self) -> None:
        """The innermost range or scope of the calling thread ended."""
        self._open.events.pop().__exit__(None, None, None)

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        """Record a mark: a range without a length until the trace is written."""
        fields = dict(zip(ranges.MARKS[name], payload, strict=True))
        with self._event(Recorded(name, fields, instant=True)):
            pass

    def enter(self, name: str, layer: int | None) -> None:
        """The scope of an operation began; without a layer it has that of the scope around it."""
        layers = self._open.layers
        if layer is None and layers:
            layer = layers[-1]
        layers.append(layer)
        label = name if layer is None else f"{layer}/{name}"
        fields: dict[str, int | str] = {"operation": name}
        self._begin(Recorded(label, fields if layer is None else fields | {"layer": layer}))

    def leave(self) -> None:
        """The innermost scope of the calling thread ended."""
        self._open.layers.pop()
        self.pop()

    abandon = leave

    def _begin(self, recorded: Recorded) -> None:
        event = self._event(recorded)
        event.__enter__()
        self._open.events.append(event)

    def _event(self, recorded: Recorded) -> Any:
        index = next(self._index)
        self.log[index] = recorded
        return self._record(event_name(index))


class _Open(threading.local):
    """The ranges and scopes of one thread that have not ended, outermost first."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.layers: list[int | None] = []


def _write(path: Path, profiler: Any, recorder: _Recorder, names: "KernelNames | None") -> None:
    """Put the names into what torch recorded, and write it."""
    about: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    if names is not None:
        about |= {
            "model": names.model,
            "device": names.device,
            "bandwidth_gb_s": names.bandwidth_gb_s,
            "costs": [asdict(cost) for cost in names.costs],
        }
    try:
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(exported))
            document = json.loads(exported.read_bytes())
        annotate(document, recorder.log, names)
        document["traceName"] = path.name  # not that of the folder it was exported to
        document["stepgraph"] = about
        text = json.dumps(document, separators=(",", ":"))
        write_file(path, gzip.compress(text.encode()))
    except WriteError as error:
        raise TraceError(str(error)) from error
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror or error}") from error
