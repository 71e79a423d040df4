"""Continuous batching of transformers: a scheduler, a paged cache and, on CUDA, captured graphs.

Prompts are prefilled in the same steps in which other rows decode. Only steps that decode the whole
batch count: from the first token of the last request on, while every request has one token a step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from .transformers_config import BaselineError, import_transformers

__all__ = ["ContinuousBatching", "whole_batch_steps"]

_STOP_SECONDS = 60.0

Decoded = tuple[list[float], list[list[int]]]
"""Milliseconds of each step of the whole batch, and the tokens of each prompt."""


class ContinuousBatching:
    """Decodes a case repeatedly; `release` frees its cache and graphs."""

    name = "continuous"

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._transformers = import_transformers()
        self._chosen: Any = None
        """The configuration of the last run, as transformers resolved it."""

    def prepare(self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int) -> None:
        """Prepare a case and run it once, which captures its graphs."""
        self._prompts, self._steps = list(prompts), steps
        count, length = len(prompts), len(prompts[0])
        # The first request decodes while the others are prefilled, and must not end before them.
        new_tokens = steps + 2 + count + 2 * -(-count * length // max_batch_tokens)
        self._generation = self._transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=new_tokens
        )
        make = self._transformers.ContinuousBatchingConfig
        default = make()
        if hasattr(default, "page_size"):
            page_size, groups = default.page_size, 1
        else:  # transformers 5.17, where layer groups draw their blocks from one pool
            page_size, groups = default.block_size, _layer_groups(self._model.config)
        pages = -(-(length + new_tokens) // page_size) + 1
        # On CUDA, graphs and asynchronous batching are requested; if transformers fails so, it
        # chooses itself. `describe` reports what ran.
        choices: list[dict[str, Any]] = [{}]
        if self._device.type == "cuda":
            choices.insert(0, {"use_cuda_graph": True, "use_async_batching": True})
        while True:
            self._batching = make(
                num_blocks=2 * count * pages * groups,
                max_blocks_per_request=pages + pages % 2,
                max_requests_per_batch=count,
                max_batch_tokens=max(max_batch_tokens, count),
                safety_margin=0.0,  # no prompt is held back
                allow_block_sharing=False,  # every repetition prefills its prompts
                **choices.pop(0),
            )
            try:
                self.run()
            except BaselineError:
                self.release()
                if not choices:
                    raise
            else:
                return

    def run(self) -> Decoded:
        """Decode the prompts once; return the last `steps` steps of the whole batch, and tokens."""
        times, token_ids = self._decode()
        found = whole_batch_steps(times)
        if len(found) < self._steps:
            raise BaselineError(
                f"transformers decoded the whole batch in {len(found)} steps, not {self._steps}"
            )
        return found[-self._steps :], token_ids

    def _decode(self) -> tuple[list[list[float]], list[list[int]]]:
        """Return the seconds at which the tokens of each prompt came, and the tokens."""
        context = self._model.continuous_batching_context_manager(
            generation_config=self._generation,
            continuous_batching_config=self._batching,
            persistent_manager=True,
            timeout=_STOP_SECONDS,
        )
        finished: dict[str, Any] = {}
        try:
            with context as manager:
                ids = manager.add_requests(self._prompts, record_timestamps=True)
                while len(finished) < len(ids):
                    result = manager.get_result(timeout=1)
                    if result is None and not manager.is_running():
                        raise BaselineError("transformers stopped decoding the prompts")
                    if result is not None and result.error is not None:
                        raise BaselineError(f"transformers gave a prompt up: {result.error}")
                    if result is not None and result.is_finished():
                        finished[result.request_id] = result
                self._chosen = manager.continuous_batching_config
        except BaselineError:
            raise
        except Exception as error:  # whatever a scheduler, a capture or an allocation raises
            raise BaselineError(f"transformers did not decode the prompts: {error}") from error
        results = [finished[request_id] for request_id in ids]
        return [r.timestamps for r in results], [list(r.generated_tokens) for r in results]

    def describe(self) -> dict[str, Any]:
        """Return whether graphs and asynchronous batching were used."""
        graphs = self._chosen.use_cuda_graph
        return {
            "compiled": False,
            "cuda_graphs": any(graphs) if isinstance(graphs, tuple) else bool(graphs),
            "async": bool(self._chosen.use_async_batching),
        }

    def release(self) -> None:
        """Free the cache and the graphs of the last case."""
        self._model.destroy_cached_continuous_batching_manager()


def _layer_groups(config: Any) -> int:
    """Return the number of groups of equally many layers of one kind."""
    counts = Counter(getattr(config, "layer_types", None) or ["full_attention"]).values()
    return sum(counts) // math.gcd(*counts)


def whole_batch_steps(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the milliseconds of the steps that gave every request exactly one token.

    Args:
        times: for each request the seconds at which its tokens came, ascending.
    """
    last = max(times, key=lambda of_request: of_request[0])
    # In such a step every request has one token between two tokens of any other request.
    return [
        1e3 * (end - start)
        for start, end in pairwise(last)
        if all(bisect_right(t, end) - bisect_right(t, start) == 1 for t in times)
    ]
