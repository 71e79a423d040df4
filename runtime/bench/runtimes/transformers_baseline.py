"""The same model with the same weights in transformers, as a baseline.

It decodes the same prompts greedily by two methods: `generate` with a static cache, and continuous
batching. Their repetitions are interleaved with ours, with the same number of steps of the whole
batch, and their tokens are compared with ours. Needs the extra "baseline".
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ....profiling.stats import Summary
from ...models.decoder_model import DecoderConfig
from ..workload import equal_share
from .continuous_batching import ContinuousBatching, Decoded
from .static_generate import StaticGenerate
from .transformers_config import BaselineError, import_transformers
from .transformers_model import load_model

__all__ = ["BaselineCase", "BaselineError", "TransformersBaseline"]


class Method(Protocol):
    """A method by which transformers decodes a batch; every failure is a `BaselineError`."""

    @property
    def name(self) -> str:
        """Its name in the JSON."""

    def prepare(self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int) -> None:
        """Prepare a case and warm it up.

        Args:
            prompts: token ids, all prompts of one length.
            steps: steps of the whole batch that each run returns.
            max_batch_tokens: prompt tokens of a step, if prompts are prefilled in chunks.
        """

    def run(self) -> Decoded:
        """Decode the prompts once."""

    def describe(self) -> dict[str, Any]:
        """Return compilation, graphs and asynchrony, for the JSON."""

    def release(self) -> None:
        """Free the memory of the last case."""


class BaselineCase:
    """A case that is run repeatedly by every method that can."""

    def __init__(
        self, methods: Sequence[Method], common: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        """`common` are the JSON fields of all methods; `say` reports that one has failed."""
        self._methods, self._common, self._say = methods, common, say
        self._runs: dict[Method, list[Decoded]] = {method: [] for method in methods}
        self._errors: dict[Method, str] = {}

    def prepare(self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int) -> None:
        """Prepare every method; one that fails is left out.

        Raises:
            BaselineError: all of them failed.
        """
        self._each(lambda method: method.prepare(prompts, steps, max_batch_tokens))

    def run(self) -> None:
        """Decode the prompts once by each method.

        Raises:
            BaselineError: the last method failed.
        """
        self._each(lambda method: self._runs[method].append(method.run()))

    def _each(self, act: Callable[[Method], None]) -> None:
        for method in self._methods:
            if method not in self._errors:
                try:
                    act(method)
                except BaselineError as error:
                    self._errors[method] = str(error).partition("\n")[0]
                    method.release()
                    self._say(f"{method.name} is left out: {self._errors[method]}")
        if len(self._errors) == len(self._methods):
            reasons = "; ".join(f"{m.name}: {self._errors[m]}" for m in self._methods)
            raise BaselineError(f"transformers cannot be compared with: {reasons}")

    def to_json(
        self, ours_ms: Sequence[float], ours_token_ids: Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        """Return the `baselines` of a case of the benchmark's JSON, an entry for each method.

        Args:
            ours_ms: our steps: `speedup` is the ratio of the medians.
            ours_token_ids: our tokens.
        """
        return [self._entry(method, ours_ms, ours_token_ids) for method in self._methods]

    def _entry(
        self, method: Method, ours_ms: Sequence[float], ours_token_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        entry = {"method": method.name, **self._common}
        error, runs = self._errors.get(method), self._runs[method]
        if error is not None or not runs:
            unknown = ("compiled", "cuda_graphs", "async", "step_ms", "speedup", "tokens_equal")
            return {**entry, **dict.fromkeys(unknown), "error": error}
        summary = Summary.of(ms for step_ms, _ in runs for ms in step_ms)
        return {
            **entry,
            **method.describe(),
            "step_ms": summary.to_json(),
            "speedup": summary.p50 / Summary.of(ours_ms).p50,
            "tokens_equal": equal_share(ours_token_ids, runs[0][1]),
            "error": None,
        }


class TransformersBaseline:
    """A model in transformers: `prepare` each case, and `close` it at the end."""

    def __init__(
        self,
        config: DecoderConfig,
        directory: Path | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        compiled: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Load the checkpoint in `directory`; without one, the random weights of this seed.

        With `compiled`, `generate` alone decodes, compiled on a CPU, too. `say` reports progress.

        Raises:
            BaselineError: transformers is missing, too old, or cannot load the model.
        """
        self._device = device
        self._say = say
        model = load_model(config, directory, dtype=dtype, device=device, seed=seed)
        self._methods: tuple[Method, ...] = (StaticGenerate(model, device, compiled=compiled),)
        if not compiled:
            self._methods = (ContinuousBatching(model, device), *self._methods)
        self._common = {
            "name": "transformers",
            "version": import_transformers().__version__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
        }

    @property
    def dtype(self) -> str:
        """Of its weights and its cache, whatever ours are."""
        return str(self._common["dtype"])

    def prepare(
        self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int
    ) -> BaselineCase:
        """Compile, capture and run a case once, after releasing the last one.

        Raises:
            BaselineError: no method can run the model or the case.
        """
        self._release()
        case = BaselineCase(self._methods, self._common, self._say)
        case.prepare(prompts, steps, max_batch_tokens)
        return case

    def _release(self) -> None:
        """Free the caches and the graphs of the last case."""
        for method in self._methods:
            method.release()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._release()
        self._methods = ()
        gc.collect()
