"""Requests with and without grammars join, leave and are preempted; outputs stay what they are."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from stepgraph.runtime import RequestOutput, SamplingParams

from ..rigs.engine_rig import Open
from ..rigs.structured_rig import GRAMMARS, PROMPTS

pytestmark = pytest.mark.native_kernels

CHOICES = [None, *GRAMMARS]
TIGHT = {"num_blocks": 12, "block_size": 4, "prefill_chunk": 4, "max_num_seqs": 3}


FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 20},
    {"max_tokens": 25},
    {"max_tokens": 9, "n": 2, "logprobs": 1},
    {"max_tokens": 20, "min_tokens": 12},
    {"max_tokens": 20, "ignore_eos": True, "presence_penalty": 1.0},
]


@pytest.mark.parametrize(
    "config",
    [
        TIGHT,
        TIGHT | {"host_cache_bytes": 1 << 16, "kernels": "native"},
        TIGHT | {"speculation": {"adaptive": False, "prompt_lookup_min": 2}},
    ],
    ids=["recompute", "swap", "drafts"],
)
def test_outputs_depend_on_nothing_else(open_engine: Open, config: dict[str, Any]) -> None:
    engine = open_engine("text", structured_output=True, **config)
    alone = open_engine("text", structured_output=True, prefix_cache=False)
    draw = random.Random(0)

    @cache
    def params_of(grammar: int, seed: int, fields: int) -> SamplingParams:
        return SamplingParams(seed=seed, structured=CHOICES[grammar], **FIELDS[fields])

    @cache
    def expected(prompt: int, *params: int) -> list[tuple[tuple[int, ...], Any]]:
        return shown(alone.generate([PROMPTS[prompt]], params_of(*params))[0])

    def shown(output: RequestOutput) -> list[tuple[tuple[int, ...], Any]]:
        return [(c.token_ids, c.finish_reason) for c in output.completions]

    def step() -> None:
        for output in engine.step():
            if output.finished and output.request_id in unfinished:
                request = unfinished.pop(output.request_id)
                assert shown(output) == expected(*request), request
        engine.check_integrity()

    unfinished: dict[str, tuple[int, ...]] = {}
    for number in range(150):
        action = draw.random()
        if action < 0.5:
            request = tuple(map(draw.randrange, (len(PROMPTS), len(CHOICES), 3, len(FIELDS))))
            unfinished[f"r{number}"] = request
            engine.add_request(PROMPTS[request[0]], params_of(*request[1:]), f"r{number}")
        elif action < 0.6 and unfinished:
            request_id = draw.choice(sorted(unfinished))
            del unfinished[request_id]
            engine.abort(request_id)
        else:
            for _ in range(draw.randrange(1, 13)):
                step()
    while engine.has_unfinished():
        step()
    assert not unfinished
    if config.get("num_blocks"):
        assert engine.stats()["preemptions"] > 0
