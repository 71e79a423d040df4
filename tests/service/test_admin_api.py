"""Endpoints for operators: who may use them, profiles, the timeline, load, sleep."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from stepgraph.profiling import ranges
from stepgraph.profiling.trace import read_trace
from stepgraph.runtime import AsyncEngine, ConfigError
from stepgraph.runtime.service import app
from stepgraph.runtime.service.http.app import OPERATIONS

from ..rigs.fake_engine import fake_engine
from ..rigs.http_rig import COMPLETIONS, service, slow_engine
from ..rigs.http_servers import HEADERS, SECONDS, Command
from ..rigs.service_rig import in_event_loop

BODY: dict[str, Any] = {"prompt": [1], "max_tokens": 8, "ignore_eos": True}
ADMIN = [endpoint for endpoint, operation in OPERATIONS.items() if operation.admin]


def steps_of(path: str) -> int:
    return sum(event["name"] == "step" for event in read_trace(path)["traceEvents"])


@in_event_loop
async def test_operators_are_asked_for_admin_and_others_are_not() -> None:
    async with service(api_keys=["key"]) as rig:
        headers = {"authorization": "Bearer key"}
        for method, path in ADMIN:
            refused = await rig.http.request(method, path, headers=headers)
            assert refused.status_code == 403
            assert "--admin" in refused.json()["error"]["message"]
            assert (await rig.http.request(method, path)).status_code == 401
        assert (await rig.http.get("/ping")).json() == (await rig.http.get("/health")).json()
        assert (await rig.http.get("/load")).status_code == 401
        loads = [(await rig.http.get("/load", headers=headers)).json()]
        assert loads == [dict.fromkeys(loads[0], 0)]
        assert (await rig.http.get("/is_sleeping", headers=headers)).json() == {
            "is_sleeping": False
        }


@in_event_loop
async def test_profile_is_a_trace_of_the_steps_between_start_and_stop(tmp_path: Path) -> None:
    async with service(admin=True, profile_dir=tmp_path / "made") as rig:
        await rig.post(BODY)
        assert (await rig.http.post("/stop_profile")).status_code == 409
        path = (await rig.http.post("/start_profile")).json()["path"]
        assert Path(path).parent == tmp_path / "made"
        assert (await rig.http.post("/start_profile")).status_code == 409
        await rig.post(BODY)  # the first profile goes on
        await asyncio.gather(rig.post(BODY), rig.post(BODY))
        assert (await rig.http.post("/stop_profile")).json() == {"path": path}
        assert steps_of(path) >= 2 * BODY["max_tokens"]
        assert (await rig.http.post("/stop_profile")).status_code == 409


@in_event_loop
async def test_profiles_that_start_together_are_one(tmp_path: Path) -> None:
    async with service(admin=True, profile_dir=tmp_path) as rig:
        starts = await asyncio.gather(*[rig.http.post("/start_profile") for _ in range(4)])
        (path,) = [each.json()["path"] for each in starts if each.status_code == 200]
        refused = {each.json()["error"]["message"] for each in starts if each.status_code != 200}
        assert refused == {"a profile is running: POST /stop_profile ends it"}
        assert (await rig.http.post("/stop_profile")).json() == {"path": path}


@in_event_loop
async def test_profile_whose_folder_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    async with service(admin=True, profile_dir=tmp_path / "made") as rig:
        assert (await rig.http.post("/start_profile")).status_code == 200
        (tmp_path / "made").rmdir()
        for path in ("/stop_profile", "/start_profile"):
            failed = await rig.http.post(path)
            assert failed.status_code == 500
            assert str(tmp_path / "made") in failed.json()["error"]["message"]
        (tmp_path / "made").mkdir()
        path = (await rig.http.post("/start_profile")).json()["path"]
        assert (await rig.http.post("/stop_profile")).json() == {"path": path}


def test_profile_folder_that_cannot_be_made_is_a_wrong_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as raised:
        app(AsyncEngine(fake_engine), profile_dir=tmp_path / "file" / "traces")
    assert raised.value.flag == "--profile-dir"


@in_event_loop
async def test_profile_that_is_forgotten_ends_after_its_seconds(tmp_path: Path) -> None:
    async with service(admin=True, profile_dir=tmp_path) as rig:
        path = Path((await rig.http.post("/start_profile?seconds=0.02")).json()["path"])
        async with asyncio.timeout(SECONDS):
            while not path.exists():
                await rig.post(BODY)
        assert steps_of(str(path)) > 0
        assert (await rig.http.post("/stop_profile")).json() == {"path": str(path)}
        assert (await rig.http.post("/stop_profile")).status_code == 409
        assert (await rig.http.post("/start_profile")).status_code == 200
        await rig.http.post("/stop_profile")


@in_event_loop
async def test_profile_under_nsys_is_its_capture_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_STARTED_NSYS", "1")
    names: list[str] = []
    listener = SimpleNamespace(push=lambda name, payload: names.append(name), pop=lambda: None)
    async with service(admin=True) as rig:
        with ranges.listening(listener):
            assert (await rig.http.post("/start_profile")).json() == {"path": None}
            await rig.post(BODY)
            assert (await rig.http.post("/start_profile")).status_code == 409
            assert (await rig.http.post("/stop_profile")).json() == {"path": None}
    assert names[0] == ranges.WINDOW
    assert names.count(ranges.STEP) >= BODY["max_tokens"]


def test_operators_use_the_unix_socket_and_the_end_of_the_server_keeps_a_profile(
    tmp_path: Path,
) -> None:
    socket, traces = tmp_path / "socket", tmp_path / "traces"
    command = Command(
        *("demo", "--mode", "eager", "--kernels", "torch"),
        *("--uds", str(socket), "--profile-dir", str(traces)),
    )
    command.wait_ready()
    transport = httpx.HTTPTransport(uds=str(socket))
    with httpx.Client(
        transport=transport, base_url="http://local", headers=HEADERS, timeout=SECONDS
    ) as client:
        assert client.post("/start_profile", headers={"authorization": ""}).status_code == 401
        reported = client.post("/start_profile").json()["path"]
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
        ended = client.post("/stop_profile?report=true").json()
        assert ended["path"] == reported
        found = {(each["phase"], each["name"]): each["us"]["p50"] for each in ended["operations"]}
        assert found["decode", "qkv_linear"] > 0
        assert ("prefill", "sample") in found
        path = client.post("/start_profile").json()["path"]
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
    status, _ = command.stop(signal.SIGTERM)
    assert status == 0
    assert {str(file) for file in traces.iterdir()} == {path, reported}
    names = [event["name"] for event in read_trace(path)["traceEvents"]]
    assert names.count("step") >= 8
    assert "0/qkv_linear" in names


@in_event_loop
async def test_timeline_has_the_last_steps_as_records_and_as_a_trace() -> None:
    async with service(admin=True) as rig:
        await rig.post(BODY)
        last = (await rig.http.get("/timeline?steps=3")).json()["steps"]
        found = (await rig.http.get("/timeline")).json()
        records = rig.inner.timeline().records()
        assert last == found["steps"][-3:]
        for got, record in zip(found["steps"], records, strict=True):
            assert {name: getattr(record, name) for name in got} == got
        assert found["clock_ns"] >= records[-1].ended_ns
        trace = (await rig.http.get("/timeline?format=perfetto")).json()
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        steps = [event for event in events if event["name"] == "step"]
        assert [step["args"] for step in steps] == found["steps"]
        for step in steps:
            end = step["ts"] + step["dur"] + 1e-3
            inside = [e for e in events if step["ts"] <= e["ts"] < end and e is not step]
            assert all(event["ts"] + event["dur"] <= end for event in inside)
            assert sum(event["dur"] for event in inside) == pytest.approx(step["dur"], abs=1e-2)
            assert {"plan", "launch", "commit"} <= {event["name"] for event in inside}
        for query, param in (("steps=0", "steps"), ("format=x", "format")):
            refused = await rig.http.get(f"/timeline?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@in_event_loop
async def test_sleep_frees_the_engine_until_wake_up() -> None:
    async with service(admin=True) as rig:
        assert (await rig.http.post("/sleep?timeout=5&level=1")).json() == {"is_sleeping": True}
        assert (await rig.post(BODY)).status_code == 503
        assert (await rig.http.get("/load")).json()["running"] == 0
        assert (await rig.http.get("/timeline")).json()["steps"] == []
        assert (await rig.http.post("/reset_prefix_cache")).status_code == 503
        assert (await rig.http.post("/wake_up")).json() == {"is_sleeping": False}
        assert (await rig.post(BODY)).status_code == 200


@in_event_loop
async def test_load_and_prefix_cache() -> None:
    async with service(slow_engine, admin=True) as rig:
        prompt = {**BODY, "prompt": [1] * 24}
        stream = asyncio.create_task(rig.post({**prompt, "max_tokens": 20}))
        async with asyncio.timeout(SECONDS):
            while not (load := (await rig.http.get("/load")).json())["kv_cache_usage"]:
                await asyncio.sleep(0)
        assert load["server_load"] == 1
        assert load["running"] + load["waiting"] + load["queued"] >= 1
        await stream
        for cached, path in ((True, "/reset_prefix_cache"), (False, None)):
            usage = (await rig.post(prompt)).json()["usage"]
            details = usage["prompt_tokens_details"] or {}
            assert bool(details.get("cached_tokens")) is cached
            if path is not None:
                assert (await rig.http.post(path)).status_code == 200
