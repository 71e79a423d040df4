"""What a client reads about a body whose JSON or types are wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("httpx")

from stepgraph.runtime import AsyncEngine

from ..rigs.fake_engine import fake_engine
from ..rigs.http_rig import COMPLETIONS, Rig


def error_of(body: Any, path: str = COMPLETIONS) -> tuple[str, str | None]:
    """The message and the field of the error that a body gets."""

    async def main() -> tuple[str, str | None]:
        async with AsyncEngine(fake_engine) as engine:
            response = await Rig(engine).post(body, path)
        assert response.status_code == 400
        error = response.json()["error"]
        return error["message"], error["param"]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, "prompt", "prompt is missing"),
        ([], None, "the body must be an object, not an array"),
        (b"", None, "the body is empty: send a JSON object"),
        (b"{", None, "the body is not valid JSON: Input data was truncated"),
        ({"prompt": 5}, "prompt", "prompt must be a string or an array, not an integer"),
        (
            {"prompt": [1.5]},
            "prompt[0]",
            "prompt[0] must be an integer, a string or an array, not a number",
        ),
        (
            {"prompt": "a", "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
            "stream_options.include_usage must be a boolean, not a string",
        ),
        (
            {"prompt": "a", "logit_bias": {"x": 1}},
            "logit_bias",
            "a key of logit_bias must be an integer, not a string",
        ),
        (b'{"prompt": "a", "top_p": 1e999}', "top_p", "top_p: Number out of range"),
        (
            {"prompt": "a", "response_format": {}},
            "response_format.type",
            "response_format.type is missing",
        ),
    ],
    ids=str,
)
def test_the_message_names_the_field(body: Any, field: str | None, message: str) -> None:
    found, param = error_of(body)
    assert param == field
    assert sorted(found.split()) == sorted(message.split())  # msgspec orders types as it likes


@pytest.mark.parametrize(
    ("method", "path", "status", "named"),
    [
        ("GET", "/nowhere", 404, "/nowhere"),
        ("GET", COMPLETIONS, 405, "use POST"),
        ("POST", "/health", 405, "does not accept POST"),
        ("GET", "/v1/models/other", 404, "give stepgraph, or leave"),
    ],
)
def test_an_unknown_path_method_or_model_is_named(
    method: str, path: str, status: int, named: str
) -> None:
    async def main() -> None:
        async with AsyncEngine(fake_engine) as engine:
            response = await Rig(engine).http.request(method, path)
        assert response.status_code == status
        assert named in response.json()["error"]["message"]

    asyncio.run(main())
