"""Prompts with embeddings in the place of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepgraph.runtime import (
    EmbeddedSpan,
    EncodedContent,
    PromptEmbeds,
    RequestError,
)

from ..rigs.engine_rig import Open, greedy
from ..rigs.tiny_models import TinyModel

pytestmark = pytest.mark.native_kernels

NEW_TOKENS = 12
GREEDY = greedy(NEW_TOKENS)
HIDDEN = 48


def reference(model: TinyModel, ids: list[int], spans: list[EmbeddedSpan]) -> list[int]:
    """What transformers generates from `inputs_embeds`."""
    embeds = model.reference.get_input_embeddings()(torch.tensor([ids])).detach().clone()
    for span in spans:
        embeds[0, span.position : span.stop] = span.content.embeds
    output = model.reference.generate(
        inputs_embeds=embeds,
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0].tolist()


def content(seed: int, tokens: int) -> EncodedContent:
    generator = torch.Generator().manual_seed(seed)
    return EncodedContent.of(torch.randn(tokens, HIDDEN, generator=generator))


@pytest.mark.parametrize(
    "config",
    [{}, {"num_blocks": 24}, pytest.param({"mode": "compile"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_tokens_are_those_of_transformers(
    open_engine: Open, base: TinyModel, config: dict[str, Any]
) -> None:
    """In one batch with plain prompts, in chunks that cut through the spans, and preempted."""
    engine = open_engine("base", prompt_embeds=True, prefill_chunk=16, block_size=4, **config)
    prompts = base.prompts(30, 41, 4, 25)
    spans = [
        [EmbeddedSpan(20, content(1, 7)), EmbeddedSpan(0, content(2, 11))],
        [EmbeddedSpan(10, content(3, 31))],
        [],
        [EmbeddedSpan(3, content(4, 1)), EmbeddedSpan(4, content(5, 2))],
    ]
    expected = [reference(base, *pair) for pair in zip(prompts, spans, strict=True)]
    batch = [PromptEmbeds(*pair) for pair in zip(prompts, spans, strict=True)]
    assert [o.token_ids for o in engine.generate(batch, GREEDY)] == expected
    assert (engine.stats()["preemptions"] > 0) == ("num_blocks" in config)
    # What an earlier chunk showed must not show again in a prompt without embeddings.
    plain = [base.greedy([prompt], NEW_TOKENS)[0] for prompt in prompts]
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    assert plain[0] != expected[0]
    engine.check_integrity()


def test_blocks_are_shared_by_content(open_engine: Open, base: TinyModel) -> None:
    engine = open_engine("base", prompt_embeds=True, block_size=4)
    (ids,) = base.prompts(30)
    same, other = content(1, 8), content(2, 8)

    def cached(spans: list[EmbeddedSpan]) -> int:
        (output,) = engine.generate([PromptEmbeds(ids, spans)], GREEDY)
        assert output.token_ids == reference(base, ids, spans)
        return output.cached_tokens

    assert cached([EmbeddedSpan(10, same)]) == 0
    assert cached([EmbeddedSpan(10, same)]) == 28
    assert cached([EmbeddedSpan(10, other)]) == 8  # what precedes the span
    assert cached([EmbeddedSpan(11, same)]) == 8
    assert cached([]) == 8


def span(embeds: torch.Tensor) -> EmbeddedSpan:
    return EmbeddedSpan(0, EncodedContent.of(embeds))


BAD_SPANS: list[Any] = [
    EmbeddedSpan(0, content(0, 11)),  # of a prompt of 10 tokens
    EmbeddedSpan(-1, content(0, 2)),
    span(torch.rand(2, 7)),
    span(torch.rand(0, HIDDEN)),
    span(torch.ones(2, HIDDEN).long()),
    span(torch.full((2, HIDDEN), torch.nan)),
    span(torch.full((2, HIDDEN), 1e300, dtype=torch.float64)),  # too large for float32
    (0, content(0, 2)),
    EmbeddedSpan(True, content(0, 2)),
    EmbeddedSpan(0, torch.rand(2, HIDDEN)),  # type: ignore[arg-type]
    EmbeddedSpan(0, EncodedContent([1.0], b"x" * 32)),  # type: ignore[arg-type]
    EmbeddedSpan(0, EncodedContent(torch.rand(2, HIDDEN), b"short")),
    EmbeddedSpan(0, EncodedContent(torch.rand(2, HIDDEN), None)),  # type: ignore[arg-type]
]


def test_bad_spans(open_engine: Open) -> None:
    engine = open_engine("base", prompt_embeds=True)
    for bad in BAD_SPANS:
        with pytest.raises(RequestError):
            engine.add_request(PromptEmbeds([1] * 10, [bad]))
    assert not engine.has_unfinished()
