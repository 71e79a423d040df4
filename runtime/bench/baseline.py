"""The same model with the same weights in transformers: `generate` with a static cache.

All prompts are one batch, and a step is the time from one set of tokens on the host to the next, as
a streamer measures it. `generate` copies the tokens of every step to the host for it and waits for
them, and its work between two steps (stopping criteria, the next inputs) is included. On CUDA it
compiles decoding itself (`torch.compile`, by default with graphs); on a CPU only where `compiled`
demands it. Needs the extra "baseline".
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ...profiling.stats import Summary
from ..errors import ConfigError
from ..models.transformers import library
from .peers import PeerError
from .workload import equal_share

__all__ = ["TransformersBaseline", "import_transformers"]

_WARM_STEPS = 4
"""Decode steps, at least, before any counts: compiling, capturing and the first replays."""
_MOST_SHAPES = 64
"""Shapes that decoding is compiled for; beyond the limit it would silently run uncompiled."""


def import_transformers() -> Any:
    """Return the module, with its progress bars disabled.

    Raises:
        PeerError: it is missing or too old.
    """
    try:
        transformers = library.import_transformers("comparing with transformers", "baseline")
    except ConfigError as error:
        raise PeerError(str(error)) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


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


class TransformersBaseline:
    """A model in transformers: `prepare` each case, `run` it repeatedly, `close` it at the end.

    Every failure is a `PeerError`.
    """

    def __init__(
        self, checkpoint: Path, *, dtype: torch.dtype, device: torch.device, compiled: bool = False
    ) -> None:
        """Load a checkpoint. `compiled`: decoding is compiled on a CPU, too."""
        self._transformers = import_transformers()
        self._device = device
        self._compiles = compiled or device.type == "cuda"
        self._cache: Any = None
        try:
            load = self._transformers.AutoModelForCausalLM.from_pretrained
            self._model = load(checkpoint, dtype=dtype).to(device).eval()
            text = self._model.config.get_text_config()
            if getattr(text, "attn_logit_softcapping", None) is not None:
                self._model.set_attn_implementation("eager")  # sdpa ignores the soft cap
        except Exception as error:  # whatever a file, a configuration or an allocation raises
            reason = str(error).partition("\n")[0]
            raise PeerError(f"transformers cannot load the model: {reason}") from error
        # Our side ignores the checkpoint's generation settings (penalties, stop tokens) as well.
        self._model.generation_config = self._transformers.GenerationConfig()

    def prepare(self, prompts: Sequence[list[int]], steps: int) -> None:
        """Prepare a case, of prompts of one length, and run it until everything is compiled."""
        self._release()
        self._steps = steps
        self._runs: list[tuple[list[float], list[list[int]]]] = []
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
            raise PeerError(f"transformers has no static cache for this: {error}") from error
        for _ in range(-(-_WARM_STEPS // steps)):
            self.run()
        self._runs.clear()

    def run(self) -> None:
        """Decode the prompts once more."""
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
            raise PeerError(f"transformers did not generate: {error}") from error
        if len(times.steps) != self._steps + 1:
            raise PeerError(f"transformers decoded {len(times.steps) - 1} steps, not {self._steps}")
        step_ms = [1e3 * (end - start) for start, end in pairwise(times.seconds)]
        self._runs.append((step_ms, [list(tokens) for tokens in zip(*times.steps, strict=True)]))

    def to_json(
        self, ours_ms: Sequence[float], ours_token_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """Return an entry of `baselines`: `speedup` is the ratio of the medians of the steps."""
        summary = Summary.of(ms for step_ms, _ in self._runs for ms in step_ms)
        compiled = self._compiles and bool(self._cache.is_compileable)
        return {
            "method": "static",
            "name": "transformers",
            "version": self._transformers.__version__,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "attention": self._model.config._attn_implementation,
            "compiled": compiled,
            "step_ms": summary.to_json(),
            "speedup": summary.p50 / Summary.of(ours_ms).p50,
            "tokens_equal": equal_share(ours_token_ids, self._runs[0][1]),
        }

    def _release(self) -> None:
        self._cache = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._model = None
        self._release()
