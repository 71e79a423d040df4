"""What all measurements with engines share: device, engines, progress and the document."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...profiling import bandwidth
from ...profiling.device_state import DeviceMonitor
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.rank_start import check_can_split
from ..errors import ConfigError
from ..kernels import cpu_kernels_obstacle
from ..loading.loader import resolve_source
from ..models.resolved_config import ResolvedConfig, resolve_device
from .options import MODES
from .results import new_document, settle_bandwidth, write_json

__all__ = ["BenchmarkRun", "ModelKind", "StepMode", "modes_of", "resolve_engine"]


class ModelKind(NamedTuple):
    """A model with its dtypes (of the model, its linear weights, its cache), as flags name them."""

    model: str
    dtype: str
    weight_dtype: str
    kv_dtype: str

    def __str__(self) -> str:
        dtypes = zip(("dtype", "weights", "KV"), self[1:], strict=True)
        return " ".join([self.model, *(f"{n} {d}" for n, d in dtypes if d != "auto")])


class StepMode(NamedTuple):
    """How the steps of an engine run, as flags name it."""

    mode: str
    kernels: str
    model_impl: str = "auto"
    ranks: int = 1

    @classmethod
    def of(cls, config: EngineConfig) -> StepMode:
        """Return the mode of an engine."""
        return cls(config.mode, config.kernels, config.model_impl, config.tensor_parallel)

    def __str__(self) -> str:
        kernels = "" if self.kernels == "auto" else f" with {self.kernels} kernels"
        layers = f", layers of {self.model_impl}" if self.model_impl == "transformers" else ""
        ranks = "" if self.ranks == 1 else f", {self.ranks} ranks"
        return self.mode + kernels + layers + ranks


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


class BenchmarkRun:
    """One run of the command line."""

    def __init__(
        self,
        options: argparse.Namespace,
        measure: Callable[[BenchmarkRun, ModelKind, StepMode], Iterator[dict[str, Any]]]
        | None = None,
    ) -> None:
        """Check the device and all engines, and measure the bandwidth.

        Args:
            options: the checked command line.
            measure: yields the entries of a model and mode as they are measured; None: `run` does
                something else.

        Raises:
            StepgraphError: an engine cannot run as configured; nothing was measured yet.
        """
        self.options = options
        self._measure_each = measure
        self.device = resolve_device(options.device)
        self.monitor = DeviceMonitor.of(self.device)
        self.modes = self._step_modes(options.mode or modes_of(self.device)[-1:])
        self.kinds = self._check_kinds()
        self.say("measuring the read bandwidth of the device")
        self.bandwidth = bandwidth.measure_read_bandwidth(self.device)
        self.document = new_document(self.device, self.bandwidth, options)
        """The content of `--output-json`; has an entry as soon as it is measured."""

    def run(self) -> None:
        """Measure, and write the document after each entry."""
        assert self._measure_each is not None
        entries = self.document[self.options.scenario] = []
        for kind, mode in itertools.product(self.kinds, self.modes):
            for entry in self._measure_each(self, kind, mode):
                entries.append(entry)
                write_json(self.options, self.document)

    def settle(self) -> None:
        """Measure the bandwidth again, after all cases, and write the document."""
        settle_bandwidth(self.document, bandwidth.measure_read_bandwidth(self.device))
        write_json(self.options, self.document)

    def say(self, text: str) -> None:
        """Print progress to stderr."""
        print(text, file=sys.stderr, flush=True)

    def config(self, kind: ModelKind, mode: StepMode, **sizes: Any) -> EngineConfig:
        """Return the configuration of an engine; `sizes` are further fields."""
        options = self.options
        fields: dict[str, Any] = {
            "device": str(self.device),
            **dict(zip(("dtype", "weight_dtype", "kv_dtype"), kind[1:], strict=True)),
            "mode": mode.mode,
            "kernels": mode.kernels,
            "model_impl": mode.model_impl,
            "prefill_chunk": options.prefill_chunk,
            "prefix_cache": False,  # every repetition prefills its prompts
            "seed": options.seed,
            "tensor_parallel": mode.ranks,
            "threads": options.threads,
        }
        return EngineConfig(**fields | sizes)

    def start(self, kind: ModelKind, config: EngineConfig, what: str = "") -> Engine:
        """Start an engine; `what` is what it is started for.

        With `--verbose`, its memory plan and the phases of its start are printed.
        """
        self.say(", ".join(filter(None, (f"{kind} {StepMode.of(config)}", what))))
        engine = Engine.from_pretrained(kind.model, config, progress=False)
        if self.options.verbose:
            self.say(f"{engine.memory_plan.format()}\n{_describe_start(engine.stats())}")
        return engine

    def _step_modes(self, modes: Iterable[str]) -> list[StepMode]:
        """Return every combination of modes, `--kernels`, `--model-impl` and ranks once.

        Eager first: tokens and logits of the other modes are compared with it.
        """
        ordered = sorted(modes, key=MODES.index)
        options = self.options
        ranks = options.tensor_parallel or [1]
        every = itertools.product(ordered, options.kernels, options.model_impl, ranks)
        return list(dict.fromkeys(StepMode(*values) for values in every))

    def _check_kinds(self) -> list[ModelKind]:
        """Return the models and dtypes to be measured, once each, in the order of the flags.

        `auto` and the dtype that it resolves to are one engine.
        """
        options = self.options
        kinds: dict[tuple[object, ...], ModelKind] = {}
        for values in itertools.product(
            options.model, options.dtype, options.weight_dtype, options.kv_dtype
        ):
            kind = ModelKind(*values)
            for mode in self.modes:
                found = resolve_engine(kind.model, self.config(kind, mode))
                kinds.setdefault((kind.model, found.dtype, found.weights, found.storage), kind)
        return list(kinds.values())


def _describe_start(stats: Mapping[str, Any]) -> str:
    """Return one line about the start of an engine, from its statistics."""
    start, code = stats["start"], stats["start"]["code_cache"]
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start["phases"].items())
    return (
        f"started in {start['seconds']:.1f} s ({phases}), {stats['prepared']['steps']} steps ready;"
        f" compiled code: {code['hits']} graphs found, {code['misses']} compiled"
    )
