"""Penalties, minimal lengths and log-probabilities equal transformers'."""

from __future__ import annotations

import pytest
from stepgraph.runtime import SamplingParams

from ..rigs.engine_rig import Open
from ..rigs.tiny_models import TinyModel


def test_repetition_penalty_equals_transformers(open_engine: Open, base: TinyModel) -> None:
    prompts = base.prompts(12, 5, 30, 2, 8, seed=21)
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, repetition_penalty=1.7)
    outputs = open_engine("base").generate(prompts, params)
    expected = base.greedy(prompts, 48, repetition_penalty=1.7)
    assert [o.token_ids for o in outputs] == expected
    assert expected != base.greedy(prompts, 48), "the penalty has no effect"


def test_min_tokens_equals_transformers(open_engine: Open, base: TinyModel) -> None:
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


def test_logprobs_equal_transformers(open_engine: Open, base: TinyModel) -> None:
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
