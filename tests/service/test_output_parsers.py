"""Parsers of chat output: the same events for any split of the text, whatever the text is."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.service.http.output_parsers import (
    REASONING_FORMATS,
    OutputParser,
    make_output_parser,
)
from stepgraph.runtime.service.http.responses import ChatMessage
from stepgraph.runtime.service.http.tool_calls import MAX_HELD_CHARS, TOOL_FORMATS

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "größe")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'

Answer = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and each call's name and arguments."""


def add(answer: Answer, parser: OutputParser, text: str, *, last: bool = False) -> Answer:
    """Return an answer with what the parser makes of the next text."""
    message = parser.message(text, last=last)
    reasoning, content, calls = answer
    for call in message.tool_calls or ():
        if call.index == len(calls):
            assert call.id
            calls = [*calls, (call.function.name or "", "")]
        assert call.index == len(calls) - 1
        name, arguments = calls[-1]
        calls = [*calls[:-1], (name, arguments + call.function.arguments)]
    return reasoning + (message.reasoning or ""), content + (message.content or ""), calls


def parse(
    pieces: Sequence[str],
    tool_parser: str = "hermes",
    reasoning_parser: str = "think",
    **options: Any,
) -> Answer:
    parser = make_output_parser(tool_parser, reasoning_parser, tools=TOOLS, **options)
    answer: Answer = ("", "", [])
    for piece in pieces[:-1]:
        answer = add(answer, parser, piece)
    return add(answer, parser, pieces[-1] if pieces else "", last=True)


HERMES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("plain", "plain", []),
    (CALL, "", [("f", '{"x": 1}')]),
    (f"Let me see. {CALL}\n{CALL}\nDone", "Let me see. Done", [("f", '{"x": 1}')] * 2),
    (f"{CALL}{CALL}", "", [("f", '{"x": 1}')] * 2),
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"id": 12, "name": "g", "z": [{}, -1.5e+3]}</tool_call>', "", [("g", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        '<tool_call>{"name": "gr\\u00f6\\u00dfe", "parameters": {"ö": "é\U0001f600"}}</tool_call>',
        "",
        [("größe", '{"ö": "é\U0001f600"}')],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "}\\"]}</tool_call>{"}}</tool_call>',
        "",
        [("f", '{"a": "}\\"]}</tool_call>{"}')],
    ),
    # The last brackets are missing.
    ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!', "!", [("f", '{"a": 1}')]),
    # The output was cut off.
    ('<tool_call>{"name": "f", "arguments": {"a": [', "", [("f", '{"a": [')]),
    # No calls.
    ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    ("a <tool_ca", "a <tool_ca", []),
    ("a <tool_ <tool_call", "a <tool_ <tool_call", []),
    *[
        (f"<tool_call>{body}</tool_call>.", f"<tool_call>{body}</tool_call>.", [])
        for body in (
            "no JSON",
            "{}",
            '{"arguments": {}}',
            '{"name": 3, "arguments": {}}',
            '{"name": "", "arguments": {}}',
            '{"name": "\\ud800", "arguments": {}}',
            '{"name": "f", "arguments": "{}"}',
            '{"name": "f", "arguments": {a: 1}}',
            '{"name": "f", "x": 01, "arguments": {}}',
            "{'name': 'f', 'arguments': {}}",
        )
    ],
    (f"<tool_call>{CALL}", "<tool_call>", [("f", '{"x": 1}')]),
]
BARE = '{"name": "f", "parameters": {"x": {"y": "};"}}}'
OF_BARE = ("f", '{"x": {"y": "};"}}')
LLAMA: list[tuple[str, str, list[tuple[str, str]]]] = [
    (BARE, "", [OF_BARE]),
    (f" \n{BARE}; {BARE};{BARE}", "", [OF_BARE] * 3),
    (f"<|python_tag|>{BARE}", "", [OF_BARE]),
    (f"<|python_tag|>{BARE};<|python_tag|>{BARE}\n", "", [OF_BARE] * 2),
    (f"I look. <|python_tag|>{BARE} Done", "I look. Done", [OF_BARE]),
    ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ('<|python_tag|>{"name": "other"}', "", [("other", "{}")]),
    *[
        (text, text, [])
        for text in (
            '{"name": "other", "parameters": {}}',
            '{"name": "f"}',
            '{"name": "f", "age": 7, "parameters": {}}',
            '{"answer": {"name": "f", "parameters": {}}}',
            f"An object: {BARE}",
            '  <|python_tag|>print("hi")',
            "[1, 2]",
            "  ",
        )
    ],
]


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [*(("hermes", *case) for case in HERMES), *(("llama3_json", *case) for case in LLAMA)],
)
def test_calls(parser: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        assert parse(pieces, parser) == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "started", "reasoning", "content"),
    [
        ("<think>\nhm < 3\n</think>\n\nYes", False, "hm < 3\n", "Yes"),
        ("\n<think>a</think></think>", False, "a", "</think>"),
        ("<think>not closed </thin", False, "not closed </thin", ""),
        ("<think></think>x", False, "", "x"),
        ("the tag <think>", False, "", "the tag <think>"),
        ("<thi", False, "", "<thi"),
        ("hm</think>Yes <think>", True, "hm", "Yes <think>"),
        ("\n<think>\nhm</think>Yes", True, "hm", "Yes"),
        (f"{CALL}</think>", True, CALL, ""),
        ("<thi", True, "<thi", ""),
    ],
)
def test_think(text: str, started: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(pieces, in_reasoning=started) == (reasoning, content, [])


def test_ends_in_reasoning() -> None:
    ends_in_reasoning = REASONING_FORMATS["think"].ends_in_reasoning
    assert ends_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert not ends_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")


FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "</", ";"),
    *("{", "}", "[", "]", ",", ":", '"', "\\", "\\u00e9", "\\ud800", " ", "\n", "\0", "é"),
    *('"name"', '"f"', '"arguments"', "true", "null", "-1.5e3", "0", CALL, BARE),
    '{"name": "f", "arguments": {"a": ',
]


def fragments(name: str) -> list[str]:
    """Parts of the texts of a format, and of what may be there in their place."""
    tool_format = TOOL_FORMATS[name]
    texts = [tool_format.open, *tool_format.heads, tool_format.end, tool_format.trailing]
    texts += [*(tool_format.parameter or ()), tool_format.quote or "", "f(a=1)", "(", "=", "x", "'"]
    filled = [re.sub(r"\{\w+\}", "f", text) for text in texts if text]
    return [*filled, *(tag.strip() for tag in filled), *(tag[:-1] for tag in filled), *FRAGMENTS]


@pytest.mark.parametrize("tool_parser", TOOL_FORMATS)
@given(data=st.data(), cuts=st.lists(st.integers(0, 200), max_size=8), in_reasoning=st.booleans())
def test_any_split_gives_the_same_events(
    tool_parser: str, data: st.DataObject, cuts: list[int], in_reasoning: bool
) -> None:
    part = st.sampled_from(fragments(tool_parser)) | st.text(max_size=3)
    text = data.draw(st.lists(part, max_size=20).map("".join))
    reasoning_parser = tool_parser if tool_parser in REASONING_FORMATS else "think"
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    names = tool_parser, reasoning_parser
    whole = parse([text], *names, in_reasoning=in_reasoning)
    assert parse(pieces, *names, in_reasoning=in_reasoning) == whole
    assert parse(list(text), *names, in_reasoning=in_reasoning) == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(), JSON),
    text=st.text(st.characters(exclude_characters="<{", exclude_categories=["Cs", "Z", "Cc"])),
    ascii_only=st.booleans(),
)
def test_any_call_is_found(arguments: dict[str, Any], text: str, ascii_only: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    call = f'{{"name": "f", "arguments": {written}}}'
    tagged = f"<tool_call>{call}</tool_call>"
    assert parse([f"{text}{tagged}\n{tagged}{text}"]) == ("", text * 2, [("f", written)] * 2)
    assert parse([f"{call};{call}"], "llama3_json") == ("", "", [("f", written)] * 2)


def test_nothing_but_possible_tags_is_held_back() -> None:
    parser = make_output_parser("hermes", "think", tools=TOOLS)
    held = [parser.message(char) for char in "<think>ab</x</think>c<d"]
    texts = [(message.reasoning or "") + (message.content or "") for message in held]
    assert texts == [*[""] * 7, "a", "b", "", "", "</x", *[""] * 8, "c", "", "<d"]
    parser = make_output_parser("hermes", None, tools=TOOLS)
    parser.message('<tool_call>{"name": "f", "arguments": {"')
    for char in 'ab": 1':
        assert add(("", "", [("f", "")]), parser, char) == ("", "", [("f", char)])


def test_hostile_text_takes_linear_time_and_bounded_memory() -> None:
    deep = '{"name": "f", "arguments": ' + '{"a":' * 2000
    for unit in ("<tool_call>", "<tool_call>{", "<", " ", '<tool_call>{"name":"f",', deep, CALL):
        many = unit * (50_000 // len(unit))
        for text in (many, f'<tool_call>{{"a": "{many}'):
            began = time.thread_time()
            parse([text])
            parse([text[start : start + 9] for start in range(0, len(text), 9)], "llama3_json")
            assert time.thread_time() - began < 5  # takes 0.1 s
    began = time.thread_time()
    parse(["<|tool_call_start|>[f(" + "a=1," * 200_000], "lfm2")
    assert time.thread_time() - began < 7  # takes 1 s; 13 s if each part is joined at once


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_hostile_text_takes_linear_time_in_every_format(name: str) -> None:
    parts = fragments(name)[:20]
    began = time.thread_time()
    for begin in ("", "".join(parts[:2])):
        for unit in (*parts, "a"):
            text = begin + unit * (3_000 // len(unit))
            for size in (1, len(text)):
                parse([text[start : start + size] for start in range(0, len(text), size)], name)
    assert time.thread_time() - began < 10  # takes 0.4 s


def test_the_limit_of_held_text_does_not_depend_on_the_split() -> None:
    num_calls = []
    for size in range(MAX_HELD_CHARS - 60, MAX_HELD_CHARS, 5):
        text = f'<tool_call>{{"arguments": {{"a": "{size * "x"}"}}, "name": "f"}}</tool_call>'
        whole = parse([text])
        assert parse([text[:100], text[100:]]) == whole
        assert parse([text[:-30], *text[-30:]]) == whole
        num_calls.append(len(whole[2]))
    assert (num_calls[0], num_calls[-1]) == (1, 0)
    parser = make_output_parser("hermes", None, tools=TOOLS)
    parser.message('<tool_call>{"arguments": {"a": "')
    pieces = [parser.message("x" * 1000).content for _ in range(2 * MAX_HELD_CHARS // 1000)]
    assert all(pieces[MAX_HELD_CHARS // 1000 + 1 :])


def test_without_tools_or_parsers_all_text_is_content() -> None:
    for names in ((None, None), ("hermes", None)):
        parser = make_output_parser(*names, tools=[])
        text = "<think>" + CALL
        assert parser.message(text, last=True) == ChatMessage(content=text)
