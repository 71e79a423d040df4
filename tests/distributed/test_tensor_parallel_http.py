"""The OpenAI server over an engine of several processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx

from ..rigs.http_rig import COMPLETIONS
from ..rigs.http_servers import KEY, SECONDS, Command
from ..rigs.parallel_rig import ranks_of, wait_until_gone

pytestmark = pytest.mark.slow
BODY: dict[str, Any] = {"prompt": "def main(", "temperature": 0.0, "ignore_eos": True}
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def command() -> Iterator[Command]:
    command = Command(
        *("demo", "--port", "0", "--mode", "eager", "--tensor-parallel", "2"),
        *("--rank-timeout", "5"),
    )
    command.wait_ready()
    yield command
    if command.process.poll() is None:
        command.stop()


def complete(command: Command, max_tokens: int = 8, **fields: Any) -> httpx.Response:
    body = BODY | {"max_tokens": max_tokens} | fields
    return httpx.post(
        f"{command.address}{COMPLETIONS}", json=body, headers=HEADERS, timeout=SECONDS
    )


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(command: Command, number: signal.Signals) -> None:
    ranks = ranks_of(command.process.pid)
    assert len(ranks) == 1
    text_of(complete(command))
    status, errors = command.stop(number)
    assert status == 0, errors
    wait_until_gone(ranks, SECONDS)
