"""The endpoint `/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from ...engine.request_output import RequestOutput
from ..request_handle import Delta
from .chat_output import ChatOutput
from .event_template import EventTemplate
from .exchange import Exchange, event
from .generation import Generation, deltas_of
from .output_parsers import ends_in_reasoning, make_output_parser
from .requests import ChatRequest, chat_prompt
from .responses import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    OptionalUsage,
    Usage,
)
from .service import Service
from .token_text import TokenTexts

__all__ = ["chat"]

PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that show whether it ends within reasoning."""


async def chat(service: Service, exchange: Exchange) -> None:
    """Respond to a conversation with the model's answers."""
    request = await exchange.read(ChatRequest)
    model = service.model_name(request.model)
    params = request.params(
        request.num_tokens(), request.num_logprobs(), request.forced_call(service.tool_parser)
    )
    prompt = chat_prompt(request, request.offered_tools())
    generation = Generation(
        service.engine, [prompt], params, request.options(exchange.header(b"traceparent"))
    )
    answer = _Answer(service, request, model)
    async with exchange.cancelled_on_disconnect():
        if request.stream:
            await generation.stream(exchange, answer, request.usage_reports())
        else:
            await generation.respond(exchange, answer)


class _Answer:
    """The answers to a conversation."""

    def __init__(self, service: Service, request: ChatRequest, model: str) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._service = service
        self._request = request
        self._model = model
        self._tokenizer = service.engine.tokenizer
        self._texts = TokenTexts(self._tokenizer)
        self._outputs: dict[int, ChatOutput] = {}  # of each completion that has begun
        self._templates: dict[int, EventTemplate] = {}  # of those whose events are only text

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Chat:
        (output,) = outputs
        choices = [self._choice(delta, output) for delta in deltas_of(output)]
        body = Chat(self.id, self._created, self._model, choices, usage)
        if self._request.return_token_ids:
            body.prompt_token_ids = output.prompt_token_ids
        return body

    def event(
        self, prompt: int, delta: Delta, output: RequestOutput, usage: OptionalUsage
    ) -> bytes:
        if delta.finish_reason is None and (template := self._templates.get(delta.index)):
            return template.event(delta.text)
        begins = delta.index not in self._outputs
        parser = self._output(delta.index, output)
        message = parser.message(delta.text, delta.finish_reason)
        choice = ChatChunkChoice(
            delta.index,
            message,
            self._logprobs(delta),
            parser.finish_reason(delta.finish_reason),
            self._token_ids(delta),
        )
        chunk = self._chunk(choice, usage)
        if begins:
            message.role = "assistant"
            if self._request.return_token_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
            elif parser.is_plain and not (self._request.logprobs or isinstance(usage, Usage)):
                self._templates[delta.index] = EventTemplate(
                    lambda text: self._chunk(
                        ChatChunkChoice(delta.index, ChatMessage(content=text)), usage
                    )
                )
        return event(chunk)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(self.id, self._created, self._model, [], usage)

    def _chunk(self, choice: ChatChunkChoice, usage: OptionalUsage) -> ChatChunk:
        return ChatChunk(self.id, self._created, self._model, [choice], usage)

    def _choice(self, delta: Delta, output: RequestOutput) -> ChatChoice:
        """Return a whole completion."""
        parser = self._output(delta.index, output)
        message = parser.message(delta.text, delta.finish_reason)
        message.role = "assistant"
        if message.tool_calls:
            for call in message.tool_calls:
                call.index = UNSET  # which streams have
        if message.content is UNSET:
            message.content = None if message.tool_calls else ""
        reason = parser.finish_reason(delta.finish_reason)
        logprobs, token_ids = self._logprobs(delta), self._token_ids(delta)
        return ChatChoice(delta.index, message, logprobs, reason, token_ids)

    def _output(self, index: int, output: RequestOutput) -> ChatOutput:
        """Return the state of a completion, which may begin now."""
        made = self._outputs.get(index)
        if made is None:
            service, parser = self._service, None
            tools = self._request.offered_tools()
            if service.reasoning_parser or (service.tool_parser and tools):
                parser = make_output_parser(
                    service.tool_parser,
                    service.reasoning_parser,
                    tools=tools,
                    in_reasoning=self._ends_in_reasoning(output),
                )
            made = self._outputs[index] = ChatOutput(parser)
        return made

    def _ends_in_reasoning(self, output: RequestOutput) -> bool:
        """Return whether the template has begun the reasoning."""
        if self._tokenizer is None:
            return False
        end = output.prompt_token_ids[-PROMPT_END_TOKENS:]
        return ends_in_reasoning(self._tokenizer.decode(end, skip_special_tokens=False))

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return self._texts.chat_logprobs(delta.logprobs)

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return list(delta.token_ids) if self._request.return_token_ids else UNSET
