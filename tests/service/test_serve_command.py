"""`stepgraph serve` and the other commands before a model is loaded, and what they log."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx
from stepgraph.runtime import ConfigError, EngineConfig
from stepgraph.runtime.engine.engine_stats import EngineCounters
from stepgraph.runtime.service.http.command import ACCESS_LOG, in_flags, logs_to_stderr
from stepgraph.runtime.service.http.server import ThroughputLog

from ..project.test_imports import run
from ..rigs import service_rig
from ..rigs.fake_engine import fake_engine
from ..rigs.http_rig import COMPLETIONS, slow_engine
from ..rigs.http_servers import Threaded

USAGE_ERRORS = (
    *("serve", "serve demo --max-num-seqs 0", "serve demo --dtype int3", "serve demo --port x"),
    *("serve demo --ssl-certfile missing", "serve demo --speculation '{'", "serve demo --no-such"),
    *("serve demo --port 99999", "serve demo --tenant-weights a", "serve demo --host ''"),
    "serve demo --max-queued-requests 0",
    *("bench --batch-size x", "bench --num-steps 400 --scenario steady", "bench --no-such"),
    *("explain memory --device-memory lots", "explain", "report", "build-kernels --no-such"),
)
COMMANDS = ("serve", "bench", "explain", "explain memory", "report", "build-kernels")


def test_help_and_usage_errors_load_neither_torch_nor_numpy() -> None:
    lines = [*(f"{command} --help" for command in COMMANDS), *USAGE_ERRORS]
    run(
        "import shlex, sys\n"
        "from stepgraph.__main__ import main\n"
        f"for line in {lines!r}:\n"
        "    try: status = main(shlex.split(line))\n"
        "    except SystemExit as end: status = end.code\n"
        "    assert status == (0 if '--help' in line else 2), (line, status)\n"
        "    assert not {'torch', 'numpy'} & sys.modules.keys(), line\n"
    )


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
        _, errors = process.communicate(timeout=service_rig.SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert len(errors.splitlines()) == 1
    assert signal.SIGINT.name in errors


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"memory_bytes": 1, "memory_tokens": 1}, "memory_bytes"),
        ({"speculation": "guess"}, "speculation"),
    ],
)
def test_config_errors_name_field_and_flag(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**values)
    assert raised.value.field == field
    assert raised.value.flag == f"--{field.replace('_', '-')}"
    assert raised.value.flag in in_flags(raised.value)


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, ACCESS_LOG):
        yield caplog


def records(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """The records of the access log, once there are `count`."""

    def found() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == ACCESS_LOG]

    service_rig.wait_until(lambda: len(found()) >= count)
    return found()


def test_the_access_log_has_a_record_for_each_request(access: pytest.LogCaptureFixture) -> None:
    server = Threaded(fake_engine)
    url = f"http://127.0.0.1:{server.port}"
    body = {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
    try:
        for more in ({}, {"stream": True}):
            httpx.post(f"{url}{COMPLETIONS}", json=body | more)
        httpx.post(f"{url}{COMPLETIONS}", content=b"{")
        httpx.get(f"{url}/no%0Asuch")
        httpx.get(f"{url}/health")
        found = records(access, 4)
    finally:
        server.close()
    assert len(found) == 4
    for line in found[:2]:
        assert line.startswith(f"POST {COMPLETIONS} 200 ")
        assert "2 tokens in, 3 out" in line
        assert "cmpl-" in line
    assert found[2].startswith(f"POST {COMPLETIONS} 400 ")
    assert found[3].startswith("GET /no%0Asuch 404 ")


def test_the_access_log_names_a_client_that_disconnects(access: pytest.LogCaptureFixture) -> None:
    server = Threaded(slow_engine)
    url = f"http://127.0.0.1:{server.port}{COMPLETIONS}"
    body = {"prompt": [1, 2], "max_tokens": 40, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", url, json=body) as response:
            next(response.iter_raw())
        (line,) = records(access, 1)
    finally:
        server.close()
    assert line.endswith("disconnected")


def test_a_failed_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    r = service_rig.Rig(max_num_seqs=2)
    r.on_step = service_rig.fail
    server = Threaded(r.make)
    url = f"http://127.0.0.1:{server.port}{COMPLETIONS}"

    async def post_all() -> list[httpx.Response]:
        async with httpx.AsyncClient() as client:
            bodies = [{"prompt": [1, 2], "max_tokens": 3, "stream": n % 2 == 1} for n in range(4)]
            return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

    try:
        statuses = [response.status_code for response in asyncio.run(post_all())]
    finally:
        server.close()
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
