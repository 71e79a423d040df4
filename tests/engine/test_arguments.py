"""Wrong arguments of public methods: a typed error that has the parameter in `field`."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stepgraph.runtime import (
    AsyncEngine,
    ChatPrompt,
    CheckpointError,
    ConfigError,
    Engine,
    EngineConfig,
    PromptEmbeds,
    RequestError,
    SamplingParams,
)

from ..loading.test_prompt_types import Raises

HUGE = 10**5000
"""An integer that Python refuses to print."""
NOT_TEXT = [None, True, 7, -1, HUGE, 1.5, math.nan, b"x", [1], {1: 2}, {1}, torch.zeros(2)]
NO_COUNT = [None, True, -1, -HUGE, HUGE, 1.5, math.nan, math.inf, "", "3", b"x", [], [1], {1}]
NO_COUNT += [torch.zeros(2), torch.tensor(1), np.array([1, 2]), np.float64(1)]
NO_NUMBER = [None, True, -1, -0.5, math.nan, math.inf, HUGE, "", [1], {}, torch.zeros(2)]
NO_FUNCTION = [None, 7, math.nan, "len", b"", [len], {}]
NO_PROMPT = [None, True, 7, 1.5, b"x", [], [None], [-1], [HUGE], [1.5], [True], {1: 2}, {1}]
NO_PROMPT += ["", "\ud800", torch.zeros(2), ChatPrompt(None), ChatPrompt([]), ChatPrompt([{}])]  # type: ignore[arg-type]
NO_PROMPT += [PromptEmbeds(None), PromptEmbeds([1], None), PromptEmbeds([1], [7])]  # type: ignore[arg-type, list-item]
NO_PROMPTS = [None, 5, 2.5, {}, object, [True], [-1], np.array([1.5]), np.array(3)]
NO_SALT = [True, 7, HUGE, 1.5, "", "\ud800", b"x", [1], "x" * 300]
NO_PARAMS = [True, 7, "x", {}, {"max_tokens": 3}, torch.zeros(2), EngineConfig()]
NO_PRIORITY = [None, True, 1.5, math.nan, "1", [1], 1 << 63, -HUGE]
NO_SECONDS = [True, -1, math.nan, math.inf, HUGE, "1", [1]]
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
MESSAGES = [{"role": "user", "content": "hi"}]


Call = Callable[[Any, Any], Any]
"""A method of an engine with one wrong argument; or a coroutine of it."""
FIELDS: dict[str, set[str | None]] = {
    "prompt": {"prompt", "messages", "spans"},
    "prompts": {"prompts", "prompt"},
    "token_ids": {"prompt", "token_ids"},
    "source": {None},
}
"""What errors of a parameter name where it is not the parameter."""
TABLE: dict[str, tuple[list[Any], Call]] = {
    "add_request prompt": (NO_PROMPT, lambda e, v: e.add_request(v, GREEDY)),
    "add_request params": (NO_PARAMS, lambda e, v: e.add_request([1], v)),
    "add_request request_id": ([*NOT_TEXT[1:], ""], lambda e, v: e.add_request([1], GREEDY, v)),
    "add_request priority": (NO_PRIORITY, lambda e, v: e.add_request([1], GREEDY, priority=v)),
    "add_request cache_salt": (NO_SALT, lambda e, v: e.add_request([1], GREEDY, cache_salt=v)),
    "prepare request_id": (NOT_TEXT, lambda e, v: e.prepare([1], GREEDY, v)),
    "queue group": ([*NOT_TEXT, "x"], lambda e, v: e.queue(v)),
    "has_compiled structured": ([*NOT_TEXT, "x"], lambda e, v: e.has_compiled(v)),
    "abort request_id": (NOT_TEXT, lambda e, v: e.abort(v)),
    "abort reason": ([*NOT_TEXT, "", "stop"], lambda e, v: e.abort("x", v)),
    "generate prompt": (
        [v for v in NO_PROMPT if v != [] and type(v) is not int],  # [7] is one prompt
        lambda e, v: e.generate([v], GREEDY),
    ),
    "generate prompts": (NO_PROMPTS, lambda e, v: e.generate(v, GREEDY)),
    "generate params": (
        [*NO_PARAMS, Raises(), [7], [Raises()]],
        lambda e, v: e.generate([[1]], v),
    ),
    "chat messages": ([None, 7, "hi", [], [7], [[]], [{}]], lambda e, v: e.chat(v, GREEDY)),
    "chat continue_final_message": (
        [None, 7, 1.5, [1], torch.zeros(2)],
        lambda e, v: e.chat(MESSAGES, GREEDY, continue_final_message=v),
    ),
    "score token_ids": ([v for v in NO_PROMPT if not isinstance(v, str)], lambda e, v: e.score(v)),
    "score prompt_len": ([*NO_COUNT, 0, 4], lambda e, v: e.score([1, 2, 3], v)),
    "weight_bytes_read rows": (NO_NUMBER, lambda e, v: e.weight_bytes_read(v)),
    "kv_bytes_read context": (NO_COUNT, lambda e, v: e.kv_bytes_read(v)),
    "num_cached_tokens group": ([None, 7, "x", [1]], lambda e, v: e.num_cached_tokens(v)),
    "reload_weights source": ([None, True, 7, "", [1]], lambda e, v: e.reload_weights(v)),
    "from_pretrained config": (
        [True, 7, "x", {}, [], torch.zeros(2), SamplingParams()],
        lambda e, v: Engine.from_pretrained("demo", v),
    ),
    "from_pretrained source": ([None, True, 7, "", [1]], lambda e, v: Engine.from_pretrained(v)),
}
ASYNC: dict[str, tuple[list[Any], Call]] = {
    "generate prompt": (NO_PROMPT, lambda e, v: e.generate(v, GREEDY)),
    "generate request_id": (
        [*NOT_TEXT[1:], ""],
        lambda e, v: e.generate([1], GREEDY, request_id=v),
    ),
    "generate tenant": ([*NOT_TEXT[1:], "t" * 257], lambda e, v: e.generate([1], GREEDY, tenant=v)),
    "submit priority": (NO_PRIORITY, lambda e, v: e.submit([1], GREEDY, priority=v)),
    "submit cache_salt": ([2.0], lambda e, v: e.submit([1], GREEDY, cache_salt=v)),
    "submit first_token_deadline": (
        [*NO_SECONDS, 1e10],
        lambda e, v: e.submit([1], GREEDY, first_token_deadline=v),
    ),
    "submit dead_line": ([1.0], lambda e, v: e.submit([1], GREEDY, dead_line=v)),
    "generate traceparent": (NOT_TEXT[1:], lambda e, v: e.generate([1], GREEDY, traceparent=v)),
    "generate deadline": (NO_SECONDS, lambda e, v: e.generate([1], GREEDY, deadline=v)),
    "submit callback": (NO_FUNCTION[1:], lambda e, v: e.submit([1], GREEDY, callback=v)),
    "abort request_id": (NOT_TEXT, lambda e, v: e.abort(v)),
    "add_listener listener": (NO_FUNCTION, lambda e, v: e.add_listener(v)),
    "run_in_pool function": (NO_FUNCTION, lambda e, v: e.run_in_pool(v)),
    "drain timeout": (NO_SECONDS, lambda e, v: e.drain(v)),
    "reload source": ([None, 7, "", [1]], lambda e, v: e.reload(v)),
    "from_pretrained source": (
        [None, True, 7, "", [1]],
        lambda e, v: AsyncEngine.from_pretrained(v),
    ),
    "from_pretrained config": (
        [True, 7, "x", {}, SamplingParams()],
        lambda e, v: AsyncEngine.from_pretrained("demo", v),
    ),
}
TYPED = (RequestError, ConfigError, CheckpointError)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(
        mode="eager", num_blocks=32, max_num_seqs=2, structured_output=True, prompt_embeds=True
    )
    with Engine.from_pretrained("demo", config) as engine:
        yield engine


def check_field(error: Exception, name: str) -> None:
    parameter = name.split()[1]
    assert getattr(error, "field", None) in FIELDS.get(parameter, {parameter}), name


@pytest.mark.filterwarnings("ignore:.*prompts were refused")
@pytest.mark.parametrize("name", TABLE)
def test_arguments_of_an_engine(engine: Engine, name: str) -> None:
    values, call = TABLE[name]
    for value in values:
        with pytest.raises(TYPED) as caught:
            call(engine, value)
        check_field(caught.value, name)
        assert 0 < len(str(caught.value)) < 1000
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_arguments_at_the_edge_are_accepted(engine: Engine) -> None:
    assert engine.kv_bytes_read(0) == 0
    assert engine.kv_bytes_read(np.int64(5)) == engine.kv_bytes_read(5) > 0
    assert engine.weight_bytes_read(0.5) > 0
    assert len(engine.score([1, 2, 3], np.int32(3))) == 1
    assert not engine.abort("unknown", "deadline")


async def awaited(call: Call, engine: AsyncEngine, value: Any) -> None:
    result = call(engine, value)
    if inspect.isawaitable(result):
        await asyncio.wait_for(result, 30)


def test_arguments_of_an_async_engine() -> None:
    async def check() -> None:
        config = EngineConfig(mode="eager", num_blocks=32, max_num_seqs=2)
        async with AsyncEngine.from_pretrained("demo", config) as engine:
            for name, (values, call) in ASYNC.items():
                for value in values:
                    with pytest.raises(TYPED) as caught:
                        await awaited(call, engine, value)
                    check_field(caught.value, name)
            output = await engine.generate([1], GREEDY)  # it still serves
            assert len(output.token_ids) == 1

    asyncio.run(check())
