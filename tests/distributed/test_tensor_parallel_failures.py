"""Ranks that die, hang, raise or disagree: a typed error in time, and nothing that remains."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from stepgraph.runtime import (
    AsyncEngine,
    CheckpointError,
    ConfigError,
    Engine,
    EngineConfig,
    EngineFailedError,
    RankError,
    SamplingParams,
)

from ..rigs.engine_rig import greedy, loop_of
from ..rigs.http_rig import COMPLETIONS, events_of
from ..rigs.http_servers import HEADERS, SECONDS, Command
from ..rigs.parallel_rig import PROMPTS, SIZES, children, opened, ranks_of, wait_until_gone
from ..rigs.service_rig import wait_until
from ..rigs.tiny_models import TinyModel

TIMEOUT = 3.0
BOUND = 20.0
"""Seconds from a failure to the error: the timeout, and a machine that runs much else."""
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def disagree(engine: Engine, rank: psutil.Process) -> None:
    """Let rank 0 believe that it has had other tokens."""
    group = loop_of(engine).group
    assert group is not None
    group.checksum ^= 1


def misread(engine: Engine, rank: psutil.Process) -> None:
    """Let the rank fail in its own code: an unknown command."""
    group = loop_of(engine).group
    assert group is not None
    group.send("unknown")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda _, rank: rank.kill(), "rank 1: process .* was ended by SIGKILL"),
        pytest.param(
            lambda _, rank: rank.suspend(),
            "rank 1: did not take part in .* 3 s",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            disagree, "rank 1: its tokens differ from rank 0's at step", marks=pytest.mark.slow
        ),
        pytest.param(misread, "rank 1: AttributeError", marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped", "disagrees", "fails"],
)
@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_lost_rank_ends_the_engine(
    base: TinyModel, fault: Callable[[Engine, psutil.Process], None], reason: str, busy: bool
) -> None:
    with opened(base.directory, 2, rank_timeout=TIMEOUT) as engine:
        engine.generate(PROMPTS, greedy())
        (rank,) = children()
        happened: list[float] = []

        def happen() -> None:
            time.sleep(0.2 if busy else 0.0)
            happened.append(time.monotonic())
            fault(engine, rank)

        thread = threading.Thread(target=happen)
        thread.start()
        if not busy:
            thread.join()
            if "SIGKILL" in reason or "AttributeError" in reason:  # others: by the next step
                wait_until(lambda: not engine.stats()["healthy"], BOUND)
        with pytest.raises(RankError, match=reason) as failed:
            generate_for_ever(engine)
        assert time.monotonic() - happened[0] < BOUND
        thread.join()
        assert not engine.stats()["healthy"]
        wait_until_gone([rank], BOUND)
        with pytest.raises(EngineFailedError) as again:
            engine.generate(PROMPTS, LONG)
        assert repr(str(failed.value)) in str(again.value)
    assert not children()
    assert not [t for t in threading.enumerate() if t.name == "stepgraph-ranks"]


def generate_for_ever(engine: Engine) -> None:
    while True:
        engine.generate(PROMPTS, LONG)


@pytest.mark.slow
def test_ctrl_c_leaves_an_engine_that_serves(base: TinyModel) -> None:
    with opened(base.directory, 2) as engine:
        expected = engine.generate(PROMPTS, greedy())
        (rank,) = children()

        def interrupt() -> None:
            time.sleep(0.2)
            rank.send_signal(signal.SIGINT)  # a terminal sends it to the whole group
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            generate_for_ever(engine)
        thread.join()
        engine.step()
        again = engine.generate(PROMPTS, greedy())
        assert [o.token_ids for o in again] == [o.token_ids for o in expected]


PARENT = """
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
engine = Engine.from_pretrained({source!r}, EngineConfig(**{fields!r}))
print("ready", flush=True)
while {busy}:
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=60, ignore_eos=True))
import time
time.sleep({idle})
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
@pytest.mark.parametrize("busy", [True, False])
def test_ranks_end_with_their_parent(
    base: TinyModel, how: signal.Signals | None, busy: bool
) -> None:
    """With `None` the parent ends by itself and has not closed its engine."""
    fields = SIZES | {"tensor_parallel": 2, "rank_timeout": TIMEOUT}
    busy = busy and how is not None
    idle = 60 if how is not None else 0
    program = PARENT.format(source=str(base.directory), fields=fields, busy=busy, idle=idle)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        ranks = psutil.Process(parent.pid).children(recursive=True)
        assert ranks
        if how is not None:
            parent.send_signal(how)
        parent.wait(60)
        wait_until_gone(ranks, BOUND)


@pytest.mark.slow
def test_an_engine_that_was_not_closed(base: TinyModel) -> None:
    fields = SIZES | {"tensor_parallel": 2}
    engine = Engine.from_pretrained(base.directory, EngineConfig(**fields))
    ranks = children()
    engine.generate(PROMPTS, greedy())
    del engine
    import gc

    gc.collect()
    wait_until_gone(ranks, BOUND)


@pytest.mark.slow
def test_two_engines_and_a_fork(base: TinyModel) -> None:
    with opened(base.directory, 2) as one, opened(base.directory, 2, seed=3) as two:
        expected = [o.token_ids for o in one.generate(PROMPTS, greedy())]
        child = os.fork()
        if not child:
            one.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [o.token_ids for o in two.generate(PROMPTS, greedy())] == expected
        one.close()
        assert len(children()) == 1
        assert [o.token_ids for o in two.generate(PROMPTS, greedy())] == expected
    assert not children()


@pytest.mark.slow
@pytest.mark.parametrize("idle", [False, True])
def test_async_engine_ends_with_a_rank(base: TinyModel, idle: bool) -> None:
    async def serve() -> None:
        config = EngineConfig(**SIZES | {"tensor_parallel": 2, "rank_timeout": TIMEOUT})
        async with AsyncEngine.from_pretrained(base.directory, config) as engine:
            expected = await engine.generate(PROMPTS[0], greedy())
            await engine.sleep()
            assert not children()
            await engine.wake()
            again = await engine.generate(PROMPTS[0], greedy())
            assert again.token_ids == expected.token_ids
            (rank,) = children()
            rank.kill()
            if not idle:
                with pytest.raises(EngineFailedError):
                    await engine.generate(PROMPTS[0], LONG)
            until = time.monotonic() + 60
            while engine.health().live:
                assert time.monotonic() < until
                await asyncio.sleep(0.05)

    asyncio.run(serve())
    assert not children()


@pytest.mark.parametrize("ranks", [4, 64])
def test_numbers_that_do_not_divide_the_model(base: TinyModel, ranks: int) -> None:
    with pytest.raises(ConfigError, check=lambda error: error.field == "tensor_parallel"):
        Engine.from_pretrained(base.directory, EngineConfig(**SIZES | {"tensor_parallel": ranks}))
    assert not children()


@pytest.mark.slow
def test_a_rank_that_finds_another_checkpoint(base: TinyModel, tmp_path: Path) -> None:
    """The parent removes the directory when the ranks begin to read."""
    fields: dict[str, Any] = SIZES | {"tensor_parallel": 2}
    moved = tmp_path / "model"
    moved.symlink_to(base.directory)

    def remove() -> None:
        wait_until(lambda: bool(children()), 60)
        moved.unlink()

    removed = threading.Thread(target=remove)
    removed.start()
    with pytest.raises((RankError, CheckpointError)):
        Engine.from_pretrained(moved, EngineConfig(**fields))
    removed.join()
    assert not children()


# The OpenAI server over an engine of several processes --------------------------------------------


BODY: dict[str, Any] = {"prompt": "def main(", "temperature": 0.0, "ignore_eos": True}


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(command: Command, number: signal.Signals) -> None:
    ranks = ranks_of(command.process.pid)
    assert len(ranks) == 1
    text_of(complete(command))
    status, errors = command.stop(number)
    assert status == 0, errors
    wait_until_gone(ranks, SECONDS)
