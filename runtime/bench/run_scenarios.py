"""Scenarios besides decode steps of whole batches: which engines are started for them."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from ...cache.memory.device_memory import resident_bytes
from ...profiling import bandwidth
from ...profiling.device_state import DeviceMonitor, watch
from ..config import EngineConfig
from ..engine.engine import Engine
from ..loading.loader import resolve_source
from ..resolved_config import ResolvedConfig, resolve_device
from . import memory, neighbours, prefix
from .churn import ChurnCase, churn_to_json, measure_churn
from .document import Way, modes_of, new_document, ways_of, write_json
from .interference import InterferenceCase, interference_to_json, measure_interference
from .kernels import measure_kernels
from .peers import choose_peers, start_peers
from .plot import MeasuredSteps
from .pool import RequestBlocks
from .resolved import resolve_engine
from .start import measure_starts
from .steady import BenchmarkCase, longest_sequence
from .workload import random_prompts

__all__ = ["ScenarioRun"]

Dtypes = tuple[str, str, str]
"""Of the model, its weights and its cache, as flags name them."""
AUTOMATIC_BUDGET = 8.0
"""Decode steps that fit the budget which interference is measured with when none is given."""


class ScenarioRun:
    """Interference, churn and starts: each point of the grid on an engine of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the device and the engines, and choose the modes.

        Raises:
            StepgraphError: an engine cannot be as it is asked for.
        """
        self.options = options
        self.console = Console(stderr=True)
        self.device = resolve_device(options.device)
        self.monitor = DeviceMonitor.of(self.device)
        self.ways = ways_of(options, options.mode or [modes_of(self.device)[-1]])
        dtypes = itertools.product(options.dtype, options.weight_dtype, options.kv_dtype)
        self.engines = list(itertools.product(options.model, dtypes, self.ways))
        for model, stored, way in self.engines:  # nothing is measured unless all of them can be
            resolve_engine(model, EngineConfig(**self._choices(stored, way)))
        self.peers = choose_peers(options.peer, self.device) if options.neighbours else []
        self.bandwidth = bandwidth.measure_read_bandwidth(self.device)
        self.document = new_document(self.device, self.bandwidth)
        """What `--output-json` writes; has an entry as soon as it is measured."""
        self.steps = MeasuredSteps(options)

    def say(self, text: str) -> None:
        """Tell on stderr what is going on."""
        self.console.print(text, style="dim", highlight=False, markup=False)

    def run(self) -> None:
        """Measure, and write the document after each entry."""
        options = self.options
        measure = getattr(self, options.scenario)
        entries = self.document[options.scenario] = []
        for engine in self.engines:
            for entry in measure(*engine):
                entries.append(entry)
                write_json(options, self.document)

    def interference(self, model: str, dtypes: Dtypes, way: Way) -> Iterator[dict[str, Any]]:
        """Yield the results without a budget, and with each."""
        options = self.options
        for input_len, batch_size in itertools.product(options.input_len, options.batch_size):
            case = InterferenceCase(model, batch_size, input_len, options.num_steps)
            rows = range(batch_size, batch_size + 3)  # nobody is timed in a far larger bucket
            config = EngineConfig(
                **self._choices(dtypes, way),
                max_num_seqs=case.max_num_seqs,
                buckets=tuple(rows),
                max_model_len=case.longest_sequence,
            )
            budgets: list[float | None] = [None, *(options.max_itl_ms or ())]
            for max_itl_ms in budgets:
                with self._engine(case, dataclasses.replace(config, max_itl_ms=max_itl_ms)) as e:
                    read_again = watch(self.monitor)
                    with self.steps.timed(e):
                        measured = measure_interference(e, case, seed=options.seed)
                    state, reads = read_again(), self.bandwidth
                    entry = interference_to_json(e, measured, max_itl_ms, bandwidth=reads)
                if max_itl_ms is None and not options.max_itl_ms:  # one that the next run takes
                    budgets.append(round(AUTOMATIC_BUDGET * entry["decode_step_ms"]["p50"], 2))
                self.steps.add(entry, measured.records)
                automatic = max_itl_ms is not None and not options.max_itl_ms
                yield {**entry, "automatic_budget": automatic, "device_state": state}

    def churn(self, model: str, dtypes: Dtypes, way: Way) -> Iterator[dict[str, Any]]:
        """Yield the results with each budget, or without one."""
        options = self.options
        points = itertools.product(options.output_len, options.input_len, options.batch_size)
        for output_len, input_len, batch_size in points:
            case = ChurnCase(model, batch_size, input_len, output_len, options.num_steps)
            for max_itl_ms in options.max_itl_ms or (None,):
                config = EngineConfig(
                    **self._choices(dtypes, way),
                    max_num_seqs=batch_size,
                    max_model_len=case.longest_sequence,
                    max_itl_ms=max_itl_ms,
                )
                with self._engine(case, config) as engine:
                    read_again = watch(self.monitor)
                    with self.steps.timed(engine):
                        measured = measure_churn(engine, case, seed=options.seed)
                    state, reads = read_again(), self.bandwidth
                    entry = churn_to_json(engine, measured, max_itl_ms, bandwidth=reads)
                self.steps.add(entry, measured.records)
                yield {**entry, "device_state": state}

    def prefix(self, model: str, dtypes: Dtypes, way: Way) -> Iterator[dict[str, Any]]:
        """Yield what sharing brings, for each point of the grid."""
        options = self.options
        source = resolve_source(model, config_only=True).config
        points = itertools.product(options.output_len, options.input_len, options.batch_size)
        sized = []
        for output_len, input_len, batch_size in points:
            case = BenchmarkCase(model, batch_size, input_len, output_len)
            longest = longest_sequence(case, options.prefill_chunk)
            config = EngineConfig(
                **self._choices(dtypes, way),
                max_num_seqs=batch_size,
                buckets=(batch_size,),
                max_model_len=longest,
            )
            prefix.check_case(case, config.block_size)
            blocks = RequestBlocks.of(source, config, longest).pool(batch_size)
            sized.append((case, dataclasses.replace(config, num_blocks=blocks)))
        for case, config in sized:  # nothing is measured unless all of it can be
            self._say_case(model, dtypes, way, case.batch_size, f"prompts of {case.input_len}")
            sharing = dataclasses.replace(config, prefix_cache=True)
            with self._start(model, config) as unshared, self._start(model, sharing) as shared:
                read_again = watch(self.monitor)
                runs = prefix.measure_prefix(
                    unshared,
                    shared,
                    case,
                    num_warmup=options.num_warmup,
                    num_iters=options.num_iters,
                    seed=options.seed,
                )
                entry = prefix.to_json(*runs, bandwidth=self.bandwidth)
                yield {**entry, "device_state": read_again()}

    def memory(self, model: str, dtypes: Dtypes, way: Way) -> Iterator[dict[str, Any]]:
        """Yield what memory there is and what it costs, for each number of rows."""
        options = self.options
        source = resolve_source(model, config_only=True).config
        base = EngineConfig(**self._choices(dtypes, way))
        input_lens = tuple(sorted(set(options.input_len)))
        sized = []
        for output_len, batch_size in itertools.product(options.output_len, options.batch_size):
            case = memory.MemoryCase(model, batch_size, input_lens, output_len, options.num_steps)
            sized.append((case, case.roomy(base, source), case.scarce(base, source)))
        for case, roomy, scarce in sized:  # nothing is measured unless all of it can be
            lengths = ", ".join(map(str, input_lens))
            self._say_case(model, dtypes, way, case.batch_size, f"prompts of {lengths}")
            before = resident_bytes(self.device)
            with ExitStack() as stack:

                def start(config: EngineConfig, stack: ExitStack = stack) -> Engine:
                    return stack.enter_context(self._start(model, config))

                engine = start(roomy)
                held = {"before": before, "started": resident_bytes(self.device)}
                read_again = watch(self.monitor)
                full = memory.measure_full_cache(engine, case, seed=options.seed)
                entry = memory.to_json(
                    engine, case, full, process_bytes=held, bandwidth=self.bandwidth
                )
                runs: dict[str, memory.Scarcity] = {}
                if scarce:
                    engines = {"none": engine, **{n: start(c) for n, c in scarce.items()}}
                    runs = memory.measure_scarcity(
                        engines,
                        case,
                        num_warmup=options.num_warmup,
                        num_iters=options.num_iters,
                        seed=options.seed,
                    )
                scarcity = [
                    run.to_json(name, runs["none"], self.bandwidth) for name, run in runs.items()
                ]
                entry |= {"interleaved": True, "scarcity": scarcity, "device_state": read_again()}
                yield entry

    def neighbours(self, model: str, dtypes: Dtypes, way: Way) -> Iterator[dict[str, Any]]:
        """Yield the results with each number of busy processes, for each point."""
        options = self.options
        counts = tuple(options.neighbours)
        cases = [
            neighbours.NeighboursCase(model, *point, options.num_steps, counts)
            for point in neighbours.points(options.batch_size, options.input_len)
        ]
        batch_sizes = tuple(sorted({case.batch_size for case in cases}))
        longest = max(case.longest_sequence(options.prefill_chunk) for case in cases)
        config = EngineConfig(
            **self._choices(dtypes, way),
            max_num_seqs=batch_sizes[-1],
            buckets=batch_sizes,
            max_model_len=longest,
        )
        resolve_engine(model, config)  # refused before weights are read
        with ExitStack() as stack:
            engine = stack.enter_context(self._start(model, config))
            peers = start_peers(
                stack, self.peers, model, config, required=bool(options.peer), say=self.say
            )
            for case in cases:
                rows = case.batch_size
                self._say_case(model, dtypes, way, rows, f"prompts of {case.input_len}")
                ours = neighbours.SideRun(neighbours.EngineSide(engine))
                theirs = [(peer, neighbours.SideRun(peer)) for peer in peers]
                prompts = random_prompts(engine.model_config, rows, case.input_len, options.seed)
                read_again = watch(self.monitor)
                neighbours.measure_neighbours(
                    [ours, *(run for _, run in theirs)],
                    case,
                    prompts,
                    longest - case.input_len,
                    num_warmup=options.num_warmup,
                    num_iters=options.num_iters,
                    say=self.say,
                )
                state = read_again()
                for entry in neighbours.to_json(engine, case, ours, theirs):
                    yield {**entry, "device_state": state}

    def start(self, model: str, dtypes: Dtypes, way: Way) -> Iterator[dict[str, Any]]:
        """Yield the first start and the second one."""
        buckets = sorted(self.options.batch_size)
        config = self._choices(dtypes, way)
        config |= {"max_num_seqs": buckets[-1], "buckets": buckets}
        # Refused here, not in a process.
        found = resolve_engine(model, EngineConfig(**{**config, "buckets": tuple(buckets)}))
        self.say(f"{model} {' '.join(dtypes)} {way}: two starts, the first with empty caches")
        for number, measured in enumerate(measure_starts(model, config), start=1):
            engine = {"model": model, "mode": way.mode, "kernels": found.kernels}
            yield {**engine, "buckets": buckets, "number": number, **measured}

    def kernels(self, model: str, dtypes: Dtypes, way: Way) -> Iterator[dict[str, Any]]:
        """Yield what each kernel of a decode step takes, beside what is predicted."""
        config = EngineConfig(**self._choices(dtypes, way))
        model_config = resolve_source(model, config_only=True).config
        resolved = ResolvedConfig.resolve(config, model_config)
        for context, rows in itertools.product(self.options.input_len, self.options.batch_size):
            self.say(f"{model} {' '.join(dtypes)}: kernels of {rows} rows of {context} tokens")
            names = dict(zip(("dtype", "weight_dtype", "kv_dtype"), dtypes, strict=True))
            for entry in measure_kernels(
                model_config,
                resolved,
                self.device,
                rows=rows,
                context=context,
                bandwidth=self.bandwidth,
            ):
                yield {"model": model, **names, "rows": rows, "context": context, **entry}

    def _choices(self, dtypes: Dtypes, way: Way) -> dict[str, Any]:
        dtype, weight_dtype, kv_dtype = dtypes
        return {
            "device": str(self.device),
            "dtype": dtype,
            "weight_dtype": weight_dtype,
            "kv_dtype": kv_dtype,
            "mode": way.mode,
            "kernels": way.kernels,
            "prefill_chunk": self.options.prefill_chunk,
            "prefix_cache": False,
            "seed": self.options.seed,
        }

    def _say_case(self, model: str, dtypes: Dtypes, way: Way, rows: int, what: str) -> None:
        dtype, weight_dtype, kv_dtype = dtypes
        self.say(f"{model} {dtype} weights {weight_dtype} KV {kv_dtype} {way}, {rows} rows, {what}")

    def _start(self, model: str, config: EngineConfig) -> Engine:
        return Engine.from_pretrained(model, config, progress=False)

    def _engine(self, case: InterferenceCase | ChurnCase, config: EngineConfig) -> Engine:
        budget = "no budget" if config.max_itl_ms is None else f"{config.max_itl_ms:g} ms"
        dtypes = (config.dtype, config.weight_dtype, config.kv_dtype)
        what = f"prompts of {case.input_len}, {budget}"
        way = Way(config.mode, config.kernels)
        self._say_case(case.model, dtypes, way, case.batch_size, what)
        return self._start(case.model, config)
