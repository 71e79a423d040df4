"""What the scenarios share: device, engines, progress and the document."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import psutil
import torch

from ...cache.memory.handler import format_bytes
from ...profiling import bandwidth, ranges
from ...profiling.atomic_write import write_file
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.rank_start import check_can_split
from ..errors import ConfigError
from ..kernels import cpu_kernels_obstacle
from ..loading.loader import resolve_source
from ..models.resolved_config import ResolvedConfig, resolve_device
from .html_report import write_report
from .options import MODES, engine_configs
from .results import new_document, settle_bandwidth

SAMPLE_SECONDS = 0.005
"""Between two samples of memory during a start."""


class ModelKind(NamedTuple):
    """A model with its dtypes, and an engine of it for each mode."""

    model: str
    configs: list[EngineConfig]


def modes_of(device: torch.device) -> tuple[str, ...]:
    """Return the modes that a device supports, the fastest last."""
    if device.type != "cpu":
        return MODES
    return ("eager", "compile") if cpu_kernels_obstacle() is None else ("eager",)


def resolve_engine(model: str, config: EngineConfig) -> ResolvedConfig:
    """Return the choices for a model; only its configuration is read.

    Raises:
        CheckpointError: the model does not exist.
        ConfigError: it cannot run with this configuration: names the model and the reason.
    """
    source = resolve_source(model, config_only=True, model_impl=config.model_impl)
    try:
        resolved = ResolvedConfig.resolve(config, source.config)
        if config.tensor_parallel > 1:
            check_can_split(source, resolved)
        return resolved
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from error


class StartMemory:
    """Peaks of the anonymous memory of this process while an engine starts.

    Pages of mapped files are left out: the system can reclaim them at any time.
    """

    def __init__(self) -> None:
        self.peaks = {"peak_bytes": 0, "load_peak_bytes": 0}
        """Most bytes above those at the beginning, of the start and of loading the weights."""
        self._before = {"peak_bytes": self._anonymous()}
        self._open: list[str] = []

    def push(self, name: str, _: ranges.Payload) -> None:
        """A range began."""
        self._open.append(name)
        if name == ranges.LOAD:
            self._before["load_peak_bytes"] = self._anonymous()

    def pop(self) -> None:
        """The innermost range ended."""
        if self._open.pop() == ranges.LOAD:
            self._sample()
            del self._before["load_peak_bytes"]

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample the memory during the block."""
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(SAMPLE_SECONDS):
                self._sample()

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            with ranges.listening(self):
                yield
        finally:
            ended.set()
            thread.join()

    def _sample(self) -> None:
        now = self._anonymous()
        for name, before in self._before.copy().items():
            self.peaks[name] = max(self.peaks[name], now - before)

    def _anonymous(self) -> int:
        held = psutil.Process().memory_info()
        return int(held.rss) - int(getattr(held, "shared", 0))  # Linux knows both


class BenchmarkRun:
    """One run of the command line."""

    def __init__(self, options: argparse.Namespace, sizes: dict[str, Any]) -> None:
        """Check the device and all engines, and measure the bandwidth.

        Args:
            options: the checked command line.
            sizes: fields of `EngineConfig` that all engines share.

        Raises:
            StepgraphError: an engine cannot run as configured; nothing was measured yet.
        """
        self.options = options
        self.device = resolve_device(options.device)
        self.kinds = self._resolve_kinds(sizes)
        self.say("measuring the read bandwidth of the device")
        self.bandwidth = bandwidth.measure_read_bandwidth(self.device)
        self.document = new_document(self.device, self.bandwidth, options)
        """The content of `--output-json`; has an entry as soon as it is measured."""
        self.start_memory: WeakKeyDictionary[Engine, dict[str, int]] = WeakKeyDictionary()
        """The `StartMemory.peaks` of each engine."""

    def settle(self) -> None:
        """Measure the bandwidth again, after all cases, and write the document."""
        settle_bandwidth(self.document, bandwidth.measure_read_bandwidth(self.device))
        self.write()

    def write(self) -> None:
        """Write the document as it is now to the files of `--output-json` and `--html`, if given.

        Raises:
            WriteError: it cannot be written.
        """
        if self.options.output_json is not None:
            write_file(self.options.output_json, json.dumps(self.document, indent=1) + "\n")
        if self.options.html is not None and self.document["cases"]:
            write_report(self.options.html, self.document)

    def say(self, text: str) -> None:
        """Print progress to stderr."""
        print(text, file=sys.stderr, flush=True)

    def start(self, model: str, config: EngineConfig, what: str = "") -> Engine:
        """Start an engine; `what` is what it is started for.

        With `--verbose`, its memory plan and the phases of its start are printed.
        """
        stored = {"dtype": config.dtype, "weights": config.weight_dtype, "KV": config.kv_dtype}
        stored["activations"] = config.activation_dtype
        kind = [model, *(f"{name} {dtype}" for name, dtype in stored.items() if dtype != "auto")]
        how = [f"{' '.join(kind)} {config.mode}"]
        how += [f"{config.kernels} kernels"] * (config.kernels != "auto")
        how += [f"layers of {config.model_impl}"] * (config.model_impl == "transformers")
        how += [f"{config.tensor_parallel} ranks"] * (config.tensor_parallel > 1)
        self.say(", ".join([*how, what] if what else how))
        memory = StartMemory()
        with memory.sampling():
            engine = Engine.from_pretrained(model, config, progress=False)
        self.start_memory[engine] = memory.peaks
        if self.options.verbose:
            stats = engine.stats()
            peak, load = map(format_bytes, memory.peaks.values())
            start, code = stats["start"], stats["start"]["code_cache"]
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start["phases"].items())
            self.say(
                f"{engine.memory_plan.format()}\nstarted in {start['seconds']:.1f} s ({phases}),"
                f" at most {peak} of anonymous memory ({load} while loading),"
                f" {stats['prepared']['steps']} steps ready; compiled code: {code['hits']} graphs"
                f" found, {code['misses']} compiled"
            )
        return engine

    def _resolve_kinds(self, sizes: dict[str, Any]) -> list[ModelKind]:
        """Return the models and dtypes to be measured, once each, in the order of the flags.

        `auto` and the dtype that it resolves to are one engine. Eager mode comes first: tokens of
        the other modes are compared with it.
        """
        options = self.options
        modes = sorted(options.mode or modes_of(self.device)[-1:], key=MODES.index)
        shared: dict[str, Any] = {
            "device": str(self.device),
            "prefill_chunk": options.prefill_chunk,
            "prefix_cache": False,  # every repetition prefills its prompts
            "seed": options.seed,
            "threads": options.threads,
            **sizes,
        }
        kinds: dict[tuple[object, ...], ModelKind] = {}
        for model, configs in engine_configs(options, modes, options.tensor_parallel, **shared):
            found = [resolve_engine(model, config) for config in configs][-1]
            rounded = found.user.activation_dtype
            key = model, found.dtype, found.weights, rounded, found.storage
            kinds.setdefault(key, ModelKind(model, configs))
        return list(kinds.values())
