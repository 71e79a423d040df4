"""A trace of steps for Perfetto, by torch's profiler, with the same names on host and device.

    with torch_trace("steps.trace.json.gz"):
        ...  # steps of an engine

On the host's rows stand the ranges of `ranges` with their payloads, and torch's operators; on the
device's rows each kernel of a captured step is called by the layer and the operation that launched
it when it was captured (`attribution`). Importing this module imports no torch.
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
from .kernel_names import Node
from .trace_events import Annotation, TraceError, annotate, annotation
from .trace_table import SCHEMA_VERSION, read_trace, trace_operations
from .whole_files import WriteError, check_writable, write_file

if TYPE_CHECKING:
    from .kernel_names import KernelNames

__all__ = ["SUFFIX", "TraceError", "read_trace", "torch_trace", "trace_operations"]

SUFFIX = ".json.gz"
"""What the name of a trace ends in: viewers go by it."""


@contextlib.contextmanager
def torch_trace(path: Path | str, names: "KernelNames | None" = None) -> Iterator[None]:
    """Record what runs inside, and write it as a compressed trace in the Chrome format.

    The device is synchronised at both ends, so that the trace holds the work that was launched
    inside. It costs some microseconds for each operator and range: what a trace is good for is
    where the time goes, not how much of it there is.

    Args:
        path: a name that ends in `.json.gz`; another trace of that name is replaced, once the new
            one is complete. Where the body raises nothing is written.
        names: the nodes of captured steps, recorded while the engine was made
            (`attribution.recording`); without them kernels keep the names of their functions.

    Raises:
        TraceError: the file cannot be written, or torch's profiler is at work already.
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

    if torch.autograd.profiler._is_profiler_enabled:  # it would take over without a word
        raise TraceError(f"cannot write {path}: torch's profiler is at work already")
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    # An engine may run in another thread than the one that asks for the trace.
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
    """Passes ranges, marks and scopes on to torch's profiler, and notes what they carry.

    torch's events have a name and nothing else, so an event is called by an index here until the
    trace is written (`trace_events.annotation`).
    """

    def __init__(self) -> None:
        from torch.profiler import record_function

        self.log: dict[int, Annotation] = {}
        self._record = record_function
        self._index = itertools.count()
        self._open = _Open()

    def push(self, name: str, payload: ranges.Payload) -> None:
        """Begin a range on the calling thread."""
        said = {"payload": payload} if isinstance(payload, int) else payload._asdict()
        self._begin(Annotation(name, said))

    def pop(self) -> None:
        """End the innermost range of the calling thread."""
        self._open.events.pop().__exit__(None, None, None)

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        """Note something that happened: a range without a length until the trace is written."""
        fields = (field.name for field in ranges.MARKS[name].fields)
        said = dict(zip(fields, payload, strict=True))
        with self._note(Annotation(name, said, instant=True)):
            pass

    def enter(self, name: str, layer: int | None) -> None:
        """Begin the scope of an operation; without a layer of its own it is in that around it."""
        layers = self._open.layers
        if layer is None and layers:
            layer = layers[-1]
        layers.append(layer)
        node = Node(layer, name, "other", None, None)
        said: dict[str, int | str] = {"operation": name}
        self._begin(Annotation(node.label, said if layer is None else said | {"layer": layer}))

    def leave(self, mark: object) -> None:
        """End the innermost scope of the calling thread."""
        self._open.layers.pop()
        self.pop()

    def abandon(self, mark: object) -> None:
        """End the innermost scope of the calling thread, which an exception leaves."""
        self.leave(mark)

    def _begin(self, noted: Annotation) -> None:
        event = self._note(noted)
        event.__enter__()
        self._open.events.append(event)

    def _note(self, noted: Annotation) -> Any:
        index = next(self._index)
        self.log[index] = noted
        return self._record(annotation(index))


class _Open(threading.local):
    """The ranges and scopes of one thread that have not ended, outermost first."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.layers: list[int | None] = []


def _write(path: Path, profiler: Any, recorder: _Recorder, names: "KernelNames | None") -> None:
    """Put the names into what torch recorded, and write it."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(exported))
            document = json.loads(exported.read_bytes())
        annotate(document, recorder.log, names)
        document["traceName"] = path.name  # not that of the folder it was exported to
        document["stepgraph"] = _said(names)
        text = json.dumps(document, separators=(",", ":"))
        write_file(path, gzip.compress(text.encode()))
    except OSError as error:
        raise TraceError(f"cannot write {path}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return error.reason if isinstance(error, WriteError) else error.strerror or str(error)


def _said(names: "KernelNames | None") -> dict[str, Any]:
    """Return what the table of a trace needs beside its events."""
    if names is None:
        return {"schema_version": SCHEMA_VERSION}
    return {
        "schema_version": SCHEMA_VERSION,
        "model": names.model,
        "device": names.device,
        "bandwidth_gb_s": names.bandwidth_gb_s,
        "costs": [asdict(cost) for cost in names.costs],
    }
