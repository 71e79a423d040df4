"""The engine over every part of the cache: whatever is shared, copied, swapped or computed again,
the tokens are those of a request that runs alone and computes everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, SamplingParams

from ..rigs.engine_rig import Open, greedy, loop_of, parts_of, run, tokens_of
from ..rigs.tiny_models import Tiny, TinyModel

pytestmark = pytest.mark.native_kernels

BLOCK_SIZES = [1, 4, 16, 32, 256]
NEW_TOKENS = 24
GREEDY = greedy(NEW_TOKENS)
MODES = ["eager", pytest.param("compile", marks=pytest.mark.slow)]


def sweep(values: Sequence[Any], *quick: Any) -> list[Any]:
    """Parameters of which only the quick ones run without being asked for."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


def poison(engine: Engine) -> None:
    """Fill every block but the null block with bytes that are NaN in every storage."""
    engine.reset_prefix_cache()
    parts_of(engine).arena.tensor.view(torch.uint8)[:, :, 1:] = 0xFF


def shared_prompts(model: TinyModel) -> list[list[int]]:
    """Prompts that begin alike, of lengths that end within blocks and at their ends."""
    stem, *tails = model.prompts(64, 1, 17, 40, 3, seed=31)
    return [stem, *(stem + tail for tail in tails), stem[:33] + tails[2], tails[2] + stem]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefix_cache_changes_no_token(
    open_engine: Open, base: TinyModel, block_size: int, mode: str
) -> None:
    prompts = shared_prompts(base)
    expected = base.greedy(prompts, NEW_TOKENS)
    settings: dict[str, Any] = {"mode": mode, "block_size": block_size, "prefill_chunk": 48}
    off = open_engine("base", prefix_cache=False, **settings)
    poison(off)
    outputs = off.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == expected
    assert {o.cached_tokens for o in outputs} == {0}
    on = open_engine("base", **settings)
    poison(on)
    for warm in (False, True):
        outputs = on.generate(prompts, GREEDY)
        assert [o.token_ids for o in outputs] == expected
        if warm:
            full = [(len(prompt) - 1) // block_size * block_size for prompt in prompts]
            assert [o.cached_tokens for o in outputs] == full
    stats = on.stats()
    assert stats["blocks"]["free"] == stats["blocks"]["usable"]
    assert stats["fallbacks"] == 0
    if block_size < 64:
        assert stats["cache"]["hit_tokens"] > 0
        assert stats["blocks"]["cached"] > 0


def test_salts_keep_tenants_apart(open_engine: Open, base: TinyModel) -> None:
    engine = open_engine("base", block_size=4)
    (prompt,) = base.prompts(30, seed=34)
    cached = []
    for salt in ("tenant a", "tenant b", None, "tenant a", "tenant b", None):
        engine.add_request(prompt, GREEDY, "it", cache_salt=salt)
        output = run(engine)["it"]
        cached.append(output.cached_tokens)
        assert [output.token_ids] == base.greedy([prompt], NEW_TOKENS)
    assert cached == [0, 0, 0, 28, 28, 28]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("prefix_cache", sweep([True, False], False))
def test_forks_equal_separate_requests(
    open_engine: Open, base: TinyModel, block_size: int, prefix_cache: bool, mode: str
) -> None:
    """Completions of one request draw what they would draw had they computed the prompt."""
    engine = open_engine(
        "base",
        mode=mode,
        block_size=block_size,
        prefix_cache=prefix_cache,
        prefill_chunk=24,
        max_num_seqs=15,
    )
    prompts = base.prompts(1, 2, 33, 64, 65, seed=35)
    params = SamplingParams(max_tokens=12, temperature=0.9, n=3, seed=7, ignore_eos=True)
    poison(engine)
    forked = tokens_of(engine.generate(prompts, params))
    assert engine.stats()["cache"]["forks"] == 2 * 4  # a prompt of one token has nothing to share
    assert len({tuple(tokens) for tokens in forked[3]}) > 1
    alone = open_engine(
        "base", mode=mode, block_size=block_size, prefix_cache=False, max_num_seqs=1
    )
    for prompt, expected in zip(prompts, forked, strict=True):
        requests = alone.prepare(prompt, params, "seeds").requests
        for seed, tokens in zip([request.seed for request in requests], expected, strict=True):
            assert _run_with_seed(alone, prompt, params, seed) == tokens


def _run_with_seed(engine: Engine, prompt: list[int], params: SamplingParams, seed: int) -> Any:
    """The tokens of a single request that draws with exactly this seed."""
    single = SamplingParams(
        max_tokens=params.max_tokens, temperature=params.temperature, ignore_eos=True, seed=0
    )
    engine.add_request(prompt, single, "one")
    loop_of(engine).requests.groups["one"].requests[0].seed = seed
    return run(engine)["one"].token_ids


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", sweep([1, 4, 16, 32], 1, 16))
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("host_cache_bytes", [1 << 20, 0])
def test_preemption_changes_no_token(
    open_engine: Open,
    base: TinyModel,
    block_size: int,
    prefix_cache: bool,
    host_cache_bytes: int,
    mode: str,
) -> None:
    """Room for about two and a half of the four sequences that run at once."""
    if mode == "compile" and (block_size not in (4, 16)):
        pytest.skip("the compiled code is the same")
    lengths = (20, 31, 32, 7, 16, 25)
    engine = open_engine(
        "base",
        mode=mode,
        block_size=block_size,
        num_blocks=1 + 160 // block_size,
        prefix_cache=prefix_cache,
        host_cache_bytes=host_cache_bytes,
    )
    prompts = base.prompts(*lengths, seed=36)
    plain = base.greedy(prompts, NEW_TOKENS)
    poison(engine)
    for _ in range(2):
        outputs = engine.generate(prompts, GREEDY)
        assert [o.token_ids for o in outputs] == plain
        engine.check_integrity()
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert (stats["cache"]["swapped_out"] > 0) == (host_cache_bytes > 0)
    assert stats["cache"]["swapped_in"] == stats["cache"]["swapped_out"]
    assert stats["blocks"]["host_free"] == stats["blocks"]["host"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("host_cache_bytes", sweep([1 << 22, 0], 1 << 22))
@pytest.mark.parametrize("variant", ["qwen3", "mistral", "gemma2", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("mode", MODES)
def test_every_family_shares_forks_and_swaps(
    open_engine: Open, tiny: Tiny, variant: str, host_cache_bytes: int, mode: str
) -> None:
    """Windows, hybrids and latents through the same cache, which is too small for all rows."""
    model = tiny(variant)
    prompts = shared_prompts(model)
    params = greedy(NEW_TOKENS, n=2)
    expected = [[tokens] * 2 for tokens in model.greedy(prompts, NEW_TOKENS)]
    roomy = open_engine(variant, mode=mode, block_size=4, prefill_chunk=24, num_blocks=2000)
    poison(roomy)
    for warm in (False, True):
        outputs = roomy.generate(prompts, params)
        assert tokens_of(outputs) == expected
        if warm:
            assert [o.cached_tokens for o in outputs] == [(len(p) - 1) // 4 * 4 for p in prompts]
    assert roomy.stats()["cache"]["forks"] > 0
    # Room for the longest sequence: windows leave some of it to others that are decoding.
    longest = max(map(len, prompts)) + NEW_TOKENS
    blocks = sum(group.spec.most_blocks(longest, 4, 5) for group in parts_of(roomy).groups)
    tight = open_engine(
        variant,
        mode=mode,
        block_size=4,
        prefill_chunk=5,
        max_num_seqs=12,
        num_blocks=1 + blocks,
        host_cache_bytes=host_cache_bytes,
    )
    poison(tight)
    assert tokens_of(tight.generate(prompts, params)) == expected
    tight.check_integrity()
    stats = tight.stats()
    if variant != "mistral":  # whose rows need no more blocks the longer they get
        assert stats["preemptions"] > 0
        assert (stats["cache"]["swapped_in"] > 0) == (host_cache_bytes > 0)


def test_what_ran_during_a_reset_is_not_shared_afterwards(
    open_engine: Open, base: TinyModel
) -> None:
    engine = open_engine("base", block_size=4)
    (prompt,) = base.prompts(30, seed=44)
    engine.add_request(prompt, GREEDY)
    for _ in range(5):
        engine.step()
    engine.reset_prefix_cache()
    run(engine)
    assert engine.stats()["blocks"]["cached"] == 0
    assert engine.generate([prompt], GREEDY)[0].cached_tokens == 0
