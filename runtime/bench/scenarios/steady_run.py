"""Steady decode steps: which engines are started, and how their repetitions are interleaved."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from typing import Any

import torch

from ....cache.memory.handler import MemoryBudgetError
from ....profiling.device_state import watch
from ...config import EngineConfig
from ...engine.engine import Engine
from ...errors import ConfigError
from ...loading.loader import resolve_source
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode
from ..engine_memory import share_memory
from ..results.result_document import write_json
from ..results.result_tables import describe_start
from ..runtimes.transformers_baseline import BaselineCase, BaselineError, TransformersBaseline
from ..runtimes.transformers_config import import_transformers
from ..token_check import TokenCheck
from ..workload import interleave
from .steady import BenchmarkCase, CaseRun, Reference, is_reference

__all__ = ["SteadyRun"]

PROGRESS_SECONDS = 5.0
"""Between lines of progress within a case."""
SHARED_MEMORY_FRACTION = 0.5
"""Of the free memory, for engines that leave room for another runtime."""


class SteadyRun(BenchmarkRun):
    """Every case in all modes of the device, whose repetitions are interleaved."""

    all_modes = True
    profiled = False
    """Whether a profiler runs, which makes times longer."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the device, the engines and the baseline, and measure the bandwidth.

        Raises:
            BaselineError: the baseline is missing or too old.
            StepgraphError: an engine cannot run as configured.
        """
        if options.baseline is not None:
            import_transformers()  # fails before anything is measured
        points = itertools.product(options.output_len, options.input_len, options.batch_size)
        self.grid = [BenchmarkCase(rows, length, output) for output, length, rows in points]
        super().__init__(options)
        whole = options.tensor_parallel in (None, [1])  # the reference has all weights
        if options.check and not whole:
            raise ConfigError("--check compares tokens on one device: leave out --tensor-parallel")
        self.baseline_error: str | None = None
        """Of transformers, which is left out from then on."""
        on_cuda = self.device.type == "cuda" and whole
        self.checks = on_cuda if options.check is None else options.check

    def config(self, kind: ModelKind, mode: StepMode, **sizes: Any) -> EngineConfig:
        """Return the configuration of an engine with room for every case."""
        options = self.options
        chunk, steps = options.prefill_chunk, options.steps_per_launch
        grid = {
            "max_num_seqs": max(options.batch_size),
            "max_model_len": max(case.longest_sequence(chunk, steps) for case in self.grid),
            "buckets": tuple(options.batch_size),
            "steps_per_launch": steps,
        }
        return super().config(kind, mode, **grid | sizes)

    def say(self, text: str) -> None:
        """Print progress to stderr."""
        super().say(text)
        self._said = time.monotonic()

    def reporting(self, act: Callable[[], None], what: str) -> Callable[[], None]:
        """Return `act` followed by a line of progress, unless one was printed recently."""

        def act_and_report() -> None:
            act()
            if time.monotonic() - self._said >= PROGRESS_SECONDS:
                self.say(what)

        return act_and_report

    def run(self) -> None:
        """Measure every case, and write the document after each.

        Raises:
            BaselineError: transformers failed; all cases of ours were measured and written.
        """
        for (model, dtype), kinds in itertools.groupby(self.kinds, lambda kind: kind[:2]):
            self.measure_model(model, dtype, kinds)
        if self.baseline_error is not None:
            raise BaselineError(self.baseline_error)

    def measure_model(self, model: str, dtype: str, kinds: Iterable[ModelKind]) -> None:
        """Measure the kinds of one model and dtype, which have one baseline."""
        with ExitStack() as stack:

            @cache
            def baseline() -> TransformersBaseline:
                return stack.enter_context(closing(self.load_baseline(model, dtype)))

            for kind in kinds:
                self.measure_kind(kind, None if self.options.baseline is None else baseline)

    def load_baseline(self, model: str, dtype: str) -> TransformersBaseline:
        """Load the model in transformers.

        Raises:
            BaselineError: transformers cannot load it.
        """
        self.say(f"loading {model} in transformers")
        source = resolve_source(model, model_impl=self.modes[0].model_impl)
        return TransformersBaseline(
            source.config,
            source.directory,
            dtype=getattr(torch, source.config.torch_dtype if dtype == "auto" else dtype),
            device=self.device,
            seed=self.options.seed,
            compiled=self.options.baseline == "compiled",
            say=self.say,
        )

    def measure_kind(
        self, kind: ModelKind, baseline: Callable[[], TransformersBaseline] | None
    ) -> None:
        """Measure the cases of one model and dtypes in every mode.

        `baseline` loads transformers at its first call, which follows our first case.
        """
        # The weights and the cache of another runtime need memory as well.
        fraction = None if baseline is None else SHARED_MEMORY_FRACTION
        configs = [self.config(kind, mode, memory_fraction=fraction) for mode in self.modes]
        eager: dict[BenchmarkCase, Reference] = {}
        with ExitStack() as stack:
            engines = self.start_together(stack, kind, configs, fraction)
            if engines:
                self.measure(kind.model, engines, eager, baseline)
                return
        for config in configs:
            with self.start(kind, config) as engine:
                self.measure(kind.model, [engine], eager, baseline)

    def start_together(
        self,
        stack: ExitStack,
        kind: ModelKind,
        configs: Sequence[EngineConfig],
        fraction: float | None,
    ) -> list[Engine]:
        """Start all engines, closed by the stack; return none if there is one or they do not fit.

        The memory plans decide, before a weight is read. If the device then still refuses one, the
        engines before it are closed.
        """
        if len(configs) < 2:
            return []
        try:
            shared = share_memory(kind.model, configs, self.device, fraction)
            return [stack.enter_context(self.start(kind, config)) for config in shared]
        except MemoryBudgetError as error:
            stack.close()
            reason, *_ = str(error).splitlines()
            modes = ", ".join(map(str, self.modes))
            self.say(f"{kind.model}: {modes} run one after the other, not interleaved: {reason}")
            return []

    def start(self, kind: ModelKind, config: EngineConfig, what: str = "") -> Engine:
        """Start an engine, and report its memory plan and its start."""
        engine = super().start(kind, config, what)
        mode = StepMode.of(config)
        self.say(f"{kind} {mode}\n{engine.memory_plan.format()}")
        self.say(describe_start(engine.stats()))
        return engine

    def measure(
        self,
        model: str,
        engines: Sequence[Engine],
        eager: dict[BenchmarkCase, Reference],
        baseline: Callable[[], TransformersBaseline] | None,
    ) -> None:
        """Measure each case of each engine; `eager` holds the references from eager mode.

        With a baseline our entries are written first, as transformers may take minutes to load and
        compile. Then a second measurement, interleaved with transformers, replaces them.
        """
        options = self.options
        check = None
        if self.checks:
            unpacked = [engine for engine in engines if engine.decoder.kernels.pack is None]
            check = TokenCheck((unpacked or engines)[0], model)
        for number, case in enumerate(self.grid, 1):
            about = f"{case.batch_size} rows after {case.input_len} tokens"
            self.say(f"{model}, {number} of {len(self.grid)}: {about}")
            first = len(self.document["cases"])
            runs = [self.case_run(engine, case) for engine in engines]
            for run in runs:
                for _ in range(options.num_warmup):
                    self.reporting(run.warm_up, f"{about}: a warm-up of {_name(run)}")()
            self.write_cases(first, self.repeat(model, runs, eager, check, None))
            if baseline is None or self.baseline_error is not None:
                continue
            runs = [self.case_run(engine, case) for engine in engines]
            try:
                loaded = baseline()
                self.say(f"transformers, weights and cache in {loaded.dtype}")
                theirs = loaded.prepare(runs[0].prompts, case.output_len - 1, options.prefill_chunk)
                self.write_cases(first, self.repeat(model, runs, eager, check, theirs))
            except BaselineError as error:
                # Its text alone: the frames of its traceback hold the model.
                self.baseline_error = str(error)
                self.say(f"from here on without transformers: {error}")

    def write_cases(self, first: int, entries: Iterable[dict[str, Any]]) -> None:
        """Put entries into the document from index `first` on, and write it after each."""
        cases: list[dict[str, Any]] = self.document["cases"]
        for index, entry in enumerate(entries, first):
            cases[index : index + 1] = [entry]
            write_json(self.options, self.document)

    def repeat(
        self,
        model: str,
        runs: Sequence[CaseRun],
        eager: dict[BenchmarkCase, Reference],
        check: TokenCheck | None,
        theirs: BaselineCase | None,
    ) -> Iterator[dict[str, Any]]:
        """Interleave the repetitions of one case, and yield the entry of each run.

        Raises:
            BaselineError: transformers failed, before anything was yielded.
        """
        options, case = self.options, runs[0].case
        about = f"{case.batch_size} rows after {case.input_len} tokens"
        sides = [
            self.reporting(run.repeat, f"{about}: a repetition of {_name(run)}") for run in runs
        ]
        if theirs is not None:
            sides.append(self.reporting(theirs.run, f"{about}: a repetition of transformers"))
        read_again = watch(self.monitor)
        interleave(sides, options.num_iters, options.turn_seconds)
        state = read_again()
        for run in runs:
            done = len(run.repetitions)
            if done < options.num_iters:
                few = f"{done} of {options.num_iters} repetitions, as they are long"
                self.say(f"{_name(run)}: {few}")
            if is_reference(run.engine):
                eager[case] = run.reference()
            yield run.to_json(model, self.bandwidth, eager.get(case), check) | {
                "interleaved": len(runs) > 1,
                "baselines": theirs.to_json(run.step_ms, run.token_ids) if theirs else [],
                "device_state": state,
                "profiled": self.profiled,
            }

    def case_run(self, engine: Engine, case: BenchmarkCase) -> CaseRun:
        """Return a case to be run on an engine."""
        return CaseRun(engine, case, seed=self.options.seed)


def _name(run: CaseRun) -> str:
    return str(StepMode.of(run.engine.config))
