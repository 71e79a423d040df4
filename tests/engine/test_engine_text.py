"""The text of an engine: of the tokenizer, in deltas, and with special tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from stepgraph.runtime import RequestOutput, SamplingParams
from tokenizers import Tokenizer

from ..rigs.engine_rig import Open, greedy
from ..rigs.tiny_models import Tiny

pytestmark = pytest.mark.native_kernels


@pytest.fixture
def text_tokenizer(tiny: Tiny) -> Tokenizer:
    return Tokenizer.from_file(str(tiny("text").directory / "tokenizer.json"))


@pytest.fixture
def ascii_bias(text_tokenizer: Tokenizer) -> dict[int, float]:
    """Makes a random model write plain ASCII."""
    text_of = {i: text_tokenizer.decode([i]) for i in range(text_tokenizer.get_vocab_size())}
    plain = [i for i, text in text_of.items() if text and text.isascii() and text.isprintable()]
    assert 60 < len(plain) < 200
    return dict.fromkeys(plain, 100.0)


def test_text_is_the_tokenizers(
    open_engine: Open, text_tokenizer: Tokenizer, ascii_bias: dict[int, float]
) -> None:
    engine = open_engine("text")
    prompts = ["def main():", "the café", "s"]
    outputs = engine.generate(prompts, greedy(40, logit_bias=ascii_bias))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == text_tokenizer.encode(prompt).ids
        assert output.text == text_tokenizer.decode(output.token_ids)
        assert len(output.text) >= 40
    # Of any bytes, U+FFFD included; what could still become a character is left out at the end.
    for output in engine.generate(prompts, greedy(40)):
        whole = text_tokenizer.decode(output.prompt_token_ids + output.token_ids)
        text = text_tokenizer.decode(output.prompt_token_ids) + output.text
        assert text.rstrip("\ufffd") == whole.rstrip("\ufffd")
    # One text is one prompt, and as good as its tokens.
    (alone,) = engine.generate(prompts[0], greedy(40, logit_bias=ascii_bias))
    (by_ids,) = engine.generate(
        [text_tokenizer.encode(prompts[0]).ids], greedy(40, logit_bias=ascii_bias)
    )
    assert alone.text == by_ids.text == outputs[0].text


@pytest.mark.parametrize("config", [{}, {"num_blocks": 9}], ids=str)
def test_deltas_join_to_the_output(
    open_engine: Open, ascii_bias: dict[int, float], config: dict[str, Any]
) -> None:
    """Held-back text, several completions, preemption, an abort, and `generate` in between."""
    engine = open_engine("text", max_num_seqs=4, block_size=8, **config)
    (plain,) = engine.generate("the", greedy(40, logit_bias=ascii_bias))
    stop = [plain.text[20:24], plain.text[5:9] + "\x00"]
    params = [
        SamplingParams(max_tokens=40, n=3, seed=1, logprobs=1, stop=["e", "th"]),
        greedy(40, logit_bias=ascii_bias, stop=stop),
        greedy(40),
        greedy(40),
        greedy(40),
    ]
    ids = [engine.add_request("the", own) for own in params]
    joined: dict[str, list[tuple[str, list[int], int]]] = {}
    final: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_unfinished():
        if (steps := steps + 1) == 3:
            engine.generate("s", greedy(4))
        if steps == 5:
            engine.abort(ids[3])
        for output in engine.step():
            parts = joined.setdefault(output.request_id, [("", [], 0)] * len(output.completions))
            for index, completion in enumerate(output.completions):
                delta, (text, tokens, logprobs) = completion.delta, parts[index]
                logprobs += len(delta.logprobs)
                parts[index] = (text + delta.text, [*tokens, *delta.token_ids], logprobs)
                assert parts[index][:2] == (completion.text, completion.token_ids)
            if output.finished:
                final[output.request_id] = output
    assert [joined[i] for i in ids] == [
        [(c.text, c.token_ids, len(c.logprobs)) for c in final[i].completions] for i in ids
    ]
    assert final[ids[1]].finish_reason == "stop"
    assert final[ids[3]].finish_reason == "abort"
    if "num_blocks" in config:
        assert engine.stats()["preemptions"] > 0


def test_special_tokens_in_the_text(open_engine: Open) -> None:
    engine = open_engine("text")
    special = greedy(3, logit_bias={0: 100.0})  # <s>
    (hidden,) = engine.generate("the", special)
    (shown,) = engine.generate("the", dataclasses.replace(special, skip_special_tokens=False))
    assert hidden.token_ids == shown.token_ids == [0, 0, 0]
    assert (hidden.text, shown.text) == ("", "<s><s><s>")
