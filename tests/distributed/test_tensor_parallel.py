"""Engines of several processes give the tokens of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stepgraph.runtime import (
    EmbeddedSpan,
    EncodedContent,
    Engine,
    PromptEmbeds,
    RequestOutput,
    SamplingParams,
)
from stepgraph.runtime.request import TokenLogprobs

from ..rigs.engine_rig import greedy, loop_of, tokens_of
from ..rigs.parallel_rig import PROMPTS, children, opened
from ..rigs.reload_rig import Write, make_write
from ..rigs.tiny_models import Tiny

__all__ = ["make_write"]

SAMPLED = SamplingParams(
    max_tokens=10, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True, logprobs=3
)


def test_four_ranks_with_a_latency_budget(tiny: Tiny) -> None:
    """As `pair` has two. `test_sharding.py` has the other families."""
    directory = tiny("wide").directory
    with opened(directory) as engine:
        expected = tokens_of(engine.generate(PROMPTS, greedy()))
        logits = engine.score(PROMPTS[0], 20)
    with opened(directory, 4, max_itl_ms=50.0) as engine:
        assert engine.stats()["tensor_parallel"] == 4
        assert tokens_of(engine.generate(PROMPTS, greedy())) == expected
        torch.testing.assert_close(engine.score(PROMPTS[0], 20), logits, rtol=1e-4, atol=1e-4)
        engine.check_integrity()
    assert not children()


@pytest.fixture(scope="module")
def pair(tiny: Tiny) -> Iterator[tuple[Engine, Engine]]:
    """An engine of one process and one of two on native kernels, with all features on."""
    fields: dict[str, Any] = {
        "prompt_embeds": True,
        "host_cache_bytes": 1 << 20,
        "num_blocks": 14,
        "prefill_chunk": 24,
    }
    directory = tiny("base").directory
    native: dict[str, Any] = {"mode": "compile", "kernels": "native", "buckets": (4,)}
    with opened(directory, **fields) as one, opened(directory, 2, **fields, **native) as two:
        yield one, two
        assert two.stats()["fallbacks"] == 0


def scores(output: RequestOutput) -> list[TokenLogprobs]:
    """The log-probabilities of the prompt and of all completions."""
    groups = (output.prompt_logprobs, *(c.logprobs for c in output.completions))
    return [entry for group in groups for entry in group or () if entry is not None]


def both(pair: tuple[Engine, Engine], *arguments: Any) -> list[RequestOutput]:
    """Generate by both engines and compare; return what two processes gave."""
    one, two = (engine.generate(*arguments) for engine in pair)
    assert tokens_of(one) == tokens_of(two)
    for expected, found in zip(one, two, strict=True):
        assert found.cached_tokens == expected.cached_tokens
        for a, b in zip(scores(expected), scores(found), strict=True):
            assert (a.token_id, list(a.top)) == (b.token_id, list(b.top))
            assert b.logprob == pytest.approx(a.logprob, abs=1e-3)
    for engine in pair:
        engine.check_integrity()
    return two


def test_sampled_tokens_and_logprobs(pair: tuple[Engine, Engine]) -> None:
    both(pair, PROMPTS, SAMPLED)
    penalties = dataclasses.replace(
        SAMPLED, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 2.0}, min_tokens=4
    )
    both(pair, PROMPTS, [penalties, SAMPLED, greedy(), penalties])


def test_forks_and_shared_prefixes(pair: tuple[Engine, Engine]) -> None:
    both(pair, [PROMPTS[0]], dataclasses.replace(SAMPLED, n=3))
    assert both(pair, [[*PROMPTS[0], 4]], greedy())[0].cached_tokens


def test_prompt_logprobs(pair: tuple[Engine, Engine]) -> None:
    """One chunk ends within a slice of the positions that are scored at once."""
    prompts = [[*PROMPTS[2], 6], PROMPTS[1], [*range(3, 25)]]
    for output, prompt in zip(both(pair, prompts, greedy(prompt_logprobs=4)), prompts, strict=True):
        assert len(output.prompt_logprobs) == len(prompt)


def test_prompt_embeds(pair: tuple[Engine, Engine]) -> None:
    generator = torch.Generator().manual_seed(7)
    content = EncodedContent.of(torch.randn(5, 48, generator=generator))
    outputs = []
    for engine in pair:
        prompt = PromptEmbeds([7, *[0] * 5, 3, 1], [EmbeddedSpan(1, content)])
        outputs.append(tokens_of(engine.generate([prompt, PROMPTS[1]], greedy())))
    assert outputs[0] == outputs[1]
    both(pair, PROMPTS, greedy())  # no embedding remains


def test_swapped_requests(pair: tuple[Engine, Engine]) -> None:
    both(pair, [[k] * 12 for k in range(4)], greedy(30))
    for engine in pair:
        assert engine.stats()["cache"]["swapped_in"]


@pytest.mark.slow
def test_reloaded_weights(tiny: Tiny, write: Write) -> None:
    other = write(seed=3)
    with opened(other) as engine:
        expected = tokens_of(engine.generate(PROMPTS, greedy()))
    with opened(tiny("base").directory, 2) as engine:
        assert tokens_of(engine.generate(PROMPTS, greedy())) != expected
        engine.reload_weights(other)
        assert tokens_of(engine.generate(PROMPTS, greedy())) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"mode": "compile", "buckets": (4,)},
        # Keys and values are rounded by head, so that ranks round them as one process does.
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp8"},
    ],
    ids=str,
)
def test_modes(tiny: Tiny, config: dict[str, Any]) -> None:
    found = []
    for ranks, fields in ((1, {}), (2, config)):
        fields |= {"kv_dtype": config.get("kv_dtype", "auto")}
        with opened(tiny("base").directory, ranks, **fields) as engine:
            found.append(tokens_of(engine.generate(PROMPTS, greedy())))
            again = engine.generate([[*PROMPTS[0], 4]], greedy())
            assert again[0].cached_tokens
            found[-1] += tokens_of(again)
            assert engine.stats()["fallbacks"] == 0
    assert found[0] == found[1]


def test_operations_of_torch_leave_the_cores_of_other_ranks(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step rank 0 has as many threads as the others; the application keeps its own number."""
    before, library = torch.get_num_threads(), loop_of(pair[1]).runner.library
    seen: set[int] = set()
    run = library.run

    def watched(*args: Any) -> Any:
        seen.add(torch.get_num_threads())
        return run(*args)

    monkeypatch.setattr(library, "run", watched)
    torch.set_num_threads(3)
    try:
        pair[1].generate(PROMPTS, greedy())
        assert (seen, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)
