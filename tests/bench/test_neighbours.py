"""Decode steps with busy processes and other runtimes: the order, and that no process is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from stepgraph.runtime.bench import peers
from stepgraph.runtime.bench.peers import Peer, PeerError, PeerSpec
from stepgraph.runtime.bench.scenarios import neighbours
from stepgraph.runtime.bench.scenarios.neighbours import (
    NeighboursCase,
    busy_processes,
    measure_rounds,
)
from stepgraph.runtime.errors import StepgraphError

from ..rigs.bench_rig import ROOT, measured
from ..rigs.service_rig import wait_until

SMALL = "--scenario neighbours --mode eager --input-len 8 --num-steps 30 --num-warmup 0"


def spinning(parent: int | None = None, word: str = "getppid") -> list[psutil.Process]:
    """Return the live children whose command line has a word."""
    found = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_busy_processes_spin_as_this_process_may() -> None:
    with pytest.raises(KeyboardInterrupt), busy_processes(2):  # noqa: PT012
        found = spinning()
        assert len(found) == 2
        wait_until(lambda: all(sum(p.cpu_times()[:2]) > 0.2 for p in found))
        for process in found:
            assert process.nice() == psutil.Process().nice()
            assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(0)
            process.send_signal(signal.SIGINT)  # a terminal sends it to the whole group
        time.sleep(0.05)
        assert len(spinning()) == 2
        raise KeyboardInterrupt
    assert spinning() == []


def test_one_that_ends_early_is_an_error() -> None:
    with pytest.raises(StepgraphError), busy_processes(2):  # noqa: PT012
        victim = spinning()[0]
        victim.kill()
        wait_until(lambda: victim.status() == psutil.STATUS_ZOMBIE)
    assert spinning() == []


def test_a_killed_process_leaves_none() -> None:
    pid = os.fork()
    if pid == 0:
        try:
            with busy_processes(2):
                time.sleep(60)
        finally:
            os._exit(1)  # whatever happens: a child that returned would go on with the tests
    wait_until(lambda: len(spinning(pid)) == 2)
    left = spinning(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: not any(p.is_running() for p in left))


class FakeSide:
    """Steps take as many milliseconds as there are busy processes, and one."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def prefill(self, prompts: Any, max_tokens: int) -> None:
        self.log.append(f"{self.name} prefill")

    def steps(self, count: int) -> list[float]:
        if count != neighbours.SETTLING_STEPS:
            self.log.append(f"{self.name} {len(spinning())}")
        return [1.0 + len(spinning())] * count

    def end(self) -> None:
        self.log.append(f"{self.name} end")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "SETTLING_SECONDS", 0.0)


def test_every_round_meets_every_runtime_and_number(at_once: None) -> None:
    log: list[str] = []
    sides: Any = [FakeSide(name, log) for name in "ab"]
    case, turns = NeighboursCase(1, 8, 30, (0, 2)), {"num_warmup": 1, "num_iters": 2}
    found = measure_rounds(sides, case, [[1]], 99, **turns, say=lambda text: None)
    prefills, ends = ["a prefill", "b prefill"], ["a end", "b end"]
    assert log == [
        *(*prefills, "b 0", "a 0", *ends),
        *(*prefills, "a 0", "b 0", "a 2", "b 2", *ends),
        *(*prefills, "b 2", "a 2", "b 0", "a 0", *ends),
    ]
    assert found == [{0: [[1.0] * 30] * 2, 2: [[3.0] * 30] * 2}] * 2


FAKE_VLLM = """
import os
from types import SimpleNamespace
__version__ = "1.2.3"
EngineArgs = SamplingParams = dict
class LLMEngine:
    @classmethod
    def from_engine_args(cls, args):
        assert os.path.isfile(os.path.join(args["model"], "config.json"))
        if args["max_num_seqs"] == 7:
            raise MemoryError("seven rows\\nare too many")
        print("noise on stdout", flush=True)
        return cls()
    def __init__(self):
        self.requests, self.prefilled, self.steps = {}, [], 0
    def add_request(self, name, prompt, params):
        assert params["ignore_eos"] and prompt["prompt_token_ids"]
        self.requests[name] = params["max_tokens"]
    def step(self):
        self.steps += 1
        if self.steps == FAIL_AT:
            os._exit(3)
        self.prefilled = list(self.requests)[: len(self.prefilled) + 1]  # one prompt a step
        return [SimpleNamespace(request_id=name) for name in self.prefilled]
    def has_unfinished_requests(self):
        return bool(self.requests)
    def abort_request(self, names):
        self.requests, self.prefilled = {}, []
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `vllm` that this interpreter can import; no process is left at the end."""
    path = tmp_path / "vllm.py"
    path.write_text(FAKE_VLLM.replace("FAIL_AT", "0"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    # A file that is replaced within a second by one of the same size looks unchanged to a cache.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    yield path
    assert spinning(word="peer_runner") == []


def open_peer(rows: int = 2) -> Peer:
    limits = {"threads": 1, "rows": rows, "tokens": 64, "batch_tokens": 16}
    spec = PeerSpec("vllm", sys.executable)
    return Peer(spec, ROOT / "runtime" / "demo", dtype="bfloat16", weight_dtype="auto", **limits)


def test_a_peer_that_fails_dies_or_hangs(fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError):
        open_peer(rows=7)
    fake_vllm.write_text(FAKE_VLLM.replace("FAIL_AT", "4"))
    with closing(open_peer()) as peer:
        peer.prefill([[1], [2]], 32)
        with pytest.raises(PeerError):
            peer.steps(5)
        with pytest.raises(PeerError):
            peer.end()
    hangs = FAKE_VLLM.replace("self.steps += 1", "import time; time.sleep(60)")
    fake_vllm.write_text(hangs.replace("FAIL_AT", "0"))
    with closing(open_peer()) as peer:
        monkeypatch.setattr(peers, "REPLY_SECONDS", 0.0)
        with pytest.raises(PeerError):
            peer.prefill([[1]], 32)


def test_neighbours_run_with_a_peer(
    fake_vllm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_once: None
) -> None:
    sizes = "--peer vllm --batch-size 2 --num-iters 2 --neighbours 0 1"
    document = measured(monkeypatch, tmp_path, f"{SMALL} {sizes}")
    assert [entry["neighbours"] for entry in document["neighbours"]] == [0, 1]
    for entry in document["neighbours"]:
        (peer,) = entry["peers"]
        assert (peer["name"], peer["version"], peer["dtype"]) == ("vllm", "1.2.3", "bfloat16")
        assert entry["step_ms"]["n"] == peer["step_ms"]["n"] == 60
        assert len(entry["repetition_ms"]) == 2
        assert peer["step_ms"]["min"] > 0
        for p in ("p50", "p90"):
            assert peer[f"ratio_{p}"] == entry["step_ms"][p] / peer["step_ms"][p]
