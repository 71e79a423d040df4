"""Chunks chosen by time, and the collector's one option, on a real engine."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
from stepgraph.runtime import Engine
from stepgraph.runtime.engine import loop, startup
from stepgraph.runtime.execution import runner
from stepgraph.runtime.execution.step_key import StepKey

from ..rigs.engine_rig import Open, greedy, loop_of
from ..rigs.tiny_models import TinyModel

pytestmark = pytest.mark.native_kernels


class Clock:
    """Moves when a step runs, by what the step is said to take."""

    def __init__(self) -> None:
        self.now_ns = 10**9
        self.slower = 1.0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def perf_counter(self) -> float:
        return self.now_ns / 1e9

    def seconds(self, phase: str, size: int) -> float:
        return self.slower * (2e-3 + (1e-4 * size if phase == "prefill" else 0.0))

    def ran(self, key: StepKey) -> None:
        self.now_ns += round(1e9 * self.seconds(key.phase, key.size))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Nothing takes time but steps: 2 ms, and 0.1 ms a token of the bucket that prefills."""
    clock = Clock()
    for module in (startup, loop, runner, runner):
        monkeypatch.setattr(module, "time", clock)
    seconds = startup.null_step_seconds

    def timed(runner: Any, last: int, phase: Any, size: int, context: int) -> float:
        assert seconds(runner, last, phase, size, context) == 0.0  # it has run
        return clock.seconds(phase, size)

    monkeypatch.setattr(startup, "null_step_seconds", timed)
    return clock


def serve(engine: Engine, model: TinyModel, clock: Clock) -> tuple[list[list[int]], list[float]]:
    """Three rows decode, and a long prompt comes; return all tokens and the times of steps, ms."""
    library = loop_of(engine).runner.library
    run = library.run

    def timed(key: StepKey) -> Any:
        clock.ran(key)
        return run(key)

    library.run = timed  # type: ignore[method-assign]
    prompts = model.prompts(9, 5, 7, 90, seed=5)
    ids = [engine.add_request(prompt, greedy(40)) for prompt in prompts[:3]]
    took: list[float] = []
    final: dict[str, list[int]] = {}
    while engine.has_unfinished():
        began = clock.now_ns
        for output in engine.step():
            if output.finished:
                final[output.request_id] = output.token_ids
        engine.check_integrity()
        took.append((clock.now_ns - began) / 1e6)
        if len(took) == 8:
            ids.append(engine.add_request(prompts[3], greedy(4)))
    del library.run
    return [final[i] for i in ids], took


def test_steps_beside_decoding_rows_stay_within_the_budget(
    open_engine: Open, base: TinyModel, clock: Clock
) -> None:
    plain = open_engine("base", prefill_chunk=64)
    tokens, took = serve(plain, base, clock)
    assert max(took[1:]) == pytest.approx(2 + 2 + 6.4)
    assert plain.stats()["step_budget"] is None

    engine = open_engine("base", prefill_chunk=64, max_itl_ms=7.5)
    again, took = serve(engine, base, clock)
    assert again == tokens
    assert max(took[1:]) == pytest.approx(2 + 2 + 3.2)  # the bucket of 32, not of 48
    records = engine.timeline().records()
    assert [r.prefill_tokens for r in records[1:] if r.prefill_tokens] == [32, 32, 26]
    assert all(r.rows == 3 for r in records[1:] if r.prefill_tokens)
    stats = engine.stats()["step_budget"]
    assert (stats["n"], stats["over_budget"], stats["forced"], stats["ignored"]) == (3, 0, 0, 0)
    assert stats["observed_ms"] == pytest.approx(7.2)
    assert stats["predicted_ms"] == pytest.approx(7.2)
    assert engine.stats()["fallbacks"] == 0


def test_steps_leave_no_cyclic_garbage(open_engine: Open, base: TinyModel) -> None:
    """Requests that come, decode and go; prompts in several chunks."""
    engine = open_engine("base", prefill_chunk=16, max_itl_ms=500.0)
    prompts = base.prompts(9, 50, 7, 30, 12, seed=5)

    def serve() -> None:
        for prompt in prompts:
            engine.add_request(prompt, greedy(len(prompt)))
            engine.step()
        while engine.has_unfinished():
            engine.step()

    serve()
    gc.collect()
    gc.disable()
    try:
        serve()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_collector_is_left_alone_unless_asked_to() -> None:
    """In a process of its own: what is frozen stays so."""
    code = """
import gc, weakref
from stepgraph.runtime import Engine, EngineConfig, SamplingParams

def run(**config):
    config = EngineConfig(mode="eager", max_num_seqs=1, **config)
    with Engine.from_pretrained("demo", config) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        frozen = gc.get_freeze_count()
        return frozen, weakref.ref(engine._loop.runner._arena.tensor), engine

before = gc.get_freeze_count()
frozen, arena, engine = run(memory_tokens=256)
assert frozen == before, (frozen, before)
frozen, arena, engine = run(memory_tokens=256, freeze_gc=True)
assert frozen > before + 10_000, frozen
assert arena() is None, "closing gives memory back without the collector"
assert gc.isenabled()
assert gc.get_freeze_count() > before, "closing thaws nothing"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
