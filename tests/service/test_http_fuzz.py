"""The HTTP service against requests drawn from its OpenAPI document, and against hostile ones."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("jinja2")

import httpx
import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Mount
from stepgraph.runtime import AsyncEngine, Engine
from stepgraph.runtime.loading.chat_template import ChatTemplates
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from stepgraph.runtime.service.http.app import OPERATIONS
from stepgraph.runtime.service.http.http_errors import ErrorBody
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ..rigs.fake_engine import fake_engine
from ..rigs.http_bodies import DOCUMENT, POSTS, bodies, resolved
from ..rigs.http_rig import Rig, events_of, service
from ..rigs.service_rig import in_event_loop

SECONDS = 20
PIECES = [
    *("<unk>", "a", " ", "{", "}", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *('{"name": "f", "arguments": {', '"x": "'),
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.name | default(0) | tojson }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{% endfor %}"
    "{{ tools | tojson }}{{ documents | tojson(indent=1) }}{{ style | string | length }}"
    "{% if add_generation_prompt %}a{% endif %}"
)
OPTIONS: dict[str, Any] = {"tool_parser": "hermes", "reasoning_parser": "think"}


def text_engine() -> Engine:
    """A fake engine whose tokens are fragments of reasoning and of tool calls."""
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(PIECES)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    templates = ChatTemplates({"default": TEMPLATE}, {})
    return fake_engine(tokenizer=TextTokenizer(tokenizer, templates=templates))


Serve = Callable[[Callable[[Rig], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Runs a coroutine with a service that all tests share."""
    with asyncio.Runner() as runner, AsyncEngine(text_engine) as engine:
        rig = Rig(engine, **OPTIONS)
        yield lambda run: runner.run(run(rig))
        runner.run(rig.until_idle())
        rig.inner.check_integrity()


def check_response(path: str, body: bytes, response: httpx.Response) -> None:
    """Assert that a response is one that the document allows for its status."""
    operation, text = OPERATIONS["POST", path], response.text
    shown = f"{path} {body[:300]!r}: {response.status_code} {text[:300]}"
    kind = response.headers["content-type"].partition(";")[0]
    if response.status_code != 200:
        error = msgspec.json.decode(text, type=ErrorBody).error
        assert 0 < len(error.message) <= 1000
        expected = {400: "invalid_request_error", 404: "not_found_error"}
        if response.status_code == 503:  # a deadline
            assert int(response.headers["retry-after"]) >= 1, shown
            assert b"timeout" in body, shown
        else:
            assert expected[response.status_code] == error.type, shown
    elif kind == "application/json":
        msgspec.json.decode(text, type=operation.response)
    else:
        assert kind == "text/event-stream"
        *events, end = events_of(text)
        assert end == "[DONE]"
        chunks: list[Any] = [msgspec.json.decode(event, type=operation.event) for event in events]
        ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason is not None]
        begun = {choice.index for chunk in chunks for choice in chunk.choices}
        assert sorted(ends) == sorted(begun), shown


def fuzz(serve: Serve, path: str, body: bytes) -> int:
    statuses = []

    async def run(rig: Rig) -> None:
        async with asyncio.timeout(SECONDS):
            response = await rig.post(body, path)
        check_response(path, body, response)
        statuses.append(response.status_code)

    serve(run)
    return statuses[0]


QUICK = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
SLOW = settings(QUICK, max_examples=1000, derandomize=False)


@pytest.mark.parametrize("path", POSTS)
@QUICK
@given(data=st.data())
def test_bodies_of_the_document(serve: Serve, path: str, data: st.DataObject) -> None:
    fuzz(serve, path, data.draw(bodies(path)))


@pytest.mark.parametrize("path", POSTS)
@QUICK
@given(data=st.data())
def test_hostile_bodies(serve: Serve, path: str, data: st.DataObject) -> None:
    fuzz(serve, path, data.draw(bodies(path, hostile=True)))


BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
SAMPLES: dict[str, Any] = {
    "boolean": True,
    "integer": 1,
    "number": 0.5,
    "string": "a",
    "array": ["a"],
    "object": {"a": "a"},
}
NEEDS: dict[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": 1 << 20},
    "top_logprobs": {"logprobs": True},
    "n": {"best_of": None},
}
"""Other fields without which a field is refused."""
NEED_MORE = frozenset(
    (
        *("allowed_token_ids", "bad_words", "truncate_prompt_tokens", "logprob_token_ids"),
        *("messages", "tools", "documents"),
    )
)
"""Fields whose largest values need token masks, more context, log-probabilities or entries."""


def limits(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(value on a limit, value beyond it) for each limit of a schema."""
    step: Any = 1 if schema.get("type") == "integer" else 1e-6
    if "minimum" in schema:
        yield schema["minimum"], schema["minimum"] - step
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"] + step, schema["exclusiveMinimum"]
    if "maximum" in schema:
        above = schema["maximum"] + (step if schema["maximum"] < 1e6 else 1)
        yield schema["maximum"], above
    if "minLength" in schema:
        yield "a" * schema["minLength"], "a" * (schema["minLength"] - 1)
    if "maxLength" in schema:
        yield "a" * schema["maxLength"], "a" * (schema["maxLength"] + 1)
    if "maxItems" in schema:
        item = SAMPLES[schema["items"]["type"]]
        yield [item] * schema["maxItems"], [item] * (schema["maxItems"] + 1)


@pytest.mark.parametrize("path", POSTS)
def test_fields_are_accepted_up_to_their_limits(serve: Serve, path: str) -> None:
    """Just beyond a limit of the document, and of a wrong type, a field is 400 with its name."""

    async def run(rig: Rig) -> None:
        async def param_of(name: str, value: Any) -> str | None:
            response = await rig.post({**BASES[path], **NEEDS.get(name, {}), name: value}, path)
            if response.status_code == 200:
                return None
            assert response.status_code == 400, response.text
            param = str(response.json()["error"]["param"])
            return re.split(r"[.\[]", param)[0]

        for name, field in resolved(POSTS[path])["properties"].items():
            kinds = [resolved(each) for each in field.get("anyOf", [field])]
            types = {kind["type"] for kind in kinds if "type" in kind}
            for kind in kinds if types else ():
                for allowed, refused in limits(kind):
                    accepted = await param_of(name, allowed) is None
                    assert accepted or name in NEED_MORE, (name, allowed)
                    assert await param_of(name, refused) == name, (name, refused)
            for kind, sample in SAMPLES.items():
                is_number = kind == "integer" and "number" in types
                if not (kind in types or is_number or (name == "prompt" and kind == "array")):
                    assert await param_of(name, sample) == name, (name, sample)

    serve(run)


@in_event_loop
async def test_the_document_names_the_mount_and_the_key() -> None:
    async with service(api_keys=["k"]) as rig:
        rig.http._transport.app = Starlette(routes=[Mount("/llm", rig.app)])  # type: ignore
        assert (await rig.http.get("/llm/openapi.json")).status_code == 401
        assert (await rig.http.get("/llm/health")).status_code == 200
        headers = {"authorization": "Bearer k"}
        assert (await rig.http.get("/llm/v1/models", headers=headers)).status_code == 200
        document = (await rig.http.get("/llm/openapi.json", headers=headers)).json()
        assert document["servers"] == [{"url": "/llm"}]
        paths = document["paths"]
        assert paths.keys() == DOCUMENT["paths"].keys()
        free = [path for path, ops in paths.items() for op in ops.values() if "security" not in op]
        assert free == ["/health", "/ready"]


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("path", POSTS)
@SLOW
@given(data=st.data())
def test_many_bodies(serve: Serve, path: str, hostile: bool, data: st.DataObject) -> None:
    fuzz(serve, path, data.draw(bodies(path, hostile)))
