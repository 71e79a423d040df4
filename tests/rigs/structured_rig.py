"""Grammars outside the engine: what they allow, and greedy decoding that follows them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from stepgraph.runtime import Engine, RequestOutput, SamplingParams, StructuredOutputError
from stepgraph.runtime.mask_words import MaskWords
from stepgraph.runtime.structured.grammars import grammar_text
from stepgraph.runtime.structured.matcher import TokenMatcher
from stepgraph.runtime.structured_output import StructuredOutput
from transformers import PreTrainedModel

from .engine_rig import run

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "person": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 16, "maxLength": 40}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
    "required": ["person"],
    "additionalProperties": False,
}
"""No text of it needs a comma, which ends the outputs of the tiny models."""
GRAMMARS: list[dict[str, Any]] = [
    {"json": PERSON},
    {"regex": "[a-c]{2,5}-[0-9]+"},
    {"choice": ["yes", "no", "naïve café"]},
    {"grammar": 'start: "(" inner ")"\ninner: /[xy]*/ | start'},
    {"grammar": 'root ::= "a" | "b" root'},
    {"json_object": True},
]
PROMPTS = [[7, 30, 41], [5, 5, 90, 12], [60], [100, 3, 8, 8, 8], [44, 45], [70, 71, 72]]
LONG = "The quick brown fox jumps over the lazy dog. "
FORCED = {"regex": f"[ab](?:{LONG})[ab]".replace(".", "[.]")}
"""A grammar that forces most of its text."""


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests with and without grammars, greedy and drawn."""
    params = [
        SamplingParams(max_tokens=20, seed=index, structured=grammar, **own)
        for index, (grammar, own) in enumerate(
            [
                *((grammar, {"temperature": 0.0}) for grammar in [*GRAMMARS, FORCED]),
                *((grammar, {"logprobs": 2}) for grammar in GRAMMARS[:3]),
                (FORCED, {"top_p": 0.8}),
                (GRAMMARS[1], {"n": 3}),
                (GRAMMARS[2], {"ignore_eos": True, "temperature": 0.0}),
                (None, {"temperature": 0.0}),
                (None, {"top_p": 0.9, "presence_penalty": 0.5}),
                (None, {"temperature": 0.0, "n": 2}),
            ]
        )
    ]
    prompts = [PROMPTS[0], PROMPTS[1] * 5, *PROMPTS[2:]]
    return [prompts[index % len(prompts)] for index in range(len(params))], params


def run_with_a_failing_grammar(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> dict[str, RequestOutput]:
    """Run requests named good, bad and plain; the grammar of the bad one fails at token 2."""
    fill = TokenMatcher.fill

    def failing(self: TokenMatcher, request: Any, *arguments: Any) -> Any:
        if request.id.startswith("bad") and request.num_output >= 2:
            raise ValueError("a bug of the grammar")
        return fill(self, request, *arguments)

    monkeypatch.setattr(TokenMatcher, "fill", failing)
    for index, name in enumerate(("good", "bad", "plain")):
        structured = None if name == "plain" else GRAMMARS[index]
        params = SamplingParams(max_tokens=40, temperature=0.0, structured=structured)
        engine.add_request(PROMPTS[index], params, name)
    final = run(engine, checked=True)
    error = final["bad"].error
    assert isinstance(error, StructuredOutputError)
    assert "a bug of the grammar" in str(error)
    return final


BYTES = LLTokenizer("byte")
DEMO = Path(__file__).resolve().parents[2] / "runtime" / "demo"


def byte_matcher(kind: str, source: str, tokenizer: LLTokenizer = BYTES) -> LLMatcher:
    """Return a matcher, of bytes by default. Raises `ValueError` for a grammar that is refused."""
    matcher = LLMatcher(tokenizer, grammar_text(kind, source), log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def matcher_of(tokenizer: LLTokenizer, structured: dict[str, Any]) -> LLMatcher:
    given = StructuredOutput.of(structured)
    return byte_matcher(given.kind, given.source, tokenizer)


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether a whole text follows a grammar of bytes."""
    copy, tokens = matcher.deep_copy(), list(text.encode())
    return copy.try_consume_tokens(tokens) == len(tokens) and bool(copy.is_accepting())


def walk(matcher: LLMatcher, draw: random.Random) -> str | None:
    """Return a random text of the grammar; None for one that does not end. None has a dead end."""
    copy, text = matcher.deep_copy(), bytearray()
    while len(text) < 80:
        if copy.is_stopped() or (copy.is_accepting() and draw.random() < 0.3):
            return text.decode()
        packed = np.frombuffer(copy.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(packed, bitorder="little")[:256])
        assert len(allowed) or copy.is_accepting(), f"nothing may follow {bytes(text)!r}"
        if not len(allowed):
            return text.decode()
        text.append(draw.choice(allowed.tolist()))
        assert copy.consume_token(text[-1]), (bytes(text), copy.get_error())
    return None


def masks_of(count: int, vocab_size: int) -> list[MaskWords]:
    return [MaskWords(np.zeros(-(-vocab_size // 32), dtype=np.int32)) for _ in range(count)]


def bits_of(mask: MaskWords) -> npt.NDArray[np.uint8]:
    return np.unpackbits(mask.array.view(np.uint8), bitorder="little")


@lru_cache
def ll_tokenizer(directory: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    text = (directory / "tokenizer.json").read_text()
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def allowed(matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> torch.Tensor:
    """Return which tokens may come next, bool `[vocab_size]`.

    The end-of-sequence tokens of tiny models are texts, which a grammar may allow anywhere.
    """
    packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    bits = np.unpackbits(packed, bitorder="little")[:vocab_size]
    found = torch.from_numpy(bits.astype(bool))
    if not matcher.is_accepting():
        found[list(eos_token_ids)] = False
    return found


def reference(
    model: PreTrainedModel,
    tokenizer: LLTokenizer,
    prompt_ids: Sequence[int],
    structured: dict[str, Any] | None,
    max_tokens: int,
    eos_token_ids: Sequence[int],
) -> list[int]:
    """Return the greedy tokens of transformers' model, with the logits masked in plain torch.

    Text that the grammar forces has the tokens that the tokenizer makes of it.
    """
    matcher = None if structured is None else matcher_of(tokenizer, structured)
    tokens: list[int] = []
    forced: list[int] = []
    while len(tokens) < max_tokens:
        if matcher is not None:
            forced = forced or matcher.compute_ff_tokens()
        if matcher is not None and forced and forced[0] not in eos_token_ids:
            tokens.append(forced.pop(0))
            assert matcher.consume_token(tokens[-1])
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt_ids, *tokens]])).logits[0, -1].float()
        if matcher is not None:
            logits = logits.masked_fill(~allowed(matcher, len(logits), eos_token_ids), -torch.inf)
        tokens.append(int(logits.argmax()))
        if tokens[-1] in eos_token_ids:
            break
        if matcher is not None:
            assert matcher.consume_token(tokens[-1])
    return tokens
