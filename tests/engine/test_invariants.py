"""What holds under any load: same tokens in any company, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams

from ..rigs.engine_rig import Open, keep_in_flight, loop_of, parts_of, tokens_of
from ..rigs.tiny_models import Tiny, TinyModel

pytestmark = pytest.mark.native_kernels

MODEL = "odd"
NEW_TOKENS = 24
LENGTHS = (1, 3, 17, 9, 50, 33, 8)

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "max_tokens": NEW_TOKENS, "ignore_eos": True}
GREEDY = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
PARAMS = [
    SamplingParams(**GREEDY),
    SamplingParams(**SAMPLED, seed=1),
    SamplingParams(**GREEDY, repetition_penalty=1.5),
    SamplingParams(**SAMPLED, seed=2, frequency_penalty=0.7),
    SamplingParams(**GREEDY),
    SamplingParams(**SAMPLED, seed=3, top_k=12, n=3),
    SamplingParams(**SAMPLED, seed=4, logit_bias={7: 3.0}, min_p=0.01),
]

Tokens = list[list[list[int]]]
"""Token ids of each prompt and completion."""


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> TinyModel:
    return tiny(MODEL)


@pytest.fixture(scope="module")
def prompts(model: TinyModel) -> list[list[int]]:
    return model.prompts(*LENGTHS, seed=31)


@pytest.fixture(scope="module")
def alone(model: TinyModel, prompts: list[list[int]]) -> Tokens:
    """What each request gets when it has the engine to itself: one row, default blocks."""
    config = EngineConfig(device="cpu", mode="eager", max_num_seqs=1)
    with Engine.from_pretrained(model.directory, config) as engine:
        return [
            tokens_of(engine.generate([prompt], params))[0]
            for prompt, params in zip(prompts, PARAMS, strict=True)
        ]


def arena(engine: Engine) -> torch.Tensor:
    return parts_of(engine).arena.tensor


def poison(engine: Engine) -> None:
    """Fill every block but the null block with NaN, and let nobody share what was in them."""
    arena(engine)[:, :, 1:] = float("nan")
    engine.reset_prefix_cache()


@contextmanager
def one_step_in_flight(engine: Engine) -> Iterator[None]:
    """Commit a step after the next one was launched, as on a device beside the host."""
    before, loop_of(engine)._in_flight = loop_of(engine)._in_flight, 1
    yield
    keep_in_flight(engine, before)


# The same tokens ---------------------------------------------------------------------------------


def test_greedy_alone_is_what_transformers_says(
    model: TinyModel, prompts: list[list[int]], alone: Tokens
) -> None:
    for index in (0, 4):
        assert alone[index] == model.greedy([prompts[index]], NEW_TOKENS)


SHAPES: list[dict[str, Any]] = [
    {"block_size": 1},
    {"block_size": 4, "max_num_seqs": 16},
    {"prefill_chunk": 1},
    {"prefill_chunk": 3, "block_size": 4},
    {"max_num_seqs": 8, "buckets": (3, 5)},
    {"max_num_seqs": 8, "buckets": (8,)},
    {"max_num_seqs": 3, "max_batch_tokens": 4},
    {"prefill_chunk": 64, "max_num_seqs": 2},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", SHAPES, ids=str)
def test_tokens_do_not_depend_on_the_shape_of_the_engine(
    open_engine: Open, prompts: list[list[int]], alone: Tokens, config: dict[str, Any]
) -> None:
    engine = open_engine(MODEL, **config)
    assert tokens_of(engine.generate(prompts, PARAMS)) == alone
    # Others next to each other and in other rows.
    assert tokens_of(engine.generate(prompts[::-1], PARAMS[::-1])) == alone[::-1]
    stats = engine.stats()
    assert stats["preemptions"] == stats["fallbacks"] == 0
    engine.check_integrity()


def test_tokens_do_not_depend_on_the_mode(
    compiled: Callable[[str], Engine], prompts: list[list[int]], alone: Tokens
) -> None:
    engine = compiled(MODEL)
    assert tokens_of(engine.generate(prompts, PARAMS)) == alone
    poison(engine)
    with one_step_in_flight(engine):
        assert tokens_of(engine.generate(prompts[::-1], PARAMS[::-1])) == alone[::-1]
    for prompt, params, expected in zip(prompts, PARAMS, alone, strict=True):
        assert tokens_of(engine.generate([prompt], params)) == [expected]
    engine.check_integrity()


@pytest.mark.parametrize("in_flight", [0, 1])
def test_tokens_do_not_depend_on_who_comes_and_goes(
    open_engine: Open, prompts: list[list[int]], alone: Tokens, in_flight: int
) -> None:
    """Requests arrive at any time with any priority, and others are aborted around them."""
    rng = random.Random(in_flight)
    engine = open_engine(MODEL, block_size=4, num_blocks=26, prefill_chunk=16)
    keep_in_flight(engine, in_flight)
    poison(engine)
    to_come = list(range(len(prompts))) * 2
    rng.shuffle(to_come)
    index_of: dict[str, int] = {}
    strangers: list[str] = []
    finished: dict[str, list[list[int]]] = {}
    while to_come or engine.has_unfinished():
        if to_come and rng.random() < 0.2:
            index = to_come.pop()
            priority = rng.randint(-1, 1)
            request_id = engine.add_request(prompts[index], PARAMS[index], priority=priority)
            index_of[request_id] = index
        if to_come and rng.random() < 0.1:
            noise = SamplingParams(max_tokens=40, temperature=5.0, presence_penalty=2.0)
            strangers.append(engine.add_request(rng.choice(prompts), noise, priority=-2))
        if strangers and rng.random() < 0.1:
            engine.abort(strangers.pop())
        for output in engine.step():
            if output.finished and output.request_id in index_of:
                assert output.request_id not in finished, "one final output each"
                finished[output.request_id] = tokens_of([output])[0]
        engine.check_integrity()
    assert finished == {request_id: alone[index] for request_id, index in index_of.items()}
    assert engine.stats()["preemptions"] > 0
    assert not arena(engine)[:, :, 0].isnan().any(), "the null block took up a NaN"


def test_children_differ_and_are_reproducible(open_engine: Open, prompts: list[list[int]]) -> None:
    engine = open_engine(MODEL)
    many = SamplingParams(**SAMPLED, seed=9, n=6)
    (first,), (second,) = (tokens_of(engine.generate([prompts[2]], many)) for _ in range(2))
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 6
    assert tokens_of(engine.generate([prompts[2]], SamplingParams(**SAMPLED, seed=9))) == [
        first[:1]
    ]
    other = tokens_of(engine.generate([prompts[2]], SamplingParams(**SAMPLED, seed=10, n=6)))
    assert not {tuple(t) for t in first} & {tuple(t) for t in other[0]}


# Nothing is left behind --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_padding_writes_to_the_null_block_only(
    open_engine: Open, compiled: Callable[[str], Engine], model: TinyModel, mode: str
) -> None:
    """One request of 5 + 10 tokens, in a decode bucket and a prefill bucket that it cannot fill."""
    engine = (
        compiled(MODEL) if mode == "compile" else open_engine(MODEL, buckets=(4,), block_size=4)
    )
    poison(engine)
    before = arena(engine).clone()
    (prompt,) = model.prompts(5, seed=33)
    engine.add_request(
        prompt, SamplingParams(max_tokens=11, temperature=0.0, ignore_eos=True), "it"
    )
    held: list[int] = []
    while engine.has_unfinished():
        engine.step()
        if engine.stats()["running"]:
            held = list(loop_of(engine).scheduler.cache.block_table("it/0"))
    assert engine.stats()["padding"] > 0
    block_size = arena(engine).shape[4]
    assert len(held) == -(-15 // block_size)
    after = arena(engine)
    # NaN differs from itself: compare bits. A slot of all layers, heads and of keys and values:
    changed = (after.view(torch.int32) != before.view(torch.int32)).movedim(2, 0).movedim(4, 1)
    written = changed.flatten(2).any(-1)  # [num_blocks, block_size]
    expected = torch.zeros_like(written)
    for position in range(15):  # the last sampled token is never written
        block, offset = held[position // block_size], position % block_size
        expected[block, offset] = True
        assert after[:, :, block, :, offset].isfinite().all()
    assert torch.equal(written[1:], expected[1:])


FORMER_OWNERS = [
    SamplingParams(**SAMPLED, seed=5, repetition_penalty=3.0, presence_penalty=2.0),
    SamplingParams(**GREEDY, logit_bias={3: 100.0}),
    SamplingParams(**GREEDY, min_tokens=24, stop_token_ids=list(range(16))),
    SamplingParams(**GREEDY, frequency_penalty=2.0, logprobs=3),
    SamplingParams(temperature=50.0, max_tokens=5, seed=1, top_k=3),
]


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_recycled_row_carries_nothing_over(
    open_engine: Open, prompts: list[list[int]], alone: Tokens, in_flight: int
) -> None:
    engine = open_engine(MODEL, max_num_seqs=1)
    keep_in_flight(engine, in_flight)
    for number, former in enumerate(FORMER_OWNERS):
        # Greedy and with a repetition penalty; sampled and with a frequency penalty.
        for index in ((0, 2), (1, 3))[(number + in_flight) % 2]:
            requests = [prompts[5], prompts[index]]
            outputs = tokens_of(engine.generate(requests, [former, PARAMS[index]]))
            assert outputs[1] == alone[index]


def test_a_row_left_in_the_middle_carries_nothing_over(
    open_engine: Open, prompts: list[list[int]], alone: Tokens
) -> None:
    """An aborted request has a step in flight that still writes to its row and blocks."""
    engine = open_engine(MODEL, max_num_seqs=1, prefill_chunk=16, prefix_cache=False)
    keep_in_flight(engine, 1)
    for steps in (1, 4, 7):
        for former in FORMER_OWNERS:
            aborted = engine.add_request(prompts[4], former)
            for _ in range(steps):
                engine.step()
            assert engine.abort(aborted) is True
            assert tokens_of(engine.generate([prompts[2]], PARAMS[2])) == [alone[2]]
            engine.check_integrity()


# Prepared steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_a_missing_step_is_served_and_counted(
    open_engine: Open,
    compiled: Callable[[str], Engine],
    prompts: list[list[int]],
    alone: Tokens,
    mode: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = compiled(MODEL) if mode == "compile" else open_engine(MODEL, block_size=4)
    library = parts_of(engine).runner.library
    kept = dict(library._steps)
    assert engine.stats()["fallbacks"] == 0
    try:
        for key in kept:
            if key.phase == "decode" and key.size == 4:
                del library._steps[key]
        engine.reset_prefix_cache()
        assert tokens_of(engine.generate(prompts, PARAMS)) == alone
        misses = engine.stats()["fallbacks"]
        assert misses > 0
        engine.reset_prefix_cache()
        engine.generate(prompts, PARAMS)
        assert engine.stats()["fallbacks"] == 2 * misses
    finally:
        library._steps.update(kept)
        library._misses = 0  # the fixture asserts that nobody else had any
    warnings = [r for r in caplog.records if r.levelname == "WARNING" and "no step" in r.message]
    assert len(warnings) == len(library.stats().missed_keys) > 0, "one line a key, not a launch"
