"""The same model in transformers, with the same weights, to be compared with.

It decodes the same prompts greedily, in two ways: `generate` with a static cache, and continuous
batching (`static_generate`, `continuous`). Both take turns with ours, for as many steps of the
whole batch, and their tokens are compared with ours. Needs the extra "baseline".
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from ...profiling.stats import Summary
from ..models.config import ModelConfig
from .continuous import ContinuousBatching, Decoded
from .hf_config import BaselineError, import_transformers
from .hf_model import load_model
from .static_generate import StaticGenerate
from .workload import equal_share

__all__ = ["BaselineCase", "BaselineError", "TransformersBaseline"]


class Method(Protocol):
    """A way in which transformers decodes a batch; every failure is a `BaselineError`."""

    @property
    def name(self) -> str:
        """What the JSON calls it."""

    def prepare(self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int) -> None:
        """Make a case ready and warm it up."""

    def run(self) -> Decoded:
        """Decode the prompts once."""

    def how(self) -> dict[str, Any]:
        """Return what ran, for the JSON."""

    def forget(self) -> None:
        """Let go of the memory of the last case."""


@dataclass
class _Turns:
    """What a method did in a case."""

    method: Method
    step_ms: list[float] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    """Of the first run."""
    error: str | None = None

    def run(self) -> None:
        """Decode the prompts once and keep what there is to tell."""
        step_ms, token_ids = self.method.run()
        self.step_ms += step_ms
        self.token_ids = self.token_ids or token_ids


class BaselineCase:
    """A case that is ready to be run as often as wanted, by every method that can."""

    def __init__(
        self, methods: Sequence[Method], common: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        """`common` is what the JSON says of all methods; `say` tells that one has failed."""
        self._turns = [_Turns(method) for method in methods]
        self._common = common
        self._say = say

    def prepare(self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int) -> None:
        """Make every method ready; one that fails is left out from there on.

        Raises:
            BaselineError: all of them failed.
        """
        for turns in self._turns:
            self._try(turns, lambda t: t.method.prepare(prompts, steps, max_batch_tokens))
        self._check()

    def run(self) -> None:
        """Decode the prompts once by each method.

        Raises:
            BaselineError: the last method failed.
        """
        for turns in self._turns:
            self._try(turns, _Turns.run)
        self._check()

    def to_json(
        self, ours_ms: Sequence[float], ours_token_ids: Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        """Return the `baselines` of a case of the benchmark's JSON, an entry for each method.

        Args:
            ours_ms: the steps that they are compared with: `speedup` is the ratio of the medians.
            ours_token_ids: the tokens that theirs are compared with.
        """
        return [self._entry(turns, ours_ms, ours_token_ids) for turns in self._turns]

    def _entry(
        self, turns: _Turns, ours_ms: Sequence[float], ours_token_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        entry = {"method": turns.method.name, **self._common}
        if not turns.step_ms:
            unknown = ("compiled", "cuda_graphs", "async", "step_ms", "speedup", "tokens_equal")
            return {**entry, **dict.fromkeys(unknown), "error": turns.error}
        summary = Summary.of(turns.step_ms)
        return {
            **entry,
            **turns.method.how(),
            "step_ms": summary.to_json(),
            "speedup": summary.p50 / Summary.of(ours_ms).p50,
            "tokens_equal": equal_share(ours_token_ids, turns.token_ids),
            "error": None,
        }

    def _try(self, turns: _Turns, act: Callable[[_Turns], None]) -> None:
        if turns.error is not None:
            return
        try:
            act(turns)
        except BaselineError as error:
            turns.error = str(error).partition("\n")[0]
            turns.step_ms.clear()
            turns.method.forget()
            self._say(f"{turns.method.name} is left out: {turns.error}")

    def _check(self) -> None:
        if all(turns.error is not None for turns in self._turns):
            reasons = "; ".join(f"{t.method.name}: {t.error}" for t in self._turns)
            raise BaselineError(f"transformers cannot be compared with: {reasons}")


class TransformersBaseline:
    """A model in transformers: `prepare` each case, `close` at the end."""

    def __init__(
        self,
        config: ModelConfig,
        directory: Path | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Load the checkpoint in `directory`; without one, the random weights of this seed.

        `say` tells the user what is going on.

        Raises:
            BaselineError: transformers is missing, too old, or cannot load the model.
        """
        self._device = device
        self._say = say
        model = load_model(config, directory, dtype=dtype, device=device, seed=seed)
        self._methods: tuple[Method, ...] = (
            ContinuousBatching(model, device),
            StaticGenerate(model, device),
        )
        self._common = {
            "name": "transformers",
            "version": import_transformers().__version__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
        }

    def __enter__(self) -> TransformersBaseline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def dtype(self) -> str:
        """Of its weights and its cache, whatever ours are stored as."""
        return str(self._common["dtype"])

    def prepare(
        self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int
    ) -> BaselineCase:
        """Warm up for a case: compile, capture, and run it once. It ends the last case.

        Args:
            prompts: token ids, all prompts of one length.
            steps: steps of the whole batch that each run of the case returns.
            max_batch_tokens: prompt tokens of one step at most, where prompts are prefilled in
                chunks.

        Raises:
            BaselineError: no method can run the model or the case.
        """
        self._forget()
        case = BaselineCase(self._methods, self._common, self._say)
        case.prepare(prompts, steps, max_batch_tokens)
        return case

    def _forget(self) -> None:
        """Let go of the caches and the graphs of the last case."""
        for method in self._methods:
            method.forget()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Give back the memory. Idempotent."""
        self._forget()
        self._methods = ()
        gc.collect()
