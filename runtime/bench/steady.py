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
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...cache.memory.handler import MemoryBudgetError
from ...profiling import attribution, nsys
from ...profiling.attribution import KernelNames
from ...profiling.device_state import watch
from ...profiling.ranges import require_nvtx
from ...profiling.report import read_report, report_text
from ...profiling.trace import torch_trace
from ..engine.engine import Engine
from ..errors import ConfigError
from ..loading.loader import resolve_source
from ..models.config import ModelConfig
from ..models.transformers.attention import import_transformers
from ..tools.step_costs import operation_bytes
from .benchmark_run import BenchmarkRun, ModelKind, resolve_engine
from .peers import Peer, PeerError, checkpoint_of
from .results import describe_engine
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

SETTLING_SECONDS = 0.3
"""Pause before another runtime runs: threads may spin for 0.2 s after a step."""

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
                import_transformers("comparing with transformers", "baseline")
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
                    engines = [stack.enter_context(self.run.start(model, one)) for one in configs]
                except MemoryBudgetError as error:
                    reason, *_ = str(error).splitlines()
                    self.run.say(f"modes run one after the other, not interleaved: {reason}")
                else:
                    self._measure(model, engines, eager, peers)
                    return
        for config in configs:
            with self.run.start(model, config) as engine:
                self._measure(model, [engine], eager, peers)

    def _measure(
        self, model: str, engines: Sequence[Engine], eager: Tokens, peers: list[Peer]
    ) -> None:
        """Measure each case of each engine; `eager` holds the tokens from eager mode."""
        check = None
        if self.checks:
            unpacked = [e for e in engines if e.decoder.kernels.pack_parts is None]
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
        before_step = None if profile is None else profile.watch(self.run, engines[0], model, case)
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
        read_again = watch(self.run.device)
        interleave(sides, options.num_iters, options.turn_seconds)
        state = read_again()
        entries = []
        for busy, own in ours:
            if own.engine.config.mode == "eager" and own.engine.config.kernels != "native":
                eager[case] = own.token_ids
            same = equal_share(own.token_ids, eager[case]) if case in eager else None
            measured = own.to_json(self.run.bandwidth)
            measured["start"] |= self.run.start_memory[own.engine]
            entries.append(
                {
                    **describe_engine(own.engine, model),
                    **measured,
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


def nsys_commands(options: argparse.Namespace) -> str:
    """Return the shell commands that profile a checked command line and report the profile."""
    name = str(options.profile_output)
    on_cuda = options.device not in ("auto", "cpu")
    profile = nsys.nsys_command(
        [sys.executable, "-m", *options.command],
        output=name,
        graph_trace=options.graph_trace,
        on_cuda=on_cuda or (options.device == "auto" and torch.cuda.is_available()),
    )
    report = shlex.join(["stepgraph", "report", f"{name}.sqlite"])
    return "\n".join([profile, nsys.export_command(Path(f"{name}.nsys-rep")), report])


class StepProfile:
    """A profile of some decode steps of the only case, by nsys or by torch's profiler.

    Warm-up, compilation and captures come before the window, which opens before a step of the whole
    batch in the one repetition that is measured, and closes before another.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Check that the profiler is installed.

        Raises:
            NvtxMissingError: nsys profiles this process, which lacks the package `nvtx`.
        """
        if options.profile == "nsys":
            require_nvtx("--profile nsys")
        self.options = options
        self._names = KernelNames()
        self._window = ExitStack()

    def open(self) -> ExitStack:
        """Record the nodes of captured steps; return what ends the profile at an error too."""
        self._names = self._window.enter_context(attribution.recording())
        return self._window

    def watch(
        self, run: BenchmarkRun, engine: Engine, model: str, case: BenchmarkCase
    ) -> Callable[[int], None]:
        """Return what is called before each step: it begins and ends the profile."""
        steps, config, names = self.options.profile_steps, engine.model_config, self._names
        names.model, names.device = model, str(run.document["environment"]["device"])
        names.bandwidth_gb_s = run.bandwidth / 1e9
        if names.reason is not None:
            run.say(f"kernels of captured steps: {names.reason}")
        on_gpu = engine.config.mode == "graph" and engine.config.device.type == "cuda"
        if on_gpu and isinstance(config, ModelConfig):
            context = case.input_len + (steps.start + steps.stop) // 2
            names.bytes_read = operation_bytes(
                config, engine.config, rows=case.batch_size, context=context
            )

        def before_step(step: int) -> None:
            if step == steps.start:
                window = nsys.capture_window()
                if self.options.profile == "torch":
                    window = torch_trace(self.options.trace_path, names)
                self._window.enter_context(window)
            elif step == steps.stop:
                self._window.close()

        return before_step

    def finish(self, run: BenchmarkRun) -> str:
        """Write the profile; return where it is, and the time of each operation in it.

        Raises:
            WriteError: the names of kernels cannot be written.
            TraceError: the trace has no work of a step.
        """
        shown = f"{self.options.profile_steps.start}:{self.options.profile_steps.stop}"
        names = f"names of kernels: {self.options.kernels_path}"
        if self.options.profile == "nsys" or self._names.steps:
            self._names.save(self.options.kernels_path)
        if self.options.profile == "nsys":
            return f"nsys profiled steps {shown}; {names}"
        path = self.options.trace_path
        found = read_report(path, self._names)
        (case,) = run.document["cases"]
        case["profile"] = asdict(found)
        run.write()
        if run.device.type == "cuda" and found.graph_trace is None:
            run.say("torch recorded no captured step: is another profiler attached to the device?")
        text = f"\ntrace of steps {shown}: {path} (open it in https://ui.perfetto.dev)"
        return f"{text}{f'; {names}' if self._names.steps else ''}\n\n{report_text(found)}"
