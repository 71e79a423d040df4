"""Clients that attack the HTTP service over sockets, and one that must not notice it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from stepgraph.runtime import ServiceConfig
from stepgraph.runtime.service.http import connection, exchange

from ..rigs.fake_engine import fake_engine
from ..rigs.http_rig import COMPLETIONS, events_of
from ..rigs.http_servers import HEADERS, KEY, SECONDS, Command, Threaded, body_of, read_all, request
from ..rigs.service_rig import wait_until

BODY = body_of(2)
VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def threaded() -> Iterator[Threaded]:
    server = Threaded(fake_engine, max_body_bytes=1000)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (request(b"", b"content-length: 1000000").replace(b"/v1/completions", b"/"), b"x"),
        (
            request(b"", b"transfer-encoding: chunked").replace(b"/v1/completions", b"/"),
            b"1\r\nx\r\n",
        ),
        (VERSION, b"\r\n"),
    ],
    ids=["body", "chunks", "empty lines"],
)
def test_bytes_after_a_response_have_a_limited_time(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch, begin: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    with threaded.connect() as sock:
        sock.sendall(begin)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 ")

        def is_closed() -> bool:
            try:
                sock.sendall(piece)
            except ConnectionError:
                return True
            return False

        wait_until(is_closed)


def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GRACE_SECONDS", 0.0)
    server = Threaded(fake_engine, ServiceConfig(send_timeout=0.1))
    connections = server.server.server_state.connections
    with server.connect() as sock:
        sock.sendall(VERSION.replace(b"version", b"openapi.json") * 1000)
        wait_until(lambda: connections)
        wait_until(lambda: not connections)
    server.close()


def test_streams_that_are_not_read_give_up_their_rows_and_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients whose answers fill the buffers, on more connections than there are rows."""
    records: list[tuple[str, int]] = []
    monkeypatch.setattr(connection, "UNSENT_BYTES", 1024)
    service = ServiceConfig(send_timeout=1.5, max_unread_tokens=16)
    server = Threaded(lambda: fake_engine(max_model_len=400, num_blocks=500), service)
    server.engine.add_listener(
        lambda record: records.append((record.outcome, record.num_output_tokens))
    )
    clients = []
    for _ in range(6):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request(body_of(390, stream=True), b"connection: close"))
        clients.append(sock)
    paused = server.engine._thread.dispatcher._paused
    wait_until(lambda: len(paused) == 6 and server.running() == 0)
    assert server.answer(request(BODY, b"connection: close")).startswith(b"HTTP/1.1 200")
    wait_until(lambda: len(records) == 7)
    outcomes = [outcome for outcome, _ in records]
    assert outcomes == ["length"] + ["send_timeout"] * 6, "it has waited for them"
    assert max(tokens for _, tokens in records) < 200
    assert not paused
    blocks = asyncio.run(server.engine.stats())["blocks"]
    assert blocks["free"] == blocks["usable"]
    for sock in clients:
        with sock:
            assert b'"code":"send_timeout"' in read_all(sock)
    server.close()


@pytest.mark.parametrize("size", [1, 7, 1 << 16], ids=str)
def test_requests_to_upgrade_are_served(threaded: Threaded, size: int) -> None:
    """HTTP/2 clients send them; the body must not be lost, and not be read as a request."""
    upgrade = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AA")
    whole = request(BODY, *upgrade)
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    chunked = request(chunk, *upgrade, b"transfer-encoding: chunked")
    last = request(BODY, b"upgrade: x", b"connection: upgrade, close")
    data = whole + VERSION + chunked + whole + last
    with threaded.connect() as sock:
        for at in range(0, len(data), size):
            sock.sendall(data[at : at + size])
        text = read_all(sock)
    assert text.count(b"HTTP/1.1 200 ") == 5
    assert text.count(b'"completion_tokens":2') == 4


def test_bodies_that_arrive_share_a_limit(
    threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_BODIES", 2)
    limits = (b"content-length: 1000", b"connection: close")  # of a body that is not complete
    address = f"http://127.0.0.1:{threaded.port}{COMPLETIONS}"
    with threaded.connect() as first, threaded.connect() as second, threaded.connect() as third:
        for sock in (first, second):
            sock.sendall(request(b" " * 999, *limits))
        wait_until(lambda: httpx.post(address, content=BODY).status_code == 503)
        third.sendall(request(BODY.ljust(1000), *limits))
        answer = read_all(third)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
    wait_until(lambda: httpx.post(address, content=BODY).status_code == 200)


class Neighbour:
    """A client that streams all the time, in a thread."""

    TOKENS = 100

    def __init__(self, address: str) -> None:
        self._address = address
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(1)
        self.longest_gap = 0.0
        """Seconds between two events."""
        self.num_streams = 0
        self._done = self._threads.submit(self._run)

    def stop(self) -> None:
        self._stopped.set()
        self._threads.shutdown()
        self._done.result()

    def _run(self) -> None:
        body = {"prompt": "def f(", "max_tokens": self.TOKENS, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        with httpx.Client(headers=HEADERS, timeout=SECONDS) as client:
            while not self._stopped.is_set():
                text, last = "", time.monotonic()
                with client.stream("POST", self._address + COMPLETIONS, json=body) as response:
                    for piece in response.iter_text():
                        now = time.monotonic()
                        self.longest_gap = max(self.longest_gap, now - last)
                        text, last = text + piece, now
                assert f'"completion_tokens":{self.TOKENS}' in events_of(text)[-2]
                self.num_streams += 1


MAX_GAP = 5.0
"""Seconds that the neighbour may wait; a machine of two busy cores included."""
MAX_GROWTH = 300 << 20
"""Bytes that the process may grow by; some of them are the allocator's."""
NUM_CLIENTS = 16


@pytest.fixture(scope="module")
def attacked() -> Iterator[Command]:
    """The command with a neighbour. What the attacks cost is checked at the end."""
    command = Command("demo", "--port", "0", "--mode", "eager", "--max-model-len", "512")
    command.wait_ready()
    process = psutil.Process(command.process.pid)
    neighbour = Neighbour(command.address)
    wait_until(lambda: neighbour.num_streams)
    num_files = process.num_fds()
    yield command
    neighbour.stop()
    wait_until(lambda: process.num_fds() <= num_files)
    status, _ = command.stop()
    assert status == 0
    assert neighbour.num_streams > 1
    assert neighbour.longest_gap < MAX_GAP


@pytest.fixture
def bounded_memory(attacked: Command) -> Iterator[None]:
    """Asserts that the attack of a test costs little memory."""
    process = psutil.Process(attacked.process.pid)
    before = process.memory_info().rss
    yield
    assert process.memory_info().rss - before < MAX_GROWTH


SIZE = (4 << 20) - 64
LARGE = [
    (COMPLETIONS, b'{"prompt": "%b"}', b"a "),
    (COMPLETIONS, b'{"prompt": [%b0]}', b"999,"),
    (COMPLETIONS, b'{"prompt": [%b0]}', b"9" * 4000 + b","),
    (COMPLETIONS, b'{"prompt": [%b[]]}', b"[],"),
    (COMPLETIONS, b'{"prompt": [%b""]}', b'"",'),
    (COMPLETIONS, b'{"prompt": [1], "stop": [%b""]}', b'"a",'),
    (COMPLETIONS, b'{"prompt": "a", "unknown": [%b0]}', b"{},"),
    (COMPLETIONS, b'{"prompt": "a", "unknown": [%b0]}', b"0" + b" " * 20 + b"{},"),
    ("/v1/chat/completions", b'{"messages": [%b{}]}', b"{},"),
    ("/v1/chat/completions", b'{"messages": [{"content": [%b{}]}]}', b'"aaaaaaaaaaaa",'),
    ("/v1/chat/completions", b'{"messages": [{}], "tools": [%b{}]}', b'{"function":{"name":""}},'),
    ("/tokenize", b'{"return_token_strs": true, "prompt": "%b"}', b"\\u4f60"),
    ("/detokenize", b'{"tokens": [%b0]}', b"2147483647,"),
]
"""Path, body, and what repeats in it up to the limit of bodies."""


@pytest.mark.slow
@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("number", range(len(LARGE)))
def test_large_bodies(attacked: Command, number: int) -> None:
    path, body, piece = LARGE[number]
    body %= piece * (SIZE // len(piece))

    def attack(_: int) -> int:
        answer = httpx.post(attacked.address + path, content=body, headers=HEADERS, timeout=SECONDS)
        return answer.status_code

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        assert set(threads.map(attack, range(2 * NUM_CLIENTS))) <= {200, 400}


@pytest.mark.slow
@pytest.mark.usefixtures("bounded_memory")
def test_slow_and_endless_requests(attacked: Command) -> None:
    """Hundreds of connections that never complete a request, and that never read an answer."""
    key = b"authorization: Bearer %b" % KEY.encode()
    begins = [
        b"POST /v1/comp",
        request(b"", b"a: b" * 100)[:-2],
        request(b"{" * 1000, key, b"content-length: 4000000"),
        request(b"1\r\n{\r\n" * 1000, key, b"transfer-encoding: chunked"),
        request(b"1;" + b"a" * 1000, key, b"transfer-encoding: chunked"),
        request(body_of(400, stream=True), key) * 20,
        b"\x00" * 1000,
    ]
    host, port = attacked.address.removeprefix("http://").split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(50 * len(begins))]
    try:
        for sock, begin in zip(sockets, begins * 50, strict=True):
            sock.sendall(begin)
        for _ in range(20):
            time.sleep(0.1)
            assert httpx.get(f"{attacked.address}/health", timeout=SECONDS).status_code == 200
    finally:
        for sock in sockets:
            sock.close()
