"""Decode steps of whole batches: which engines are started, and what is measured on each."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ...profiling import bandwidth
from ..config import DTYPES, EngineConfig, resolve_device
from ..engine import Engine
from ..loading import resolve_source
from .baseline import BaselineCase, TransformersBaseline
from .document import modes_of, new_document, write_json
from .hf_config import import_transformers
from .options import MODES
from .steady import BenchmarkCase, Measurement, longest_sequence, measure, to_json
from .tables import describe_start
from .workload import random_prompts

__all__ = ["SteadyRun"]

SHARED_MEMORY_FRACTION = 0.5
"""Of the memory that is free, for an engine beside which another runtime needs some."""


class SteadyRun:
    """One run of the command line: which engines to start, what to measure on each."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the device, and what is compared with; measure the bandwidth."""
        self.options = options
        self.console = Console(stderr=True)
        if options.baseline is not None:
            import_transformers()  # before anything is measured for a comparison that cannot be
        self.device = resolve_device(options.device)
        # Eager first: it is what the other modes' tokens and logits are compared with.
        self.modes = [m for m in MODES if m in (options.mode or modes_of(self.device))]
        self.grid = [
            (batch_size, input_len, output_len)
            for output_len in options.output_len
            for input_len in options.input_len
            for batch_size in options.batch_size
        ]
        self.say("measuring the read bandwidth of the device")
        self.bandwidth = bandwidth.measure_read_bandwidth(self.device)

    def say(self, text: str) -> None:
        """Tell on stderr what is going on."""
        self.console.print(text, style="dim", highlight=False)

    def run(self) -> dict[str, Any]:
        """Measure every case; return the document that `--output-json` writes after each."""
        options = self.options
        document = new_document(self.device, self.bandwidth)
        cases = document["cases"]
        with Progress(
            console=self.console, transient=True, disable=not self.console.is_terminal
        ) as progress:
            models = list(itertools.product(options.model, options.dtype))
            stored = list(itertools.product(options.weight_dtype, options.kv_dtype))
            engines = len(models) * len(stored) * len(self.modes)
            task = progress.add_task("starting", total=engines * len(self.grid))
            for model, dtype in models:
                with self.baseline(model, dtype) as baseline:
                    for weight_dtype, kv_dtype in stored:
                        kind = (model, dtype, weight_dtype, kv_dtype)
                        eager: dict[BenchmarkCase, Measurement] = {}
                        for mode in self.modes:
                            run = self.run_engine(*kind, mode, eager, baseline)
                            for case, measured, entry in run:
                                if mode == "eager":
                                    eager[case] = measured
                                cases.append(entry)
                                write_json(options, document)
                                name = " ".join((*kind, mode))
                                progress.update(task, advance=1, description=name)
        return document

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

    def run_engine(
        self,
        model: str,
        dtype: str,
        weight_dtype: str,
        kv_dtype: str,
        mode: str,
        eager: Mapping[BenchmarkCase, Measurement],
        baseline: TransformersBaseline | None,
    ) -> Iterator[tuple[BenchmarkCase, Measurement, dict[str, Any]]]:
        """Start an engine and yield each of its cases as it is measured."""
        options = self.options
        config = EngineConfig(
            device=str(self.device),
            dtype=dtype,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            mode=mode,
            prefix_cache=False,  # every repetition prefills its prompts
            # The other runtime's cache is on the device as well.
            memory_fraction=None if baseline is None else SHARED_MEMORY_FRACTION,
            max_rows=max(options.batch_size),
            buckets=tuple(options.batch_size),
            prefill_chunk=options.prefill_chunk,
            steps_per_launch=options.steps_per_launch,
            seed=options.seed,
        )
        cases = [BenchmarkCase(model, *point) for point in self.grid]
        longest = max(
            longest_sequence(case, config.prefill_chunk, config.steps_per_launch) for case in cases
        )
        config = dataclasses.replace(config, max_model_len=longest)
        with Engine.from_pretrained(model, config, progress=False) as engine:
            self.say(
                f"{model} {dtype} weights {weight_dtype} KV {kv_dtype} {mode}\n"
                + engine.memory_plan.format()
            )
            self.say(describe_start(engine.stats()))
            for case in cases:
                turns: BaselineCase | None = None
                if baseline is not None:
                    self.say(
                        f"{case.batch_size} rows after {case.input_len} in transformers, weights"
                        f" and cache in {baseline.dtype}"
                    )
                    prompts = random_prompts(
                        engine.model_config, case.batch_size, case.input_len, options.seed
                    )
                    turns = baseline.prepare(prompts, case.output_len - 1, config.prefill_chunk)
                measured = measure(
                    engine,
                    case,
                    num_warmup=options.num_warmup,
                    num_iters=options.num_iters,
                    seed=options.seed,
                    after_each=None if turns is None else turns.run,
                )
                reference = measured if mode == "eager" else eager.get(case)
                document = to_json(
                    engine,
                    measured,
                    bandwidth=self.bandwidth,
                    eager=reference,
                    baselines=[]
                    if turns is None
                    else turns.to_json(measured.step_ms, measured.token_ids),
                )
                yield case, measured, document
