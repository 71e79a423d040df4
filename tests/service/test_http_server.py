"""`stepgraph serve`: command line, log, the openai client, and connections that misbehave."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from stepgraph.runtime import ConfigError, EngineConfig, ServiceConfig
from stepgraph.runtime.engine.engine_stats import EngineCounters
from stepgraph.runtime.service.http import connection, server
from stepgraph.runtime.service.http.command import (
    ACCESS_LOG,
    logs_to_stderr,
    make_parser,
    run,
)
from stepgraph.runtime.service.http.server import ThroughputLog
from stepgraph.runtime.tools.arguments import config_of, in_flags

from ..rigs.fake_engine import fake_engine
from ..rigs.http_rig import COMPLETIONS, events_of
from ..rigs.http_servers import HEADERS, KEY, SECONDS, Command, Threaded, body_of, request
from ..rigs.service_rig import Rig as EngineRig
from ..rigs.service_rig import fail, wait_until

BODY = {"prompt": "def main(", "temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    command = Command("demo", "--port", "0", "--mode", "eager", "--served-model-name", "small")
    assert httpx.get(f"{command.address}/health").status_code == 200, "while it loads"
    command.wait_ready()
    yield command
    if command.process.poll() is None:
        command.stop()


def test_the_openai_client(command: Command) -> None:
    client = openai.OpenAI(base_url=f"{command.address}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["small"]
    metrics = httpx.get(f"{command.address}/metrics", headers=HEADERS).text
    assert 'stepgraph:engine_ready{model_name="small"} 1.0' in metrics
    body = {"model": "small", **BODY}
    extra = {"ignore_eos": body.pop("ignore_eos")}
    whole = client.completions.create(**body, extra_body=extra)
    chunks = list(
        client.completions.create(
            **body, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
    )
    text = whole.choices[0].text
    assert text
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 8
    for model, error in (("other", openai.NotFoundError), ("small", openai.BadRequestError)):
        with pytest.raises(error) as raised:
            client.completions.create(model=model, prompt="x", temperature=-1, stream=True)
        assert raised.value.param in ("model", "temperature")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError):  # the model has no template
        client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "hi"}], stream=True
        )


@contextmanager
def streamed(command: Command, max_tokens: int) -> Iterator[list[str]]:
    """A stream while it runs, and all of its text afterwards."""
    body = {**BODY, "max_tokens": max_tokens, "stream": True}
    url = f"{command.address}{COMPLETIONS}"
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=SECONDS) as response:
        chunks = response.iter_text()
        text = [next(chunks)]
        yield text
        text += chunks


def test_sigterm_completes_the_requests_in_progress(command: Command) -> None:
    with streamed(command, 200) as text:
        command.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{command.address}/ready").status_code != 200)
        url = f"{command.address}{COMPLETIONS}"
        assert httpx.post(url, json=BODY, headers=HEADERS).status_code == 503
    events = events_of("".join(text))
    assert events[-1] == "[DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert command.process.wait(SECONDS) == 0


def test_a_signal_while_the_model_loads(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    command = Command("demo", "--uds", str(path), "--mode", "eager")
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://local") as client:
        wait_until(path.exists)
        assert client.get("/health").status_code == 200
    status, errors = command.stop(signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert signal.SIGTERM.name in errors
    assert not path.exists()


def test_a_unix_socket_replaces_no_other_that_is_used(tmp_path: Path) -> None:
    used, file = tmp_path / "socket", tmp_path / "file"
    file.touch()
    server.listen_unix(str(used)).close()  # as a process that has ended leaves it
    with server.listen_unix(str(used)), socket.socket(socket.AF_UNIX) as client:
        for path in (used, file, tmp_path):
            with pytest.raises(OSError, match=str(path)):
                server.listen_unix(str(path))
        client.connect(str(used))
    assert file.exists()


def test_a_unix_socket_of_a_relative_path_is_one_for_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    served = Threaded(fake_engine, listener=server.listen_unix("socket"))
    with httpx.Client(transport=httpx.HTTPTransport(uds="socket"), base_url="http://x") as client:
        assert client.post("/reset_prefix_cache").status_code == 200
    served.close()


def test_a_second_interrupt_ends_the_requests_at_once() -> None:
    command = Command("demo", "--port", "0", "--mode", "eager", "--kernels", "torch")
    command.wait_ready()
    with streamed(command, 2000) as text:
        command.process.send_signal(signal.SIGINT)
        command.wait_for_error("1 request")
        began = time.monotonic()
        status, _ = command.stop(signal.SIGINT)
        assert time.monotonic() - began < 10, "of the 30 s that it may take"
    assert status == 0
    assert '"finish_reason":"abort"' in "".join(text)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("no/such/checkpoint", 1),
        ("demo --host 203.0.113.1", 1),
        ("demo --tool-parser unknown", 2),
        ("demo --ssl-certfile missing --ssl-keyfile missing", 1),
    ],
)
def test_what_cannot_be_served(
    arguments: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments.split(), "--port", "0"], server.serve) == status
    assert "stepgraph serve: error: " in capsys.readouterr().err


def test_flags_of_sizes_lists_and_mappings() -> None:
    flags = ("--memory-bytes", "1GiB", "--buckets", "1", "4", "--tenant-weights", "a=2", "b=0.5")
    options = make_parser().parse_args(["demo", *flags, "--no-freeze-gc"])
    expected = EngineConfig(memory_bytes=1 << 30, buckets=(1, 4))
    assert config_of(EngineConfig, options, freeze_gc=True) == expected
    assert config_of(ServiceConfig, options) == ServiceConfig(tenant_weights={"a": 2.0, "b": 0.5})


def test_config_errors_name_the_flag() -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(memory_bytes=1, memory_tokens=1)
    assert "--memory-bytes" in in_flags(raised.value)


@pytest.fixture
def threaded() -> Iterator[Threaded]:
    server = Threaded()
    yield server
    server.close()


@pytest.mark.parametrize("pipelined", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_socket_frees_its_row(threaded: Threaded, stream: bool, pipelined: int) -> None:
    with threaded.connect() as sock:
        sock.sendall(request(body_of(40, stream=stream)) * pipelined)
        wait_until(threaded.running)
    wait_until(lambda: not threaded.running())
    assert asyncio.run(threaded.engine.stats())["steps"] < 35, "of the 40 that it would take"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n" * 1000),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\na: ", b"b" * 10_000),
        (b"GET /", b"a" * 10_000),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
            b"a: b\r\n" * 1000,
        ),
    ],
    ids=["headers", "value", "path", "trailers"],
)
def test_floods_end_the_connection(threaded: Threaded, head: bytes, piece: bytes) -> None:
    with threaded.connect() as sock:
        sock.sendall(head)
        with pytest.raises(ConnectionError):
            sock.sendall(piece * ((64 << 20) // len(piece)))
    assert httpx.get(f"http://127.0.0.1:{threaded.port}/health").status_code == 200


def test_slow_heads_end_the_connection(threaded: Threaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    for begin in (b"", b"POST /v1/comp", b"POST / HTTP/1.1\r\nhost: x\r\na:"):
        assert threaded.answer(begin) == b""
    answer = threaded.answer(request(body_of(12), b"connection: close"))
    assert answer.startswith(b"HTTP/1.1 200 "), "it may take longer"


def test_requests_in_one_packet_are_answered_in_order(threaded: Threaded) -> None:
    packet = b"".join(request(body_of(n)) for n in (3, 1, 2))
    packet += b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    text = threaded.answer(packet).decode()
    assert [text.count(f'"completion_tokens":{n}') for n in (1, 2, 3)] == [1, 1, 1]
    places = [text.index(f'"completion_tokens":{n}') for n in (3, 1, 2)]
    assert places == sorted(places)
    assert text.count("HTTP/1.1 200 OK") == 4


def test_a_stream_of_http_1_0_has_no_chunks(threaded: Threaded) -> None:
    packet = request(body_of(3, stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, text = threaded.answer(packet).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert len(events_of(text.decode())) == 4


def test_a_connection_that_is_reset_is_no_error(
    threaded: Threaded, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(8):
        with threaded.connect() as sock:
            sock.sendall(request(body_of(40, stream=True)) * 2)
            sock.recv(1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until(lambda: not threaded.running())
    assert not caplog.records


SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("importing", flush=True)
            try: time.sleep(60)
            except BaseException: pass  # as libraries do

sys.meta_path.insert(0, Slow())
from stepgraph.__main__ import main
sys.exit(main(["serve", "demo"]))
"""


def test_a_signal_during_imports_ends_the_command() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert len(errors.splitlines()) == 1
    assert signal.SIGINT.name in errors


def test_the_access_log_has_a_record_for_each_request(
    threaded: Threaded, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOG)
    url = f"http://127.0.0.1:{threaded.port}"
    body = {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
    for more in ({}, {"stream": True}):
        httpx.post(f"{url}{COMPLETIONS}", json=body | more)
    httpx.post(f"{url}{COMPLETIONS}", content=b"{")
    httpx.get(f"{url}/no%0Asuch")
    httpx.get(f"{url}/health")
    long = {**body, "max_tokens": 40, "stream": True}
    with httpx.stream("POST", f"{url}{COMPLETIONS}", json=long) as response:
        next(response.iter_raw())
    wait_until(lambda: len(caplog.records) >= 5)
    found = [record.getMessage() for record in caplog.records if record.name == ACCESS_LOG]
    assert len(found) == 5
    for line in found[:2]:
        assert line.startswith(f"POST {COMPLETIONS} 200 ")
        assert "2 tokens in, 3 out" in line
        assert "cmpl-" in line
    assert found[2].startswith(f"POST {COMPLETIONS} 400 ")
    assert found[3].startswith("GET /no%0Asuch 404 ")
    assert found[4].endswith("disconnected")


def test_a_failed_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    r = EngineRig(max_num_seqs=2)
    r.on_step = fail

    async def post_all(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient() as client:
            bodies = [{"prompt": [1, 2], "max_tokens": 3, "stream": n % 2 == 1} for n in range(4)]
            return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

    with closing(Threaded(r.make)) as server:
        responses = asyncio.run(post_all(f"http://127.0.0.1:{server.port}{COMPLETIONS}"))
    statuses = [response.status_code for response in responses]
    assert set(statuses) <= {500, 503}
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_the_log_of_the_command_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    handlers, own = logging.root.handlers[:], logging.getLogger("stepgraph")
    level = own.level
    with logs_to_stderr("info", access=False):
        logging.getLogger("stepgraph.runtime").info("own")
        logging.getLogger("stepgraph.runtime").debug("hidden")
        logging.getLogger(ACCESS_LOG).info("hidden")
        logging.getLogger("uvicorn.error").info("hidden")
        logging.getLogger("uvicorn.error").error("uvicorn")
        logging.getLogger("asyncio").error("asyncio")
        shown = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in shown] == ["own", "uvicorn", "asyncio"]
    assert (logging.root.handlers, own.level) == (handlers, level)
    assert [type(handler) for handler in own.handlers] == [logging.NullHandler]


def test_throughput_is_logged_while_the_engine_is_busy(caplog: pytest.LogCaptureFixture) -> None:
    gauges = SimpleNamespace(running=2, waiting=1, held_blocks=5, usable_blocks=20)
    state = SimpleNamespace(
        gauges=gauges, counters=EngineCounters(), queued_requests=3, open_requests=0
    )
    now = 0.0
    log = ThroughputLog(lambda: state, lambda: now)  # type: ignore[arg-type,return-value]
    caplog.set_level(logging.INFO, "stepgraph.serve")
    for now in range(1, 41):
        log.tick()
        if now == 15:
            state.counters = EngineCounters(prompt_tokens=100, output_tokens=50)
    (record,) = caplog.records
    assert record.args == (2, 4, 10.0, 5.0, 25.0)
