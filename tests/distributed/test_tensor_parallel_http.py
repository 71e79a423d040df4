"""The OpenAI server over an engine of several processes."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx

from ..rigs.http_rig import COMPLETIONS, events_of
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


def events(response: httpx.Response) -> list[dict[str, Any]]:
    *found, last = events_of(response.text)
    assert last == "[DONE]"
    return [json.loads(event) for event in found]


@pytest.mark.parametrize("stream", [False, True])
def test_a_rank_that_dies_under_load(command: Command, stream: bool) -> None:
    (rank,) = ranks_of(command.process.pid)
    expected = text_of(complete(command))
    chunks = events(complete(command, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    failures: list[str] = []

    def load() -> None:
        while not failures:
            response = complete(command, 400, stream=stream)
            if "error" in response.text:
                failures.append(response.text)

    clients = [threading.Thread(target=load) for _ in range(2)]
    for client in clients:
        client.start()
    time.sleep(1.0)
    rank.kill()
    for client in clients:
        client.join(SECONDS)
        assert not client.is_alive()
    assert failures
    assert command.process.wait(SECONDS) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(command: Command, number: signal.Signals) -> None:
    ranks = ranks_of(command.process.pid)
    assert len(ranks) == 1
    text_of(complete(command))
    status, errors = command.stop(number)
    assert status == 0, errors
    wait_until_gone(ranks, SECONDS)
