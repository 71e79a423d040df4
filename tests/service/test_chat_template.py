"""Conversations to prompts, against transformers; the form of messages; templates that do harm."""

from __future__ import annotations

import enum
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from stepgraph.runtime import ChatPrompt, ConfigError, Engine, RequestError
from stepgraph.runtime.loading import chat_template as module
from stepgraph.runtime.loading.chat_template import ChatTemplates
from stepgraph.runtime.loading.tokenizer import TextTokenizer, load_tokenizer
from stepgraph.runtime.service.http.requests import template_messages
from transformers import AutoTokenizer

from ..rigs.engine_rig import greedy, opened
from ..rigs.http_rig import quick_config
from ..rigs.tiny_models import Tiny

CHATML = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] not in ('system', 'user', 'assistant', 'tool') -%}
{{ raise_exception('unknown role ' ~ message['role']) }}{% endif -%}
<|{{ message.role }}|>{% if message.content is string %}{{ message.content | trim }}{% else %}
{%- for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}[{{ call | tojson }}]{% endfor %}
{%- if message.reasoning_content is defined %}({{ message.reasoning_content }}){% endif %}
{{- eos_token }}
{% endfor %}
{%- set ns = namespace(count=0) %}{% for tool in tools or [] %}{% set ns.count = ns.count + 1 %}
{%- if loop.index > 2 %}{% break %}{% endif %}{{ tool | tojson(indent=2) }}{% endfor %}
{%- generation %}{{ ns.count }}{{ mood | default('') }}{{ documents }}{% endgeneration %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}{{ strftime_now('%Y') }}"""
TOOLS = [{"name": f"f{i}", "parameters": {"text": "<ü>"}} for i in range(4)]
SAID = [
    {"role": "system", "content": " be <kind> "},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "!"}]},
    {"role": "assistant", "content": "x", "tool_calls": [{"id": 1, "é": None}], "name": None},
    {"role": "assistant", "content": "the end", "reasoning_content": "hm"},
]


def save(directory: Path, template: Any, **config: Any) -> Path:
    config |= {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


RECENT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
NEW = pytest.mark.skipif(not RECENT, reason="older transformers know no fields of reasoning")


@pytest.fixture
def directory(tiny: Tiny, tmp_path: Path) -> Path:
    return shutil.copytree(tiny("text").directory, tmp_path / "checkpoint")


def load(directory: Path) -> TextTokenizer:
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def test_a_file_replaces_the_templates_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ eos_token }}{% for said in messages %}[{{ said.content }}]{% endfor %}")
    config = replace(quick_config(128), chat_template=str(path))
    with Engine.from_pretrained("demo", config) as engine:
        assert engine.tokenizer is not None
        said = ChatPrompt([{"role": "user", "content": "hi"}])
        assert engine.tokenizer.render(said) == "<|endoftext|>[hi]"
        assert engine.generate([said], greedy(1))[0].prompt_token_ids
    path.write_text("[{{ messages }}\n{% for x %}")
    with pytest.raises(ConfigError) as raised:
        Engine.from_pretrained("demo", config)
    assert raised.value.flag == "--chat-template"
    assert str(path) in str(raised.value)
    assert "line 2" in str(raised.value)
    with pytest.raises(ConfigError):
        Engine.from_pretrained("demo", replace(config, chat_template=str(tmp_path)))
    with pytest.raises(ConfigError):  # it has no tokenizer
        Engine.from_pretrained("preset:smollm2-135m", config)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        pytest.param({"continue_final_message": "reasoning_content"}, marks=NEW),
        {"tools": TOOLS},
        {"documents": [{"title": "a", "text": "b"}]},
        {"mood": "merry", "bos_token": "<other>"},
    ],
    ids=str,
)
def test_the_prompt_is_that_of_transformers(directory: Path, options: dict[str, Any]) -> None:
    save(directory, CHATML)
    reference, tokenizer = AutoTokenizer.from_pretrained(directory), load(directory)
    for tokenize in (False, True):
        settings = options | {"tokenize": tokenize}
        expected = reference.apply_chat_template(SAID, return_dict=False, **settings)
        assert tokenizer.apply_chat_template(SAID, **settings) == expected
        batch = tokenizer.apply_chat_template([SAID, SAID[1:2] + SAID[3:]], **settings)
        assert batch[0] == expected
        assert len(batch) == 2


def test_reasoning_is_read_under_several_names(directory: Path) -> None:
    tokenizer = load(save(directory, CHATML))
    expected = tokenizer.apply_chat_template(SAID, tokenize=False)
    last = SAID[3] | {"reasoning_content": None}
    for name in ("thinking", "reasoning"):
        said = [*SAID[:3], last | {name: "hm"}]
        assert tokenizer.apply_chat_template(said, tokenize=False) == expected


def test_texts_that_are_members_of_an_enumeration(directory: Path) -> None:
    class Role(str, enum.Enum):  # noqa: UP042  whose text is its name
        USER = "user"

    tokenizer = load(save(directory, "{% for m in messages %}{{ m.role }}{% endfor %}"))
    said = [{"role": Role.USER, "content": "hi"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "user"


def test_where_templates_are_found(directory: Path) -> None:
    """And which one counts: files of their own before tokenizer_config.json."""

    def same(**options: Any) -> Any:
        reference = AutoTokenizer.from_pretrained(directory)
        text = load(directory).apply_chat_template(SAID[:1], tokenize=False, **options)
        assert text == reference.apply_chat_template(SAID[:1], tokenize=False, **options)
        return text

    assert load(directory).chat_templates == {}
    (directory / "chat_template.json").write_text('{"chat_template": "json"}')
    assert load(directory).apply_chat_template(SAID, tokenize=False) == "json"
    save(directory, [{"name": n, "template": n} for n in ("default", "tool_use", "rag")])
    assert (same(), same(tools=TOOLS), same(chat_template="rag")) == ("default", "tool_use", "rag")
    (directory / "chat_template.jinja").write_text("file")
    assert same() == "file"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "more.jinja").write_text("more")
    assert same(chat_template="more") == "more"
    with pytest.raises(RequestError):
        load(directory).apply_chat_template(SAID, chat_template="{{ 1 }}")


HARMFUL = {
    "endless": "{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "endless_output": "{% for i in r %}{% for j in r %}{{ 'a' * 1000 }}{% endfor %}{% endfor %}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power_of_megabytes": "{{ 7 ** (10 ** 7) % 10 }}",
    "times": "{{ 'a' * 10**9 }}",
    "times_list": "{{ ([1] * 10**9) | length }}",
    "squared": "{% set n = namespace(x=3) %}{% for i in r %}{% set n.x = n.x * n.x %}{% endfor %}",
    "macro": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "block": "{% set x %}{% for i in r %}{% for j in range(9) %}{{ 'a' * 999 }}{% endfor %}"
    "{% endfor %}{% endset %}",
}


ERRORS = (
    *("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{% for", "{{ 1 / 0 }}"),
    *("{{ cycler.__init__.__globals__ }}", "{{ raise_exception('x' * 10**5) }}"),
)


@pytest.mark.parametrize("template", [*HARMFUL.values(), *ERRORS], ids=[*HARMFUL, *ERRORS])
def test_harm_is_ended(directory: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Harm and other errors of templates are errors of the request."""
    monkeypatch.setattr(module, "RENDER_SECONDS", 0.05)
    tokenizer = load(save(directory, "{% set r = range(99999) | list %}" + template))
    began = time.perf_counter()
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template(SAID)
    assert time.perf_counter() - began < 8, "a third of a second on an idle machine"
    assert len(str(caught.value)) < 400


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else "end"


@pytest.mark.parametrize(
    "messages",
    [
        *([], "hi", None, {"role": "user"}, [["hi"]], ["hi"], [{"content": "hi"}]),
        *([{"role": 1, "content": "hi"}], [{"role": "user", "content": 3}]),
        *([{"role": "user", "content": ["hi"]}], [{"role": "user", "content": b"hi"}]),
        *([{"role": "user", 3: "hi"}], [{"role": "user", "content": "a", "x": object()}]),
        [{"role": "user", "content": "a", "x": nested(99)}],
    ],
    ids=lambda value: str(value)[:30],
)
def test_messages_of_other_types(directory: Path, messages: Any) -> None:
    with pytest.raises(RequestError):
        load(save(directory, CHATML)).apply_chat_template(messages)


def test_without_jinja2(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(save(directory, CHATML))
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(RequestError):
        tokenizer.apply_chat_template(SAID)


def test_an_engine_chats(directory: Path) -> None:
    """With the tokens that the template writes, and no others."""
    params = greedy(4)
    save(directory, "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    config = json.loads((directory / "tokenizer.json").read_text()) | {"post_processor": None}
    (directory / "tokenizer.json").write_text(json.dumps(config))
    flags = json.loads((directory / "tokenizer_config.json").read_text()) | {"add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(flags))
    hi, there = ([{"role": "user", "content": text}] for text in ("hi", "there"))
    with opened(directory) as engine:
        assert engine.tokenizer is not None
        (output,) = engine.chat(hi, params)
        assert output.prompt_token_ids == engine.tokenizer.encode("hi")
        assert output.prompt_token_ids[0] == 0
        first, second = engine.chat([hi, there], params)
        assert first.token_ids == output.token_ids
        assert second.prompt_token_ids == engine.tokenizer.encode("there")
        with pytest.warns(UserWarning, match="1 of 2"):
            good, bad = engine.chat([hi, [{"role": "user", "content": 3}]], params)
        assert good.token_ids == output.token_ids
        assert type(bad.error) is RequestError
        with pytest.raises(RequestError):
            engine.chat([{"role": "user", "content": 3}], params)
        engine.add_request(ChatPrompt(hi), params)
        text = ""
        while engine.has_unfinished():
            for step in engine.step():
                text += step.delta.text
        assert text == output.text
    (directory / "tokenizer.json").unlink()
    with opened(directory) as engine, pytest.raises(RequestError):
        engine.chat(hi, params)


START = "{% for m in messages %}[{{ m.role }}:"
END = "]{% endfor %}"
PRINTS = START + "{{ m.content }}" + END
TRIMS = START + "{{ m['content'].strip() }}" + END
LOOPS = (
    START
    + "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    + END
)
MACRO = (
    "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}"
    "{% for p in c %}{{ p['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    + START
    + "{{ show(m.content) }}"
    + END
)
FIRST_ONLY = START + "{{ m.content if m.content is string else m.content[0].text }}" + END
DUMPS = START + "{{ m.content | tojson }}" + END
PARTS = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]


def rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    prompt = ChatPrompt(template_messages(messages), add_generation_prompt=False, **options)
    return ChatTemplates({"default": template}, {}).render(prompt)


@pytest.mark.parametrize(
    ("template", "of_parts", "of_text"),
    [
        (PRINTS, "a\nb", "c"),
        (TRIMS, "a\nb", "c"),
        (LOOPS, "ab", "c"),
        (MACRO, "ab", "c"),
        (FIRST_ONLY, "a\nb", "c"),
        (DUMPS, '"a\\nb"', '"c"'),
    ],
)
def test_content_has_the_form_that_the_template_reads(
    template: str, of_parts: str, of_text: str
) -> None:
    for role in ("system", "user", "assistant", "tool", "judge"):
        said = [{"role": role, "content": PARTS}, {"role": role, "content": "c"}]
        assert rendered(template, said) == f"[{role}:{of_parts}][{role}:{of_text}]"


def test_content_that_is_continued_ends_the_prompt() -> None:
    for template, content in ((LOOPS, "c"), (LOOPS, PARTS), (PRINTS, PARTS)):
        said = [{"role": "assistant", "content": content}]
        assert rendered(template, said, continue_final_message=True).endswith(("c", "b"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        *[
            (unusable, {})
            for unusable in (
                *("", " ", "x", "{", '{"x": 1} }', '"x"', "[1]", "null", "5", "NaN", '{"x": NaN}'),
                *('{"x": 1e400}', '{"x": "\\ud800"}', '{"x": "\x00"}'),
                *('{"x":' * 100 + "1" + "}" * 100, "[" * 10_000),
                *(None, [], [1], 5, True),
            )
        ],
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_that_are_no_object_become_an_empty_one(arguments: Any, expected: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (converted,) = template_messages([message])
    assert converted["tool_calls"][0]["function"]["arguments"] == expected
    template = "{{ messages[0].tool_calls[0].function.arguments.items() | list }}"
    assert rendered(template, [message]) == str(list(expected.items()))
