"""Decode steps of a whole batch, in one mode or in several, whose repetitions are interleaved.

A case prefills `batch_size` random prompts of `input_len` tokens and decodes them greedily, until
`output_len` - 1 steps have decoded the whole batch, `num_iters` times. Only those steps count, each
from one set of tokens on the host to the next: plan, commit and the caller's use of the tokens are
included. Prompts that are prefilled first decode alone for a while; that time is not counted.

Other runtimes (`--baseline`, `--peer`) run the same cases, interleaved as well, and so do numbers
of busy processes (`--neighbours`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from ...cache.memory.handler import MemoryBudgetError
from ...profiling.device_state import watch
from ..config import EngineConfig
from ..engine.engine import Engine
from ..errors import ConfigError
from ..loading.loader import resolve_source
from ..models.transformers import library
from .benchmark_run import BenchmarkRun, ModelKind, resolve_engine
from .peers import Peer, PeerError, checkpoint_of
from .results import describe_engine
from .step_profile import StepProfile
from .token_check import TokenCheck
from .workload import (
    BenchmarkCase,
    EngineRun,
    PeerRun,
    busy_processes,
    equal_share,
    interleave,
    random_prompts,
)

__all__ = ["SteadyScenario"]

SETTLING_SECONDS = 0.3
"""Pause before a runtime runs beside others: their threads may spin for 0.2 s after a step."""

Tokens = dict[BenchmarkCase, list[list[int]]]


class SteadyScenario:
    """Every case in each of the modes."""

    def __init__(self, options: argparse.Namespace, profile: StepProfile | None = None) -> None:
        """Check the device, the engines and the baseline, and measure the bandwidth.

        Raises:
            StepgraphError: an engine cannot run as configured, or transformers is missing.
        """
        self.options = options
        points = itertools.product(options.output_len, options.input_len, options.batch_size)
        self.grid = [BenchmarkCase(rows, length, output) for output, length, rows in points]
        if any(spec.python == sys.executable for spec in options.peer if spec[0] == "transformers"):
            try:  # fails before anything is measured
                library.import_transformers("comparing with transformers", "baseline")
            except ConfigError as error:
                raise PeerError(str(error)) from error
        sizes = {
            "max_num_seqs": max(options.batch_size),
            "max_model_len": max(
                case.longest_sequence(options.prefill_chunk) for case in self.grid
            ),
            "buckets": tuple(options.batch_size),
        }
        self.run = BenchmarkRun(options, sizes)
        whole = options.tensor_parallel in (None, [1])  # the reference has all weights
        if options.check and not whole:
            raise ConfigError("--check compares tokens on one device: leave out --tensor-parallel")
        on_cuda = self.run.device.type == "cuda"
        self.checks = on_cuda and whole if options.check is None else options.check
        others = [spec.name for spec in options.peer if spec.name != "transformers"]
        if others and on_cuda:
            raise PeerError(
                f"--peer {' '.join(others)} measures on a CPU, and the device is"
                f" {str(self.run.device)!r}: give --device cpu"
            )
        self._profile = profile
        self._peer_error: PeerError | None = None

    def measure(self) -> None:
        """Measure every case, and write the document after each.

        Raises:
            PeerError: another runtime failed; all cases of ours were measured and written.
        """
        for kind in self.run.kinds:
            with ExitStack() as stack:
                self._measure_kind(kind, self._start_peers(stack, kind))
        if self._peer_error is not None:
            raise self._peer_error

    def _start_peers(self, stack: ExitStack, kind: ModelKind) -> list[Peer]:
        """Start the other runtimes with the checkpoint and the limits of an engine.

        Raises:
            PeerError: a runtime fails, or a preset cannot be saved as a checkpoint.
        """
        (model, (config, *_)), device = kind, str(self.run.device)
        peers: list[Peer] = []
        if not self.options.peer:
            return peers
        source = resolve_source(model, config_only=True, model_impl=config.model_impl)
        checkpoint = stack.enter_context(
            checkpoint_of(model, config.dtype, self.options.seed, device)
        )
        for spec in self.options.peer:
            self.run.say(f"loading {model} in {spec.name}")
            peer = Peer(
                spec,
                checkpoint,
                device=device,
                compiled=self.options.baseline == "compiled",
                dtype=source.config.torch_dtype if config.dtype == "auto" else config.dtype,
                weight_dtype=config.weight_dtype,
                threads=resolve_engine(model, config).threads,
                rows=config.max_num_seqs,
                tokens=config.max_model_len,
                batch_tokens=config.prefill_chunk + config.max_num_seqs,
            )
            peers.append(stack.enter_context(closing(peer)))
        return peers

    def _measure_kind(self, kind: ModelKind, peers: list[Peer]) -> None:
        """Measure the cases of one model and dtypes in every mode.

        Several engines, or an engine and other runtimes, have a cache of the size of the cases, so
        that they fit into memory together; engines that do not are started one after the other.
        """
        (model, configs), eager = kind, Tokens()
        if len(configs) > 1 or peers:
            each = (configs[0].max_model_len or 0) + configs[0].block_size
            tokens = configs[0].max_num_seqs * each
            configs = [replace(config, memory_tokens=tokens) for config in configs]
        if len(configs) > 1:
            with ExitStack() as stack:
                try:
                    engines = [stack.enter_context(self._start(model, one)) for one in configs]
                except MemoryBudgetError as error:
                    reason, *_ = str(error).splitlines()
                    self.run.say(f"modes run one after the other, not interleaved: {reason}")
                else:
                    self._measure(model, engines, eager, peers)
                    return
        for config in configs:
            with self._start(model, config) as engine:
                self._measure(model, [engine], eager, peers)

    def _start(self, model: str, config: EngineConfig) -> Engine:
        if self._profile is None:
            return self.run.start(model, config)
        with self._profile.recording(self.run, model):
            return self.run.start(model, config)

    def _measure(
        self, model: str, engines: Sequence[Engine], eager: Tokens, peers: list[Peer]
    ) -> None:
        """Measure each case of each engine; `eager` holds the tokens from eager mode."""
        check = None
        if self.checks:
            unpacked = [engine for engine in engines if engine.decoder.kernels.pack is None]
            check = TokenCheck((unpacked or engines)[0], model)
        for number, case in enumerate(self.grid, 1):
            about = f"{case.batch_size} rows after {case.input_len} tokens"
            self.run.say(f"{model}, {number} of {len(self.grid)}: {about}")
            while True:
                try:
                    entries = self._measure_case(model, engines, case, eager, check, peers)
                    break
                except PeerError as error:
                    self.run.say(f"from here on without other runtimes: {error}")
                    self._peer_error = error.with_traceback(None)  # its frames hold the engines
                    peers.clear()
            self.run.document["cases"] += entries
            self.run.write()

    def _measure_case(
        self,
        model: str,
        engines: Sequence[Engine],
        case: BenchmarkCase,
        eager: Tokens,
        check: TokenCheck | None,
        peers: Sequence[Peer],
    ) -> list[dict[str, Any]]:
        """Interleave the repetitions of one case; return an entry of each engine and number.

        Raises:
            PeerError: another runtime failed.
        """
        options, profile = self.options, self._profile
        prompts = random_prompts(
            engines[0].model_config, case.batch_size, case.input_len, options.seed
        )
        before_step = None if profile is None else profile.watch(engines[0], case)
        ours: list[tuple[int, EngineRun]] = []
        theirs: list[tuple[int, PeerRun]] = []
        for busy in options.neighbours:
            ours += [(busy, EngineRun(engine, case, prompts, before_step)) for engine in engines]
            theirs += [(busy, PeerRun(peer, case, prompts)) for peer in peers]
        runs: list[tuple[int, EngineRun | PeerRun]] = [*ours, *theirs]
        for _, run in runs[: len(engines)] + runs[len(ours) : len(ours) + len(peers)]:
            for _ in range(options.num_warmup):
                run.decode()
        pause = SETTLING_SECONDS if peers else 0.0
        sides = [partial(_repeat, run, busy, pause) for busy, run in runs]
        read_again = watch(self.run.monitor)
        interleave(sides, options.num_iters, options.turn_seconds)
        state = read_again()
        entries = []
        for busy, own in ours:
            if own.engine.config.mode == "eager" and own.engine.config.kernels != "native":
                eager[case] = own.token_ids
            same = equal_share(own.token_ids, eager[case]) if case in eager else None
            entries.append(
                {
                    **describe_engine(own.engine, model),
                    **own.to_json(self.run.bandwidth),
                    "neighbours": busy,
                    "tokens_equal_eager": same,
                    "check": None if check is None else check.check(prompts, own.outputs),
                    "interleaved": len(engines) > 1,
                    "baselines": [peer.to_json(own) for number, peer in theirs if number == busy],
                    "device_state": state,
                    "profiled": profile is not None,
                }
            )
        return entries


def _repeat(run: EngineRun | PeerRun, neighbours: int, pause: float) -> None:
    with busy_processes(neighbours):
        time.sleep(pause)
        run.repeat()
