"""A profile of some decode steps of one case, by nsys or by torch's profiler.

Warm-up, compilation and captures come before the window, which opens before a step of the whole
batch in the one repetition that is measured, and closes before another.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path

import torch

from ...profiling import attribution, nsys
from ...profiling.kernel_names import KernelNames
from ...profiling.ranges import require_nvtx
from ...profiling.trace import TraceOperations, torch_trace, trace_operations
from ..config import EngineConfig
from ..engine.engine import Engine
from ..models.config import ModelConfig
from ..tools.step_costs import decode_operation_costs
from .benchmark_run import ModelKind
from .options import kernels_path, trace_path
from .results import write_json
from .scenarios.steady import BenchmarkCase, CaseRun, SteadyRun

__all__ = ["ProfileRun", "nsys_commands"]


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


class ProfileRun(SteadyRun):
    """One case, in one mode, with a profile of some of its steps."""

    profiled = True

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the device and measure its bandwidth.

        Raises:
            NvtxMissingError: nsys profiles this process, which lacks the package `nvtx`.
        """
        if options.profile == "nsys":
            require_nvtx("--profile nsys")
        super().__init__(options)
        self.names = KernelNames()
        self._window = contextlib.ExitStack()
        self._began = False
        self._found: TraceOperations | None = None

    def run(self) -> None:
        """Measure the case, and write the profile.

        Raises:
            WriteError: the trace, or the names of kernels cannot be written.
            TraceError: the trace has no work of a step.
        """
        with self._window:
            super().run()
        if self.options.profile == "torch":
            self._found = trace_operations(trace_path(self.options))
            (case,) = self.document["cases"]
            case["profile"] = self._found.to_json()
            write_json(self.options, self.document)
        if self.options.profile == "nsys" or self.names.steps:
            self.names.save(kernels_path(self.options))

    def start(self, kind: ModelKind, config: EngineConfig, what: str = "") -> Engine:
        """Start the engine, and record the nodes of the graphs that it captures."""
        with attribution.recording() as self.names:
            engine = super().start(kind, config, what)
        self.names.model = kind.model
        self.names.device = str(self.document["environment"]["device"])
        self.names.bandwidth_gb_s = self.bandwidth / 1e9
        if self.names.reason is not None:
            self.say(f"kernels of captured steps: {self.names.reason}")
        return engine

    def case_run(self, engine: Engine, case: BenchmarkCase) -> CaseRun:
        """Return the case, which begins and ends the profile."""
        steps = self.options.profile_steps
        model = engine.model_config
        on_gpu = engine.config.mode == "graph" and self.device.type == "cuda"
        if on_gpu and isinstance(model, ModelConfig):
            self.names.costs = decode_operation_costs(
                model,
                engine.config,
                rows=case.batch_size,
                context=case.input_len + (steps.start + steps.stop) // 2,
            )
        return CaseRun(engine, case, seed=self.options.seed, before_step=self._before_step)

    def profile_report(self) -> str:
        """Return where the profile is, and the time of each operation in it."""
        shown = f"{self.options.profile_steps.start}:{self.options.profile_steps.stop}"
        if self.options.profile == "nsys":
            return f"nsys profiled steps {shown}; names of kernels: {kernels_path(self.options)}"
        assert self._found is not None, "it follows `run`"
        if self.device.type == "cuda" and not self._found.device:
            self.say("torch recorded no work of the device: is another profiler attached to it?")
        text = f"\ntrace of steps {shown}: {trace_path(self.options)} (open it in https://ui.perfetto.dev)"
        if self.names.steps:
            text += f"; names of kernels: {kernels_path(self.options)}"
        return f"{text}\n\n{self._found.markdown()}"

    def _before_step(self, step: int) -> None:
        """Begin the profile before its first step, and end it after its last one."""
        if step == self.options.profile_steps.start and not self._began:
            self._began = True
            if self.options.profile == "nsys":
                self._window.enter_context(nsys.capture_window())
            else:
                self._window.enter_context(torch_trace(trace_path(self.options), self.names))
        elif step == self.options.profile_steps.stop:
            self._window.close()
