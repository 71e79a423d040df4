"""Logits that are not a distribution end their request, and nothing else.

The models have NaN in the embedding of one token: logits are NaN from where a sequence has it.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, NonFiniteLogitsError, SamplingParams
from stepgraph.runtime.engine.request_output import RequestOutput
from stepgraph.runtime.kernels import have_compiler

from ..rigs.engine_rig import keep_in_flight, opened, parts_of, tokens_of
from ..rigs.tiny_models import Tiny, TinyModel

pytestmark = pytest.mark.native_kernels

NAN_TOKEN = 29
MODEL = "odd"
NATIVE = pytest.param(
    {"kernels": "native", "mode": "compile"},
    marks=pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler"),
)
KERNELS = [
    {"kernels": "torch"},
    NATIVE,
    pytest.param({"kernels": "torch", "mode": "compile"}, marks=pytest.mark.slow),
]
GREEDY = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True}
SAMPLED = {"max_tokens": 14, "ignore_eos": True}
PARAMS = [
    SamplingParams(**GREEDY),
    SamplingParams(**GREEDY, logit_bias={NAN_TOKEN: 100.0}),
    SamplingParams(**GREEDY, logprobs=4),
    SamplingParams(**SAMPLED, seed=1, n=4, logit_bias={NAN_TOKEN: 3.0}, repetition_penalty=1.2),
    SamplingParams(**SAMPLED, seed=2, n=2, top_p=0.9, logprobs=2, logit_bias={NAN_TOKEN: 4.0}),
]


@pytest.fixture(scope="module")
def nan_model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the checkpoint of a variant with NaN in the embedding of `NAN_TOKEN`."""

    @functools.cache
    def make(variant: str) -> Path:
        model = copy.deepcopy(tiny(variant).reference)
        with torch.no_grad():
            model.get_input_embeddings().weight[NAN_TOKEN] = torch.nan
        directory = tmp_path_factory.mktemp(f"nan_{variant}")
        model.save_pretrained(directory)
        return directory

    return make


def without_nan_token(model: TinyModel, *lengths: int, seed: int) -> list[list[int]]:
    prompts = model.prompts(*lengths, seed=seed)
    return [[token + (token == NAN_TOKEN) for token in prompt] for prompt in prompts]


def check(output: RequestOutput, sound: RequestOutput) -> int:
    """Compare with the output of the model without NaN; return how many completions ended early.

    A completion goes on up to the first `NAN_TOKEN`, after which the next token cannot be chosen.
    """
    ended = 0
    for completion, expected in zip(output.completions, sound.completions, strict=True):
        tokens = expected.token_ids
        if NAN_TOKEN in tokens[:-1]:
            ended += 1
            assert completion.finish_reason == "error"
            tokens = tokens[: tokens.index(NAN_TOKEN) + 1]
        else:
            assert completion.finish_reason == expected.finish_reason
        assert completion.token_ids == tokens
        logprobs = [entry.logprob for entry in expected.logprobs[: len(tokens)]]
        assert [e.logprob for e in completion.logprobs] == pytest.approx(logprobs, abs=1e-4)
    assert isinstance(output.error, NonFiniteLogitsError) == (ended > 0)
    return ended


CASES = [
    (MODEL, {}, 0),
    (MODEL, {"prefill_chunk": 3, "prefix_cache": False}, 1),
    (MODEL, {"num_blocks": 16, "max_model_len": 40}, 0),  # requests are preempted
    (MODEL, {"num_blocks": 16, "max_model_len": 40, "host_cache_bytes": 1 << 20}, 1),
    (MODEL, {"kv_dtype": "fp8"}, 0),
    (MODEL, {"kv_dtype": "int8"}, 0),
    ("mistral", {"prefill_chunk": 8}, 1),
    ("deepseek_v3", {}, 0),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernels", KERNELS, ids=str)
@pytest.mark.parametrize(("variant", "config", "in_flight"), CASES, ids=str)
def test_only_the_row_ends(
    tiny: Tiny,
    nan_model: Callable[[str], Path],
    variant: str,
    config: dict[str, Any],
    in_flight: int,
    kernels: dict[str, Any],
) -> None:
    if variant.startswith("deepseek") and kernels["kernels"] == "native":
        pytest.skip("latent attention has no native layers")
    prompts = without_nan_token(tiny(variant), 9, 5, 22, 7, 12, seed=5)
    with opened(tiny(variant).directory, **config, **kernels, block_size=4) as engine:
        sound = engine.generate(prompts, PARAMS)
    with opened(nan_model(variant), **config, **kernels, block_size=4) as engine:
        keep_in_flight(engine, in_flight)
        outputs = engine.generate(prompts, PARAMS)
        engine.check_integrity()
        stats = engine.stats()
        again = engine.generate(prompts, PARAMS)  # in recycled blocks, with what is cached
        assert tokens_of(again) == tokens_of(outputs)
    ended = sum(check(*pair) for pair in zip(outputs, sound, strict=True))
    assert ended == stats["non_finite"] >= 3
    assert stats["blocks"]["free"] == stats["blocks"]["usable"]
    assert (stats["preemptions"] > 0) == ("num_blocks" in config)


def cached(engine: Engine, prompt: Sequence[int]) -> int:
    (output,) = engine.generate([list(prompt)], SamplingParams(max_tokens=1, temperature=0.0))
    return output.cached_tokens


@pytest.mark.parametrize("chunk", [5, 64])
def test_what_the_row_computed_is_not_found(
    tiny: Tiny, nan_model: Callable[[str], Path], chunk: int
) -> None:
    """Blocks that finite logits came from stay."""
    prompt, tail = without_nan_token(tiny(MODEL), 16, 8, seed=7)
    sick = [*prompt, NAN_TOKEN, *tail]
    with opened(nan_model(MODEL), prefill_chunk=chunk, block_size=4) as engine:
        for _ in range(3):
            assert cached(engine, sick) == 0
            assert engine.stats()["blocks"]["cached"] == 0
        assert cached(engine, prompt) == 0
        assert cached(engine, sick) == 16
        assert cached(engine, sick) == 16
        assert cached(engine, [*prompt, *tail]) == 16
        # It generates the token itself: its blocks up to there stay.
        bias = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={NAN_TOKEN: 100.0})
        (output,) = engine.generate([[*prompt, *tail[:4]]], bias)
        assert output.token_ids == [NAN_TOKEN]
        assert cached(engine, [*prompt, *tail[:4], NAN_TOKEN, 1, 2, 3, 4]) == 20
        engine.check_integrity()


def test_the_cache_recovers_from_blocks_that_went_bad(tiny: Tiny) -> None:
    """An aborted request leaves blocks whose logits were never seen."""
    (prompt,) = tiny(MODEL).prompts(24, seed=8)
    greedy = SamplingParams(**GREEDY)
    with opened(tiny(MODEL).directory, prefill_chunk=8, block_size=4) as engine:
        expected = engine.generate([prompt], greedy)[0].token_ids
        engine.reset_prefix_cache()
        request_id = engine.add_request(prompt, greedy)
        engine.step(), engine.step()
        engine.abort(request_id)
        engine.step()
        parts_of(engine).runner.arena.tensor[:, :, 1:] = torch.nan
        outputs = [engine.generate([prompt], greedy)[0] for _ in range(2)]
        assert outputs[0].finish_reason == "error"
        assert outputs[0].cached_tokens > 0
        assert (outputs[1].cached_tokens, outputs[1].token_ids) == (0, expected)


def test_score_refuses_logits_without_a_distribution(
    tiny: Tiny, nan_model: Callable[[str], Path]
) -> None:
    (tokens,) = without_nan_token(tiny(MODEL), 10, seed=9)
    with opened(nan_model(MODEL), block_size=4) as engine:
        expected = engine.score(tokens, 4)
        for place in (2, 6, 9):
            with pytest.raises(NonFiniteLogitsError):
                engine.score([*tokens[:place], NAN_TOKEN, *tokens[place + 1 :]], 4)
            engine.check_integrity()
        assert torch.equal(engine.score(tokens, 4), expected)


def test_log_probabilities_of_impossible_tokens_are_left_out(tiny: Tiny, tmp_path: Path) -> None:
    """A model that masks all tokens but three in its head, for some prompts."""
    model = copy.deepcopy(tiny(MODEL).reference)
    with torch.no_grad():
        head = model.lm_head.weight
        head.zero_()
        head[:, 0] = -torch.inf  # times a hidden state above 0; below 0 it is +inf
        head[[3, 50, 90]] = 0.0
    model.save_pretrained(tmp_path)
    prompts = tiny(MODEL).prompts(4, 4, 4, 4, 4, 4, seed=2)
    with opened(tmp_path, block_size=4) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=1, logprobs=20, seed=1))
    assert {output.finish_reason for output in outputs} == {"length", "error"}
    for output in outputs:
        for entry in output.logprobs:
            assert entry.top.keys() == {3, 50, 90}
            json.dumps([entry.logprob, entry.top], allow_nan=False)
