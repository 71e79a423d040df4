"""Random schemas, regular expressions and grammars, compiled in children: none ends the process."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import resource
import threading
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import pytest
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.structured.compiler import STACK_BYTES
from stepgraph.runtime.structured.grammars import grammar_text
from stepgraph.runtime.structured_output import StructuredOutput

from ..rigs.structured_rig import BYTES

LIMITS = llguidance.LLParserLimits(
    max_grammar_size=200_000,
    max_lexer_states=50_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    verbose_errors=False,
)
PER_CHILD, CHILD_SECONDS, CHILD_BYTES = 250, 60.0, 8 << 30
FORK = multiprocessing.get_context("fork")
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 5, -0.0, 0.5, 1e-7, -1e300, 1e300, 1e19, -1e19, 5e-324, 1.7976931348623157e308),
    *(
        sign * 2**power + step
        for power in (31, 32, 53, 63, 64)
        for sign in (1, -1)
        for step in (-1, 0, 1)
    ),
    *(math.inf, 10**300, -(10**300), 10**4000, True, None, "1", 1e5, 99999),
)
NUMERIC = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const"),
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
)
TYPES = ("integer", "number", "string", "array", "object", "null", "boolean")
TEXTS = ("a", "", "^a$", "[a-z]+", "é", '"', "\\", "\x7f", "\x00", "\ud7ff", "date", "a" * 300, "$")
ATOMS = (
    *("a", ".", r"\d", r"\w", r"\b", "^", "$", "[a-z]", "[^a]", r"\p{L}", "é", "(?i:a)", "(?s:.)"),
    *(r"\x{10FFFF}", "[]", "[z-a]", r"\1", "(?=a)", "(?P<n>a)", "\\", "[[:alpha:]]", "(", ")", "|"),
)
REPEATS = (
    *("", "", "", "*", "+", "?", "{2}", "{0,3}", "{3,}", "{100}", "{1000}", "{4294967295}", "*?"),
)
LARK_WORDS = """
    start a b A B : | ( ) * + ? {1,3} {1000} ~ "x" "é"i /[a-z]+/ /a{1000}/ & [lazy] [stop="x"] <[1]>
    [max_tokens=5] %json %ignore %regex %llguidance @a <|x|> -> { } {9999999999}
"""
LARK = (
    *LARK_WORDS.split(),
    *("\n", "%import common.INT", '{"type": "object"}', '{"substring_chars": "abc"}'),
    *("%lark { start: a }", "// c\n", "# c\n"),
)
SEEDS = (
    'start: a b\na: "x" | /[0-9]+/\nb: %json {"type": "integer", "minimum": 3}\n',
    'start: A+ (b | "c"){2,5}\nA: /a+/ & ~/aaa/\nb[lazy]: /.*x/\n%ignore / +/\n',
    'root ::= "a" [b-d]+ item*\nitem ::= "x" | root "y"\n',
    'start: s\ns: s s s | s s | "x" |\n',
)


def schema_of(draw: random.Random, depth: int = 0) -> Any:
    """Return a random schema, often an absurd one."""
    if draw.random() < 0.05:
        return draw.choice((True, False, {}, [], None, 5))
    schema: dict[str, Any] = {}
    if draw.random() < 0.7:
        schema["type"] = draw.choice(TYPES) if draw.random() < 0.8 else draw.sample(TYPES, 2)
    for _ in range(draw.randrange(4)):
        schema[draw.choice(NUMERIC)] = draw.choice(NUMBERS)
    if draw.random() < 0.2:
        schema["enum"] = [value_of(draw) for _ in range(draw.randrange(3))]
    if draw.random() < 0.2:
        schema[draw.choice(("pattern", "format"))] = draw.choice((*TEXTS, regex_of(draw)))
    inner = lambda: schema_of(draw, depth + 1)  # noqa: E731  # short for the lines below
    if depth < 4:
        for _ in range(draw.randrange(3)):
            match draw.randrange(5):
                case 0:
                    key = draw.choice(("anyOf", "allOf", "oneOf", "prefixItems"))
                    schema[key] = [inner() for _ in range(draw.randrange(4))]
                case 1:
                    key = draw.choice(("items", "additionalProperties", "not", "contains"))
                    schema[key] = inner()
                case 2:
                    schema["properties"] = {draw.choice(TEXTS): inner() for _ in range(3)}
                    schema["required"] = draw.sample(TEXTS, draw.randrange(3))
                case 3:
                    schema["patternProperties"] = {draw.choice((*TEXTS, regex_of(draw))): inner()}
                case 4:
                    schema["$defs"] = {"D": inner(), "E": inner()}
                    schema["$ref"] = draw.choice(("#", "#/$defs/D", "#/$defs/E", "#/x", "y"))
    return schema


def value_of(draw: random.Random) -> Any:
    return draw.choice((draw.choice(NUMBERS), draw.choice(TEXTS), [1, {"a": -(2**63)}], {"é": "x"}))


def regex_of(draw: random.Random) -> str:
    parts = [draw.choice(ATOMS) + draw.choice(REPEATS) for _ in range(draw.randrange(1, 7))]
    whole = "".join(parts)
    for _ in range(draw.randrange(3)):
        whole = f"({whole}){draw.choice(REPEATS)}{draw.choice(('', '|' + whole))}"
    return whole


def lark_of(draw: random.Random) -> str:
    if draw.random() < 0.3:
        schema = json.dumps(schema_of(draw), ensure_ascii=False)
        return f"start: a %json {schema}\na: /{regex_of(draw)}/"
    if draw.random() < 0.5:
        return "start: " + " ".join(draw.choice(LARK) for _ in range(draw.randrange(1, 30)))
    words = draw.choice(SEEDS)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(words))
        words = words[:place] + draw.choice(LARK) + words[place + draw.randrange(3) :]
    return words


def case_of(seed: int) -> tuple[str, str]:
    """Return a field of `StructuredOutput` and its value."""
    draw = random.Random(seed)
    kind = draw.choice(("json", "json", "regex", "grammar"))
    if kind == "json":
        return kind, json.dumps(schema_of(draw), ensure_ascii=False)
    return kind, regex_of(draw) if kind == "regex" else lark_of(draw)


def use(seed: int) -> None:
    """Compile a grammar, and follow it for some bytes."""
    kind, text = case_of(seed)
    try:
        given = StructuredOutput(**{kind: text})
        grammar = grammar_text(given.kind, given.source)
    except (RequestError, ValueError, RecursionError):
        return
    draw = random.Random(seed)
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0, limits=LIMITS)
    for _ in range(8):
        if matcher.is_error() or matcher.is_stopped():
            return
        matcher.compute_ff_tokens()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:256])
        if not len(allowed) or not matcher.consume_token(int(draw.choice(allowed.tolist()))):
            return


def died(seeds: Sequence[int]) -> list[tuple[int, str]]:
    """Use the grammars of seeds in children; return those that end one, and how."""
    found, left = [], list(seeds)
    last = FORK.RawValue("q", 0)
    while left:
        child = FORK.Process(target=_use_all, args=(left[:PER_CHILD], last))
        child.start()
        child.join(CHILD_SECONDS)
        if slow := child.exitcode is None:
            child.kill()
            child.join()
        if child.exitcode:
            found.append((last.value, "slow" if slow else f"exit code {child.exitcode}"))
        left = left[left.index(last.value) + 1 :]
    return found


def _use_all(seeds: Sequence[int], last: Any) -> None:
    """Use the grammars of seeds in a thread with the stack of compilations."""
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def run() -> None:
        for seed in seeds:
            last.value = seed
            try:
                use(seed)
            except BaseException:  # a panic of llguidance, of which a request is refused
                continue

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "seeds",
    [
        range(400),
        *(
            pytest.param(range(first, first + 10_000), marks=pytest.mark.slow)
            for first in range(1_000, 101_000, 10_000)
        ),
    ],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
def test_grammars_end_no_process(seeds: range) -> None:
    found = died(seeds)
    shown = [(seed, how, *case_of(seed)) for seed, how in found]
    print(json.dumps(shown, indent=1))
    assert [case for case in shown if case[1] != "slow"] == []
