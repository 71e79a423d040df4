"""Drafts that stay on the device: the next step verifies them before the host has read them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from stepgraph.runtime import Engine
from stepgraph.runtime.execution.outputs import LaunchedStep
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.request import Request
from stepgraph.runtime.scheduling.plan import StepPlan

from ..rigs.engine_rig import Open, greedy, loop_of
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.speculation_rig import guess
from ..rigs.tiny_models import Tiny, TinyModel
from .test_drafter_engine import drafting
from .test_speculation import MIXED, SIZES, run_mixed

DRAFTS = 3
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("base", {}),
    "windows": ("mistral", {}),
    "no prefix cache": ("base", {"prefix_cache": False}),
    "swap": ("base", {"num_blocks": 19, "host_cache_bytes": 1 << 20}),
    "recompute": ("gemma2", {"num_blocks": 30}),
    "latent": ("deepseek_v3", {}),
}


@pytest.fixture(name="open_async")
def make_open_async(
    open_engine: Open, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> Open:
    """Open eager engines on a device whose steps stay in flight, in float32."""
    monkeypatch.setattr(ResolvedConfig, "is_async_device", property(lambda self: True))

    def make(variant: str, **config: Any) -> Engine:
        return open_engine(variant, **SIZES | {"dtype": "float32"} | config)

    return make


def watch(engine: Engine) -> Counter[str]:
    """Count steps, verified drafts, and steps launched while the one before is in flight."""
    seen: Counter[str] = Counter()
    loop = loop_of(engine)
    launch, read = loop.runner.launch, loop.runner.read

    def counted_read(step: LaunchedStep) -> Any:
        seen["read"] += 1
        return read(step)

    def counted(number: int, plan: StepPlan) -> LaunchedStep:
        unread = seen["steps"] - seen["read"]
        seen["steps"] += 1
        seen["in flight"] += unread
        verified = sum(count > 1 for count in plan.decode_counts)
        assert plan.drafts or not verified or unread == 1
        seen["sent" if plan.drafts else "own"] += verified
        return launch(number, plan)

    loop.runner.launch = counted  # type: ignore[method-assign]
    loop.runner.read = counted_read  # type: ignore[method-assign]
    return seen


def rest_sometimes(engine: Engine) -> None:
    """Let decode steps, with and without proposals, follow steps that verify drafts."""
    speculator: Any = loop_of(engine).speculator
    rng, propose = random.Random(1), speculator.propose

    def propose_sometimes(requests: list[Request]) -> Sequence[Sequence[int]]:
        drafts, draw = propose(requests), rng.random()
        if draw < 0.2:
            speculator.begin_plan(requests)
        if draw < 0.3:
            drafts = speculator.unread = ()
        return drafts

    speculator.propose = propose_sometimes


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("other", [False, True])
def test_tokens_are_those_of_plain_decoding(
    open_async: Open, tiny: Tiny, case: str, other: bool
) -> None:
    """Of all parameters, with drafts that are mostly right, and mostly wrong."""
    variant, config = CASES[case]
    prompts = tiny(variant).prompts(30, 4, 12, 7, 9, 5)
    expected = run_mixed(open_async(variant, **config), prompts, MIXED)
    drafter = tiny("base" if other else variant).directory
    engine = open_async(variant, **config, speculation=drafting(drafter, DRAFTS))
    seen = watch(engine)
    if other:
        rest_sometimes(engine)
    for _ in range(2):  # the second time prompts are cached
        assert run_mixed(engine, prompts, MIXED) == expected
    stats = engine.stats()
    assert seen["own"] > 30
    assert seen["in flight"] > 0.8 * seen["steps"]
    assert stats["preemptions"] >= ("num_blocks" in config)
    if variant == "base" and not other:
        own = stats["speculation"]  # half of the rows sample, whose drafts are greedy all the same
        assert own["accepted_by_position"][0] > 0.6 * own["drafted_by_position"][0]


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_output_ends_at_each_token_of_a_step(
    open_engine: Open, tiny: Tiny, request: pytest.FixtureRequest, in_flight: bool
) -> None:
    """By its number of tokens, a stop token or a stop string."""
    (prompt,) = tiny("text").prompts(9)
    make = request.getfixturevalue("open_async") if in_flight else open_engine
    plain = make("text")
    (whole,) = plain.generate([prompt], greedy(24))
    text = whole.completions[0].text
    params = [greedy(count) for count in range(1, 10)]
    params += [greedy(20, stop_token_ids=[token]) for token in whole.token_ids[4:10]]
    params += [greedy(20, stop=[text[at : at + 2]]) for at in range(4, 9)]
    params += [greedy(20, stop=[text[6:8]], min_tokens=9)]
    expected = run_mixed(plain, [prompt] * len(params), params)
    if in_flight:
        engine = make("text", speculation=drafting(tiny("text").directory, DRAFTS))
        seen = watch(engine)
    else:
        engine = make("text", speculation={"num_speculative_tokens": 7})
        guesses = guess(engine, dict.fromkeys(expected, whole.token_ids), right=1.0)
    assert run_mixed(engine, [prompt] * len(params), params) == expected
    assert (seen["own"] if in_flight else guesses.accepted) > 10


def test_a_row_keeps_no_drafts_of_its_last_request(open_async: Open, base: TinyModel) -> None:
    """One that is aborted while a step with its drafts is in flight."""
    first, second = base.prompts(9, 7)
    engine = open_async("base", max_num_seqs=1, speculation=drafting(base.directory, DRAFTS))
    (expected,) = open_async("base", max_num_seqs=1).generate([second], greedy(20))
    seen = watch(engine)
    drafts = loop_of(engine).runner.state.drafts
    assert drafts is not None
    engine.add_request(first, greedy(30), "first")
    while seen["own"] < 3:
        engine.step()
    assert drafts[0].any()
    engine.abort("first")
    engine.add_request(second, greedy(20), "second")
    own = seen["own"]
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
        if seen["own"] == own and loop_of(engine).requests.groups:
            (request,) = loop_of(engine).requests.groups["second"].requests
            assert request.num_drafts or not drafts[0].any()
    assert outputs["second"].token_ids == expected.token_ids
    assert seen["own"] > own
