"""How many drafts a step verifies: measured acceptance, step times, and the gain of both."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from operator import eq
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.graphs.buckets import Buckets
from stepgraph.runtime.config import Speculation
from stepgraph.runtime.request import Request
from stepgraph.runtime.sampling_params import SamplingParams
from stepgraph.runtime.scheduling.plan import Proposed, RowSpan, StepPlan
from stepgraph.runtime.scheduling.speculator import (
    FEW_TOKENS,
    INDEXED_PER_STEP,
    LARGEST_DELAY,
    LEAST_GAIN,
    LOOKUP_PRICE,
    LookupSpeculator,
    Speculator,
    choose_drafts,
)
from stepgraph.runtime.scheduling.step_times import DraftTimes, PhaseTimes, StepTimes
from stepgraph.runtime.speculation.request_drafter import (
    AHEAD,
    LOOKUP_RATES,
    Acceptance,
    Draft,
    RequestDrafter,
    SuffixIndex,
)

from ..rigs.scheduler_rig import make_request

ROWS = Buckets([1, 8])
SIZES = (1, 2, 3, 5)


def choose(
    chances: Sequence[Sequence[float]], *, padded: bool = True, slope: float | None = None
) -> list[int]:
    """Choose the drafts of 1 to 8 rows.

    A draft of each row takes 0.1 decode steps for one row and 0.8 for 8, or `slope`.
    """
    size = 1 if len(chances) == 1 else 8
    multiples = {n: 1 + (slope or 0.1 * size) * (n - 1) for n in SIZES}
    return choose_drafts(chances, DraftTimes(size, multiples, padded=padded))


def step_times(
    multiples: Mapping[int, Mapping[int, float]],
    *,
    decode: float = 1.0,
    padded: bool = True,
    prefill: bool = False,
) -> StepTimes:
    """Times by rows and tokens per row, in decode steps that take `decode` seconds."""
    rows = Buckets(multiples)

    def phase() -> PhaseTimes:
        return PhaseTimes(rows, [decode] * len(rows), 0.0, 1)

    drafts = [[DraftTimes(size, multiples[size], padded=padded) for size in rows] for _ in range(2)]
    return StepTimes(
        (phase(), phase()),
        lambda context: context,
        prefill=(phase(), phase()) if prefill else None,
        drafts=drafts,
    )


def lookup(
    *, is_async_device: bool = False, decode: float = 1.0, prefill: bool = False, **fields: Any
) -> LookupSpeculator:
    times = step_times(
        {size: {n: 1 + 0.1 * size * (n - 1) for n in SIZES} for size in (1, 8)},
        decode=decode,
        prefill=prefill,
    )
    return LookupSpeculator(Speculation(**fields), times, is_async_device=is_async_device)


def step(speculator: Speculator, plan: StepPlan, seconds: float, *advanced: int) -> None:
    """Launch and commit a step, and learn from its time."""
    plan.timed = 1
    speculator.launched(plan)
    took = speculator.times.learn(plan, seconds) if plan.timed else 0.0
    speculator.committed(plan, advanced or None, took)


def test_the_gain_decides() -> None:
    sure, unlikely = [1.0, 1.0, 1.0, 1.0], [0.08, 0.01, 0.0, 0.0]
    for padded in (True, False):
        assert choose([sure], padded=padded) == [4]
        assert choose([unlikely], padded=padded) == [0]
        assert choose([[]], padded=padded) == [0]
        assert choose([[0.9, 0.05, 0.05, 0.05]], padded=padded) == [1]
        assert choose([sure] * 8, padded=padded) == [4] * 8
        # For one row it would pay.
        assert choose([[0.7, 0.5, 0.3, 0.2]] * 8, padded=padded) == [0] * 8
        assert choose([[0.7, 0.5, 0.3, 0.2]], padded=padded)[0] > 0


@given(
    st.lists(
        st.lists(st.floats(0.05, 1), max_size=4).map(lambda own: sorted(own, reverse=True)),
        min_size=1,
        max_size=3,
    ),
    st.floats(0.01, 1.5),
)
def test_no_other_drafts_gain_more(chances: list[list[float]], slope: float) -> None:
    """Compared with all numbers of drafts of all rows."""
    rows, size = len(chances), 1 if len(chances) == 1 else 8

    def per_token(counts: Sequence[int]) -> list[float]:
        """Of each row, in decode steps."""
        time = 1 + slope * sum(counts) / size
        return [time / (1 + sum(own[:n])) for own, n in zip(chances, counts, strict=True)]

    def gain(counts: Sequence[int]) -> float:
        return -sum(map(math.log, per_token(counts))) / rows

    found = choose(chances, padded=False, slope=slope)
    best = max(itertools.product(*(range(len(own) + 1) for own in chances)), key=gain)
    if any(found):
        assert gain(found) == pytest.approx(gain(best), abs=1e-9)
        assert sum(per_token(found)) <= rows + 1e-9
    else:
        assert gain(best) <= LEAST_GAIN + 1e-9 or sum(per_token(best)) >= rows - 1e-9


@pytest.mark.parametrize(("padded", "slope"), [(True, 0.075), (False, 0.33)])
def test_rows_do_not_wait_for_a_few(padded: bool, slope: float) -> None:
    """Two of eight rows get 4 or 5 tokens in 1.3 times the time: for the others, it is too long."""
    some, all_rows = [[1.0] * 4] * 2 + [[]] * 6, [[1.0] * 4] * 8
    assert not any(choose(some, padded=padded, slope=slope))
    assert any(choose(some, padded=padded, slope=slope / 1.5))
    assert all(choose(all_rows, padded=padded, slope=slope))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=120), st.data())
def test_a_draft_is_followed_while_it_is_right(tokens: list[int], data: st.DataObject) -> None:
    """The guess is that of a search, after the known tokens or before those that it foretold."""
    least, most = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    acceptance, judged = (Acceptance(LOOKUP_RATES, 64) for _ in range(2))
    drafter = RequestDrafter(SuffixIndex(least), acceptance, most, 0)
    plain, seen, draft, known = SuffixIndex(least), 0, None, 0
    while known < len(tokens):
        known = min(known + data.draw(st.integers(1, 2 * most)), len(tokens))
        drafter.catch_up(known, lambda start, stop: tokens[start:stop], 1000)
        followed = tokens[seen:known]
        if (
            draft is None
            or draft.tokens[: known - seen] != followed
            or (len(draft.tokens) - len(followed) < most)
        ):
            if draft is not None:
                judged.judge(draft.kinds, draft.tokens, followed)
            plain.extend(followed)
            seen, draft = known, plain.propose(AHEAD * most)
        rest = [] if draft is None else draft.tokens[known - seen :][:most]
        assert drafter.guess.tokens == rest or (not rest and not drafter.guess.tokens)
        if draft is not None:
            matched, agreed = draft.matched + known - seen, draft.agreed[known - seen :]
            expected = judged.chances(Draft(rest, matched, agreed[:most]).kinds)
            assert drafter.guess.chances == pytest.approx(expected)
        assert [acceptance.rate(k) for k in range(10)] == [judged.rate(k) for k in range(10)]


def test_lookups_in_vain_take_a_small_share_of_the_time() -> None:
    """Rows that repeat nothing are looked at seldom; when they begin to repeat, they soon draft."""
    step_ns, speculator = 10**6, lookup(decode=1e-3)
    requests = [row([n]) for n in range(8)]
    rng, looked_ns, drafted_at = random.Random(0), 0.0, None
    for number in range(1000):
        plan = StepPlan(decode=requests)
        drafts = speculator.propose(requests)
        looked_ns += min(speculator._lookup_ns, LARGEST_DELAY * step_ns)
        if drafts and any(drafts):
            drafted_at = number
            break
        step(speculator, plan, step_ns / 1e9)
        for request in requests:
            request.append_token(number % 5 if number >= 800 else rng.randrange(10**6), 0)
        if number == 800:
            steps = speculator.first_credit + LARGEST_DELAY * LOOKUP_PRICE + speculator.share * 800
            assert looked_ns < steps * step_ns / LOOKUP_PRICE
    assert drafted_at is not None
    assert drafted_at <= 900


def test_prompts_are_indexed_with_their_chunks() -> None:
    speculator = lookup()
    request = row([n % 9 for n in range(1000)])
    for start in (0, 600):
        chunk = RowSpan(request, 0, start, 600 if start == 0 else 400, samples=start > 0)
        speculator.launched(StepPlan(prefill=[chunk]))
        assert request.drafter is not None
        assert request.drafter.seen == chunk.start + chunk.count
        assert request.drafter.draft is None
    request.append_token(1000 % 9, 1)
    assert speculator.propose([request])[0] == [n % 9 for n in range(1001, 1005)]


def test_rows_share_the_tokens_that_a_step_indexes() -> None:
    speculator = lookup()
    requests = [row([1, 2, 3, 4])] + [row([n % 9 for n in range(2000)]) for _ in range(7)]
    for _ in range(80):
        speculator._credit = 1.0
        before = [r.drafter.seen if r.drafter else 0 for r in requests]
        speculator.propose(requests)
        after = [r.drafter.seen for r in requests if r.drafter]
        assert sum(after) - sum(before) <= INDEXED_PER_STEP + FEW_TOKENS
    assert after == [r.num_tokens for r in requests]


def test_a_verify_step_that_was_taken_for_too_slow_is_tried_again() -> None:
    seconds = {1: 1.0, 2: 1.1, 5: 1.4}
    requests, slow = [row([1])], step_times({1: {1: 1.0, 2: 1.1, 5: 9.0}})
    chosen = []
    for _ in range(20_000):
        count = 1 + choose_drafts([[0.9] * 4], slow.with_drafts(requests))[0]
        counts = [count] if count > 1 else []
        plan = StepPlan(decode=requests, decode_counts=counts, timed=1)
        slow.learn(plan, seconds[count])
        chosen.append(count)
    assert 5 not in chosen[:100]
    assert chosen[-1000:].count(5) > 900


@pytest.mark.parametrize(
    ("decode", "adaptive", "matcher"),
    [
        (1.0, False, None),
        (1.0, True, None),
        (1e-9, True, None),
        (1.0, True, SimpleNamespace(drafts=lambda request, tokens: ([], False))),
    ],
    ids=["always", "adaptive", "paused", "grammar"],
)
def test_decode_times_of_a_latency_budget_follow_a_change(
    decode: float, adaptive: bool, matcher: Any
) -> None:
    """Whether steps look for drafts in vain, looking costs more than it gains, or masks matter."""
    speculator, request = lookup(decode=decode, prefill=True, adaptive=adaptive), row([1])
    request.matcher = matcher
    serve(speculator, request, range(2, 60), {1: 2 * decode})
    assert speculator.counts["drafted"] == 0
    assert speculator.times.decode_seconds([request]) == pytest.approx(2 * decode, rel=0.01)


def row(tokens: list[int]) -> Request:
    """A request that has a row."""
    params = SamplingParams(max_tokens=4000, temperature=0.0)
    request = make_request(tokens, params=params, max_tokens=4000)
    request.row = 0
    return request


class Served(NamedTuple):
    proposing: int
    """Steps that proposed."""
    steps: int
    seconds: float


def serve(
    speculator: Speculator,
    request: Request,
    output: Sequence[int],
    seconds: Mapping[int, float],
    *,
    right: float = 0.0,
) -> Served:
    """Decode a request up to the end of `output`.

    Steps take `seconds` by tokens per row, or 0.1 less if they verify nothing but propose. Proposed
    tokens are 1 by a chance of `right`, and 0 otherwise.
    """
    rng, total, steps, proposing = random.Random(0), 0.0, 0, 0
    while request.num_output < len(output):
        plan = StepPlan(decode=[request])
        drafts = speculator.propose([request])
        plan.proposes, proposed = speculator.proposes, speculator.config.num_speculative_tokens
        following = output[request.num_output :][: 1 + proposed]
        accepted = 0
        if drafts and drafts[0]:
            plan.drafts, plan.decode_counts = drafts, [1 + len(drafts[0])]
            accepted = [*map(eq, drafts[0], following), False].index(False)
        only_proposes = plan.proposes and not plan.drafts
        tokens = next(n for n in seconds if n >= max(plan.decode_counts, default=1))
        took = seconds[2] - 0.1 if only_proposes else seconds[tokens]
        step(speculator, plan, took, *([accepted + 1] if plan.drafts else ()))
        total += took
        for token in following[: accepted + 1]:
            request.append_token(token, 0)
        if plan.proposes:
            tokens = [int(rng.random() < right) for _ in range(proposed)]
            speculator.received([Proposed(request, 10**6, tokens, [right] * proposed)])
        steps, proposing = steps + 1, proposing + (plan.proposes > 0)
    return Served(proposing, steps, total)


def served(guessable: bool, *, is_async_device: bool = False) -> tuple[LookupSpeculator, float]:
    """Decode 600 tokens with the times of `costs`; tokens in a unit of time."""
    speculator = lookup(is_async_device=is_async_device, num_speculative_tokens=4)
    rng = random.Random(1)
    output = [index % 9 if guessable else rng.randrange(12) for index in range(600)]
    seconds = {n: 1 + 0.1 * (n - 1) for n in SIZES}
    return speculator, 600 / serve(speculator, row([6, 5, 7]), output, seconds).seconds


def test_text_that_can_be_guessed_is_faster() -> None:
    speculator, speed = served(guessable=True)
    assert speed > 3
    assert sum(speculator.accepted_by_position) == speculator.counts["accepted"] > 400


def test_text_that_nobody_can_guess_is_as_fast() -> None:
    """Twelve tokens: short contexts recur, and a draft is right for one of twelve."""
    speculator, speed = served(guessable=False)
    assert speed > 0.98
    assert speculator.counts["drafted"] < 90


def test_a_device_in_flight_is_waited_for_while_drafts_pay() -> None:
    speculator, _ = served(guessable=True, is_async_device=True)
    request = row([1, 2, 3, 4] * 9)
    request.num_pending = 1
    for _ in range(2):
        assert speculator.propose([request]) == ()
        assert speculator.waits
    request.num_pending = 0
    assert speculator.propose([request])[0]
    assert speculator.propose([row(list(range(40)))]) == ()
    assert not speculator.waits
    speculator.times = step_times({1: {1: 1.0}})
    assert speculator.propose([request]) == ()
    assert not speculator.waits


def test_drafts_that_masks_took_out_are_not_counted() -> None:
    """Masks shorten the drafts of a step, whose counts stay as planned."""
    speculator, requests = lookup(), [make_request([1, 2, 3]) for _ in range(2)]
    plan = StepPlan(decode=requests, decode_counts=[4, 3], drafts=[[1], []])
    speculator.committed(plan, [2, 1], 0.0)
    assert speculator.counts == {
        **{"verify_steps": 1, "verified_rows": 1},
        **{"drafted": 1, "accepted": 1},
    }
