"""Steps that run eagerly, compiled, or as a captured CUDA graph, with one interface.

A step wraps a callable without arguments. All tensors that the callable reads have fixed addresses,
so it can be called, compiled or captured.

A step is prepared in two stages, `warm_up()` and `record()`. So a library can warm up all of its
steps before it captures the first one, and memory that warm-ups leave in the allocator's cache is
freed once, not between captures.

The contract of warm-up: both stages run the callable several times before the first request. If it
changes device state (writes keys and values, feeds tokens back), its inputs must be padding only:
all rows are the null row, all writes go to the null block. `StaticBuffers` contain such inputs
after `allocate`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import torch

from ..profiling import attribution
from .compilation import StepPreparationError, run_until_compiled

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
"""How a step runs, named as the engine's `mode`."""


class Step(Generic[O]):
    """A callable over static buffers, prepared once and run many times.

    Attributes:
        kind: how it runs.
        name: in error messages.
        seconds: wall-clock seconds of the stages that have run.
        bytes: device memory that `record` allocated and the step keeps.
    """

    kind: ClassVar[StepKind]

    run: Callable[[], O]
    """Runs the step with the current static buffers. Does not wait for the device."""

    def __init__(self, fn: Callable[[], O], name: str) -> None:
        """Wrap `fn`, which runs in the grad mode that it sets itself."""
        self._fn = fn
        self.name = name
        self.seconds = 0.0
        self.bytes = 0

    def prepare(self) -> None:
        """Run both stages; raises what they raise."""
        self.warm_up()
        self.record()

    def warm_up(self) -> None:
        """Compile, load and allocate what the first run needs; see the contract of warm-up above.

        Raises:
            StepPreparationError: the callable failed, with the cause. The step cannot be run.
        """
        self._timed(self._warm_up)

    def record(self) -> None:
        """Capture the step if its kind is "graph". Call it after `warm_up`; raises the same."""
        self._timed(self._record)

    def _timed(self, stage: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            stage()
        except Exception as error:
            raise StepPreparationError(self.name, self.kind, error) from error
        self.seconds += time.perf_counter() - started

    def _warm_up(self) -> None:
        """Do the work of `warm_up`; may raise anything."""

    def _record(self) -> None:
        """Do the work of `record`; may raise anything."""


class EagerStep(Step[O]):
    """The callable as it is. It needs no preparation."""

    kind = "eager"

    def run(self) -> O:
        """Call the callable; its outputs are new tensors."""
        return self._fn()


class CompiledStep(Step[O]):
    """A callable with parts for `torch.compile`, compiled before the first request.

    Preparation fails if later requests would be slow: if the parts have reached their recompile
    limit (torch falls back to eager mode), or if a second run over the same buffers compiles again.
    A callable without compiled parts runs once.
    """

    kind = "compile"

    def _warm_up(self) -> None:
        run_until_compiled(self._fn)
        self.run = self._fn  # its outputs are new tensors


@dataclass(frozen=True, slots=True)
class Capture(Generic[O]):
    """A captured callable.

    Attributes:
        replay: runs it again and overwrites the tensors of `output`.
        output: return value of the recorded run.
        bytes: device memory of the capture.
    """

    replay: Callable[[], None]
    output: O
    bytes: int


class GraphCapturer(Protocol):
    """The device interface of a `CapturedStep`: runs work, records it and replays it."""

    def warm_up(self, fn: Callable[[], object]) -> None:
        """Run `fn` once, under the conditions of a capture but without recording."""

    def capture(self, fn: Callable[[], O]) -> Capture[O]:
        """Record one run of `fn`. The result may have been replayed already."""


class CapturedStep(Step[O]):
    """The callable, recorded once by a capturer and replayed with one graph launch.

    `run` returns the same tensors each time, with new contents. Captures of one capturer share
    their memory, so an output is valid until the next run of *any* of them. To keep it, copy it on
    the same stream before that run.
    """

    kind = "graph"

    def __init__(
        self,
        fn: Callable[[], O],
        name: str,
        capturer: GraphCapturer,
        identity: attribution.StepIdentity | None = None,
    ) -> None:
        """Wrap `fn`. Steps with the same `capturer` share memory; capture the largest first.

        `identity` is the key for the recorded names of its kernels; None records none.
        """
        super().__init__(fn, name)
        self._capturer = capturer
        self._identity = identity
        self._capture: Capture[O] | None = None

    def _warm_up(self) -> None:
        # A first run may allocate permanently, load a module or compile: no capture can record it.
        self._capturer.warm_up(partial(run_until_compiled, self._fn))

    def _record(self) -> None:
        with attribution.step(self._identity):
            self._capture = self._capturer.capture(self._fn)
        self.bytes = self._capture.bytes

    def run(self) -> O:
        """Replay the capture; its outputs are the static tensors that it was captured with."""
        capture = self._capture
        assert capture is not None, f"step {self.name} is run before it is prepared"
        capture.replay()
        return capture.output


class CudaGraphCapturer:
    """Captures CUDA graphs on one side stream into one memory pool.

    One pool: graphs never run at the same time, so they can share scratch memory. Together they
    take about as much as the largest, if that is captured first. One stream: captures share memory
    only within a stream, and libraries keep a workspace for each stream. A failed capture leaves
    the pool in an unknown state: create a new capturer after it.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Make the stream and the pool.

        Raises:
            ValueError: `device` is not a CUDA device.
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
        self._settled = False

    def warm_up(self, fn: Callable[[], object]) -> None:
        """Run `fn` once on the stream of the captures, after all work queued so far."""
        self._settled = False
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            fn()
        current.wait_stream(self._stream)

    def capture(self, fn: Callable[[], O]) -> Capture[O]:
        """Record one run of `fn` and replay it once, so that the graph is uploaded to the device.

        `bytes` is the decrease of the device's free memory: the pool's growth and the graph's
        nodes. Allocations of other threads and processes at the same time are counted too.
        """
        with torch.cuda.device(self.device):
            self._settle()
            free_before, _ = torch.cuda.mem_get_info(self.device)
            graph = torch.cuda.CUDAGraph()
            # `torch.cuda.graph` would wait for the device and empty the allocator's cache.
            with torch.cuda.stream(self._stream), _collector_paused():
                # "thread_local": another thread of the service may use the device meanwhile.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    with attribution.capturing(self._nodes):
                        output = fn()
                except BaseException:
                    # Ends the capture; an error here only follows from the error of `fn`.
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            graph.replay()
            free_after, _ = torch.cuda.mem_get_info(self.device)
        return Capture(graph.replay, output, max(0, free_before - free_after))

    def _nodes(self) -> attribution.CudaGraphNodes:
        """Return the source of the graph nodes of the current capture."""
        return attribution.cuda_graph_nodes(self._stream.cuda_stream)

    def _settle(self) -> None:
        """Free the memory that warm-ups left in the allocator's cache.

        Captures allocate from their own pool, which cannot use it: the device would hold the
        activations of the largest step twice.
        """
        if not self._settled:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self._settled = True


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
