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
    ("body", "field"),
    [
        ({}, "prompt"),
        ([], None),
        (b"", None),
        (b"{", None),
        ({"prompt": [1.5]}, "prompt[0]"),
        (
            {"prompt": "a", "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
        ),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (b'{"prompt": "a", "top_p": 1e999}', "top_p"),
        ({"prompt": "a", "response_format": {}}, "response_format.type"),
    ],
    ids=str,
)
def test_body_errors_name_the_field(body: Any, field: str | None) -> None:
    message, param = error_of(body)
    assert param == field
    assert (field or "the body") in message
