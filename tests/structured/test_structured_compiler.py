"""Grammars are compiled once, within limits, and hostile ones are refused with a reason."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from stepgraph.runtime.errors import (
    GrammarError,
    OverloadedError,
    RequestError,
)
from stepgraph.runtime.loading.tokenizer import load_tokenizer
from stepgraph.runtime.request import Request
from stepgraph.runtime.structured import (
    compiler,
    matcher,
)
from stepgraph.runtime.structured.compiler import GrammarCompiler
from stepgraph.runtime.structured_output import StructuredOutput

from ..rigs.scheduler_rig import make_request
from ..rigs.service_rig import wait_until
from ..rigs.structured_rig import DEMO, bits_of, masks_of

MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO, eos_token_ids=(0,))


@pytest.fixture
def grammars(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 4096, (0,))


def a_request() -> Request:
    return make_request([5], max_tokens=9)


def test_the_cache_is_bounded(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED", 3)
    for text in "abcadea":
        grammars.matchers(StructuredOutput(regex=text), 1)
    assert [t for t in "abcde" if grammars.has_compiled(StructuredOutput(regex=t))] == [
        "a",
        "d",
        "e",
    ]
    assert not grammars.has_compiled(StructuredOutput(choice=["a"])), "a grammar of another kind"
    monkeypatch.setattr(compiler, "MAX_CACHED_SECONDS", 0.0)
    grammars.matchers(StructuredOutput(regex="f"), 1)
    assert not grammars.has_compiled(StructuredOutput(regex="f"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: %%%"}, "lexer error"),
        ({"grammar": 'root ::= "a" ('}, ""),
        ({"grammar": "root ::= " + "(" * 30_000}, ""),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": False}, "not"),
        ({"json": {"type": "object", "not": {}}}, "not"),
        ({"json": {"$ref": "http://example.com/x.json"}}, "not present"),
        ({"json": {"$ref": "file:///etc/passwd"}}, ""),
        ({"json": {"$ref": "#"}}, ""),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_grammars_are_refused(
    grammars: GrammarCompiler, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(GrammarError) as raised:
        grammars.matchers(StructuredOutput(**fields), 1)
    assert reason in str(raised.value)
    assert "of structured cannot be used" in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a{1000000000}"},
        {"regex": "((a{100}b?){100}c*){100}"},
        {"regex": "(a|b)*a(a|b){30}"},
        {"regex": "(.*a.*b.*){50}"},
        {"regex": "|".join(f"a{i}.*b" for i in range(800))},
        {"grammar": 'start: x\nx: x x | "a" | ""'},
        {"grammar": "start: start start |"},
        {"json": {"type": "array", "minItems": 100_000, "items": {"type": "integer"}}},
        {"json": {"type": "string", "minLength": 1_000_000}},
        {"json": {"properties": {f"p{i}": {"$ref": "#"} for i in range(300)}}},
        {"json": {"anyOf": [{"properties": {f"a{i}": True}} for i in range(300)]}},
        {"choice": [f"{i:0900}" for i in range(1000)]},
    ],
    ids=lambda value: str(value)[:40],
)
def test_absurd_grammars_take_bounded_time(
    grammars: GrammarCompiler, fields: dict[str, Any]
) -> None:
    """They are compiled or refused. A compilation ends by itself some time after the deadline."""
    started = time.monotonic()
    with contextlib.suppress(GrammarError):
        grammars.matchers(StructuredOutput(**fields), 1)
    assert time.monotonic() - started < 4 * compiler.COMPILE_SECONDS


_CHAINS = """
import os
import sys
from pathlib import Path
from stepgraph.runtime.errors import GrammarError
from stepgraph.runtime.loading.tokenizer import load_tokenizer
from stepgraph.runtime.structured.compiler import GrammarCompiler
from stepgraph.runtime.structured_output import StructuredOutput

grammars = GrammarCompiler(load_tokenizer(Path(sys.argv[1]), eos_token_ids=(0,)), 4096, (0,))
rules = "\\n".join(f"r{i}: r{i + 1}" for i in range(4000))
refs = {f"D{i}": {"$ref": f"#/D{i + 1}"} for i in range(4200)}
null = {"type": "null"}
either = {f"D{i}": {"anyOf": [{"$ref": f"#/D{i + 1}"}, null]} for i in range(2000)}
inner = {f"D{i}": {"items": {"$ref": f"#/D{i + 1}"}} for i in range(2800)}
for fields in (
    {"grammar": f"start: r0\\n{rules}\\nr4000: \\"x\\""},
    {"json": {"$ref": "#/D0", **refs, "D4200": null}},
    {"json": {"$ref": "#/D0", **either, "D2000": null}},
    {"json": {"$ref": "#/D0", **inner, "D2800": null}},
):
    structured = StructuredOutput(**fields)
    try:
        print("compiled", len(grammars.matchers(structured, 1)))
    except GrammarError as error:
        print("refused", error)
sys.stdout.flush()
os._exit(0)  # a compilation beyond its time limit may still run, on a slow machine
"""


def test_long_chains_of_references_do_not_end_the_process() -> None:
    """llguidance recurses along them, and an overflow of the stack cannot be caught."""
    arguments = [sys.executable, "-c", _CHAINS, str(DEMO)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 4
    assert "compiled" in ended.stdout


def test_a_thread_that_cannot_be_started_takes_no_place(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(compiler.MAX_COMPILATIONS + 1):
            with pytest.raises(RequestError):
                grammars.matchers(StructuredOutput(regex="a"), 1)
    assert grammars.matchers(StructuredOutput(regex="a"), 1)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: ("b" | "c") r\nr: "' + "y" * 1000 + '" r',
        'start: B start\nB: "y"{60000}',
        'root ::= "b" root',
        '%llguidance {"no_forcing": false}\nstart: "b" start',
    ],
)
def test_a_text_without_an_end_takes_no_time(grammars: GrammarCompiler, grammar: str) -> None:
    began = time.thread_time()
    (endless,) = grammars.matchers(StructuredOutput(grammar=grammar), 1)
    (mask,), request = masks_of(1, 4096), a_request()
    for _ in range(5):
        assert endless.drafts(request, [])[0] == ()
        assert endless.fill(request, [mask]) == (None, 0)
        request.append_token(int(np.flatnonzero(bits_of(mask))[0]), 0)
    assert time.thread_time() - began < 5 * matcher.MASK_SECONDS


def test_a_grammar_is_refused_at_the_deadline(
    grammars: GrammarCompiler, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.05)
    go_on = threading.Event()
    made = GrammarCompiler._made
    monkeypatch.setattr(
        GrammarCompiler, "_made", lambda *arguments: go_on.wait(60) and made(*arguments)
    )
    for text in "abcd":
        with pytest.raises(GrammarError):
            grammars.matchers(StructuredOutput(regex=text), 1)
    with pytest.raises(OverloadedError):
        grammars.matchers(StructuredOutput(regex="e"), 1)
    with pytest.raises(OverloadedError):  # for all compilers of the process
        GrammarCompiler(tokenizer, 4096, (0,)).matchers(StructuredOutput(regex="e"), 1)
    go_on.set()
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 60.0)
    assert grammars.matchers(StructuredOutput(json=MANY), 1)
    assert grammars.matchers(StructuredOutput(regex="e"), 1)


@pytest.mark.parametrize("eos_token_ids", [(), (5000,)])
def test_models_without_what_grammars_need(
    tokenizer: Any, eos_token_ids: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    reason = "none of the model's end" if eos_token_ids else "no end-of-sequence token"
    refusing = GrammarCompiler(tokenizer, 6000, eos_token_ids)
    assert reason in caplog.text
    with pytest.raises(RequestError, match=reason):
        refusing.matchers(StructuredOutput(regex="a"), 1)


@pytest.mark.parametrize("vocab_size", [2050, 3999, 4096, 4200])
def test_tokens_that_the_model_lacks_are_never_allowed(tokenizer: Any, vocab_size: int) -> None:
    structured = StructuredOutput(regex="(?s:.*)")
    (reference,) = GrammarCompiler(tokenizer, 4096, (0,)).matchers(structured, 1)
    (cut,) = GrammarCompiler(tokenizer, vocab_size, (0, 5000)).matchers(structured, 1)
    (whole,), (mask,) = masks_of(1, 4096), masks_of(1, vocab_size)
    assert reference.fill(a_request(), [whole]) == (None, 0)
    assert cut.fill(a_request(), [mask]) == (None, 0)
    expected, found = bits_of(whole), bits_of(mask)
    shared = min(vocab_size, 4096)
    assert (found[:shared] == expected[:shared]).all()
    assert found[:shared].sum() > 1000
    assert not found[shared:].any()


def test_threads_that_ask_for_the_same_grammar_compile_it_once(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, calls, made = threading.Barrier(4), [], GrammarCompiler._made

    def counted(self: GrammarCompiler, *arguments: str) -> Any:
        calls.append(arguments)
        time.sleep(0.1)
        return made(self, *arguments)

    monkeypatch.setattr(GrammarCompiler, "_made", counted)
    structured = StructuredOutput(regex="once|only")

    def ask(_: int) -> int:
        ready.wait()
        return len(grammars.matchers(structured, 2))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [2] * 4
    assert len(calls) == 1
    assert grammars.has_compiled(structured)
    assert not grammars.has_compiled(StructuredOutput(regex="other"))


def test_tokenisation_passes_an_interrupt_on() -> None:
    """llguidance would take it for an error of the grammar."""

    class Base:
        vocab_size = 2

        def is_special_token(self, token_id: int) -> bool:
            return token_id == 0

        def decode_bytes(self, token_ids: list[int]) -> bytes:
            return b"a"

        def tokenize_str(self, text: str) -> list[int]:
            raise KeyboardInterrupt

        def greedy_tokenize(self, text: str) -> list[int]:
            return [1]

    tokenize = compiler._Tokenize(Base(), set(), 0)  # type: ignore[arg-type]
    assert tokenize("a") == [1]
    with pytest.raises(KeyboardInterrupt):
        wait_until(lambda: False)  # Python looks for interrupts in it
