"""A step run in one of three ways, eagerly, compiled, or as a captured CUDA graph: one face.

A step wraps a callable without arguments over static buffers: whatever it reads lies at a fixed
address, so the same callable can be called, compiled or captured.

The contract of warm-up: `prepare()` runs the callable, several times, before there is a request.
A callable that changes device state (writes keys and values, feeds tokens back) must find inputs
for which that is harmless: every lane points to the null row, every write to the null block. That
is what `StaticBuffers` hold after `allocate` and after `reset` followed by a copy.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import torch

from ..profiling import attribution
from ..profiling.graph_nodes import cuda_graph_nodes
from .errors import StepPreparationError

__all__ = [
    "Capture",
    "CapturedStep",
    "CompiledStep",
    "CudaGraphCapturer",
    "EagerStep",
    "GraphCapturer",
    "Step",
    "StepKind",
    "StepPreparationError",
]

O = TypeVar("O")  # noqa: E741  what a step returns

StepKind = Literal["eager", "compile", "graph"]
"""How a step runs; the words are those of the engine's `mode`."""


class Step(ABC, Generic[O]):
    """A callable over static buffers, prepared once and launched many times.

    Attributes:
        kind: how it runs.
        name: what errors call it.
        seconds: wall-clock seconds that `prepare` took; 0 before.
        bytes: device memory that the preparation took and the step holds while it lives.
    """

    kind: ClassVar[StepKind]

    def __init__(self, fn: Callable[[], O], name: str) -> None:
        """Wrap `fn`, which runs under whatever grad mode it sets up itself."""
        self._fn = fn
        self.name = name
        self.seconds = 0.0
        self.bytes = 0

    def prepare(self) -> None:
        """Do all that only the first run needs. See the contract of warm-up above.

        Raises:
            StepPreparationError: whatever went wrong, with its cause. The step cannot be launched.
        """
        started = time.perf_counter()
        try:
            self._prepare()
        except Exception as error:
            raise StepPreparationError(self.name, self.kind, error) from error
        self.seconds = time.perf_counter() - started

    @abstractmethod
    def launch(self) -> O:
        """Run the step over what the static buffers hold now. Does not wait for the device."""

    @abstractmethod
    def _prepare(self) -> None:
        """Do the work of `prepare`; may raise anything."""


class EagerStep(Step[O]):
    """The callable as it is. There is nothing to prepare, so it may be launched unprepared."""

    kind = "eager"

    def _prepare(self) -> None:
        pass

    def launch(self) -> O:
        """Call the callable; its outputs are new tensors."""
        return self._fn()


class CompiledStep(Step[O]):
    """A callable made of `torch.compile`d parts, compiled before the first request.

    Preparing fails where compilation would later, silently, cost time in traffic: if the parts have
    reached their recompile limit (torch would go on in eager mode; pass
    `torch.compile(..., recompile_limit=)` at least the number of steps that share a part), or if a
    second run over the same buffers would compile again.
    """

    kind = "compile"

    def __init__(self, fn: Callable[[], O], name: str, *, compiles: bool = True) -> None:
        """Wrap `fn`; without `compiles` no part of it is compiled, and one run warms it up."""
        super().__init__(fn, name)
        self._compiles = compiles
        self._prepared = False

    def _prepare(self) -> None:
        if self._compiles:
            _run_until_compiled(self._fn)
        else:
            self._fn()
        self._prepared = True

    def launch(self) -> O:
        """Call the compiled callable; its outputs are new tensors."""
        assert self._prepared, f"step {self.name} is launched before it is prepared"
        return self._fn()


@dataclass(frozen=True, slots=True)
class Capture(Generic[O]):
    """A captured callable: `replay()` runs it again, into the same `output`; `bytes` it holds."""

    replay: Callable[[], None]
    output: O
    bytes: int


class GraphCapturer(Protocol):
    """What a `CapturedStep` needs of a device that can record its work and replay it."""

    def warm_up(self, fn: Callable[[], object]) -> None:
        """Run `fn` once, as it will run while captured but for real."""

    def capture(self, fn: Callable[[], O]) -> Capture[O]:
        """Record one run of `fn`. The capture may have been replayed any number of times."""


class CapturedStep(Step[O]):
    """The callable recorded once by a capturer and replayed: the host pays for one launch.

    `launch` returns the same tensors each time, with new contents. Captures of one capturer share
    their memory, so an output is valid on the stream until the next launch of *any* of them: what
    must last longer is copied, on the same stream, before that.
    """

    kind = "graph"

    def __init__(
        self,
        fn: Callable[[], O],
        name: str,
        capturer: GraphCapturer,
        identity: attribution.StepIdentity | None = None,
    ) -> None:
        """Wrap `fn`; steps that share memory are given the same `capturer`, the largest first.

        `identity` is what the names of its kernels are recorded under; None: they are not.
        """
        super().__init__(fn, name)
        self._capturer = capturer
        self._identity = identity
        self._capture: Capture[O] | None = None

    def _prepare(self) -> None:
        # What runs for the first time may allocate for good, load a module or compile, none of
        # which a capture can record: it happens here.
        self._capturer.warm_up(partial(_run_until_compiled, self._fn))
        with attribution.step(self._identity):
            self._capture = self._capturer.capture(self._fn)
        self.bytes = self._capture.bytes

    def launch(self) -> O:
        """Replay the capture; its outputs are the static tensors that it was captured with."""
        capture = self._capture
        assert capture is not None, f"step {self.name} is launched before it is prepared"
        capture.replay()
        return capture.output


class CudaGraphCapturer:
    """Captures CUDA graphs on one side stream into one memory pool.

    One pool: graphs never run at the same time, so each may use the scratch memory of the others,
    and all of them together take about as much as the largest, if that is captured first. One
    stream: memory is only shared between captures from the same stream, and libraries keep a
    workspace a stream. After a capture that failed the pool is in an unknown state: the capturer
    is done with, and whoever tries again makes a new one.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Make the stream and the pool.

        Raises:
            ValueError: `device` has no CUDA graphs.
        """
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(
                f"steps can be captured as graphs on CUDA devices only, got device {self.device}; "
                "run them eagerly or compiled"
            )
        self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device):
            self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, fn: Callable[[], object]) -> None:
        """Run `fn` once on the stream that captures come from, after all work queued so far."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            fn()
        current.wait_stream(self._stream)

    def capture(self, fn: Callable[[], O]) -> Capture[O]:
        """Record one run of `fn` and replay it once, so that its first launch uploads nothing.

        `bytes` is the free memory of the device before, less that after: the pool's growth and the
        graph's own nodes, whoever allocated them. Other processes on the device blur it.
        """
        with torch.cuda.device(self.device):
            free_before = self._settled_free_bytes()
            graph = torch.cuda.CUDAGraph()
            # "thread_local": another thread of the service may use the device meanwhile.
            with (
                # Puts this thread's stream back: a capture that fails leaves its own current.
                torch.cuda.stream(torch.cuda.current_stream()),
                _collector_paused(),
                torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ),
                attribution.capturing(self._nodes) as tape,
            ):
                output = fn()
            if tape is not None:
                tape.finish(graph)
            graph.replay()
            free_after = self._settled_free_bytes()
        return Capture(graph.replay, output, max(0, free_before - free_after))

    def _nodes(self) -> attribution.NodeSource:
        """Return what tells the nodes of the capture that has begun."""
        return cuda_graph_nodes(self._stream.cuda_stream)

    def _settled_free_bytes(self) -> int:
        """Return the free memory of the device once its queue and the allocator's are empty."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return free


def _run_until_compiled(fn: Callable[[], object]) -> None:
    """Run `fn` twice: once to compile what it is made of, once to prove that this was all.

    Raises:
        Exception: of torch, if a compiled part is at its recompile limit or compiles again. (A
            callable without compiled parts just runs twice.)
    """
    # Imported here: it takes a second, and whoever runs eagerly never needs it.
    from torch._dynamo import config

    # These settings hold for this thread only. The public `set_stance("fail_on_recompile")` holds
    # for the process, and would fail what another thread of the service compiles meanwhile.
    with config.patch(fail_on_recompile_limit_hit=True):
        fn()
        with config.patch(error_on_recompile=True):
            fn()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's collector from destroying device objects, which would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
