"""Clients of the HTTP service: whole responses through httpx, single messages through ASGI."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import stepgraph.runtime.demo
from stepgraph.runtime import AsyncEngine, Engine, EngineConfig, ServiceConfig
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.service import app

from .fake_engine import fake_engine, runner_of
from .service_rig import SECONDS

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def demo_with_template(folder: Path, template: str) -> Path:
    """Make a checkpoint of the demo model with a chat template, and return its folder."""
    for path in Path(stepgraph.runtime.demo.__path__[0]).iterdir():
        if path.suffix in (".json", ".safetensors"):
            (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def quick_config(max_model_len: int) -> EngineConfig:
    """The configuration with the shortest start and steps that this machine has."""
    kernels = "native" if have_compiler() else "torch"
    return EngineConfig(mode="eager", kernels=kernels, max_model_len=max_model_len)


class Rig:
    """A service over an engine in this process."""

    def __init__(self, engine: AsyncEngine, **options: Any) -> None:
        self.engine = engine
        self.app = app(engine, **options)
        transport = httpx.ASGITransport(app=self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    @property
    def inner(self) -> Engine:
        """The engine of the step thread."""
        engine = self.engine._thread.engine
        assert engine is not None
        return engine

    async def post(self, body: Any, path: str = COMPLETIONS, **more: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return await self.http.post(path, content=body, **more)
        return await self.http.post(path, json=body, **more)

    async def events(self, body: dict[str, Any], path: str = COMPLETIONS) -> list[Any]:
        """The data of the events of a stream that ends with `[DONE]`."""
        response = await self.post({**body, "stream": True}, path)
        assert response.status_code == 200, response.text
        events = events_of(response.text)
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    async def until_idle(self) -> None:
        while (stats := await self.engine.stats())["running"] or stats["queued"]:
            await asyncio.sleep(0.001)


def events_of(text: str) -> list[str]:
    *events, rest = text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


@asynccontextmanager
async def service(
    start: Callable[[], Engine] = fake_engine,
    config: ServiceConfig | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """A service whose engine has nothing left at the end."""
    async with AsyncEngine(start, config) as engine:
        rig = Rig(engine, **options)
        yield rig
        if engine.health().ready:
            await rig.until_idle()
            rig.inner.check_integrity()
            blocks = (await engine.stats())["blocks"]
            assert blocks["free"] == blocks["usable"]


def slow_engine(**options: Any) -> Engine:
    """A fake engine whose steps take 20 ms."""
    engine = fake_engine(**options)
    runner = runner_of(engine)
    launch = runner.launch

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return launch(*arguments)

    runner.launch = slow
    return engine


class Connection:
    """A completion requested through ASGI messages, whose client may disconnect at any time."""

    def __init__(self, rig: Rig, body: dict[str, Any]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._sent = asyncio.Condition()
        self.requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.requests.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [],
            "client": None,
            "server": None,
        }
        self.task = asyncio.create_task(rig.app(scope, self.requests.get, self._send))

    async def _send(self, message: Any) -> None:
        async with self._sent:
            self.messages.append(message)
            self._sent.notify_all()

    async def received(self, count: int) -> None:
        """Wait for a number of messages."""
        async with asyncio.timeout(SECONDS), self._sent:
            await self._sent.wait_for(lambda: len(self.messages) >= count)

    async def disconnect(self) -> None:
        self.requests.put_nowait({"type": "http.disconnect"})
        async with asyncio.timeout(SECONDS):
            await self.task
