"""Formats of tool calls and reasoning: what is written is read back, however it is split."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.service.http.chat_grammars import ReasonedOutput, tool_call_grammar
from stepgraph.runtime.service.http.exchange import HttpError
from stepgraph.runtime.service.http.output_parsers import (
    REASONING_FORMATS,
    chosen_parsers,
    make_output_parser,
)

from ..rigs.structured_rig import accepts, byte_matcher
from .test_output_parsers import Answer, add

Arguments = dict[str, Any]

PROPERTIES = {
    "text": {"type": "string"},
    "kind": {"$ref": "#/$defs/Kind"},
    "n": {"type": "integer"},
    "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "flag": {"type": "boolean"},
    "opts": {"type": ["object", "array"]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"Kind": {"enum": ["1", "true"]}}}
NAMES = ("f", "get_weather", "größe-2")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def listed(name: str, arguments: Arguments) -> str:
    return f'{{"name": {dump(name)}, "arguments": {dump(arguments)}}}'


def tagged(head: str, parameter: str, end: str) -> Callable[[str, Arguments], str]:
    """A writer of calls whose arguments stand between tags."""

    def write(name: str, arguments: Arguments) -> str:
        texts = [
            parameter.replace("KEY", key)
            .replace("STRING", dump(isinstance(value, str)))
            .replace("VALUE", raw(value))
            for key, value in arguments.items()
        ]
        return head.replace("NAME", name) + "".join(texts) + end

    return write


def python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dump(k)}: {python(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python, value)) + "]"
    if isinstance(value, str):
        return "'" + dump(value)[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
    return repr(value)


def pythonic(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={python(value)}' for key, value in arguments.items())})"


def gemma(quote: str) -> Callable[[str, Arguments], str]:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(text, value)) + "]"
        return quote + value + quote if isinstance(value, str) else repr(value)

    return lambda name, arguments: f"call:{name}{text(arguments)}"


def each(begin: str, end: str, write: Callable[[str, Arguments], str] = listed) -> Any:
    return lambda calls: "".join(begin + write(*call) + end for call in calls)


def joined(begin: str, write: Any, end: str, between: str = "") -> Any:
    return lambda calls: begin + between.join(write(*call) for call in calls) + end


def header(text: str, end: str) -> Callable[[str, Arguments], str]:
    return lambda name, arguments: text.replace("NAME", name) + dump(arguments) + end


DSML, INVOKE = "｜DSML｜", '<invoke name="NAME">\n'
WRITERS: dict[str, list[Callable[[list[tuple[str, Arguments]]], str]]] = {
    "hermes": [each("<tool_call>\n", "\n</tool_call>")],
    "llama3_json": [joined("", listed, "", "; "), each("<|python_tag|>", "")],
    "qwen3_coder": [
        each(
            "<tool_call>\n",
            "\n</tool_call>",
            tagged("<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>"),
        )
    ],
    "seed_oss": [
        each(
            "<seed:tool_call>\n",
            "\n</seed:tool_call>",
            tagged("<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>"),
        )
    ],
    "glm": [
        each(
            "<tool_call>",
            "</tool_call>",
            tagged(
                "NAME" + line,
                f"<arg_key>KEY</arg_key>{line}<arg_value>VALUE</arg_value>" + line,
                "",
            ),
        )
        for line in ("\n", "")
    ],
    "minimax_m2": [
        joined(
            "<minimax:tool_call>\n",
            tagged(INVOKE, '<parameter name="KEY">VALUE</parameter>\n', "</invoke>\n"),
            "</minimax:tool_call>",
        )
    ],
    "deepseek_v3": [
        joined(
            "<｜tool▁calls▁begin｜>",
            header(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
                "\n```<｜tool▁call▁end｜>",
            ),
            "<｜tool▁calls▁end｜>",
            "\n",
        )
    ],
    "deepseek_v31": [
        joined(
            "<｜tool▁calls▁begin｜>",
            header("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            "<｜tool▁calls▁end｜>",
        )
    ],
    "kimi_k2": [
        joined(
            "<|tool_calls_section_begin|>",
            header(
                "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ),
            "<|tool_calls_section_end|>",
        )
    ],
    "mistral": [
        each("[TOOL_CALLS]", "", header("NAME[ARGS]", "")),
        each("[TOOL_CALLS]", "", header("NAME[CALL_ID]aB3[ARGS]", "")),
    ],
    "mistral_json": [
        joined("[TOOL_CALLS][", listed, "]", ", "),
        joined("[TOOL_CALLS] [", lambda *call: listed(*call)[:-1] + ', "id": "aB3"}', "]", ", "),
    ],
    "nemotron": [joined("<TOOLCALL>[", listed, "]</TOOLCALL>", ", ")],
    "apriel": [
        joined("<tool_calls>[", listed, "]</tool_calls>", ", "),
        joined("<tool_calls>\n", listed, "\n</tool_calls>", "\n"),
    ],
    "lfm2": [joined("<|tool_call_start|>[", pythonic, "]<|tool_call_end|>", ", ")],
    "granite": [joined("<|tool_call|>[", listed, "]", ", ")],
    "llama4_pythonic": [
        joined("[", pythonic, "]", ", "),
        joined("<|python_start|>[", pythonic, "]<|python_end|>", ", "),
    ],
    "gemma4": [each("<|tool_call>", "<tool_call|>", gemma('<|"|>'))],
    "functiongemma": [each("<start_function_call>", "<end_function_call>", gemma("<escape>"))],
}
for name, section in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")):
    parameter = f'<{DSML}parameter name="KEY" string="STRING">VALUE</{DSML}parameter>\n'
    write_call = tagged(INVOKE.replace("<", f"<{DSML}"), parameter, f"</{DSML}invoke>\n")
    WRITERS[name] = [joined(f"<{DSML}{section}>\n", write_call, f"</{DSML}{section}>")]
CALL_HEADS = (
    "<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>",
    "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
)
WRITERS["harmony"] = [each("", "", header(head, "<|call|>")) for head in CALL_HEADS]

REASONING = {
    **{"think": ("<think>\n", "\n</think>\n\n"), "mistral": ("[THINK]", "[/THINK]")},
    **{
        "seed_oss": ("<seed:think>", "</seed:think>"),
        "gemma4": ("<|channel>thought\n", "<channel|>"),
    },
    "granite": ("Here is my thought process: ", "Here is my response: "),
}
PLAIN = st.text(st.characters(exclude_characters="<[{", exclude_categories=["Cs", "Cc", "Z"]))
TEXT = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])) | st.sampled_from(
    [
        "a < b",
        "</x>",
        "two\n\nlines\n",
        '"it\'s" \\n \\',
        "[1], f(x=1)",
        "12",
        "True",
        "{'a': 1}",
        "",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "kind": st.sampled_from(["1", "true"]),
        "n": st.integers(),
        "x": st.none() | st.floats(-1e9, 1e9) | st.integers(),
        "flag": st.booleans(),
        "opts": st.dictionaries(st.sampled_from("abc"), JSON) | st.lists(JSON, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 400), max_size=6)


def read(parsers: tuple[str, str | None], text: str, cuts: list[int], **options: Any) -> Answer:
    """The answer of a parser to a text in pieces."""
    parser = make_output_parser(*parsers, tools=TOOLS, **options)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    answer: Answer = ("", "", [])
    for start, end in pairwise(bounds):
        answer = add(answer, parser, text[start:end])
    return add(answer, parser, "", last=True)


def decoded(answer: Answer) -> tuple[str, str, list[tuple[str, Any]]]:
    reasoning, content, calls = answer
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", WRITERS)
@given(data=st.data(), before=PLAIN, after=PLAIN, calls=CALLS, cuts=CUTS)
def test_calls_of_every_format_are_read_back(
    name: str, data: st.DataObject, before: str, after: str, calls: Any, cuts: list[int]
) -> None:
    written = data.draw(st.sampled_from(WRITERS[name]))(calls)
    if not written.startswith("<"):  # nothing marks the first call
        before = before if written.startswith("[TOOL") else ""
    if name == "harmony":  # whose calls end the answer
        before, after = f"<|channel|>final<|message|>{before}<|end|>" if before else "", ""
        content = before[len("<|channel|>final<|message|>") : -len("<|end|>")]
        parsers = name, name
    else:
        content, parsers = before + after, (name, None)
    text = before + written + after
    assert decoded(read(parsers, text, cuts)) == ("", content, calls)
    assert decoded(read(parsers, text, list(range(len(text))))) == ("", content, calls)


@pytest.mark.parametrize("name", REASONING)
@given(reasoning=PLAIN, content=PLAIN, cuts=CUTS)
def test_reasoning_of_every_format_is_read_back(
    name: str, reasoning: str, content: str, cuts: list[int]
) -> None:
    begin, end = REASONING[name]
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for before, options in ((begin, {}), ("", {"in_reasoning": True})):
        text = f"{before}{reasoning}{end}{content}{call}"
        found_reasoning, *rest = read(("hermes", name), text, cuts, **options)
        assert found_reasoning.rstrip() == reasoning
        assert rest == [content, [("f", "{}")]]


@given(analysis=PLAIN, content=PLAIN, cuts=CUTS)
def test_channels_of_harmony(analysis: str, content: str, cuts: list[int]) -> None:
    text = (
        f"<|channel|>analysis<|message|>{analysis}<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        f"<|start|>assistant<|channel|>final<|message|>{content}"
    )
    answer = read(("harmony", "harmony"), text, cuts)
    assert answer == (analysis, "I look. " + content, [("f", '{"n": 1}')])


DEMANDED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "n": {"type": "integer"},
        "opts": {"$ref": "#/$defs/Options"},
    },
    "required": ["unit", "opts"],
    "$defs": {"Options": {"type": "array", "items": {"enum": ["a", 1]}}},
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_demanded_call_of_every_format_is_written_as_templates_write_it(name: str) -> None:
    grammar = tool_call_grammar({0: {"name": "f", "parameters": DEMANDED}}, name)
    text = {"text": "two\nlines < 3"}
    for arguments in ({"unit": "F", "opts": []}, {**text, "unit": "C", "n": -1, "opts": [1, 1]}):
        call = WRITERS[name][0]([("f", arguments)])
        call = call.removeprefix("<|start|>assistant").removesuffix("<|call|>")
        if name == "llama3_json":
            call = call.replace('"arguments"', '"parameters"')
        if name in ("llama4_pythonic", "lfm2"):
            call = call.replace("'", '"')
        assert accepts(byte_matcher(grammar.kind, grammar.source), call), call
    wrong = WRITERS[name][0]([("f", {"unit": "K", "opts": []})])
    assert not accepts(byte_matcher(grammar.kind, grammar.source), wrong)


REFUSED = {
    "pattern": {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}},
    "anyOf": {"anyOf": [{"type": "object"}]},
    "properties": {"type": "object", "properties": []},
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_demanded_call_is_refused_where_its_format_cannot_follow(keyword: str) -> None:
    function = {"name": "f", "parameters": REFUSED[keyword]}
    for name in ("glm", "gemma4"):
        with pytest.raises(HttpError) as refused:
            tool_call_grammar({3: function}, name)
        assert refused.value.details.param == "tools[3].function.parameters"
        assert keyword in str(refused.value)


def test_reasoning_of_harmony_comes_before_a_demanded_call() -> None:
    call = tool_call_grammar({0: {"name": "f", "parameters": DEMANDED}}, "harmony")
    before = REASONING_FORMATS["harmony"].before_call
    assert before is not None
    grammar = ReasonedOutput.after(before, call)
    text = WRITERS["harmony"][0]([("f", {"unit": "F", "opts": []})]).removesuffix("<|call|>")
    text = f"<|channel|>analysis<|message|>hm<|end|>{text}"
    assert accepts(byte_matcher(grammar.kind, grammar.source), text)


TEMPLATES = {
    "{{ '<tool_call>\n{\"name\": \"' }}{% if '</think>' in content %}": ("hermes", "think"),
    "'<tool_call>\n<function=' + name + '>' '<parameter='": ("qwen3_coder", None),
    '<|start_header_id|> {"name": f, "parameters": {}} ': ("llama3_json", None),
    "[TOOL_CALLS]' + name + '[ARGS]' '[THINK]' '[/THINK]": ("mistral", "mistral"),
    "[TOOL_CALLS] [": ("mistral_json", None),
    "use [func_name1(param1=value1)]": ("llama4_pythonic", None),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>": ("deepseek_v31", None),
    "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>\n```json\n": ("deepseek_v3", None),
    "{% set dsml = '｜DSML｜' %}'<' + dsml + 'function_calls>' </think>": ("deepseek_v32", "think"),
    "{% set dsml = '｜DSML｜' %}'<' + dsml + 'tool_calls>' </think>": ("deepseek_v4", "think"),
    "<tool_call>{{ name }}<arg_key>": ("glm", None),
    "<|tool_calls_section_begin|>": ("kimi_k2", None),
    "<|channel|>analysis<|message|> <|channel|>final<|message|>": ("harmony", "harmony"),
    "respond with <|tool_call|> and a list": ("granite", None),
    "<|channel>thought\n<channel|><|tool_call>call:": ("gemma4", "gemma4"),
    "<start_function_call>": ("functiongemma", None),
    "<minimax:tool_call> <parameter name=": ("minimax_m2", None),
    "<seed:tool_call><function=f><parameter=x></seed:think>": ("seed_oss", "seed_oss"),
    "<tool_calls>[' <tool_call>": ("apriel", None),
    "<|im_start|>": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_parsers_are_chosen_by_the_chat_template(template: str) -> None:
    tokenizer: Any = SimpleNamespace(chat_templates={"default": "hi", "tool_use": template})
    assert chosen_parsers(tokenizer, "auto", "auto") == TEMPLATES[template]
    assert chosen_parsers(tokenizer, "none", None) == (None, None)
    assert chosen_parsers(tokenizer, "glm", "auto")[0] == "glm"
