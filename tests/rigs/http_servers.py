"""Servers over sockets: the command in a process, a fake engine in a thread; and raw requests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from stepgraph.runtime import AsyncEngine, Engine, ServiceConfig
from stepgraph.runtime.service import app
from stepgraph.runtime.service.http import connection
from stepgraph.runtime.service.http.command import API_KEY_VARIABLE

from .http_rig import slow_engine
from .service_rig import SECONDS, wait_until

KEY = "test-key"
HEADERS = {"authorization": f"Bearer {KEY}"}


class Command:
    """The command in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "stepgraph", "serve", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, API_KEY_VARIABLE: KEY},
        )
        assert self.process.stderr is not None
        self.errors = [self.process.stderr.readline()]
        # A full pipe would stop the command.
        read, stderr = self.errors.extend, self.process.stderr
        self._reader = threading.Thread(target=read, args=(stderr,), daemon=True)
        self._reader.start()
        self.address = self.errors[0].split("; ")[1].split()[0]

    def wait_for_error(self, text: str) -> None:
        """Wait for a line on stderr."""
        wait_until(lambda: any(text in line for line in self.errors))

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().endswith(f"ready: {self.address}\n")

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return self.process.returncode, "".join(self.errors)


class Threaded:
    """A server over a fake engine, a slow one by default, in a thread."""

    def __init__(
        self,
        start: Callable[[], Engine] = slow_engine,
        service: ServiceConfig | None = None,
        wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
        listener: socket.socket | None = None,
        **options: Any,
    ) -> None:
        self.engine = AsyncEngine(start, service)
        self.engine.start()
        config = uvicorn.Config(
            wrap(app(self.engine, **options)),
            http=partial(
                connection.LimitedConnection, send_timeout=self.engine.config.send_timeout
            ),
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]  # of TCP
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def answer(self, data: bytes) -> bytes:
        """Send bytes, and return everything until the server closes the connection."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_all(sock)

    def running(self) -> int:
        return int(asyncio.run(self.engine.stats())["running"])

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(SECONDS)
        self.engine.close()


def body_of(max_tokens: int, **fields: Any) -> bytes:
    fields |= {"prompt": [1], "max_tokens": max_tokens, "ignore_eos": True}
    return json.dumps(fields).encode()


def request(body: bytes, *headers: bytes) -> bytes:
    """A request with the length of its body, unless the headers say how long it is."""
    lines = [b"POST /v1/completions HTTP/1.1", b"host: x", *headers]
    if not any(line.startswith((b"content-length", b"transfer-encoding")) for line in headers):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes, also if it resets the connection."""
    data = b""
    try:
        while piece := sock.recv(1 << 16):
            data += piece
    except ConnectionError:
        pass
    return data
