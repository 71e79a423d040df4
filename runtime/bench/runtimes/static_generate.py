"""`generate` of transformers with a static cache: all prompts as one batch, one token a step.

A step is the time from one set of tokens on the host to the next, as a streamer measures it.
`generate` copies the tokens of every step to the host for it and waits for them, and its work
between two steps (stopping criteria, the next inputs) is included. On CUDA it compiles decoding
itself (`torch.compile`, by default with graphs); on a CPU only where `compiled` demands it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from .continuous_batching import Decoded
from .transformers_config import BaselineError, import_transformers

__all__ = ["StaticGenerate"]

_WARM_STEPS = 4
"""Decode steps, at least, before any counts: compiling, capturing and the first replays."""
_MOST_SHAPES = 64
"""Shapes that decoding is compiled for; beyond the limit it would silently run uncompiled."""


class _TokenTimes:
    """A streamer that records when the tokens of each step were on the host."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.steps: list[list[int]] = []
        """The tokens of each step, one for each prompt."""

    def put(self, token_ids: torch.Tensor) -> None:
        """Add the tokens of a step `[B]`, on the host; the first call has the prompts `[B, T]`."""
        if token_ids.dim() == 1:
            self.seconds.append(time.perf_counter())
            self.steps.append(token_ids.tolist())

    def end(self) -> None:
        """The output is complete."""


class StaticGenerate:
    """Decodes a case repeatedly; `release` frees its cache."""

    name = "static"

    def __init__(self, model: Any, device: torch.device, *, compiled: bool = False) -> None:
        """`compiled`: decoding is compiled on a CPU, too."""
        self._model = model
        self._device = device
        self._compiles = compiled or device.type == "cuda"
        self._transformers = import_transformers()
        self._cache: Any = None

    def prepare(self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int) -> None:
        """Prepare a case and run it until everything is compiled.

        `max_batch_tokens` is not used: `generate` prefills all prompts in one step.
        """
        self._steps = steps
        compiles = {}
        if self._compiles:
            # The default, but static shapes: else the second case would compile dynamic ones.
            compiles["compile_config"] = self._transformers.CompileConfig(dynamic=False)
            compiles["compile_config"]._compile_all_devices = True
        self._generation = self._transformers.GenerationConfig(
            do_sample=False, pad_token_id=0, max_new_tokens=steps + 1, **compiles
        )
        try:
            self._prompts = torch.tensor(prompts, device=self._device)
            # Kept between the runs: captured graphs read its addresses.
            self._cache = self._transformers.StaticCache(
                config=self._model.config, max_cache_len=len(prompts[0]) + steps + 1
            )
        except Exception as error:  # a cache of such layers, or memory for it
            raise BaselineError(f"transformers has no static cache for this: {error}") from error
        for _ in range(-(-_WARM_STEPS // steps)):
            self.run()

    def run(self) -> Decoded:
        """Decode the prompts once; return the steps of the whole batch, and the tokens."""
        times = _TokenTimes()
        try:
            self._cache.reset()
            with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
                self._model.generate(
                    self._prompts,
                    attention_mask=torch.ones_like(self._prompts),
                    generation_config=self._generation,
                    past_key_values=self._cache,
                    streamer=times,
                )
        except Exception as error:  # whatever a model, a compiler or an allocation raises
            raise BaselineError(f"transformers did not generate: {error}") from error
        if len(times.steps) != self._steps + 1:
            raise BaselineError(
                f"transformers decoded {len(times.steps) - 1} steps, not {self._steps}"
            )
        step_ms = [1e3 * (end - start) for start, end in pairwise(times.seconds)]
        return step_ms, [list(tokens) for tokens in zip(*times.steps, strict=True)]

    def describe(self) -> dict[str, Any]:
        """Return whether `generate` compiled decoding, which it then runs as graphs."""
        compiled = self._compiles and bool(self._cache.is_compileable)
        graphs = compiled and self._device.type == "cuda"
        return {"compiled": compiled, "cuda_graphs": graphs, "async": False}

    def release(self) -> None:
        """Free the cache of the last case."""
        self._cache = None
