"""Messages of requests as chat templates get them: forms of content, arguments of calls."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jinja2")

from stepgraph.runtime.loading.chat_template import ChatPrompt, ChatTemplates
from stepgraph.runtime.service.http.chat_messages import template_messages

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


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    prompt = ChatPrompt(template_messages(messages), add_generation_prompt=False)
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
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "judge"])
def test_content_has_the_form_that_the_template_reads(
    template: str, of_parts: str, of_text: str, role: str
) -> None:
    text = rendered(template, [{"role": role, "content": PARTS}, {"role": role, "content": "c"}])
    assert text == f"[{role}:{of_parts}][{role}:{of_text}]"


def test_content_that_a_template_refuses_stays() -> None:
    template = "{% if messages[0].content != 'x' %}{{ raise_exception('no') }}{% endif %}yes"
    assert rendered(template, [{"role": "user", "content": "x"}]) == "yes"


def test_content_that_is_continued_ends_the_prompt() -> None:
    for template, content in ((LOOPS, "c"), (LOOPS, PARTS), (PRINTS, PARTS)):
        prompt = ChatPrompt(
            template_messages([{"role": "assistant", "content": content}]),
            add_generation_prompt=False,
            continue_final_message=True,
        )
        text = ChatTemplates({"default": template}, {}).render(prompt)
        assert text.endswith(("c", "b"))


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
