"""The endpoint `/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from msgspec import UNSET

from ...engine.request_output import RequestOutput
from ...sampling_params import MAX_TOKENS_LIMIT
from ..request_handle import Delta
from .exchange import Exchange
from .generation import Generation, deltas_of
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


async def chat(service: Service, exchange: Exchange) -> None:
    """Respond to a conversation with the model's answers."""
    request = await exchange.read(ChatRequest)
    model = service.model_name(request.model)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = MAX_TOKENS_LIMIT  # the engine ends it at its longest sequence
    params = request.params(max_tokens, request.num_logprobs())
    prompt = chat_prompt(request, request.offered_tools())
    generation = Generation(service.engine, [prompt], params, request.options())
    answer = _Answer(request, model, TokenTexts(service.engine.tokenizer))
    async with exchange.cancelled_on_disconnect():
        if request.stream:
            await generation.stream(exchange, answer, request.usage_reports())
        else:
            await generation.respond(exchange, answer)


class _Answer:
    """The answers to a conversation."""

    def __init__(self, request: ChatRequest, model: str, texts: TokenTexts) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._request = request
        self._model = model
        self._texts = texts
        self._begun: set[int] = set()

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Chat:
        (output,) = outputs
        choices = []
        for delta in deltas_of(output):
            message = ChatMessage(role="assistant", content=delta.text)
            choice = ChatChoice(delta.index, message, self._logprobs(delta), delta.finish_reason)
            if self._request.return_token_ids:
                choice.token_ids = list(delta.token_ids)
            choices.append(choice)
        body = Chat(self.id, self._created, self._model, choices, usage)
        if self._request.return_token_ids:
            body.prompt_token_ids = output.prompt_token_ids
        return body

    def chunks(
        self, prompt: int, delta: Delta, output: RequestOutput, usage: OptionalUsage
    ) -> tuple[ChatChunk]:
        message = ChatMessage(content=delta.text)
        choice = ChatChunkChoice(
            delta.index, message, self._logprobs(delta), delta.finish_reason, UNSET
        )
        chunk = ChatChunk(self.id, self._created, self._model, [choice], usage)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            message.role = "assistant"
            if self._request.return_token_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
        if self._request.return_token_ids:
            choice.token_ids = list(delta.token_ids)
        return (chunk,)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(self.id, self._created, self._model, [], usage)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return self._texts.chat_logprobs(delta.logprobs)
