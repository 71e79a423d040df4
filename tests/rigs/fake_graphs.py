"""A recording fake of the graph API: engines in `mode="graph"` on a CPU.

`capture` runs a callable once and keeps its operations on a `Tape`. `replay` runs them again, into
the tensors that they gave when they were recorded.

Captures of one capturer share their memory: each replay begins by leaving NaN and -1 in whatever
any capture computed, outputs included.

The device works behind the host: what is launched or copied waits in a stream until the host waits
for it, and mirrors of static buffers are memory of their own. Writing a mirror that a copy has yet
to read, forgetting the copy, or reading an output too early shows in the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
import torch
from stepgraph.cache.arena import Arena, HostArena
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.steps import Capture, Step, StepLibrary
from stepgraph.profiling import attribution
from stepgraph.profiling.attribution import NodeKind
from stepgraph.runtime.engine import startup
from stepgraph.runtime.execution import inputs, runner, sample_steps
from stepgraph.runtime.execution.inputs import DeviceRows
from stepgraph.runtime.execution.outputs import OUTPUT_SETS, HostOutputs, PromptScorer
from stepgraph.runtime.execution.runner import DrafterCache, Runner
from stepgraph.runtime.execution.step_key import StepKey
from stepgraph.runtime.execution.token_masks import TokenMasks
from stepgraph.runtime.kernels import Kernels, select_kernels
from stepgraph.runtime.models import resolved_config
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.sampling.sampling_state import SamplingState
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# A tape of the operations that torch runs, which can be run again into the same tensors.
#
# It keeps the scalars and the tensors that an operation was given, so whatever was decided on the
# host stays decided. What a capture on a device cannot record (a wait for the device, a tensor made
# of numbers of the host) fails.

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
}
FROM_HOST = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class NotCapturableError(RuntimeError):
    """What would have made a capture fail on a device."""


def tensors_of(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def poison(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(-1 if tensor.dtype.is_signed else 255)


@dataclass(frozen=True)
class Operation:
    func: Any
    args: Any
    kwargs: Any
    outputs: list[torch.Tensor]
    made: list[torch.Tensor]
    """The outputs in memory that the operation took."""
    is_view: bool

    @property
    def computes(self) -> bool:
        """False for views, and for memory that may hold anything."""
        return not (self.is_view or self.func in UNWRITTEN)

    def run(self) -> None:
        """Compute the outputs again. Only for an operation that `computes`."""
        result = self.func(*self.args, **self.kwargs)
        results = [result] if isinstance(result, torch.Tensor) else tensors_of(result)
        for output, result in zip(self.outputs, results, strict=True):
            if result.data_ptr() != output.data_ptr():  # else an argument, changed in place
                output.copy_(result)


class Tape(TorchDispatchMode):
    """Records operations, and refuses those that a capture cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if func in WAITS or func in FROM_HOST:
            raise NotCapturableError(f"{func} in a capture")
        if func is aten.index.Tensor and any(t.dtype is torch.bool for t in given[1:]):
            raise NotCapturableError("an index by a mask waits for the device")
        result = func(*args, **kwargs)
        known = {storage_of(tensor) for tensor in given}
        outputs = tensors_of(result)
        made = [tensor for tensor in outputs if storage_of(tensor) not in known]
        is_view = bool(outputs) and not made and not func._schema.is_mutable
        self.operations.append(Operation(func, args, kwargs, outputs, made, is_view))
        return result


# Captures on it, and the device that replays them.


class ListedNodes:
    """Stands for `CudaGraphNodes`: what comes to a list is a node if `name` gives it a name."""

    def __init__(self, listed: list[Any], name: Callable[[Any], str | None]) -> None:
        self._listed, self._name = listed, name
        self._seen = 0

    def take(self) -> list[tuple[NodeKind, str | None]]:
        new = self._listed[self._seen :]
        self._seen = len(self._listed)
        return [("kernel", name) for name in map(self._name, new) if name is not None]


@dataclass
class FakeGraph:
    """One capture, and how often it was replayed."""

    index: int
    operations: list[Operation]
    output: Any
    replays: int = 0
    is_poisoned: bool = False
    """Whether nothing has run since what it computed was overwritten."""

    @property
    def duration_ns(self) -> int:
        """What a replay takes on the clock of the device: for each capture something else."""
        return 1_000_000 + 1000 * self.index

    def poison(self) -> None:
        if self.is_poisoned:
            return
        for operation in self.operations:
            for tensor in operation.made:
                poison(tensor)
        self.is_poisoned = True


class FakeStream:
    """Work in the order in which it was queued, done no earlier than somebody waits for it."""

    def __init__(self) -> None:
        self.behind = False
        """Whether the device works behind the host; else it does at once what it is asked for."""
        self.queued = 0
        self.done = 0
        self.now_ns = 0
        """On the clock of the device, which stands still unless it works."""
        self._work: deque[Callable[[], object]] = deque()

    def put(self, work: Callable[[], object]) -> int:
        """Queue work; return what to wait for."""
        self._work.append(work)
        self.queued += 1
        if not self.behind:
            self.wait()
        return self.queued

    def wait(self, ticket: int | None = None) -> None:
        while self.done < (self.queued if ticket is None else ticket):
            with torch.no_grad():
                self._work.popleft()()
            self.done += 1


class FakeEvent:
    """In the place of `torch.cuda.Event`."""

    def __init__(self, stream: FakeStream, *, timed: bool = True) -> None:
        self.stream = stream
        self.timed = timed
        self.ticket = 0
        self.at_ns = 0

    def record(self, stream: FakeStream) -> None:
        def note() -> None:
            self.at_ns = stream.now_ns

        self.ticket = stream.put(note)

    def synchronize(self) -> None:
        self.stream.wait(self.ticket)

    def query(self) -> bool:
        """Whether the event has been reached: after the wait for it."""
        self.synchronize()
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds; an error where it would be one, and no wait."""
        for event in (self, end):
            assert event.timed, "both events need timing"
            if event.ticket == 0 or event.stream.done < event.ticket:
                raise RuntimeError("device not ready")
        return (end.at_ns - self.at_ns) / 1e6


@dataclass
class FakeGraphs:
    """What happened, in order, over all capturers and buffers of a test.

    Events: ("capturer", device), ("warm up",), ("begin captures",), ("capture", index),
    ("end captures",), ("replay", index),
    ("copy", name of the buffers), ("copy out", phase), ("read", number of the step).
    """

    log: list[tuple[Any, ...]] = field(default_factory=list)
    graphs: list[FakeGraph] = field(default_factory=list)
    stream: FakeStream = field(default_factory=FakeStream)
    kernels: Literal["eager", "compile"] = "eager"
    """The mode whose kernels engines are given."""

    def index_of(self, library: Any) -> dict[StepKey, int]:
        """Which capture serves each key of a library."""
        by_output = {id(graph.output): graph.index for graph in self.graphs}
        return {key: by_output[id(step.capture.output)] for key, step in library.steps.items()}


class FakeCapturer:
    """In the place of `CudaGraphCapturer`."""

    def __init__(self, graphs: FakeGraphs, device: object) -> None:
        self.graphs = graphs
        graphs.log.append(("capturer", str(device)))

    def warm_up(self, fn: Callable[[], object]) -> None:
        self.graphs.log.append(("warm up",))
        self.graphs.stream.wait()
        fn()

    def capture(
        self, fn: Callable[[], Any], identity: attribution.StepIdentity | None = None
    ) -> Capture[Any]:
        graphs = self.graphs

        def name(operation: Operation) -> str | None:
            return str(operation.func) if operation.computes else None

        with Tape() as tape:
            nodes = partial(ListedNodes, tape.operations, name)
            with attribution.capturing(identity, nodes):
                output = fn()
        graph = FakeGraph(len(graphs.graphs), tape.operations, output)
        graphs.graphs.append(graph)
        graphs.log.append(("capture", graph.index))
        addresses = [tensor.data_ptr() for tensor in tensors_of(vars_of(output))]
        computing = [operation for operation in tape.operations if operation.computes]

        def run() -> None:
            for every in graphs.graphs:
                every.poison()
            graph.is_poisoned = False
            for operation in computing:
                operation.run()
            graph.replays += 1
            graphs.stream.now_ns += graph.duration_ns
            assert [t.data_ptr() for t in tensors_of(vars_of(output))] == addresses

        def replay() -> None:
            graphs.log.append(("replay", graph.index))
            graphs.stream.put(run)

        return Capture(replay, output, bytes=4096)


def vars_of(output: Any) -> list[Any]:
    """The tensors of a `StepOutput`, its details and drafts included."""
    details = [] if output.details is None else list(vars(output.details).values())
    own = [] if output.accepted is None else [output.accepted]
    return [output.tokens, output.logits, *details, *(output.drafts or ()), *own]


class MirroredBuffers(StaticBuffers[Any]):
    """Static buffers with a mirror of their own."""

    graphs: FakeGraphs | None = None
    _last_copy = 0

    def __init__(self, graphs: FakeGraphs, layout: Any, specs: Any, device: Any) -> None:
        super().__init__(layout, specs, device, mirrored=True)
        self.graphs = graphs

    def begin_write(self) -> None:
        assert self.graphs is not None
        self.graphs.stream.wait(self._last_copy)

    def copy_to_device(self) -> None:
        if self.graphs is None:  # the first values
            super().copy_to_device()
            return
        self.graphs.log.append(("copy", type(self.device).__name__))
        self._last_copy = self.graphs.stream.put(lambda: self._device_bytes.copy_(self._host_bytes))


class FakePeaks:
    """In the place of `CapturePeaks`: a kilobyte for each row or token, and a pool of one more."""

    pool_bytes = 1024

    def __init__(self, graphs: FakeGraphs, device: object) -> None:
        self.peaks: dict[StepKey, int] = {}
        self.captured_bytes = 0
        self._graphs = graphs

    def prepared(self, done: int, total: int, key: StepKey) -> None:
        self.peaks[key] = 1024 * key.size
        if 2 * done == total:
            self._graphs.log.append(("begin captures",))
        if done == total:
            self._graphs.log.append(("end captures",))
            self.captured_bytes = 4096 * len(self._graphs.graphs) + self.pool_bytes


@pytest.fixture(name="fake_graphs")
def make_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """Let engines of this test run in `mode="graph"`, on a CPU that works like another device.

    Their kernels are the plain ones unless a test says otherwise, so that a capture sees every
    operation.
    """
    graphs = FakeGraphs()

    def chosen_kernels(
        device: Any, mode: Any, dtype: Any, weights: Any, kernels: Any, **more: Any
    ) -> Kernels:
        if mode == "eager" and kernels == "native":
            return select_kernels(device, mode, dtype, weights, kernels, **more)
        return select_kernels(device, graphs.kernels, dtype, weights, **more)

    def queued(owner: Any, name: str) -> None:
        """Let a method of something on the device take effect in the order of the stream."""
        method = getattr(owner, name)

        def put(*args: Any, **kwargs: Any) -> None:
            graphs.stream.put(lambda: method(*args, **kwargs))

        monkeypatch.setattr(owner, name, put)

    def waiting(owner: Any, name: str) -> None:
        """Let a method that asks the device for something wait for all that was queued."""
        method = getattr(owner, name)

        def wait(self: Any, *args: Any) -> Any:
            graphs.stream.wait()
            return method(self, *args)

        monkeypatch.setattr(owner, name, wait)

    make_step = Step.__init__

    def waiting_step(
        self: Step[Any], kind: Any, fn: Callable[[], Any], *rest: Any, **own: Any
    ) -> None:
        def run() -> Any:
            graphs.stream.wait()
            return fn()

        make_step(self, kind, run if kind == "eager" else fn, *rest, **own)

    copy_async, read, make_outputs = HostOutputs.copy_async, Runner.read, HostOutputs.__init__

    def logged_copy(self: HostOutputs, number: int, phase: Any, output: Any) -> Any:
        graphs.log.append(("copy out", phase))
        copied = copy_async(self, number, phase, output)
        details = [] if copied.details is None else tensors_of(vars(copied.details))
        for tensor in (copied.tokens, *details, *(copied.drafts or ())):
            poison(tensor)
        graphs.stream.put(lambda: copy_async(self, number, phase, output))
        return copied

    def with_events(self: HostOutputs, *args: Any, **kwargs: Any) -> None:
        make_outputs(self, *args, **kwargs)
        self._events = [
            tuple(FakeEvent(graphs.stream, timed=timed) for timed in (True, True, False))  # type: ignore[misc]
            for _ in range(OUTPUT_SETS)
        ]

    def logged_read(self: Runner, launch: Any) -> Any:
        graphs.log.append(("read", launch.number))
        return read(self, launch)

    resolve = resolved_config._resolve_mode
    monkeypatch.setattr(
        resolved_config,
        "_resolve_mode",
        lambda config, *rest: "graph" if config.mode == "graph" else resolve(config, *rest),
    )
    monkeypatch.setattr(
        ResolvedConfig, "is_async_device", property(lambda self: self.mode == "graph")
    )
    monkeypatch.setattr(runner, "CudaGraphCapturer", lambda device: FakeCapturer(graphs, device))
    queued(DeviceRows, "update_tables")
    queued(DeviceRows, "take_row")
    queued(DeviceRows, "copy_newest")
    queued(DrafterCache, "clear")
    queued(SamplingState, "store_row")
    queued(Arena, "copy_blocks")
    queued(HostArena, "swap_out")
    queued(HostArena, "swap_in")
    queued(PromptScorer, "run")
    queued(TokenMasks, "copy_to_device")
    monkeypatch.setattr(Step, "__init__", waiting_step)
    waiting(StepLibrary, "run_fallback")
    waiting(Runner, "check_integrity")
    monkeypatch.setattr(startup, "CapturePeaks", lambda device: FakePeaks(graphs, device))
    monkeypatch.setattr(startup, "select_kernels", chosen_kernels)
    for module in (inputs, sample_steps):
        monkeypatch.setattr(module, "StaticBuffers", partial(MirroredBuffers, graphs))
    monkeypatch.setattr(HostOutputs, "copy_async", logged_copy)
    monkeypatch.setattr(HostOutputs, "__init__", with_events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: graphs.stream)
    monkeypatch.setattr(Runner, "read", logged_read)
    return graphs
