"""Failures of steps and of starts: what a restart keeps, and when there is none."""

from __future__ import annotations

import threading
import time

import pytest
from stepgraph.runtime.errors import EngineFailedError, EngineUnavailableError
from stepgraph.runtime.service.health import Phase
from stepgraph.runtime.service.restart_policy import RestartPolicy

from ..rigs.fake_engine import params
from ..rigs.service_rig import PROMPT, SECONDS, InjectedError, config, do, fail, rig, wait_until


def test_a_failed_step_ends_the_engine_without_a_restart_policy() -> None:
    with rig(max_num_seqs=1) as r:
        r.steps.close()
        futures = [r.engine.submit(PROMPT, params(i)) for i in range(3)]
        r.on_step = fail
        r.steps.open()
        errors = [future.exception(SECONDS) for future in futures]
        assert all(isinstance(error, EngineFailedError) for error in errors)
        assert len({id(error) for error in errors}) == 3, "raising changes an exception"
        assert isinstance(errors[0].__cause__, InjectedError)
        assert r.engine.health().phase is Phase.FAILED
        with pytest.raises(EngineFailedError, match="injected"):
            r.engine.submit(PROMPT)
        assert not r.engine.health().live
        r.check_idle()


def test_starts_that_fail_are_repeated_within_the_policy() -> None:
    with rig(config(max_restarts=3)) as r:
        attempts: list[float] = []

        def fail_twice() -> None:
            attempts.append(time.monotonic())
            if len(attempts) < 3:
                fail()

        r.on_start = fail_twice
        r.on_step = fail
        with pytest.raises(EngineFailedError):
            r.engine.submit(PROMPT).result(SECONDS)
        r.on_step = lambda: None
        wait_until(lambda: r.engine.health().ready)
        assert len(attempts) == 3
        assert attempts[2] - attempts[1] > 0.1  # a pause, in which it answers
        r.check_serves()
        r.on_step = fail  # the fourth failure
        with pytest.raises(EngineFailedError):
            r.engine.submit(PROMPT).result(SECONDS)
        wait_until(lambda: r.engine.health().phase is Phase.FAILED)


def test_the_engine_can_be_closed_in_the_pause_before_a_restart() -> None:
    with rig(config(max_restarts=100)) as r:
        r.on_start = fail
        r.on_step = fail
        with pytest.raises(EngineFailedError):
            r.engine.submit(PROMPT).result(SECONDS)
        wait_until(lambda: r.engine.health().phase is Phase.STARTING)
        with pytest.raises(EngineUnavailableError):
            do(r.engine.stats())
        begun = time.monotonic()
        r.engine.close()
        assert time.monotonic() - begun < 2.0


def test_a_close_is_not_undone_by_a_restart_that_is_due() -> None:
    with rig(config(max_restarts=100)) as r:
        pause, starting = threading.Event(), threading.Event()

        def slow_failure() -> None:
            starting.set()
            assert pause.wait(SECONDS)
            fail()

        r.on_start = slow_failure
        r.on_step = fail
        with pytest.raises(EngineFailedError):
            r.engine.submit(PROMPT).result(SECONDS)
        assert starting.wait(SECONDS)
        r.on_start = lambda: None  # the next start succeeds, and is due after the pause below
        pause.set()
        wait_until(lambda: r.engine._thread.supervisor.restart_ns is not None)
        r.engine._thread.supervisor.restart_ns = 0
        r.engine.close()
        assert len(r.made) == 1
        assert r.engine.health().phase is Phase.CLOSED


def test_restarts_are_counted_in_the_window_and_their_pauses_double() -> None:
    policy = RestartPolicy(4, 60.0)
    assert [policy.pause(float(now)) for now in range(5)] == [0.0, 0.1, 0.2, 0.4, None]
    assert policy.pause(60.5) == 0.4  # the first is over a window ago
    assert policy.pause(60.5) is None
    assert policy.pause(1000.0) == 0.0
    assert RestartPolicy(0, 60.0).pause(0.0) is None
    many = RestartPolicy(1 << 40, 60.0)
    assert [many.pause(0.0) for _ in range(3000)][-1] == 10.0


def test_a_failure_keeps_no_memory_of_the_engine() -> None:
    with rig(config(max_restarts=1)) as r:
        memory = r.made[0]._loop

        def fail_with_locals(held: object = memory) -> None:  # as the frames of a failed step
            fail()

        r.on_step = fail_with_locals
        future = r.engine.submit(PROMPT)
        error = future.exception(SECONDS)
        wait_until(lambda: len(r.made) == 2)
        assert error is not None
        cause = error.__cause__
        assert cause is not None
        frames = []
        traceback = cause.__traceback__
        while traceback is not None:
            frames.append(traceback.tb_frame)
            traceback = traceback.tb_next
        assert not any("held" in frame.f_locals for frame in frames)
