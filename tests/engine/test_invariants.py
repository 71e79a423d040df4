"""What holds under any load: same tokens in any company, nothing left behind.

Whatever is shared, copied, swapped or computed again, the tokens are the ones that a request gets
which runs alone and computes everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams

from ..rigs.engine_rig import Open, keep_in_flight, loop_of, parts_of, run, tokens_of
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
    """What each request gets when it computes everything itself: one row, default blocks."""
    config = EngineConfig(device="cpu", mode="eager", max_num_seqs=1, prefix_cache=False)
    with Engine.from_pretrained(model.directory, config) as engine:
        return [
            tokens_of(engine.generate([prompt], params))[0]
            for prompt, params in zip(prompts, PARAMS, strict=True)
        ]


def arena(engine: Engine) -> torch.Tensor:
    return parts_of(engine).runner.arena.tensor


def poison(engine: Engine) -> None:
    """Fill every block but the null block with NaN, and forget what was in them."""
    engine.reset_prefix_cache()
    arena(engine)[:, :, 1:] = float("nan")


# The same tokens ---------------------------------------------------------------------------------


def test_greedy_alone_is_what_transformers_says(
    model: TinyModel, prompts: list[list[int]], alone: Tokens
) -> None:
    for index in (0, 4):
        assert alone[index] == model.greedy([prompts[index]], NEW_TOKENS)
    assert len({tuple(tokens) for tokens in alone[5]}) == 3, "completions draw for themselves"


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
    if config.get("max_num_seqs") == 16:
        assert stats["cache"]["forks"] > 0
    engine.check_integrity()


def test_tokens_do_not_depend_on_the_mode(
    compiled: Callable[[str], Engine], prompts: list[list[int]], alone: Tokens
) -> None:
    engine = compiled(MODEL)
    assert tokens_of(engine.generate(prompts, PARAMS)) == alone
    poison(engine)
    keep_in_flight(engine, 1)  # as on a device beside the host
    assert tokens_of(engine.generate(prompts[::-1], PARAMS[::-1])) == alone[::-1]
    keep_in_flight(engine, 0)
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
    """Its former owner ended, or was aborted while a step was in flight that writes to the row."""
    engine = open_engine(MODEL, max_num_seqs=1, prefill_chunk=16, prefix_cache=False)
    keep_in_flight(engine, in_flight)
    for number, former in enumerate(FORMER_OWNERS):
        # Greedy and with a repetition penalty; sampled and with a frequency penalty.
        for index, steps in zip(
            ((0, 2), (1, 3))[number % 2], ((1, 7), (4, 99))[in_flight], strict=True
        ):
            aborted = engine.add_request(prompts[4], former)
            for _ in range(steps):
                engine.step()
            engine.abort(aborted)
            assert tokens_of(engine.generate([prompts[index]], PARAMS[index])) == [alone[index]]
            engine.check_integrity()


# The cache ---------------------------------------------------------------------------------------

CASES = [  # with block sizes
    *(("base", size) for size in (1, 4, 16, 32)),
    *((variant, 4) for variant in ("mistral", "qwen3", "gemma2", "deepseek_v3", "lfm2", "gemma3")),
    ("qwen3_5", 8),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("variant", "block_size"), CASES)
def test_tokens_do_not_depend_on_the_cache(
    open_engine: Open, tiny: Tiny, variant: str, block_size: int, mode: str
) -> None:
    """Windows, hybrids, latents and inputs of convolutions are shared, forked, swapped and computed
    again."""
    model = tiny(variant)
    stem, middle, tail = model.prompts(64, 17, 3, seed=31)  # ends within blocks and at their ends
    prompts = [stem, stem + middle, stem[:33] + middle + tail, middle + stem]
    params = SamplingParams(**GREEDY, n=2)
    # One by one: padding would change convolutions.
    expected = [model.greedy([prompt], NEW_TOKENS) * 2 for prompt in prompts]
    settings: dict[str, Any] = {"mode": mode, "block_size": block_size}
    roomy = open_engine(variant, **settings, prefill_chunk=24, num_blocks=2000)
    poison(roomy)
    for warm in (False, True):
        outputs = roomy.generate(prompts, params)
        assert tokens_of(outputs) == expected
        if warm:
            full = [(len(prompt) - 1) // block_size * block_size for prompt in prompts]
            assert [output.cached_tokens for output in outputs] == full
    assert roomy.stats()["cache"]["forks"] > 0
    # Room for the longest sequence: windows leave some of it to others that are decoding.
    longest = max(map(len, prompts)) + NEW_TOKENS
    blocks = sum(g.most_blocks(longest, block_size, 5) for g in parts_of(roomy).groups)
    for swaps in (True, False):
        tight = open_engine(
            variant,
            **settings,
            prefill_chunk=5,
            max_num_seqs=12,
            num_blocks=1 + blocks,
            host_cache_bytes=swaps << 22,
            prefix_cache=swaps,
        )
        poison(tight)
        assert tokens_of(tight.generate(prompts, params)) == expected
        tight.check_integrity()
        stats = tight.stats()
        assert stats["blocks"]["free"] == stats["blocks"]["usable"]
        assert stats["blocks"]["host_free"] == stats["blocks"]["host"]
        assert stats["cache"]["swapped_in"] == stats["cache"]["swapped_out"]
        if variant != "mistral":  # whose rows need no more blocks the longer they get
            assert stats["preemptions"] > 0
            assert (stats["cache"]["swapped_in"] > 0) == swaps


def test_what_ran_during_a_reset_is_not_shared_afterwards(
    open_engine: Open, model: TinyModel
) -> None:
    engine = open_engine(MODEL, block_size=4)
    (prompt,) = model.prompts(30, seed=44)
    engine.add_request(prompt, PARAMS[0])
    for _ in range(5):
        engine.step()
    engine.reset_prefix_cache()
    run(engine)
    assert engine.stats()["blocks"]["cached"] == 0
    assert engine.generate([prompt], PARAMS[0])[0].cached_tokens == 0
