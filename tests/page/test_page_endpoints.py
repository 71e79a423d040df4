"""The files of the page, its live view, and which web pages may send requests."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send
from stepgraph.runtime import AsyncEngine, ServiceConfig
from stepgraph.runtime.service import app
from stepgraph.runtime.service.http import connection, page

from ..rigs.fake_engine import fake_engine
from ..rigs.http_rig import COMPLETIONS, Rig, events_of, service
from ..rigs.http_servers import Threaded, body_of, read_all, request
from ..rigs.service_rig import in_event_loop, wait_until

BODY = {"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True}


@in_event_loop
async def test_page_is_static_files_of_a_strict_policy() -> None:
    async with service(page=True, api_keys=["k"]) as rig:
        mounted = client(Starlette(routes=[Mount("/llm", rig.app)]), "127.0.0.1")
        for http, prefix in ((rig.http, ""), (mounted, "/llm")):
            paths, texts = ["/"], {}
            for path in paths:  # every file that another one names
                response = await http.get(prefix + path)
                assert response.status_code == 200, path
                assert "default-src 'none'" in response.headers["content-security-policy"]
                assert response.headers["x-content-type-options"] == "nosniff"
                known = {"if-none-match": response.headers["etag"]}
                again = await http.get(prefix + path, headers=known)
                assert (again.status_code, again.content) == (304, b"")
                texts[path] = response.text
                named = re.findall(r'(?:from "\./|(?:src|href)="(?!#))([\w./]+)"', response.text)
                for name in named:
                    target = name if path == "/" else f"page/{name}"
                    paths += [f"/{target}"] if f"/{target}" not in paths else []
            assert set(paths) == page.FILES.keys() - {"/page/index.html", "/page/icon.svg"}
            assert not [path for path, text in texts.items() if "innerHTML" in text]
            assert (await http.get(f"{prefix}/page/settings")).status_code == 401
            assert (await http.get(f"{prefix}/live")).status_code == 401
    async with service() as rig:
        for path in ("/", "/page/app.js", "/live"):
            assert (await rig.http.get(path)).status_code == 404


def client(app: ASGIApp, server: str) -> httpx.AsyncClient:
    """A client of an application that listens on an address."""

    async def listening(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "server": (server, 80)}, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(listening), base_url="http://test")


ALLOWED = ["https://a.example"]
ORIGINS: list[tuple[str | None, str, dict[str, Any], bool]] = [
    (None, "localhost:80", {}, True),
    ("http://localhost:80", "localhost:80", {}, True),
    ("http://app.localhost", "app.localhost", {}, True),
    ("http://127.0.0.1:80", "127.0.0.1:80", {}, True),
    ("http://[::1]:80", "[::1]:80", {}, True),
    ("http://192.168.1.2:80", "192.168.1.2:80", {}, True),  # no name: forwarded to here
    ("http://127.0.0.1:81", "127.0.0.1:80", {}, False),
    ("https://b.example", "localhost:80", {}, False),
    ("null", "localhost:80", {}, False),
    ("http://[::1", "localhost:80", {}, False),
    ("http://b.example", "b.example", {}, False),  # a name that was rebound to 127.0.0.1
    ("http://b.example", "b.example", {"api_keys": ["k"]}, True),
    ("http://b.example", "b.example", {"server": "10.0.0.1"}, True),
    ("http://b.example", "b.example", {"server": "/run/socket"}, True),
    ("https://b.example", "b.example", {}, True),  # a reverse proxy with TLS
    ("https://a.example", "localhost:80", {"allow_origins": ALLOWED}, True),
    ("http://b.example", "b.example", {"allow_origins": ["http://b.example"]}, True),
    ("https://b.example", "localhost:80", {"allow_origins": ["*"]}, True),
    ("https://b.example", "localhost:80", {"allow_origins": ALLOWED}, False),
]


@in_event_loop
async def test_origins_of_other_pages_are_refused() -> None:
    async with service() as rig:
        for origin, host, options, accepted in ORIGINS:
            server = options.pop("server", "127.0.0.1")
            http = client(app(rig.engine, **options), server)
            headers = {"host": host, "authorization": "Bearer k"}
            headers |= {} if origin is None else {"origin": origin}
            response = await http.post(COMPLETIONS, json=BODY, headers=headers)
            case = (origin, host, options, response.text)
            assert response.status_code == (200 if accepted else 403), case
            if not accepted:
                assert f"--allow-origin {origin}" in response.json()["error"]["message"]
                plain = {"content-type": "text/plain", **headers}
                assert (await http.post(COMPLETIONS, headers=plain)).status_code == 403
            assert (await http.get("/v1/models", headers=headers)).status_code == 200


@in_event_loop
async def test_live_view_counts_tokens_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PERIOD_SECONDS", 0.01)
    async with service(page=True) as rig:
        reading = asyncio.create_task(rig.http.get("/live"))
        await asyncio.sleep(0.1)
        await asyncio.gather(*[rig.post(BODY) for _ in range(3)])
        monkeypatch.setattr(page, "LIVE_SECONDS", 0.0)  # the next event is the last one
        live = [json.loads(data) for data in events_of((await reading).text)]
        assert {event["phase"] for event in live} == {"serving"}
        assert live[-1]["gauges"]["rows"] == 4
        assert sum(event["counts"]["output_tokens"] for event in live) == 12
        gaps = [tokens for event in live for _, tokens in event["gaps"]]
        assert sum(gaps) == 9, "the first token of each has no gap"
        steps = [each for event in live for each in event["steps"].values()]
        assert sum(each["rows"] for each in steps) == 9
        assert sum(each["prefill_tokens"] for each in steps) == 6
        assert all(each.keys() >= {*page.PHASES} for each in steps)
        assert not {"prompt", "text"} & live[-1].keys()
        assert (await rig.http.head("/live")).status_code == 200


@in_event_loop
async def test_live_view_ends_when_the_service_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(page, "MAX_VIEWS", 1)
    async with service(page=True) as rig:
        reading = asyncio.create_task(rig.http.get("/live"))
        await asyncio.sleep(0.05)
        assert (await rig.http.get("/live")).status_code == 503, "there are too many"
        await rig.engine.drain()
        *_, last = events_of((await reading).text)
        assert json.loads(last)["phase"] == "draining"
        assert (await rig.http.get("/live")).status_code == 200


def test_live_view_without_a_reader_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PERIOD_SECONDS", 0.0)
    monkeypatch.setattr(connection, "GRACE_SECONDS", 0.0)
    server = Threaded(fake_engine, ServiceConfig(send_timeout=0.2), page=True)
    connections = server.server.server_state.connections
    get = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(get)
        wait_until(lambda: connections)
        again = request(body_of(2), b"connection: close")
        assert server.answer(again).startswith(b"HTTP/1.1 200"), "others are served"
        wait_until(lambda: not connections)
        assert len(read_all(sock)) < 16 << 20
    server.close()


@in_event_loop
async def test_page_is_served_while_the_model_loads() -> None:
    rig = Rig(AsyncEngine(fake_engine), page=True)
    assert (await rig.http.get("/")).status_code == 200
    assert (await rig.http.get("/page/settings")).status_code == 503
