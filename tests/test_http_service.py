"""The service of the embedding guide, as it is printed there."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import Engine

from .fake_engine import check_serves, expected, fake_engine, params

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "http_service.py"
SECONDS = 60


def example() -> Any:
    spec = importlib.util.spec_from_file_location("http_service", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Running:
    """A service in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.service = example().Service(engine)
        self.service.thread.daemon = True  # a test that fails does not stop it
        self.switch_interval = sys.getswitchinterval()
        ready = threading.Event()

        def started(port: int) -> None:
            self.port = port
            ready.set()

        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.service.serve(port=0, ready=started)), daemon=True
        )
        self.thread.start()
        assert ready.wait(SECONDS)

    def ask(
        self, path: str = "/v1/completions", method: str = "POST", **body: Any
    ) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        connection.request(method, path, json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def send(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        connection.sendall(data)
        return connection

    def stop(self) -> None:
        self.service.loop.call_soon_threadsafe(self.service.stopped.set)
        self.thread.join(SECONDS)
        sys.setswitchinterval(self.switch_interval)
        assert not self.thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    """A service over an engine that nothing is left in."""
    engine = fake_engine(max_num_seqs=6)
    service = Running(engine)
    yield service
    service.stop()
    check_serves(engine)


@pytest.fixture
def text_service(open_engine: Callable[..., Engine]) -> Iterator[Running]:
    service = Running(open_engine("text"))
    yield service
    service.stop()


def request(**body: Any) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(data) + data


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_text_streamed_and_whole(text_service: Running) -> None:
    body = {"prompt": "def main(", "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    status, whole = text_service.ask(**body)
    assert (status, whole["finish_reason"]) == (200, "length")
    with text_service.send(request(**body, stream=True)) as connection:
        head, _, events = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    pieces = [json.loads(event[6:]) for event in events.decode().split("\n\n")[:-1]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_many_clients(running: Running) -> None:
    """Each gets its own answer; those of the reference are what `generate` gives alone."""
    seen: dict[int, list[int]] = {}
    listen = running.service.deliver

    def deliver(outputs: list[Any]) -> None:
        seen.update({o.completions[0]._request.seed: o.token_ids for o in outputs if o.finished})
        listen(outputs)

    running.service.deliver = deliver

    def client(number: int) -> int:
        return running.ask(prompt=[number] * 3, seed=number, max_tokens=5, ignore_eos=True)[0]

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(client, range(10))) == [200] * 10
    references = [expected(running.engine, [n] * 3, params(n, 5)) for n in range(10)]
    assert sorted(seen.values()) == sorted(references)


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (400, b"nonsense\r\n\r\n"),
        (400, b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n"),
        (400, b"POST /v1/completions HTTP/1.1\r\n\r\n"),
        (400, b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n"),
        (400, b"POST / HTTP/1.1\r\n" + b"a" * 70_000 + b"\r\n\r\n"),
        (400, request()),
        (400, request(prompt=[])),
        (400, request(prompt={"a": 1})),
        (400, request(prompt=[99])),
        (400, request(prompt="text, and no tokenizer")),
        (400, request(prompt=[1], max_tokens=-1)),
        (400, request(prompt=[1], unknown=0)),
        (400, request(prompt=[1], temperature="hot")),
        (404, b"GET / HTTP/1.1\r\n\r\n"),
        (413, b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_input(running: Running, status: int, data: bytes) -> None:
    with running.send(data) as connection:
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert not running.engine.has_unfinished()


def slow_steps(engine: Engine) -> None:
    runner = engine._open_parts().runner
    launch = runner.launch

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return launch(*arguments)

    runner.launch = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_row(running: Running, stream: bool) -> None:
    engine = running.engine
    slow_steps(engine)
    connection = running.send(request(prompt=[1], max_tokens=40, ignore_eos=True, stream=stream))
    wait_until(lambda: engine.stats()["steps"] >= 2)
    connection.close()
    wait_until(lambda: engine.stats()["running"] == 0)
    assert engine.stats()["steps"] <= 20, "of the 40 that it would take"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_and_a_failed_engine() -> None:
    engine = fake_engine()
    service = Running(engine)
    assert service.ask("/health", "GET") == (200, {"healthy": True})
    runner = engine._open_parts().runner

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    runner.launch = fail  # type: ignore[method-assign]
    assert service.ask(prompt=[1, 2])[0] == 503
    wait_until(lambda: not service.service.thread.is_alive())
    assert service.ask("/health", "GET") == (503, {"healthy": False})
    assert service.ask(prompt=[1, 2])[0] == 503
    service.stop()


def test_stop_ends_open_answers() -> None:
    engine = fake_engine()
    service = Running(engine)
    slow_steps(engine)
    connection = service.send(request(prompt=[1], max_tokens=40, ignore_eos=True))
    wait_until(lambda: engine.stats()["steps"] >= 2)
    service.stop()
    assert connection.makefile("rb").read().startswith(b"HTTP/1.1 503 ")
    check_serves(engine)
