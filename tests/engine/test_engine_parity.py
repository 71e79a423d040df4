"""The engine computes what transformers computes: greedy tokens, and logits of forced tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from stepgraph.runtime import Engine, SamplingParams
from transformers import LlamaForCausalLM

if TYPE_CHECKING:
    from conftest import TinyModel

EVERY_SHAPE = [
    "base",
    "odd",
    "one_kv_head",
    "as_many_kv_heads",
    "biases",
    "sharded",
    "llama3_rope",
    "linear_rope",
]
EAGER = [  # the others are parts of `odd`
    variant
    if variant in ("base", "odd", "as_many_kv_heads", "linear_rope")
    else pytest.param(variant, marks=pytest.mark.slow)
    for variant in EVERY_SHAPE
]
COMPILED = [  # each costs seconds of compilation
    variant if variant == "odd" else pytest.param(variant, marks=pytest.mark.slow)
    for variant in EVERY_SHAPE
]
needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = [
    pytest.param(variant, mode, marks=needs_cuda)
    for variant in ("base", "odd")
    for mode in ("eager", "compile", "graph")
]

# More prompts than rows, so that rows are handed on; 150 is far beyond the 32 positions that the
# Llama-3 frequencies were scaled from.
BATCHES = [((3, 17, 1, 50, 9, 150), 16), ((2,), 20), ((33, 32, 31), 12)]


def assert_greedy_parity(engine: Engine, model: TinyModel) -> None:
    for seed, (lengths, new_tokens) in enumerate(BATCHES):
        prompts = model.prompts(*lengths, seed=seed)
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == model.greedy(prompts, new_tokens)
        assert {o.finish_reason for o in outputs} == {"length"}
    assert engine.stats()["fallbacks"] == 0


def assert_logit_parity(engine: Engine, model: TinyModel) -> None:
    (token_ids,) = model.prompts(60, seed=5)
    expected = model.logits(token_ids)
    for prompt_len in (1, 40, 60):  # all decoded, chunks of prefill and decoded, all prefilled
        logits = engine.score(token_ids, prompt_len)
        assert logits.shape == (len(token_ids) - prompt_len + 1, model.vocab_size)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected[prompt_len - 1 :], rtol=0, atol=1e-4)
    engine.check_integrity()


@pytest.mark.parametrize("variant", EAGER)
def test_eager_equals_transformers(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    engine = open_engine(variant, prefill_chunk=32)
    assert_greedy_parity(engine, tiny(variant))
    assert_logit_parity(engine, tiny(variant))


@pytest.mark.parametrize("variant", COMPILED)
def test_compiled_equals_transformers(
    compiled: Callable[[str], Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    engine = compiled(variant)
    assert engine.stats()["mode"] == "compile"
    assert_greedy_parity(engine, tiny(variant))
    assert_logit_parity(engine, tiny(variant))


@pytest.mark.parametrize(("variant", "mode"), GPU)
def test_gpu_equals_transformers(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str, mode: str
) -> None:
    engine = open_engine(variant, device="cuda", mode=mode, prefill_chunk=32, block_size=4)
    assert_greedy_parity(engine, tiny(variant))
    assert_logit_parity(engine, tiny(variant))


BF16_MODES = ["eager", "compile", *(pytest.param(m, marks=needs_cuda) for m in ("graph",))]


@pytest.mark.parametrize("mode", BF16_MODES)
def test_bfloat16_is_as_exact_as_transformers(
    open_engine: Callable[..., Engine], base: TinyModel, mode: str
) -> None:
    """Both round the same weights and then every intermediate result to bfloat16.

    Against the same rounded weights in float64 only the rounding of intermediate results is left.
    Engine and transformers round at the same places, but sum in different orders, so neither is
    the other's reference: the root mean square of the engine's error over 82 x 97 logits may be
    at most 1.5 times that of transformers. A lost rounding to float32 somewhere (softmax, norm,
    rotation) shows as more.
    """
    device = "cuda" if mode == "graph" else "cpu"
    engine = open_engine(
        "base", device=device, mode=mode, dtype="bfloat16", prefill_chunk=32, max_num_seqs=1
    )
    rounded = LlamaForCausalLM.from_pretrained(base.directory, dtype=torch.bfloat16).eval()
    exact = LlamaForCausalLM.from_pretrained(base.directory, dtype=torch.float64).eval()
    with torch.no_grad():
        for to, source in zip(exact.parameters(), rounded.parameters(), strict=True):
            to.copy_(source)
        ours, theirs = [], []
        for seed in (11, 12):
            (token_ids,) = base.prompts(60, seed=seed)
            ids = torch.tensor([token_ids])
            expected = exact(ids).logits[0]
            theirs.append(rounded(ids).logits[0].double() - expected)
            # Of the first half, which is prefilled, every third position; the second is decoded.
            ends = range(1, 30, 3)
            shown = [*(end - 1 for end in ends), *range(29, 60)]
            theirs[-1] = theirs[-1][shown]
            head = torch.cat([engine.score(token_ids[:n], n) for n in ends])
            tail = engine.score(token_ids, 30)
            ours.append(torch.cat((head, tail)).double() - expected[shown])
    our_error, their_error = (torch.cat(e).square().mean().sqrt().item() for e in (ours, theirs))
    assert their_error > 1e-3, "the reference is not rounded: this test would show nothing"
    assert our_error <= 1.5 * their_error


def test_repetition_penalty_equals_transformers(
    open_engine: Callable[..., Engine], base: TinyModel
) -> None:
    prompts = base.prompts(12, 5, 30, 2, 8, seed=21)
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, repetition_penalty=1.7)
    outputs = open_engine("base").generate(prompts, params)
    expected = base.greedy(prompts, 48, repetition_penalty=1.7)
    assert [o.token_ids for o in outputs] == expected
    assert expected != base.greedy(prompts, 48), "the penalty has no effect"


def test_min_tokens_equals_transformers(
    open_engine: Callable[..., Engine], base: TinyModel
) -> None:
    prompts = base.prompts(12, 5, 30, seed=22)
    engine = open_engine("base")
    for prompt in prompts:
        (plain,) = base.greedy([prompt], 10)
        stops = [plain[2], plain[4]]
        params = SamplingParams(
            max_tokens=40, min_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=stops
        )
        (output,) = engine.generate([prompt], params)
        expected = base.greedy([prompt], 40, eos_token_id=stops, min_new_tokens=8)
        assert [output.token_ids] == expected
        assert not set(output.token_ids[:8]) & set(stops)
        assert output.finish_reason == ("stop" if len(output.token_ids) < 40 else "length")


def test_logprobs_equal_transformers(open_engine: Callable[..., Engine], base: TinyModel) -> None:
    prompts = base.prompts(12, 5, 30, 1, 7, seed=23)
    counts = [0, 1, 5, 20, None]
    params = [
        # Neither temperature nor penalties change what is reported.
        SamplingParams(max_tokens=16, temperature=0.7, presence_penalty=1.0, logprobs=n, seed=n)
        for n in counts
    ]
    for prompt, count, output in zip(
        prompts, counts, open_engine("base").generate(prompts, params), strict=True
    ):
        if count is None:
            assert output.logprobs == []
            continue
        expected = base.logits(prompt + output.token_ids).log_softmax(-1)[len(prompt) - 1 :]
        assert len(output.logprobs) == len(output.token_ids)
        for step, (token_id, entry) in enumerate(
            zip(output.token_ids, output.logprobs, strict=True)
        ):
            assert entry.token_id == token_id
            assert entry.logprob == pytest.approx(expected[step, token_id].item(), abs=1e-4)
            best = expected[step].topk(max(count, 1))
            assert list(entry.top) == best.indices.tolist()[:count]
            assert list(entry.top.values()) == pytest.approx(best.values.tolist()[:count], abs=1e-4)
