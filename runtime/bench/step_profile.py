"""A profile of some decode steps of one case, by nsys or by torch's profiler.

Warm-up, compilation and captures come before the window, which opens before a step of the whole
batch in the one repetition that is measured, and closes before another.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from ...profiling import attribution, nsys
from ...profiling.attribution import KernelNames
from ...profiling.ranges import require_nvtx
from ...profiling.report import read_report, report_text
from ...profiling.trace import torch_trace
from ..engine.engine import Engine
from ..models.config import ModelConfig
from ..tools.step_costs import decode_operation_costs
from .benchmark_run import BenchmarkRun
from .options import kernels_path, trace_path
from .workload import BenchmarkCase

__all__ = ["StepProfile", "nsys_commands"]


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
    """The profile of the only case of a command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Check that the profiler is installed.

        Raises:
            NvtxMissingError: nsys profiles this process, which lacks the package `nvtx`.
        """
        if options.profile == "nsys":
            require_nvtx("--profile nsys")
        self.options = options
        self._names = KernelNames()
        self.window = ExitStack()

    @contextmanager
    def recording(self, run: BenchmarkRun, model: str) -> Iterator[None]:
        """Record the nodes of the graphs that an engine captures while it starts."""
        with attribution.recording() as names:
            yield
        names.model = model
        names.device = str(run.document["environment"]["device"])
        names.bandwidth_gb_s = run.bandwidth / 1e9
        if names.reason is not None:
            run.say(f"kernels of captured steps: {names.reason}")
        self._names = names

    def watch(self, engine: Engine, case: BenchmarkCase) -> Callable[[int], None]:
        """Return what is called before each step: it begins and ends the profile."""
        steps, model = self.options.profile_steps, engine.model_config
        on_gpu = engine.config.mode == "graph" and engine.config.device.type == "cuda"
        if on_gpu and isinstance(model, ModelConfig):
            context = case.input_len + (steps.start + steps.stop) // 2
            self._names.costs = decode_operation_costs(
                model, engine.config, rows=case.batch_size, context=context
            )

        def before_step(step: int) -> None:
            if step == steps.start:
                window = nsys.capture_window()
                if self.options.profile == "torch":
                    window = torch_trace(trace_path(self.options), self._names)
                self.window.enter_context(window)
            elif step == steps.stop:
                self.window.close()

        return before_step

    def finish(self, run: BenchmarkRun) -> str:
        """Write the profile; return where it is, and the time of each operation in it.

        Raises:
            WriteError: the names of kernels cannot be written.
            TraceError: the trace has no work of a step.
        """
        shown = f"{self.options.profile_steps.start}:{self.options.profile_steps.stop}"
        names = f"names of kernels: {kernels_path(self.options)}"
        if self.options.profile == "nsys" or self._names.steps:
            self._names.save(kernels_path(self.options))
        if self.options.profile == "nsys":
            return f"nsys profiled steps {shown}; {names}"
        path = trace_path(self.options)
        found = read_report(path, self._names)
        (case,) = run.document["cases"]
        case["profile"] = asdict(found)
        run.write()
        if run.device.type == "cuda" and found.graph_trace is None:
            run.say("torch recorded no captured step: is another profiler attached to the device?")
        text = f"\ntrace of steps {shown}: {path} (open it in https://ui.perfetto.dev)"
        return f"{text}{f'; {names}' if self._names.steps else ''}\n\n{report_text(found)}"
