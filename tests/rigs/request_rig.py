"""Makes requests for tests that need no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepgraph.runtime.request import Request
from stepgraph.runtime.sampling_params import SamplingParams


def make_request(prompt: Sequence[int], output: Sequence[int] = (), **fields: Any) -> Request:
    """Return a request that has sampled `output`."""
    options: dict[str, Any] = {
        "id": "a/0",
        "params": SamplingParams(),
        "seed": 1,
        "order": (0, 1),
        "max_tokens": 64,
        "stop_token_ids": frozenset(),
        "detokenizer": None,
        "arrival_ns": 0,
    }
    request = Request(prompt_ids=list(prompt), **(options | fields))
    for token_id in output:
        request.append_token(token_id, 0)
    return request
