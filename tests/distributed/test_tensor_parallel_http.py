"""The OpenAI server over an engine of several processes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

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


def test_a_rank_that_dies_under_load(command: Command) -> None:
    (rank,) = ranks_of(command.process.pid)
    expected = text_of(complete(command))
    *chunks, last = events_of(complete(command, stream=True).text)
    assert last == "[DONE]"
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == expected
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(complete, command, 400, stream=s) for s in (False, True)]
        time.sleep(0.2)
        rank.kill()
        assert all("error" in answer.result(SECONDS).text for answer in answers)
    assert command.process.wait(SECONDS) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(command: Command, number: signal.Signals) -> None:
    ranks = ranks_of(command.process.pid)
    assert len(ranks) == 1
    text_of(complete(command))
    status, errors = command.stop(number)
    assert status == 0, errors
    wait_until_gone(ranks, SECONDS)
