"""Drafters on the device: their drafts change no token, and a good one is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from stepgraph.runtime import Engine
from stepgraph.runtime.kernels import have_compiler

from ..rigs.engine_rig import greedy, loop_of
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from .test_speculation import CASES, MIXED, SIZES, run_mixed

if TYPE_CHECKING:
    from conftest import TinyModel

pytestmark = pytest.mark.native_kernels


def drafting(directory: Any, drafts: int, *, adaptive: bool = False) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(directory),
        "num_speculative_tokens": drafts,
        "adaptive": adaptive,
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_plain_decoding(
    open_engine: Callable[..., Engine],
    tiny: Callable[[str], TinyModel],
    fake_graphs: FakeGraphs,
    case: str,
    other: bool,
) -> None:
    """With the model as its own drafter, whose drafts are mostly right, and with another one."""
    variant, config = CASES[case]
    if "num_blocks" in config:
        config = config | {"num_blocks": 19}  # rows advance faster, so that fewer are open at once
    if config.get("mode") == "compile":
        if not have_compiler():
            pytest.skip("needs a C++ compiler")
        fake_graphs.kernels = "compile"
    prompts = tiny(variant).prompts(30, 4, 12, 7, 9, 5)
    plain = open_engine(variant, **SIZES | config, dtype="float32")
    drafts = 1 if config.get("mode") == "graph" else 4
    drafter = tiny("base" if other else variant).directory
    engine = open_engine(
        variant, **SIZES | config, dtype="float32", speculation=drafting(drafter, drafts)
    )
    fake_graphs.stream.behind = config.get("mode") == "graph"
    expected = run_mixed(plain, prompts, MIXED)
    for _ in range(2):  # the second time prompts are cached
        assert run_mixed(engine, prompts, MIXED) == expected
    stats = engine.stats()
    assert stats["fallbacks"] == 0
    assert stats["speculation"]["drafted"] > 50
    assert other or stats["speculation"]["accepted"] > 20


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"prefill_chunk": 16},
        {"num_blocks": 19, "host_cache_bytes": 1 << 20},
        {"num_blocks": 19},
    ],
)
def test_the_model_itself_is_a_perfect_drafter(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], config: dict[str, Any]
) -> None:
    """Greedy, in float32: a slot that is missing or wrong would cost an accepted draft."""
    model = tiny("base")
    prompts = model.prompts(30, 4, 12, 7)
    speculation = drafting(model.directory, 3)
    engine = open_engine("base", **SIZES | config, dtype="float32", speculation=speculation)
    params = [greedy(28), greedy(40), greedy(33), greedy(19, n=2)]
    for _ in range(2):  # the second time prompts are cached
        run_mixed(engine, prompts, params)
    stats = engine.stats()["speculation"]
    assert stats["verify_steps"] > 15
    assert stats["accepted"] == stats["drafted"]
    assert engine.stats()["preemptions"] >= 2 * ("num_blocks" in config)


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [32, 8])
def test_the_step_after_a_prompt_verifies_drafts(
    open_engine: Callable[..., Engine], base: TinyModel, kernels: str, chunk: int
) -> None:
    """Wherever blocks and chunks end: 5 tokens are one of the prompt's step, 3 drafts, one more."""
    sizes = SIZES | {"prefill_chunk": chunk, "kernels": kernels, "dtype": "float32"}
    sizes["max_batch_tokens"] = 64  # so that chunks leave room for drafts
    engine = open_engine("base", **sizes, speculation=drafting(base.directory, 3))
    accepted = 0
    for length in range(1, 10):
        for _ in range(2):  # the second time prompts are cached
            engine.generate(base.prompts(length, length + 7), greedy(5))
            accepted += 6
            stats = engine.stats()["speculation"]
            assert stats["accepted"] == stats["drafted"] == accepted
    engine.generate(base.prompts(9), greedy(5, n=2))  # there are 3 slots left, and none are added
    assert engine.stats()["speculation"]["accepted"] == accepted + 4
    engine.check_integrity()


def test_nothing_of_an_earlier_request_is_left_in_new_blocks(
    open_engine: Callable[..., Engine], base: TinyModel
) -> None:
    """Rows decode while the drafter rests, in blocks that others have filled with NaN. These are
    zeroed when it proposes next."""
    engine = open_engine("base", **SIZES, speculation=drafting(base.directory, 3, adaptive=True))
    runner = loop_of(engine).runner
    assert runner.drafter is not None
    speculator: Any = loop_of(engine).speculator
    speculator._credit = -1e9
    arena = runner.drafter.arena.tensor
    arena[:, :, 1:] = float("nan")
    (prompt,) = base.prompts(9)
    engine.add_request(prompt, greedy(20), "r")
    for _ in range(12):
        engine.step()
    (request,) = (r for g in loop_of(engine).requests.groups.values() for r in g.requests)
    table = loop_of(engine).scheduler.cache.block_table(request.id)
    assert len(table) > 3
    proposed = engine.stats()["speculation"]["proposing_steps"]
    speculator._credit = 10.0
    engine.step()
    assert engine.stats()["speculation"]["proposing_steps"] == proposed + 1
    assert not arena[:, :, list(table)].isnan().any()
    engine.abort("r")
    engine.step()
    engine.check_integrity()


def test_a_drafter_that_does_not_pay_rests(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel]
) -> None:
    """A drafter of the model's own size gains nothing."""
    model = tiny("base")
    engine = open_engine(
        "base", dtype="float32", speculation=drafting(model.directory, 2, adaptive=True)
    )
    speculator: Any = loop_of(engine).speculator
    for costs in (speculator._costs.greedy, speculator._costs.full):  # as if drafts took long
        for own in costs._times.values():
            own.multiples[1:] = [50.0] * len(own.multiples[1:])
    speculator._credit = 4.0  # as after steps that lost the rest
    engine.generate(model.prompts(9), greedy(60))
    stats = engine.stats()["speculation"]
    assert 0 < stats["proposing_steps"] < 20
    assert stats["verify_steps"] == 0
