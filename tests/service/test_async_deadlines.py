"""Deadlines of requests that are prepared, queued, prefilled and decoded."""

from __future__ import annotations

import time

import pytest
from stepgraph.runtime.errors import DeadlineUnreachableError

from ..rigs.fake_engine import params
from ..rigs.service_rig import LONG, PROMPT, SECONDS, do, rig


def test_a_deadline_that_passes_in_the_queue_ends_a_request_that_is_never_prefilled() -> None:
    with rig(max_num_seqs=1) as r:
        r.steps.close()
        blocker = r.engine.submit(PROMPT, params(0, max_tokens=30))
        assert r.steps.waiting.acquire(timeout=SECONDS)
        late = [
            r.engine.submit([7, 7, 7], params(1), deadline=0.01),
            r.engine.submit([7, 7, 7], params(1), first_token_deadline=0.01),
        ]
        time.sleep(0.02)
        r.steps.permit()
        outputs = [future.result(SECONDS) for future in late]
        assert [o.finish_reason for o in outputs] == ["deadline"] * 2
        assert [o.token_ids for o in outputs] == [[], []]
        r.steps.open()
        blocker.result(SECONDS)
        assert r.made[-1].stats()["requests"] == 1
        r.check_serves()


def test_a_deadline_that_passes_while_decoding_keeps_the_tokens() -> None:
    with rig() as r:
        own = params(1, max_tokens=40)
        r.on_step = lambda: time.sleep(0.5 if r.num_steps == 4 else 0.0)
        future = r.engine.submit(PROMPT, own, deadline=0.45)
        output = future.result(SECONDS)
        assert output.finish_reason == "deadline"
        assert 0 < len(output.token_ids) < 40
        assert output.token_ids == r.expected(PROMPT, own)[: len(output.token_ids)]
        r.check_serves()


def test_a_first_token_deadline_ends_a_slow_prefill_and_no_decoding() -> None:
    with rig() as r:
        r.steps.close()
        other = r.engine.submit([1], params(1, max_tokens=40))
        assert r.steps.waiting.acquire(timeout=SECONDS)
        decoding = r.engine.submit([1], params(1, max_tokens=40), first_token_deadline=0.5)
        slow = r.engine.submit(LONG, params(1), first_token_deadline=0.5)
        for _ in range(2):  # the other row; the short prompt and a chunk of the long one
            r.steps.permit()
            assert r.steps.waiting.acquire(timeout=SECONDS)
        time.sleep(0.5)
        r.steps.open()
        assert slow.result(SECONDS).finish_reason == "deadline"
        assert slow.result().token_ids == []
        assert decoding.result(SECONDS).finish_reason == "length"
        assert other.result(SECONDS).finish_reason == "length"
        r.check_serves()


def test_a_deadline_that_passes_during_preparation_ends_the_request_then() -> None:
    with rig() as r:
        r.preparations.close()
        late = r.engine.submit(tuple(PROMPT), params(1, n=2), deadline=0.5)
        output = late.result(SECONDS)  # although the preparation has not ended
        assert [c.finish_reason for c in output.completions] == ["deadline"] * 2
        assert do(r.engine.stats())["preparing"] == 1
        r.preparations.open()
        r.check_serves()


def test_a_deadline_out_of_reach_is_refused_with_the_delay() -> None:
    with rig(max_num_seqs=1) as r:
        r.on_launch = lambda plan: time.sleep(0.03)
        r.engine.submit(LONG, params(0)).result(SECONDS)  # measures the rates
        blockers = [r.engine.submit(LONG, params(i)) for i in range(3)]
        with pytest.raises(DeadlineUnreachableError) as error:
            r.engine.submit(LONG, params(9), first_token_deadline=0.15).result(SECONDS)
        assert 0 < error.value.retry_after < 10
        patient = r.engine.submit(LONG, params(9), first_token_deadline=20.0)
        for future in (*blockers, patient):
            assert future.result(SECONDS).finish_reason == "length"
        r.check_idle()


def test_tokens_in_the_prefix_cache_take_no_time_before_the_first_token() -> None:
    with rig() as r:
        r.on_launch = lambda plan: time.sleep(0.2)
        r.engine.submit(LONG, params(0, max_tokens=1)).result(SECONDS)  # measures the rates
        r.on_launch = lambda plan: None
        with pytest.raises(DeadlineUnreachableError):
            r.engine.submit(LONG[::-1], params(1), first_token_deadline=0.4).result(SECONDS)
        again = r.engine.submit(LONG, params(1), first_token_deadline=0.4)
        assert again.result(SECONDS).finish_reason == "length"


def test_one_slow_step_does_not_make_it_refuse_for_ever() -> None:
    with rig() as r:
        r.on_launch = lambda plan: time.sleep(0.5)
        r.engine.submit([1], params(0, max_tokens=1)).result(SECONDS)
        r.on_launch = lambda plan: None
        with pytest.raises(DeadlineUnreachableError):
            r.engine.submit([1], params(1), first_token_deadline=0.05).result(SECONDS)
        time.sleep(1.0)
        for _ in range(3):
            prompt = r.engine.submit([1], params(1), first_token_deadline=0.45)
            assert prompt.result(SECONDS).finish_reason == "length"


def test_distant_deadlines_take_memory_only_while_their_requests_run() -> None:
    with rig() as r:
        for _ in range(5):
            futures = [
                r.engine.submit([1], params(1, max_tokens=1), deadline=1e6) for _ in range(50)
            ]
            for future in futures:
                future.result(SECONDS)
        r.check_idle()  # which bounds the entries of ended requests
