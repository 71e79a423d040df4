"""The public face: requests come and go, outputs arrive, engines open, close and fail."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from stepgraph.runtime import (
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineFailedError,
    RequestOutput,
    SamplingParams,
)
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from conftest import TinyModel


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Step to the end; return the final output of each request, of which there is one each."""
    final: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in final, "an output after the final one"
            if output.finished:
                final[output.request_id] = output
    return final


# Requests ----------------------------------------------------------------------------------------


def test_outputs_grow_token_by_token(open_engine: Callable[..., Engine], base: TinyModel) -> None:
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
        assert final.prompt_token_ids == prompt
        assert final.timing is not None
        assert final.timing.ttft_ms > 0
    assert engine.step() == []


def test_generate_with_params_of_each_prompt(
    open_engine: Callable[..., Engine], base: TinyModel
) -> None:
    engine = open_engine("base")
    prompts = base.prompts(5, 6, 7, seed=62)
    outputs = engine.generate(prompts, [greedy(3), greedy(9, n=2), greedy(1, logprobs=2)])
    expected = base.greedy(prompts, 9)
    assert [o.token_ids for o in outputs] == [expected[0][:3], expected[1], expected[2][:1]]
    assert [len(o.completions) for o in outputs] == [1, 2, 1]
    assert outputs[1].completions[1].token_ids == expected[1], "greedy children are alike"
    assert len(outputs[2].logprobs) == 1
    assert engine.generate([], greedy()) == []


def test_generate_loses_no_output_of_other_requests(
    open_engine: Callable[..., Engine], base: TinyModel
) -> None:
    engine = open_engine("base")
    prompts = base.prompts(5, 6, 7, 8, seed=63)
    expected = base.greedy(prompts, 30)
    short = engine.add_request(prompts[0], greedy(3), "short")
    long = engine.add_request(prompts[1], greedy(30), "long")
    engine.step()
    outputs = engine.generate(prompts[2:], greedy(10))
    assert [o.token_ids for o in outputs] == [tokens[:10] for tokens in expected[2:]]
    assert engine.has_unfinished(), "there is something to report, at least"
    final = run(engine)
    assert set(final) == {short, long}
    assert final[short].token_ids == expected[0][:3]
    assert final[long].token_ids == expected[1]


def test_generate_does_not_take_the_output_of_another_request_for_its_own(
    open_engine: Callable[..., Engine], base: TinyModel
) -> None:
    """A name that the user chose and `generate` would choose, freed while its output waits."""
    engine = open_engine("base")
    prompts = base.prompts(5, 6, 7, seed=64)
    expected = base.greedy(prompts, 10)
    engine.add_request(prompts[0], greedy(2), "request-2")
    (first,) = engine.generate([prompts[1]], greedy(10))
    (second,) = engine.generate([prompts[2]], greedy(10))
    assert first.token_ids == expected[1]
    assert second.token_ids == expected[2]
    assert run(engine)["request-2"].token_ids == expected[0][:2]


def test_smaller_priority_is_served_first(
    open_engine: Callable[..., Engine], base: TinyModel
) -> None:
    engine = open_engine("base", max_num_seqs=1)
    (prompt,) = base.prompts(5, seed=66)
    for name, priority in (("late", 1), ("usual", 0), ("next", 0), ("first", -5)):
        engine.add_request(prompt, greedy(3), name, priority=priority)
    assert list(run(engine)) == ["first", "usual", "next", "late"]


def test_smaller_priority_is_preempted_last(
    open_engine: Callable[..., Engine], base: TinyModel
) -> None:
    engine = open_engine("base", num_blocks=9, block_size=4)
    prompts = base.prompts(8, 8, seed=67)
    engine.add_request(prompts[0], greedy(20), "usual")
    engine.step()
    engine.add_request(prompts[1], greedy(20), "urgent", priority=-1)
    final = run(engine)
    assert [o.token_ids for o in (final["usual"], final["urgent"])] == base.greedy(prompts, 20)
    assert final["usual"].num_preemptions > 0
    assert final["urgent"].num_preemptions == 0


@pytest.mark.parametrize("in_flight", [0, 1])
def test_abort(open_engine: Callable[..., Engine], base: TinyModel, in_flight: int) -> None:
    engine = open_engine("base", max_num_seqs=1)
    engine._loop._in_flight = in_flight
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


def test_abort_of_the_only_request_and_of_children(
    open_engine: Callable[..., Engine], base: TinyModel
) -> None:
    engine = open_engine("base", max_num_seqs=2)
    (prompt,) = base.prompts(5, seed=69)
    request_id = engine.add_request(prompt, greedy(n=5))  # two run, three wait
    engine.step()
    assert engine.abort(request_id) is True
    assert engine.abort(request_id) is False, "it has ended already"
    assert engine.has_unfinished(), "its last output"
    (output,) = engine.step()
    assert output.finished
    assert [c.finish_reason for c in output.completions] == ["abort"] * 5
    assert not engine.has_unfinished()
    assert engine.step() == []


# Ends --------------------------------------------------------------------------------------------


def test_end_of_sequence_tokens_of_the_generation_config(
    open_engine: Callable[..., Engine], base: TinyModel
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


def test_stop_token_ids_and_max_tokens(open_engine: Callable[..., Engine], base: TinyModel) -> None:
    engine = open_engine("base")
    (prompt,) = base.prompts(9, seed=71)
    ((*tokens,),) = base.greedy([prompt], 20)
    end = next(i for i in range(5, 20) if tokens.index(tokens[i]) == i)
    cases = [
        (greedy(20, stop_token_ids=[tokens[end]]), tokens[: end + 1], "stop"),
        # The stop token as the last one allowed is a stop.
        (greedy(end + 1, stop_token_ids=[tokens[end]]), tokens[: end + 1], "stop"),
        (greedy(end, stop_token_ids=[tokens[end]]), tokens[:end], "length"),
        (greedy(1), tokens[:1], "length"),
    ]
    for params, expected, reason in cases:
        (output,) = engine.generate([prompt], params)
        assert (output.token_ids, output.finish_reason) == (expected, reason)


# Text --------------------------------------------------------------------------------------------


@pytest.fixture
def text_tokenizer(tiny: Callable[[str], TinyModel]) -> Tokenizer:
    return Tokenizer.from_file(str(tiny("text").directory / "tokenizer.json"))


@pytest.fixture
def ascii_bias(text_tokenizer: Tokenizer) -> dict[int, float]:
    """Makes a random model write plain ASCII."""
    text_of = {i: text_tokenizer.decode([i]) for i in range(text_tokenizer.get_vocab_size())}
    plain = [i for i, text in text_of.items() if text and text.isascii() and text.isprintable()]
    assert 60 < len(plain) < 200
    return dict.fromkeys(plain, 100.0)


def test_text_is_the_tokenizers(
    open_engine: Callable[..., Engine],
    text_tokenizer: Tokenizer,
    ascii_bias: dict[int, float],
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


@pytest.mark.parametrize("config", [{}, {"steps_per_launch": 4}, {"num_blocks": 9}], ids=str)
def test_deltas_join_to_the_output(
    open_engine: Callable[..., Engine], ascii_bias: dict[int, float], config: dict[str, Any]
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


def test_special_tokens_in_the_text(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine("text")
    special = greedy(3, logit_bias={0: 100.0})  # <s>
    (hidden,) = engine.generate("the", special)
    (shown,) = engine.generate("the", dataclasses.replace(special, skip_special_tokens=False))
    assert hidden.token_ids == shown.token_ids == [0, 0, 0]
    assert (hidden.text, shown.text) == ("", "<s><s><s>")


# Open, close, fail -------------------------------------------------------------------------------


def test_closed_engine_says_so(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine("base")
    with engine as same:
        assert same is engine
        engine.add_request([1, 2], greedy())
        engine.step()
    engine.close()  # again
    uses: list[Callable[[], object]] = [
        lambda: engine.add_request([1]),
        lambda: engine.generate([[1]]),
        lambda: engine.score([1, 2]),
        lambda: engine.abort("request-1"),
        lambda: engine.memory_plan,
        lambda: engine.timeline(),
        lambda: engine.kv_bytes_per_token,
        lambda: engine.weight_bytes_per_step,
        engine.step,
        engine.has_unfinished,
        engine.stats,
        engine.check_integrity,
        engine.__enter__,
    ]
    for use in uses:
        with pytest.raises(EngineClosedError, match="closed: make a new one"):
            use()


def test_two_engines_in_one_process(
    open_engine: Callable[..., Engine], base: TinyModel, tiny: Callable[[str], TinyModel]
) -> None:
    """They take turns, one is closed in the middle, and neither notices."""
    other = tiny("biases")
    first, second = open_engine("base"), open_engine("biases", block_size=4)
    prompts = base.prompts(5, 18, seed=81)
    for prompt in prompts:
        first.add_request(prompt, greedy(16))
        second.add_request(prompt, greedy(16))
    final: list[dict[str, RequestOutput]] = [{}, {}]
    for _ in range(40):
        for engine, outputs in zip((first, second), final, strict=True):
            outputs |= {o.request_id: o for o in engine.step()}
    assert [o.token_ids for o in final[0].values()] == base.greedy(prompts, 16)
    assert [o.token_ids for o in final[1].values()] == other.greedy(prompts, 16)
    first.close()
    outputs = second.generate(prompts, greedy(16))
    assert [o.token_ids for o in outputs] == other.greedy(prompts, 16)


def test_close_gives_memory_back(base: TinyModel) -> None:
    """Each engine touches 48 MiB of cache; five of them may not leave half of one behind."""
    process = psutil.Process(os.getpid())
    config = EngineConfig(device="cpu", mode="eager", num_blocks=4096)

    def cycle() -> int:
        with Engine.from_pretrained(base.directory, config) as engine:
            assert engine.stats()["memory"]["cache"]["measured"] == 4096 * 12288
            engine._open_parts().arena.tensor.fill_(1.0)
            engine.generate([[1, 2, 3]], greedy(3))
            return int(process.memory_info().rss)

    def settled_rss() -> int:
        """What earlier tests left free in the heap may have held the cache: give it back first."""
        with suppress(AttributeError, OSError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        return int(process.memory_info().rss)

    open_rss = [cycle() for _ in range(2)][-1]
    baseline = settled_rss()
    assert open_rss - baseline > 40 << 20, "the cache is no part of what is measured"
    for _ in range(5):
        cycle()
    assert settled_rss() - baseline < 24 << 20


class Watch:
    """Knows which of an engine's tensors are still held by anybody."""

    def __init__(self, engine: Engine) -> None:
        parts = engine._open_parts()
        named = {
            "arena": parts.arena.tensor,
            "token_ids": parts.runner.state.token_ids,
            "decode_rows": parts.runner.inputs.device.decode_rows,
            **dict(parts.model.named_parameters()),
        }
        self._tensors = {name: weakref.ref(tensor) for name, tensor in named.items()}

    def held(self) -> list[str]:
        return [name for name, tensor in self._tensors.items() if tensor() is not None]


@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
def test_closed_engine_holds_no_tensor(open_engine: Callable[..., Engine], mode: str) -> None:
    """Without help from the collector: memory in a cycle is free only when Python thinks of it."""
    engine = open_engine("micro", mode=mode)
    engine.generate([[1, 2]], greedy(4))
    watch = Watch(engine)
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert watch.held() == []
    finally:
        gc.enable()


class BrokenDeviceError(Exception):
    pass


def break_launches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> None:
        raise BrokenDeviceError("the device is gone")

    monkeypatch.setattr(engine._open_parts().runner, "launch", launch)


def test_failed_engine_says_so(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("base")
    engine.add_request([1, 2], greedy())
    engine.step()
    assert engine.stats()["healthy"] is True
    break_launches(engine, monkeypatch)
    with pytest.raises(EngineFailedError, match=r"step 1 .*the device is gone") as caught:
        engine.step()
    assert isinstance(caught.value.__cause__, BrokenDeviceError)
    assert engine.stats()["healthy"] is False
    monkeypatch.undo()  # the state of the device stays unknown
    uses: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.add_request([1]),
        lambda: engine.generate([[1]]),
        lambda: engine.score([1, 2]),
    ]
    for use in uses:
        with pytest.raises(EngineFailedError, match="failed earlier") as caught:
            use()
        assert isinstance(caught.value.__cause__, BrokenDeviceError)
        assert "close it and make a new one" in str(caught.value)
    engine.close()


@pytest.mark.parametrize("call", ["generate", "score"])
def test_failure_inside_of_a_call(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    engine = open_engine("base")
    break_launches(engine, monkeypatch)
    with pytest.raises(EngineFailedError, match="the device is gone"):
        engine.score([1, 2, 3]) if call == "score" else engine.generate([[1], [2]])
    assert engine.stats()["healthy"] is False


def test_failed_engine_gives_memory_back(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that it keeps has a traceback, and that has frames, which hold everything."""
    engine = open_engine("base")
    watch = Watch(engine)
    break_launches(engine, monkeypatch)
    engine.add_request([1, 2], greedy())
    with suppress(EngineFailedError):
        engine.step()
    monkeypatch.undo()
    engine.close()
    gc.collect()
    assert watch.held() == []


def test_one_request_that_fails_ends_alone(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("text")
    (expected,) = engine.generate("the", greedy(8))
    engine.add_request("main", greedy(8), "bad")
    engine.add_request("the", greedy(8), "good")
    engine.step()
    (request,) = engine._loop.groups["bad"].requests

    def push(*_: object) -> None:
        raise ValueError("no such text")

    fields = {"push": push, "finish": push, "text": "so far", "num_chars": 6}
    broken = type("Broken", (), fields)()
    monkeypatch.setattr(request, "detokenizer", broken)
    final = run(engine)
    assert final["good"].token_ids == expected.token_ids
    assert final["bad"].finish_reason == "error"
    assert "no such text" in str(final["bad"].error)
    assert engine.stats()["healthy"] is True
    engine.check_integrity()


# What it tells -----------------------------------------------------------------------------------


def test_stats_count(open_engine: Callable[..., Engine], base: TinyModel) -> None:
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
    assert engine.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_checkpoint_may_go_once_it_is_loaded(base: TinyModel, tmp_path: Path) -> None:
    """Nothing stays mapped: a file may be deleted or replaced under a running engine."""
    directory = shutil.copytree(base.directory, tmp_path / "checkpoint")
    (prompt,) = base.prompts(5, seed=96)
    config = EngineConfig(device="cpu", mode="eager")
    with Engine.from_pretrained(directory, config) as engine:
        path = directory / "model.safetensors"
        path.write_bytes(b"\0" * path.stat().st_size)
        (output,) = engine.generate([prompt], greedy())
        assert [output.token_ids] == base.greedy([prompt], 12)


@pytest.mark.slow
def test_engines_do_not_use_up_each_others_compilations(base: TinyModel) -> None:
    """torch compiles a code object eight times at most; five engines are more than that."""
    for rows in range(2, 7):
        config = EngineConfig(device="cpu", mode="compile", max_num_seqs=rows)
        with Engine.from_pretrained(base.directory, config) as engine:
            assert engine.generate([[1, 2]], greedy(4))[0].token_ids == base.greedy([[1, 2]], 4)[0]
