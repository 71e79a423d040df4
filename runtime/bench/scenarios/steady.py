"""Decode steps of a whole batch, in one mode or in several, whose repetitions are interleaved.

A case prefills `batch_size` random prompts of `input_len` tokens and decodes them greedily, until
`output_len` - 1 steps have decoded the whole batch, `num_iters` times. Only those steps count, each
from one set of tokens on the host to the next: plan, commit and the caller's use of the tokens are
included. Prompts that are prefilled first decode alone for a while; that time is not
counted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from ....cache.memory.handler import MemoryBudgetError
from ....profiling.device_state import watch
from ....profiling.stats import Summary
from ....profiling.timeline import StepRecord
from ...config import EngineConfig
from ...engine.engine import Engine
from ...engine.request_output import RequestOutput
from ...errors import ConfigError, StepgraphError
from ...loading.loader import resolve_source
from ..baseline import TransformersBaseline, import_transformers
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode
from ..peers import PeerError
from ..results import describe_engine, write_json
from ..saved_preset import checkpoint_of
from ..token_check import TokenCheck
from ..workload import (
    decode_roofline,
    equal_share,
    greedy,
    interleave,
    random_prompts,
    summarize_repetitions,
)

__all__ = ["BenchmarkCase", "CaseRun", "EngineBatch", "SteadyRun"]


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """Sizes of a case: rows, and the tokens of each prompt and output."""

    batch_size: int
    input_len: int
    output_len: int

    def longest_sequence(self, prefill_chunk: int) -> int:
        """Return the tokens of the longest sequence, prompt and output.

        The first prompt gets a token in each step that prefills the others.
        """
        alone = 1 + -(-self.batch_size * self.input_len // prefill_chunk) + self.batch_size
        return self.input_len + self.output_len + alone


class CaseRun:
    """A case on an idle engine with at least `batch_size` rows, which is run repeatedly.

    Attributes:
        ttft_ms, itl_ms: of all repetitions; gaps are those between the tokens of the steps
            that count.
        repetitions: milliseconds of the steps of each repetition.
        token_ids: the first `output_len` tokens of each prompt, of the first repetition.
        outputs: the distinct outputs of each prompt over all repetitions.
        records: all steps of all repetitions, including prefill.

    Raises:
        RequestError: when it runs, if the prompts and their output do not fit the engine.
    """

    def __init__(
        self,
        engine: Engine,
        case: BenchmarkCase,
        *,
        seed: int,
        before_step: Callable[[int], None] | None = None,
    ) -> None:
        """Make the prompts. `before_step` is called in repetitions: see `EngineBatch.steps`."""
        self.engine = engine
        self.case = case
        self._before_step = before_step
        self.prompts = random_prompts(engine.model_config, case.batch_size, case.input_len, seed)
        longest = case.longest_sequence(engine.config.user.prefill_chunk)
        self._max_tokens = longest - case.input_len
        self.ttft_ms: list[float] = []
        self._prefill_ms: list[float] = []
        self.itl_ms: list[float] = []
        self.repetitions: list[list[float]] = []
        self.token_ids: list[list[int]] = []
        self.outputs: list[set[tuple[int, ...]]] = [set() for _ in self.prompts]
        self.records: list[StepRecord] = []

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds of the steps of all repetitions, in order."""
        return [duration for repetition in self.repetitions for duration in repetition]

    def decode(
        self, before_step: Callable[[int], None] | None = None
    ) -> tuple[list[float], list[RequestOutput]]:
        """Run it once without recording; return the milliseconds of its steps and the outputs."""
        batch = EngineBatch(self.engine)
        batch.prefill(self.prompts, self._max_tokens)
        return batch.steps(self.case.output_len - 1, before_step), batch.end()

    def repeat(self) -> None:
        """Run it once more."""
        engine, case = self.engine, self.case
        engine.timeline().clear()
        durations, outputs = self.decode(self._before_step)
        self.repetitions.append(durations)
        self.records += engine.timeline().records()
        if not self.token_ids:
            self.token_ids = [output.token_ids[: case.output_len] for output in outputs]
        for distinct, output in zip(self.outputs, outputs, strict=True):
            assert output.timing is not None, "every prompt got a token"
            self.ttft_ms.append(output.timing.ttft_ms)
            self.itl_ms += output.timing.itl_ms[-len(durations) :]
            distinct.add(tuple(output.token_ids))
        self._prefill_ms.append(max(self.ttft_ms[-len(outputs) :]))

    def to_json(
        self,
        model: str,
        bandwidth: float,
        eager: list[list[int]] | None,
        check: TokenCheck | None,
    ) -> dict[str, Any]:
        """Return the fields of the case in the JSON that depend on this run alone.

        Args:
            model: the name of the engine's model.
            bandwidth: of the device, in bytes per second.
            eager: the tokens of the same case in eager mode, if it was measured.
            check: scores the sampled tokens; None: they are not checked.
        """
        engine, case, stats = self.engine, self.case, self.engine.stats()
        # On average half of the output is in the context.
        context = case.input_len + case.output_len // 2
        steps = summarize_repetitions(self.repetitions)
        p50 = steps["step_ms"]["p50"]
        contexts = [context] * case.batch_size
        decoding = [r for r in self.records if r.rows == case.batch_size and not r.prefill_tokens]
        return {
            **describe_engine(engine, model),
            **asdict(case),
            "ttft_ms": Summary.of(self.ttft_ms).to_json(),
            "itl_ms": Summary.of(self.itl_ms).to_json(),
            **steps,
            "host_us": Summary.of(r.host_ns / 1e3 for r in decoding).to_json(),
            "tokens_per_second": 1e3 * case.batch_size / p50,
            "prefill_tokens_per_second": 1e3
            * case.batch_size
            * case.input_len
            / statistics.median(self._prefill_ms),
            "padding": 1 - sum(r.rows for r in decoding) / max(1, sum(r.bucket for r in decoding)),
            "kv_bytes": case.batch_size * engine.kv_bytes_read(context),
            "roofline": decode_roofline(engine, contexts, bandwidth, p50 / 1e3),
            "memory": stats["memory"],
            "captured": stats["prepared"],
            "start": stats["start"],
            "tokens_equal_eager": None if eager is None else equal_share(self.token_ids, eager),
            "check": None if check is None else check.check(self.prompts, self.outputs),
            "samples": {"step_ms": self.step_ms},
        }


class EngineBatch:
    """Requests that an engine decodes together, with the methods of `Peer`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._latest: dict[str, RequestOutput | None] = {}

    def prefill(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Run until every prompt has its first token; each may get `max_tokens`."""
        params = greedy(max_tokens)
        self._latest = {self._engine.add_request(prompt, params): None for prompt in prompts}
        while None in self._latest.values():
            self._latest.update((output.request_id, output) for output in self._engine.step())

    def steps(self, count: int, before_step: Callable[[int], None] | None = None) -> list[float]:
        """Decode the whole batch `count` times; return the milliseconds of each step.

        `before_step` is called before each step with its number, from 0, and after the last one
        with their count; its time is not counted.

        Raises:
            StepgraphError: a step did not decode all requests.
        """
        step_ms: list[float] = []
        before = time.perf_counter()
        for number in range(count):
            if before_step is not None:
                before_step(number)
                before = time.perf_counter()
            outputs = self._engine.step()
            ended = time.perf_counter()
            if len(outputs) != len(self._latest):
                raise StepgraphError(
                    f"a step decoded {len(outputs)} of {len(self._latest)} requests: the cache has"
                    " too few blocks for all of them; choose fewer rows, or a shorter --output-len"
                    " or --input-len"
                )
            # From the tokens of the step before: a device works on while the caller does this.
            step_ms.append(1e3 * (ended - before))
            before = ended
            self._latest.update((output.request_id, output) for output in outputs)
        if before_step is not None:
            before_step(count)
        return step_ms

    def end(self) -> list[RequestOutput]:
        """Drop the requests; return their outputs until now."""
        for request_id in self._latest:
            self._engine.abort(request_id)
        while self._engine.has_unfinished():
            self._engine.step()
        return [output for output in self._latest.values() if output is not None]


class SteadyRun(BenchmarkRun):
    """Every case in each of the modes, whose repetitions are interleaved."""

    profiled = False
    """Whether a profiler runs, which makes times longer."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the device, the engines and the baseline, and measure the bandwidth.

        Raises:
            StepgraphError: an engine cannot run as configured, or transformers is missing.
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
        """Return the configuration of an engine with room for every case, and no more."""
        options = self.options
        longest = max(case.longest_sequence(options.prefill_chunk) for case in self.grid)
        grid = {
            "max_num_seqs": max(options.batch_size),
            "max_model_len": longest,
            "buckets": tuple(options.batch_size),
        }
        return super().config(kind, mode, **grid | sizes)

    def run(self) -> None:
        """Measure every case, and write the document after each.

        Raises:
            PeerError: transformers failed; all cases of ours were measured and written.
        """
        for (model, dtype), kinds in itertools.groupby(self.kinds, lambda kind: kind[:2]):
            with ExitStack() as stack:
                load = cache(lambda: self._load_baseline(stack, model, dtype))  # noqa: B023
                for kind in kinds:
                    self._measure_kind(kind, None if self.options.baseline is None else load)
        if self.baseline_error is not None:
            raise PeerError(self.baseline_error)

    def _load_baseline(self, stack: ExitStack, model: str, dtype: str) -> TransformersBaseline:
        """Load the model in transformers, until the stack ends."""
        self.say(f"loading {model} in transformers")
        source = resolve_source(model, config_only=True, model_impl=self.modes[0].model_impl)
        with checkpoint_of(model, dtype, self.options.seed, self.device) as checkpoint:
            baseline = TransformersBaseline(
                checkpoint,
                dtype=getattr(torch, source.config.torch_dtype if dtype == "auto" else dtype),
                device=self.device,
                compiled=self.options.baseline == "compiled",
            )
        return stack.enter_context(closing(baseline))

    def _measure_kind(
        self, kind: ModelKind, baseline: Callable[[], TransformersBaseline] | None
    ) -> None:
        """Measure the cases of one model and dtypes in every mode.

        `baseline` loads transformers at its first call, which follows our first case. Several
        engines, or an engine and transformers, have a cache of the size of the cases, so that they
        fit into memory together; engines that do not are started one after the other.
        """
        configs = [self.config(kind, mode) for mode in self.modes]
        if len(configs) > 1 or baseline is not None:
            each = (configs[0].max_model_len or 0) + configs[0].block_size
            tokens = max(self.options.batch_size) * each
            configs = [self.config(kind, mode, memory_tokens=tokens) for mode in self.modes]
        eager: dict[BenchmarkCase, list[list[int]]] = {}
        if len(configs) > 1:
            with ExitStack() as stack:
                engines = []
                try:
                    for config in configs:
                        engines.append(stack.enter_context(self.start(kind, config)))
                except MemoryBudgetError as error:
                    reason, *_ = str(error).splitlines()
                    self.say(f"modes run one after the other, not interleaved: {reason}")
                else:
                    self._measure(kind.model, engines, eager, baseline)
                    return
        for config in configs:
            with self.start(kind, config) as engine:
                self._measure(kind.model, [engine], eager, baseline)

    def _measure(
        self,
        model: str,
        engines: Sequence[Engine],
        eager: dict[BenchmarkCase, list[list[int]]],
        baseline: Callable[[], TransformersBaseline] | None,
    ) -> None:
        """Measure each case of each engine; `eager` holds the tokens from eager mode.

        With a baseline our entries are written first, as transformers may take minutes to load and
        compile. Then a second measurement, interleaved with transformers, replaces them.
        """
        options, cases, check = self.options, self.document["cases"], None
        if self.checks:
            unpacked = [engine for engine in engines if engine.decoder.kernels.pack is None]
            check = TokenCheck((unpacked or engines)[0], model)
        for number, case in enumerate(self.grid, 1):
            about = f"{case.batch_size} rows after {case.input_len} tokens"
            self.say(f"{model}, {number} of {len(self.grid)}: {about}")
            first = len(cases)
            runs = [self.case_run(engine, case) for engine in engines]
            for run in runs:
                for _ in range(options.num_warmup):
                    run.decode()
            cases[first:] = self._repeat(model, runs, eager, check, None)
            write_json(options, self.document)
            if baseline is None or self.baseline_error is not None:
                continue
            runs = [self.case_run(engine, case) for engine in engines]
            try:
                theirs = baseline()
                theirs.prepare(runs[0].prompts, case.output_len - 1)
                cases[first:] = self._repeat(model, runs, eager, check, theirs)
                write_json(options, self.document)
            except PeerError as error:
                # Its text alone: the frames of its traceback hold the model.
                self.baseline_error = str(error)
                self.say(f"from here on without transformers: {error}")

    def _repeat(
        self,
        model: str,
        runs: Sequence[CaseRun],
        eager: dict[BenchmarkCase, list[list[int]]],
        check: TokenCheck | None,
        theirs: TransformersBaseline | None,
    ) -> list[dict[str, Any]]:
        """Interleave the repetitions of one case, and return the entry of each run.

        Raises:
            PeerError: transformers failed.
        """
        options, case = self.options, runs[0].case
        sides = [run.repeat for run in runs]
        if theirs is not None:
            sides.append(theirs.run)
        read_again = watch(self.monitor)
        interleave(sides, options.num_iters, options.turn_seconds)
        state = read_again()
        entries = []
        for run in runs:
            if run.engine.config.mode == "eager" and run.engine.config.kernels != "native":
                eager[case] = run.token_ids
            more = {
                "interleaved": len(runs) > 1,
                "baselines": [theirs.to_json(run.step_ms, run.token_ids)] if theirs else [],
                "device_state": state,
                "profiled": self.profiled,
            }
            entries.append(run.to_json(model, self.bandwidth, eager.get(case), check) | more)
        return entries

    def case_run(self, engine: Engine, case: BenchmarkCase) -> CaseRun:
        """Return a case to be run on an engine."""
        return CaseRun(engine, case, seed=self.options.seed)
