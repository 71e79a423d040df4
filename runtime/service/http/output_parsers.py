"""A chat model's text as messages: reasoning, tool calls and content, in pieces of any size.

The content that a reasoning parser finds is the text of the tool parser. Both are chosen by the
chat template, unless they are named.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from ...bounded_repr import bounded_repr
from ...errors import ConfigError
from ...loading.tokenizer import TextTokenizer
from ...request import FinishReason
from .responses import ChatMessage, ToolCall
from .text_parser import TextParser, pattern
from .tool_calls import TOOL_FORMATS, ToolFormat, ToolParser


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around the reasoning of models. A chat template has `close`."""

    open: str
    close: str
    before_call: str | None = None  # what precedes a call, if not `close`

    def is_of(self, template: str) -> bool:
        """Return whether a chat template has this format."""
        return self.close in template

    def ends_in_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Return whether a rendered prompt ends within the reasoning.

        It does after `open`, with which some chat templates end; and after a last message that is
        continued, if its text is in a reasoning that the text or the template has begun.
        """
        continued, opening = continued.strip(), self.open.rstrip()
        before = prompt.rstrip()
        if continued:
            before = before.rpartition(continued)[0].rstrip()
        begins = continued.startswith(opening) or before.endswith(opening)
        return begins and self.close not in continued


REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "harmony": ReasoningFormat(  # gpt-oss
        "<|start|>assistant", "<|channel|>final<|message|>", before_call="<|start|>assistant"
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "think": ReasoningFormat("<think>", "</think>"),
}
"""By name, in the order in which they are looked for in a template."""


class _ReasoningParser(TextParser):
    """Reads reasoning at the start of the text; its tag elsewhere is content.

    White space around the first tag and after the second is dropped. Reasoning that is not closed
    lasts to the end.
    """

    def __init__(self, tags: ReasoningFormat, reasons: bool) -> None:
        """Begin before the text; `reasons` is whether the prompt ends within the reasoning."""
        self._tags = tags
        self._reasons = reasons
        super().__init__()

    def _parse(self) -> Generator[None]:
        if (yield from self._skip(self._tags.open.rstrip())) or self._reasons:
            yield from self._skip_space()
            yield from self._take_until([self._tags.close], self._add_reasoning)
            yield from self._skip_space()
        while True:
            self._add_content(self._text[self._at :])
            self._at = len(self._text)
            yield


class _HarmonyParser(TextParser):
    """Reads the messages of gpt-oss. Its analysis is reasoning, and calls are left as text.

    Text outside of messages is content.
    """

    def _parse(self) -> Generator[None]:
        heads = ("<|channel|>{any}<|message|>", "<|start|>{any}<|message|>", "to={any}<|message|>")
        patterns = [pattern(head) for head in heads]
        while self._at < len(self._text) or not self._last:
            found = yield from self._match(*patterns)
            head, ends = "", ["<|start|>assistant"]
            if found is not None:
                head, self._at = found[0], found.end()
                ends += ["<|end|>", "<|call|>", "<|return|>"]
            recipient = head.find("to=functions.")
            if recipient >= 0:
                self._add_content(head[recipient:])
            is_analysis = recipient < 0 and "analysis" in head
            add = self._add_reasoning if is_analysis else self._add_content
            yield from self._take_until(ends, add)


class OutputParser:
    """Makes the messages of one completion: reasoning first, tool calls in the rest."""

    def __init__(
        self, *parsers: TextParser, keeps_special: bool = False, one_call: bool = False
    ) -> None:
        """Begin before the text. Each parser reads the content that the one before it finds.

        `keeps_special` is whether hidden tokens are only left out of the reasoning. With `one_call`
        calls after the first are left out.
        """
        self._parsers = parsers
        self._keeps_special = keeps_special
        self._one_call = one_call
        self._hidden: set[str] = set()
        self._has_calls = False

    def hide(self, texts: Iterable[str]) -> None:
        """Leave special tokens that the output has out of its messages; parsers read them."""
        self._hidden.update(texts)

    def message(self, text: str, *, last: bool = False) -> ChatMessage:
        """Return the next text as a message, whose parts are unset if they gain nothing."""
        message, reasoning = ChatMessage(), ""
        calls: dict[int, ToolCall] = {}
        for parser in self._parsers:
            gained = parser.push(text, last=last)
            text, reasoning = "".join(gained.content), reasoning + "".join(gained.reasoning)
            calls |= gained.calls
            for index, parts in gained.arguments.items():
                calls[index].function.arguments = "".join(parts)
        if self._one_call:
            calls = {index: call for index, call in calls.items() if index == 0}
        if not self._keeps_special:
            text = self._shown(text)
            for call in calls.values():
                call.function.arguments = self._shown(call.function.arguments)
        if text or not self._parsers:
            message.content = text
        if reasoning := self._shown(reasoning):
            message.reasoning_content = message.reasoning = reasoning
        if calls:
            message.tool_calls = list(calls.values())
            self._has_calls = True
        return message

    def _shown(self, text: str) -> str:
        for hidden in self._hidden:
            text = text.replace(hidden, "")
        return text

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return the reason of the OpenAI API; call it after `message`."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason


def make_output_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    in_reasoning: bool = False,
    **options: bool,
) -> OutputParser:
    """Return a parser for one completion; see `OutputParser` for the `options`.

    `tools` are the functions that the request offers; without any, no calls are found.
    `in_reasoning` is whether the prompt ends within the reasoning.
    """
    parsers: list[TextParser] = []
    if reasoning_parser == "harmony":
        parsers.append(_HarmonyParser())
    elif reasoning_parser is not None:
        parsers.append(_ReasoningParser(REASONING_FORMATS[reasoning_parser], in_reasoning))
    if tool_parser is not None and tools:
        functions = [tool["function"] for tool in tools if "function" in tool]
        schemas = {function["name"]: function.get("parameters") for function in functions}
        parsers.append(ToolParser(TOOL_FORMATS[tool_parser], schemas))
    return OutputParser(*parsers, **options)


def chosen_parsers(
    tokenizer: TextTokenizer | None, tool_parser: str | None, reasoning_parser: str | None
) -> tuple[str | None, str | None]:
    """Return the names of the parsers of tool calls and of reasoning, None for no parser.

    `auto` recognises the format in the tokenizer's chat templates; `none` and None mean no parser.

    Raises:
        ConfigError: no parser has this name.
    """
    template = "" if tokenizer is None else "\n".join(tokenizer.chat_templates.values())
    tool_format = _chosen("tool_parser", tool_parser, template)
    return tool_format, _chosen("reasoning_parser", reasoning_parser, template)


@lru_cache(maxsize=64)
def _chosen(field: str, name: str | None, template: str) -> str | None:
    formats: Mapping[str, ToolFormat | ReasoningFormat] = (
        TOOL_FORMATS if field == "tool_parser" else REASONING_FORMATS
    )
    if name is not None and name not in (allowed := ("auto", "none", *formats)):
        shown = f"{field} is {bounded_repr(name)}; allowed are {', '.join(allowed)}"
        raise ConfigError(shown, field=field)
    if name == "auto":
        return next((each for each in formats if formats[each].is_of(template)), None)
    return None if name == "none" else name
