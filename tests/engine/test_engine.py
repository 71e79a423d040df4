"""Requests come and go, and their outputs arrive: order, priorities, aborts, ends, counts, text."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from stepgraph.runtime import RequestOutput, SamplingParams
from tokenizers import Tokenizer

from ..rigs.engine_rig import Open, greedy, keep_in_flight, run
from ..rigs.tiny_models import Tiny, TinyModel

pytestmark = pytest.mark.native_kernels


def test_outputs_grow_token_by_token(open_engine: Open, base: TinyModel) -> None:
    engine = open_engine("base", prefill_chunk=16)
    prompts = base.prompts(20, 4, seed=61)
    expected = base.greedy(prompts, 12)
    ids = [engine.add_request(prompt, greedy()) for prompt in prompts]
    assert len(set(ids)) == 2
    seen: dict[str, list[RequestOutput]] = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        for output in engine.step():
            seen[output.request_id].append(output)
    for request_id, prompt, tokens in zip(ids, prompts, expected, strict=True):
        # Outputs are snapshots: later steps do not change those handed out before.
        assert [o.token_ids for o in seen[request_id]] == [tokens[:n] for n in range(1, 13)]
        assert [o.finished for o in seen[request_id]] == [False] * 11 + [True]
        assert [o.finish_reason for o in seen[request_id]] == [None] * 11 + ["length"]
        final = seen[request_id][-1]
        final.token_ids.clear()  # a copy
        assert (final.prompt_token_ids, final.token_ids) == (prompt, tokens)
        for output in seen[request_id]:
            assert output.timing is not None
            assert output.timing.ttft_ms > 0
            assert len(output.timing.itl_ms) == len(output.token_ids) - 1
    assert engine.step() == engine.generate([], greedy()) == []


@pytest.mark.parametrize("in_flight", [0, 1])
def test_abort(open_engine: Open, base: TinyModel, in_flight: int) -> None:
    engine = open_engine("base", max_num_seqs=1)
    keep_in_flight(engine, in_flight)
    prompts = base.prompts(5, 6, 7, seed=68)
    expected = base.greedy(prompts, 12)
    engine.add_request(prompts[0], greedy(), "running")
    engine.add_request(prompts[1], greedy(), "waiting")
    engine.add_request(prompts[2], greedy(), "other")
    for _ in range(4):
        engine.step()
    assert engine.abort("running") is True
    assert engine.abort("waiting") is True
    assert engine.abort("unknown") is False
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 1), "at once, not with the next step"
    assert stats["blocks"]["free"] == stats["blocks"]["usable"]
    reported = {output.request_id: output for output in engine.step()}
    assert {"running", "waiting"} <= set(reported)
    assert reported["running"].finish_reason == "abort"
    assert reported["running"].token_ids == expected[0][: 4 - in_flight]
    assert reported["waiting"].finish_reason == "abort"
    assert reported["waiting"].token_ids == []
    assert reported["waiting"].timing is None
    assert engine.abort("running") is False, "it is finished"
    final = run(engine)
    assert final["other"].token_ids == expected[2]
    assert engine.abort("other") is False
    engine.check_integrity()


def test_end_of_sequence_tokens_of_the_generation_config(
    open_engine: Open, base: TinyModel
) -> None:
    eos = base.reference.generation_config.eos_token_id
    engine = open_engine("base")
    assert list(engine.model_config.eos_token_ids)[-2:] == eos
    stops = engine.model_config.eos_token_ids  # that of config.json too
    prompts = base.prompts(*range(1, 13), seed=70)
    ends = set()
    heeded = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0))
    ignored = engine.generate(prompts, greedy(64))
    for output, whole in zip(heeded, ignored, strict=True):
        tokens = whole.token_ids
        assert (len(tokens), whole.finish_reason) == (64, "length")
        end = next((i for i, token in enumerate(tokens) if token in stops), None)
        if end is None:
            assert (output.token_ids, output.finish_reason) == (tokens, "length")
        else:
            assert (output.token_ids, output.finish_reason) == (tokens[: end + 1], "stop")
            ends.add(tokens[end])
    assert ends >= set(eos), "the prompts do not show every token of the list"


@pytest.mark.parametrize("max_itl_ms", [1e-3, 1e5])
def test_chunks_beside_decoding_rows_follow_the_latency_budget(
    open_engine: Open, base: TinyModel, max_itl_ms: float
) -> None:
    """Small steps run even if they take longer."""
    prompts = base.prompts(9, 5, 7, 90, seed=5)
    engine = open_engine("base", prefill_chunk=64, max_itl_ms=max_itl_ms)
    ids = [engine.add_request(prompt, greedy(40)) for prompt in prompts[:3]]
    engine.step()
    ids.append(engine.add_request(prompts[3], greedy(40)))
    final = run(engine, checked=True)
    assert [final[name].token_ids for name in ids] == base.greedy(prompts, 40)
    chunks = [r.prefill_tokens for r in engine.timeline().records()[1:] if r.prefill_tokens]
    assert chunks == [64, 26] if max_itl_ms > 1 else max(chunks) < 40
    stats = engine.stats()
    assert stats["step_budget"]["n"] == len(chunks)
    assert stats["step_budget"]["forced"] == (0 if max_itl_ms > 1 else len(chunks))
    assert stats["fallbacks"] == 0


def test_stats_count(open_engine: Open, base: TinyModel) -> None:
    engine = open_engine("base", prefill_chunk=16, max_num_seqs=4)
    engine.generate(base.prompts(20, 3, seed=95), greedy(10, n=2))
    stats = engine.stats()
    json.dumps(stats)  # plain numbers and strings
    assert stats["requests"] == stats["finished"] == 4
    assert stats["output_tokens"] == 40
    assert stats["fallbacks"] == stats["preemptions"] == 0
    assert stats["healthy"] is True
    assert stats["mode"] == "eager"
    assert 0 <= stats["padding"] < 1
    assert stats["prepared"]["steps"] > 0
    for term, sizes in stats["memory"].items():
        if sizes["measured"] is not None:
            assert sizes["measured"] <= sizes["planned"], term
    assert stats["memory"]["weights"]["measured"] == stats["memory"]["weights"]["planned"]
    assert engine.kv_bytes_read(1) == 3 * 2 * 2 * 16 * 4


# Parity with transformers -------------------------------------------------------------------------


def test_repetition_penalty_equals_transformers(open_engine: Open, base: TinyModel) -> None:
    prompts = base.prompts(12, 5, 30, seed=21)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, repetition_penalty=1.7)
    outputs = open_engine("base").generate(prompts, params)
    expected = base.greedy(prompts, 30, repetition_penalty=1.7)
    assert [o.token_ids for o in outputs] == expected
    assert expected != base.greedy(prompts, 30), "the penalty has no effect"


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


# Text: of the tokenizer, in deltas, and with special tokens ---------------------------------------


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
