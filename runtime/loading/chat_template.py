"""Renders conversations to prompts with the chat template of the checkpoint.

Templates are written in Jinja and come from the checkpoint or from `EngineConfig.chat_template`,
never from a request. Rendering follows transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, cast

from ..errors import ConfigError, RequestError
from ..prompt_ids import type_name

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes
    from jinja2.parser import Parser
    from jinja2.runtime import Context


def _sandbox() -> Environment:
    """Return the environment of transformers' chat templates, jinja2's immutable sandbox.

    Raises:
        ImportError: jinja2 is missing, or older than 3.1.6, whose sandbox templates could escape.
    """
    import jinja2
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(map(int, jinja2.__version__.split(".")[:3])) < (3, 1, 6):
        raise ImportError(f"jinja2 {jinja2.__version__} is older than 3.1.6")

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses single operations that would take minutes or gigabytes."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            length, most = 0, MAX_CHARS
            if isinstance(left, int) and isinstance(right, int):
                bits, most = left.bit_length(), MAX_BITS
                length = bits * abs(right) if operator == "**" else bits + right.bit_length()
            elif isinstance(left, Sized) or isinstance(right, Sized):
                counts = [len(x) if isinstance(x, Sized) else int(x) for x in (left, right)]
                length = counts[0] * counts[1]
            if length > most:
                raise SecurityError(f"the result of {operator} is too large")
            return super().call_binop(context, operator, left, right)

        @staticmethod
        def concat(parts: Iterable[str]) -> str:
            left, joined = MAX_CHARS, []
            for part in parts:
                left -= len(part)
                if left < 0:
                    raise SecurityError(f"it writes more than {MAX_CHARS} characters")
                joined.append(part)
            return "".join(joined)

    class Generation(Extension):
        """The block `{% generation %}` around an assistant's text, rendered as its content."""

        tags = {"generation"}  # noqa: RUF012  as the base class declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    # The optimizer would evaluate constants while it compiles.
    sandbox = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        optimized=False,
    )
    sandbox.filters["tojson"] = tojson  # jinja2's own escapes HTML
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return sandbox


# Gives messages the form of content that a chat template reads: a string, or a list of parts.
#
# Some templates print a content, others loop over its parts, and others do either. How depends on
# the role, and no field of a checkpoint says it, so a template is tried with both.

_FIRST, _SECOND = "first-part-of-a-content", "second-part-of-a-content"
_PARTS: Final = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
Messages = list[dict[str, Any]]
_CALL_ID: Final = "call00000"
_USER: Final = {"role": "user", "content": "hello"}
_CALL: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": {}}}
    ],
}
_BEFORE: Final[Mapping[str, Messages]] = {
    **{"system": [], "developer": [], "user": [], "assistant": [_USER]},
    "tool": [_USER, _CALL],
}
"""A conversation before a message of each role."""


class _Template:
    """A compiled template, and the forms of content that it reads. Thread-safe."""

    def __init__(self, name: str, compiled: Template, special_tokens: Mapping[str, str]) -> None:
        self._name = name
        self._compiled = compiled
        self._special_tokens = special_tokens
        self._known: dict[str, tuple[bool, bool]] = {}  # by role: reads texts, reads parts

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text; `RequestError` if the template fails or is late."""
        variables = {**self._special_tokens, **variables}
        text: str = _run(self._name, RENDER_SECONDS, self._compiled.render, variables)
        return text

    def adapt(self, message: dict[str, Any]) -> None:
        """Give a message the form that the template reads in its role.

        Text parts are joined with line breaks, and a string becomes a part. A content with other
        parts, and one that the template reads in no form, stay as they are.
        """
        content = message.get("content")
        if isinstance(content, str):
            if content and self._of(message["role"]) == (False, True):
                message["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            texts = [part["text"] for part in content if _is_text(part)]
            if len(texts) == len(content) and not self._of(message["role"])[1]:
                message["content"] = "\n".join(texts)

    def _of(self, role: str) -> tuple[bool, bool]:
        role = role if role in _BEFORE else "user"
        if role not in self._known:
            self._known[role] = self._reads(role, _FIRST), self._reads(role, _PARTS)
        return self._known[role]

    def _reads(self, role: str, content: str | list[dict[str, str]]) -> bool:
        """Return whether the template writes a content, and as text."""
        after = [_USER] if role in ("system", "developer") else []
        probe: dict[str, Any] = {"role": role, "content": content}
        if role == "tool":
            probe |= {"tool_call_id": _CALL_ID, "name": "f"}
        try:
            messages = [*_BEFORE[role], probe, *after]
            text = self.render({"messages": messages, "add_generation_prompt": False})
        except RequestError:  # the template refuses it
            return False
        if isinstance(content, str):
            return _FIRST in text
        is_dump = f"'{_FIRST}'" in text or f'"{_FIRST}"' in text
        return _FIRST in text and _SECOND in text and not is_dump


def _is_text(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


Message = Mapping[str, Any]
"""`role`, `content` (a text or a list of parts) and other fields that the template reads."""
RENDER_SECONDS = 2.0
COMPILE_SECONDS = 10.0
MAX_CHARS = 1 << 26
"""Of what a template writes; also the largest length that it multiplies to."""
MAX_BITS = 1 << 14
"""Of an integer: the time of a power grows faster than its length, and nothing interrupts it."""
MAX_DEPTH = 64
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
_MAX_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """A conversation as a prompt of `Engine.add_request` and `Engine.generate`."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of functions that the model may call."""
    documents: Sequence[Mapping[str, Any]] | None = None
    """Texts for retrieval-augmented generation, for templates that support them."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of an assistant's message."""
    continue_final_message: bool | str = False
    """Whether the model continues the last message; a string names the field to continue."""
    chat_template: str | None = None
    """The name of one of the checkpoint's templates; None: `tool_use` with tools if there is one,
    else `default`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template, for example `enable_thinking`."""


class ChatTemplates:
    """The chat templates of a checkpoint, compiled when they are first used. Thread-safe."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Take Jinja sources by name, and the special tokens as template variables."""
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, _Template] = {}
        self._sandbox: Environment | None = None
        self._lock = threading.Lock()

    def replaced_by(self, path: str) -> ChatTemplates:
        """Return a file's template in place of these; `ConfigError`, which names the line."""
        try:
            source = Path(path).read_text(encoding="utf-8")
            templates = ChatTemplates({"default": source}, self._special_tokens)
            templates._template("default")
        except (OSError, ValueError, RequestError) as error:
            line = getattr(error.__cause__, "lineno", None)  # of a syntax error
            problem = error if line is None else f"line {line}: {error.__cause__}"
            raise ConfigError(
                f"chat_template {path} cannot be used: {problem}", field="chat_template"
            ) from error
        return templates

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text of a conversation, each content in the form that the template reads.

        Raises `RequestError` if there is no such template; jinja2 is missing; messages, tools or
        variables have a wrong type; the template fails, or takes longer than 2 s.
        """
        name = self._name(prompt)
        messages = _messages(prompt.messages)
        tools = _objects(prompt.tools, "tools")
        documents = _objects(prompt.documents, "documents")
        more = _plain(dict(prompt.template_kwargs), "template_kwargs")
        template = self._template(name)
        for message in messages:
            template.adapt(message)
        final = ""
        if prompt.continue_final_message:
            if prompt.add_generation_prompt:
                raise RequestError(
                    "continue_final_message continues the last message, and"
                    " add_generation_prompt begins a new one: set one of them",
                    field="continue_final_message",
                )
            final = _mark_final(messages, prompt.continue_final_message, self.sources[name])
        variables = {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": prompt.add_generation_prompt,
            **more,
        }
        text = template.render(variables)
        return _cut_at_mark(text, final) if prompt.continue_final_message else text

    def _name(self, prompt: ChatPrompt) -> str:
        if not self.sources:
            raise RequestError(
                "the checkpoint has no chat template: give a text or token ids as the prompt",
                field="messages",
            )
        name = prompt.chat_template
        if name is None:
            name = "tool_use" if prompt.tools and "tool_use" in self.sources else "default"
        if not isinstance(name, str) or name not in self.sources:
            names = ", ".join(sorted(self.sources))[:_MAX_SHOWN_CHARS]
            shown = repr(name[:80]) if isinstance(name, str) else type_name(name)
            raise RequestError(
                f"chat_template {shown} is not one of the checkpoint's: {names}. Templates of"
                " requests are not rendered",
                field="chat_template",
            )
        return name

    def _template(self, name: str) -> _Template:
        with self._lock:
            if self._sandbox is None:
                try:
                    self._sandbox = _sandbox()
                except ImportError as error:
                    raise RequestError(
                        'chat templates need jinja2 3.1.6 or newer: pip install "stepgraph[chat]"',
                        field="messages",
                    ) from error
            if name not in self._compiled:
                compile_source, source = self._sandbox.from_string, self.sources[name]
                compiled = _run(name, COMPILE_SECONDS, compile_source, source)
                self._compiled[name] = _Template(name, compiled, self._special_tokens)
            return self._compiled[name]


def chat_prompts(
    messages: Sequence[Message] | Sequence[Sequence[Message]], **fields: Any
) -> list[ChatPrompt]:
    """Return a prompt with these fields for a conversation, or for each of a list of them."""
    conversations = messages if is_batch(messages) else [messages]
    return [ChatPrompt(cast("Sequence[Message]", each), **fields) for each in conversations]


def is_batch(messages: object) -> bool:
    """Return whether `messages` is a list of conversations, and not one conversation."""
    first = next(iter(messages), None) if isinstance(messages, list | tuple) else None
    return isinstance(first, list | tuple)


class _LateError(BaseException):
    """A template ran too long. Not an `Exception`, so that no filter catches it."""


def _run(name: str, seconds: float, work: Callable[[Any], Any], argument: object) -> Any:
    """Return `work(argument)`, which runs in a thread whose trace function ends it when it is late.

    Raises `RequestError` for whatever the template raises or does wrong.
    """
    deadline, late = time.monotonic() + seconds, _LateError(f"it ran for more than {seconds:g} s")
    ended: Future[Any] = Future()

    def trace(frame: FrameType, event: str, value: object) -> Any:
        if time.monotonic() > deadline:
            raise late
        return trace

    def body() -> None:
        sys.settrace(trace)  # of this thread
        try:
            ended.set_result(work(argument))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=body, name="stepgraph-template", daemon=True).start()
    try:
        return ended.result()
    except (Exception, _LateError) as error:
        shown = f"{type_name(error)}: {error}"[:_MAX_SHOWN_CHARS]
        raise RequestError(
            f"the chat template {name!r} failed: {shown}", field="messages"
        ) from error


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy of JSON values; templates get no other objects."""
    if isinstance(value, str):
        return str.__str__(value)  # a member of an enumeration would be rendered as its name
    if value is None or isinstance(value, int | float):
        return value
    if depth > MAX_DEPTH:
        raise RequestError(f"{where[:80]} is nested more than {MAX_DEPTH} deep", field=_root(where))
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {k: _plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    raise RequestError(
        f"{where[:80]} is a {type_name(value)}, or has keys that are not strings: templates take"
        " JSON values only",
        field=_root(where),
    )


def _root(where: str) -> str:
    """Return the field that a place is in: `messages` of `messages[0].content`."""
    return re.split(r"[.\[]", where, maxsplit=1)[0]


def _objects(value: object, where: str) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise RequestError(
            f"{where} must be a list of JSON objects, not a {type_name(value)}", field=where
        )
    objects = _plain(value, where)
    for index, entry in enumerate(objects):
        if not isinstance(entry, dict):
            raise RequestError(
                f"{where}[{index}] must be a JSON object, not a {type_name(entry)}", field=where
            )
    return list(objects)


def _messages(value: object) -> list[dict[str, Any]]:
    """Return the messages of a conversation, checked, without the fields that are None."""
    messages = _objects(value, "messages")
    if not messages:
        raise RequestError("messages must be a list of at least one message", field="messages")
    checked = []
    for index, message in enumerate(messages):
        given = {key: entry for key, entry in message.items() if entry is not None}
        if not isinstance(given.get("role"), str):
            raise RequestError(
                f"messages[{index}].role must be a string, not {type_name(given.get('role'))}",
                field="messages",
            )
        content = given.get("content", "")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, (str, list)) or not all(isinstance(p, dict) for p in parts):
            raise RequestError(
                f"messages[{index}].content must be a string or a list of JSON objects",
                field="messages",
            )
        # Templates read reasoning under several names.
        reasoning = next((given[key] for key in _REASONING if key in given), None)
        if reasoning is not None:
            given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
        checked.append(given)
    return checked


def _mark_final(messages: list[dict[str, Any]], field_name: bool | str, source: str) -> str:
    """Append a mark to the text that the model continues; return the text."""
    name = field_name if isinstance(field_name, str) else "content"
    holder = messages[-1]
    text, names = holder.get(name), [name]
    if name in _REASONING:
        names = [other for other in _REASONING if holder.get(other) == text]
    is_read = any(other in source for other in names)
    if isinstance(text, list):  # the last part with a text
        parts = (part for part in reversed(text) if isinstance(part, dict))
        holder = next((part for part in parts if isinstance(part.get("text"), str)), {})
        text, names = holder.get("text"), ["text"]
    if not isinstance(text, str) or not is_read:
        raise RequestError(
            f"continue_final_message: the last message has no text in {name[:80]!r} that the"
            " template reads",
            field="continue_final_message",
        )
    holder.update(dict.fromkeys(names, text + _CONTINUE))
    return text


def _cut_at_mark(text: str, final: str) -> str:
    """Return the text before the mark, without trailing space if the template trimmed it."""
    mark = text.rfind(_CONTINUE.strip())
    if mark < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message: the chat template omits a part of the last message",
            field="continue_final_message",
        )
    kept = text[mark : mark + len(_CONTINUE)] == _CONTINUE
    return text[:mark] if kept else text[:mark].rstrip()
