"""Decode steps of whole batches: which engines are started, and what is measured on each."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console

from ...cache.memory.handler import MemoryBudgetError
from ...profiling import bandwidth
from ...profiling.device_state import DeviceMonitor, watch
from ..config import DTYPES, EngineConfig
from ..engine.engine import Engine
from ..loading.loader import resolve_source
from ..resolved_config import resolve_device
from .baseline import BaselineCase, TransformersBaseline
from .check import TokenCheck
from .document import Way, modes_of, new_document, ways_of, write_json
from .hf_config import import_transformers
from .options import MODES
from .plot import MeasuredSteps
from .resolved import resolve_engine
from .shares import share_memory
from .steady import BenchmarkCase, CaseRun, Measurement, is_reference, longest_sequence, to_json
from .tables import describe_start
from .turns import take_turns

__all__ = ["SteadyRun"]

PROGRESS_SECONDS = 5.0
"""Between lines about what is being measured."""

SHARED_MEMORY_FRACTION = 0.5
"""Of the memory that is free, for engines beside which another runtime needs some."""

Kind = tuple[str, str, str, str]
"""Model and dtypes (of the model, its weights, its cache), as flags name them."""


class SteadyRun:
    """One run of the command line: which engines to start, what to measure on each."""

    profiled = False
    """Whether a profiler was at work: then times are longer than they are otherwise."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the device, and what is compared with; measure the bandwidth.

        Raises:
            BaselineError: what is compared with is missing or too old.
            StepgraphError: an engine cannot be as it is asked for.
        """
        self.options = options
        self.console = Console(stderr=True)
        if options.baseline is not None:
            import_transformers()  # before anything is measured for a comparison that cannot be
        self.device = resolve_device(options.device)
        self.monitor = DeviceMonitor.of(self.device)
        self.checks = self.device.type == "cuda" if options.check is None else options.check
        # Eager first: it is what the other modes' tokens and logits are compared with.
        modes = [m for m in MODES if m in (options.mode or modes_of(self.device))]
        self.ways = ways_of(options, modes)
        self.grid = [
            (batch_size, input_len, output_len)
            for output_len in options.output_len
            for input_len in options.input_len
            for batch_size in options.batch_size
        ]
        self.kinds = self.check_kinds()
        self.say("measuring the read bandwidth of the device")
        self.bandwidth = bandwidth.measure_read_bandwidth(self.device)
        self.document = new_document(self.device, self.bandwidth)
        """What `--output-json` writes; has a case as soon as it is measured."""
        self.steps = MeasuredSteps(options)

    def say(self, text: str) -> None:
        """Tell on stderr what is going on."""
        self.console.print(text, style="dim", highlight=False, markup=False)
        self._told = time.monotonic()

    def telling(self, act: Callable[[], None], what: str) -> Callable[[], None]:
        """Return `act` with a line on stderr after it, if there was none for a while."""

        def told() -> None:
            act()
            if time.monotonic() - self._told >= PROGRESS_SECONDS:
                self.say(what)

        return told

    def run(self) -> None:
        """Measure every case, and write the document after each."""
        for (model, dtype), kinds in itertools.groupby(self.kinds, lambda kind: kind[:2]):
            with self.baseline(model, dtype) as baseline:
                for kind in kinds:
                    for case in self.measure_kind(kind, baseline):
                        self.document["cases"].append(case)
                        write_json(self.options, self.document)

    def check_kinds(self) -> list[Kind]:
        """Return the models and dtypes to be measured, once each, in the order of the flags.

        What `auto` comes to may be asked for by its name as well, and is the same engine.

        Raises:
            StepgraphError: one of the engines cannot be; nothing was measured yet.
        """
        options = self.options
        kinds: dict[tuple[object, ...], Kind] = {}
        for kind in itertools.product(
            options.model, options.dtype, options.weight_dtype, options.kv_dtype
        ):
            for way in self.ways:
                found = resolve_engine(kind[0], self.config(kind, way, None))
                kinds.setdefault((kind[0], found.dtype, found.weights, found.storage), kind)
        return list(kinds.values())

    @contextmanager
    def baseline(self, model: str, dtype: str) -> Iterator[TransformersBaseline | None]:
        """Load the model in the runtime to compare with, if there is one."""
        if self.options.baseline is None:
            yield None
            return
        self.say(f"loading {model} in transformers")
        source = resolve_source(model)
        with TransformersBaseline(
            source.config,
            source.directory,
            dtype=DTYPES[source.config.torch_dtype if dtype == "auto" else dtype],
            device=self.device,
            seed=self.options.seed,
            say=self.say,
        ) as baseline:
            yield baseline

    def measure_kind(
        self, kind: Kind, baseline: TransformersBaseline | None
    ) -> Iterator[dict[str, Any]]:
        """Yield the cases of one model and dtypes in every mode, each as it is measured."""
        model = kind[0]
        # The other runtime's cache is on the device as well.
        fraction = None if baseline is None else SHARED_MEMORY_FRACTION
        alone = [self.config(kind, way, fraction) for way in self.ways]
        eager: dict[BenchmarkCase, Measurement] = {}
        with ExitStack() as stack:
            engines = self.start_together(stack, model, alone, fraction)
            if engines:
                yield from self.measure(model, engines, eager, baseline)
                return
        for config in alone:
            with self.start(model, config) as engine:
                yield from self.measure(model, [engine], eager, baseline)

    def start_together(
        self,
        stack: ExitStack,
        model: str,
        configs: Sequence[EngineConfig],
        fraction: float | None,
    ) -> list[Engine]:
        """Start all engines, to be closed by the stack; none if there is one, or they do not fit.

        The memory plans decide; they are made before a weight is read. An engine that is told
        otherwise by its device ends what was started before it.
        """
        if len(configs) < 2:
            return []
        try:
            shared = share_memory(model, configs, self.device, fraction)
            return [stack.enter_context(self.start(model, config)) for config in shared]
        except MemoryBudgetError as error:
            stack.close()
            reason, *_ = str(error).splitlines()
            ways = ", ".join(map(str, self.ways))
            self.say(f"{model}: {ways} run one after the other, without turns: {reason}")
            return []

    def start(self, model: str, config: EngineConfig) -> Engine:
        """Start an engine, and tell how that went."""
        engine = Engine.from_pretrained(model, config, progress=False)
        self.say(
            f"{model} {config.dtype} weights {config.weight_dtype} KV {config.kv_dtype}"
            f" {Way(config.mode, config.kernels)}\n{engine.memory_plan.format()}"
        )
        self.say(describe_start(engine.stats()))
        return engine

    def measure(
        self,
        model: str,
        engines: Sequence[Engine],
        eager: dict[BenchmarkCase, Measurement],
        baseline: TransformersBaseline | None,
    ) -> Iterator[dict[str, Any]]:
        """Yield each case of each engine; the repetitions of a case take turns.

        `eager` has what was measured in eager mode, and gets what is.
        """
        options = self.options
        check = None
        if self.checks:
            unpacked = [engine for engine in engines if engine.decoder.kernels.pack is None]
            check = TokenCheck((unpacked or engines)[0], model)
        for number, point in enumerate(self.grid, 1):
            case = BenchmarkCase(model, *point)
            about = f"{case.batch_size} rows after {case.input_len} tokens"
            self.say(f"{model}, {number} of {len(self.grid)}: {about}")
            runs = [self.case_run(engine, case) for engine in engines]
            names = [str(Way(e.config.mode, e.config.kernels)) for e in engines]
            sides = [
                self.telling(run.repeat, f"{about}: a repetition of {name}")
                for name, run in zip(names, runs, strict=True)
            ]
            turns: BaselineCase | None = None
            if baseline is not None:
                self.say(f"transformers, weights and cache in {baseline.dtype}")
                turns = baseline.prepare(
                    runs[0].prompts, case.output_len - 1, options.prefill_chunk
                )
                sides.append(self.telling(turns.run, f"{about}: a repetition of transformers"))
            for name, run in zip(names, runs, strict=True):
                for _ in range(options.num_warmup):
                    self.telling(run.warm_up, f"{about}: a warm-up of {name}")()
            read_again = watch(self.monitor)
            with self.steps.timed(*engines):
                take_turns(sides, options.num_iters, options.turn_seconds)
            state = read_again()
            for name, run in zip(names, runs, strict=True):
                measured = run.result()
                done = len(measured.repetition_ms)
                if done < options.num_iters:
                    self.say(
                        f"{name}: {done} of {options.num_iters} repetitions, as they take long"
                    )
                if is_reference(run.engine):
                    eager[case] = measured
                checked = None if check is None else check.check(run.prompts, measured.outputs)
                entry = self.to_json(
                    run.engine, measured, eager, len(runs) > 1, turns, state, checked
                )
                self.steps.add(entry, measured.records)
                yield entry

    def case_run(self, engine: Engine, case: BenchmarkCase) -> CaseRun:
        """Return a case to be run on an engine."""
        return CaseRun(engine, case, seed=self.options.seed)

    def to_json(
        self,
        engine: Engine,
        measured: Measurement,
        eager: Mapping[BenchmarkCase, Measurement],
        interleaved: bool,
        turns: BaselineCase | None,
        device_state: dict[str, Any] | None,
        check: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Return a case of the document."""
        case = to_json(
            engine,
            measured,
            bandwidth=self.bandwidth,
            eager=eager.get(measured.case),
            interleaved=interleaved,
            baselines=() if turns is None else turns.to_json(measured.step_ms, measured.token_ids),
            device_state=device_state,
            check=check,
        )
        return case | {"profiled": self.profiled}

    def config(self, kind: Kind, way: Way, fraction: float | None) -> EngineConfig:
        """Return how an engine runs where it has the device to itself."""
        options = self.options
        model, dtype, weight_dtype, kv_dtype = kind
        longest = max(
            longest_sequence(
                BenchmarkCase(model, *point), options.prefill_chunk, options.steps_per_launch
            )
            for point in self.grid
        )
        return EngineConfig(
            device=str(self.device),
            dtype=dtype,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            mode=way.mode,
            kernels=way.kernels,
            prefix_cache=False,  # every repetition prefills its prompts
            memory_fraction=fraction,
            max_num_seqs=max(options.batch_size),
            max_model_len=longest,
            buckets=tuple(options.batch_size),
            prefill_chunk=options.prefill_chunk,
            steps_per_launch=options.steps_per_launch,
            seed=options.seed,
        )
