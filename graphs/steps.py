"""Steps that run eagerly, compiled, or as a captured CUDA graph, and the library of all of them.

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
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

import torch

from ..profiling import attribution, ranges
from .compilation import StepPreparationError, run_until_compiled

logger = logging.getLogger("stepgraph.graphs")

K = TypeVar("K", bound=Hashable)
O = TypeVar("O")  # noqa: E741  what a step returns

StepKind = Literal["eager", "compile", "graph"]
"""How a step runs, named as the engine's `mode`."""


class Step(Generic[O]):
    """A callable over static buffers, prepared once and run many times.

    - An eager step needs no preparation.
    - A compiled step has parts for `torch.compile`. Its preparation fails if later requests would
      be slow: if the parts have reached their recompile limit (torch falls back to eager mode), or
      if a second run over the same buffers compiles again.
    - A captured step is recorded once and replayed with one graph launch. It returns the same
      tensors each time, with new contents. Captures of one capturer share their memory, so an
      output is valid until the next run of *any* of them. To keep it, copy it on the same stream
      before that run.

    Attributes:
        kind: how it runs.
        name: in error messages.
        run: runs the step with the current static buffers. Does not wait for the device.
        capture: of a captured step, once it is recorded.
        seconds: wall-clock seconds of the stages that have run.
        bytes: device memory that `record` allocated and the step keeps.
    """

    def __init__(
        self,
        kind: StepKind,
        fn: Callable[[], O],
        name: str,
        capturer: CudaGraphCapturer | None = None,
        identity: attribution.StepIdentity | None = None,
    ) -> None:
        """Wrap `fn`, which runs in the grad mode that it sets itself.

        A "graph" needs a `capturer`: steps with the same one share memory; capture the largest
        first. `identity` is the key for the recorded names of its kernels; None records none.
        """
        assert (kind == "graph") == (capturer is not None)
        self._fn, self._capturer, self._identity = fn, capturer, identity
        self.kind, self.name = kind, name
        self.run: Callable[[], O] = fn
        self.capture: Capture[O] | None = None
        self.seconds = 0.0
        self.bytes = 0

    def warm_up(self) -> None:
        """Compile, load and allocate what the first run needs; see the contract of warm-up above.

        Raises:
            StepPreparationError: the callable failed, with the cause. The step cannot be run.
        """
        compiled = partial(run_until_compiled, self._fn)
        with self._timed():
            if self._capturer is not None:
                # A first run may allocate permanently, load a module or compile: no capture can
                # record it.
                self._capturer.warm_up(compiled)
            elif self.kind == "compile":
                compiled()

    def record(self) -> None:
        """Capture the step if its kind is "graph". Call it after `warm_up`; raises the same."""
        if self._capturer is None:
            return
        with self._timed():
            capture = self._capturer.capture(self._fn, self._identity)
        self.capture, self.bytes = capture, capture.bytes

        def run() -> O:
            capture.replay()
            return capture.output

        self.run = run

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            raise StepPreparationError(self.name, self.kind, error) from error
        self.seconds += time.perf_counter() - started


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


class CudaGraphCapturer:
    """Captures CUDA graphs on one side stream into one memory pool.

    One pool: graphs never run at the same time, so they can share scratch memory. Together they
    take about as much as the largest, if that is captured first. One stream: captures share memory
    only within a stream, and libraries keep a workspace for each stream. A failed capture leaves
    the pool in an unknown state: create a new capturer after it.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Make the stream and the pool on a CUDA device."""
        self.device = torch.device(device)
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

    def capture(
        self, fn: Callable[[], O], identity: attribution.StepIdentity | None = None
    ) -> Capture[O]:
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
                    nodes = partial(attribution.cuda_graph_nodes, self._stream.cuda_stream)
                    with attribution.capturing(identity, nodes):
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


class StepLibrary(Generic[K, O]):
    """All steps of an engine by key, prepared before the first request.

    A key contains the size of the step and every other host scalar that is constant in a capture,
    such as the read width and the sampler.

    For a key that was not prepared, a slower fallback step runs; no step is prepared while requests
    are served. Each miss is counted, and the first one of a key is logged as a warning.
    """

    def __init__(
        self,
        make_step: Callable[[K], Step[O]],
        keys: Iterable[K],
        size_of: Callable[[K], int],
        make_fallback: Callable[[K], Callable[[], O]],
    ) -> None:
        """Make a library; `prepare` does the work.

        Args:
            make_step: creates the step of a key, unprepared.
            keys: steps to prepare; duplicates are ignored.
            size_of: returns rows or tokens of a key's step; the largest is prepared first.
            make_fallback: returns a callable that needs no preparation, for all other keys.
        """
        self._make_step = make_step
        self._make_fallback = make_fallback
        # Largest first: smaller captures reuse its memory; otherwise the pool would grow with each.
        self._keys = sorted(dict.fromkeys(keys), key=size_of, reverse=True)
        self._size_of = size_of
        self.steps: dict[K, Step[O]] = {}
        """The prepared steps, in the order of preparation.

        Captures share a memory pool: the bytes of one are the growth of the pool.
        """
        self.misses = 0
        """Lookups that fell back to a slower step."""
        self.used_lanes = 0
        """Rows or tokens of requests that steps computed."""
        self.padded_lanes = 0
        """Rows or tokens of padding that steps computed."""
        self._fallbacks: dict[K, Callable[[], O]] = {}

    @property
    def padding_fraction(self) -> float:
        """Padding as a fraction of all rows and tokens computed; 0.0 before the first step."""
        lanes = self.used_lanes + self.padded_lanes
        return self.padded_lanes / lanes if lanes else 0.0

    def prepare(self, progress: Callable[[int, int, K], None] | None = None) -> None:
        """Create and warm up every step, then capture every step, largest first.

        Args:
            progress: called after each warm-up and each capture with (finished stages, all stages,
                key of the step).

        Raises:
            StepPreparationError: a step failed, with its cause. All steps are dropped.
        """
        assert not self.steps, "the library is prepared already"
        try:
            self.steps = {key: self._make_step(key) for key in self._keys}
            captured = [key for key, step in self.steps.items() if step.kind == "graph"]
            stages = [
                *((key, self.steps[key].warm_up) for key in self._keys),
                *((key, self.steps[key].record) for key in captured),
            ]
            with ranges.span(ranges.WARMUP, len(self._keys)):
                for done, (key, stage) in enumerate(stages, start=1):
                    with ranges.span(ranges.CAPTURE, self._size_of(key)):
                        stage()
                    if progress is not None:
                        progress(done, len(stages), key)
        except BaseException:
            self.close()
            raise
        logger.info(
            "prepared %d steps in %.1f s, %.1f MiB: sizes %s",
            len(self.steps),
            sum(step.seconds for step in self.steps.values()),
            sum(step.bytes for step in self.steps.values()) / 2**20,
            sorted({self._size_of(key) for key in self.steps}),
        )

    def run(self, key: K) -> O:
        """Run the step for `key`, or the fallback, and return its output (see `Step`)."""
        step = self.steps.get(key)
        return self.run_fallback(key) if step is None else step.run()

    def run_fallback(self, key: K) -> O:
        """Run a key as it is where no step is prepared; logged once per key."""
        assert self.steps, f"step {key} is looked up in a library that is not prepared"
        self.misses += 1
        fn = self._fallbacks.get(key)
        if fn is None:
            fn = self._fallbacks[key] = self._make_fallback(key)
            logger.warning(
                "no step was prepared for %s: a slower 'eager' step runs instead (logged once per"
                " key)",
                key,
            )
        return fn()

    def record_padding(self, used: int, bucket: int) -> None:
        """Count a step of `bucket` rows or tokens, of which `used` belong to requests."""
        assert 0 <= used <= bucket, f"{used} lanes used of a bucket of {bucket}"
        self.used_lanes += used
        self.padded_lanes += bucket - used

    def close(self) -> None:
        """Release all steps and their memory. The counters remain."""
        self.steps.clear()
        self._fallbacks.clear()
