"""The endpoint `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import UNSET, UnsetType

from ...engine.request_output import RequestOutput
from ...loading.chat_template import ChatPrompt
from ...sampling_params import SamplingParams
from ...structured_output import StructuredOutput
from ..request_handle import Delta
from .chat_grammars import ReasonedOutput, spells_end_of_reasoning
from .exchange import Exchange
from .generation import Answer, Service, generate
from .output_parsers import ChatOutput, OutputParser, ends_in_reasoning, make_output_parser
from .requests import ChatRequest, chat_prompt, joined_text
from .responses import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    OptionalUsage,
    Usage,
)
from .token_text import TokenTexts

__all__ = ["chat"]

PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that show whether it ends within reasoning."""


async def chat(service: Service, exchange: Exchange) -> None:
    """Respond to a conversation with the model's answers."""
    request = await exchange.read(ChatRequest, service.fields)
    model = service.model_name(request.model)
    params = request.params(
        request.num_tokens(service.engine.sampling_defaults.max_tokens),
        request.num_logprobs(),
        request.forced_call(service.tool_parser),
    )
    prompt = chat_prompt(request, request.offered_tools())
    continued = _continued(request)
    params = await _after_reasoning(service, prompt, continued, params)
    answer = _Answer(service, request, model, params, continued)
    if answer.is_parsed:
        params = replace(params, skip_special_tokens=False)
    async with exchange.cancelled_on_disconnect():
        await generate(exchange, service.engine, request, [prompt], params, answer)


async def _after_reasoning(
    service: Service, prompt: ChatPrompt, continued: str, params: SamplingParams
) -> SamplingParams:
    """Let the reasoning end first, if the prompt is in it and the grammar does not have its end."""
    structured, tokenizer = params.structured, service.engine.tokenizer
    if service.reasoning_parser is None or tokenizer is None or structured is None:
        return params
    assert isinstance(structured, StructuredOutput)
    if spells_end_of_reasoning(structured):
        return params
    text = await service.engine.run_in_pool(lambda: tokenizer.render(prompt))
    if not ends_in_reasoning(text, continued):
        return params
    return replace(params, structured=ReasonedOutput(content=structured))


class _Answer(Answer):
    """The answers to a conversation."""

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        model: str,
        params: SamplingParams,
        continued: str,
    ) -> None:
        """Take a request; `continued` is the text of the last message, if the model continues it.

        Parsers read all of the text, special tokens included, whatever `params` say of these.
        """
        super().__init__("chatcmpl", model, ChatChunk)
        self._service = service
        self._request = request
        self._tokenizer = service.engine.tokenizer
        as_ids = bool(request.return_tokens_as_token_ids)
        self._texts = TokenTexts(self._tokenizer, as_ids=as_ids)
        self._tools = request.offered_tools() if service.tool_parser else None
        self._continued = continued
        self.is_parsed = bool(service.reasoning_parser or self._tools)
        """Whether parsers read the text."""
        self._keeps_special = self._spells_special(params)
        self._hides_special = (
            self.is_parsed
            and params.skip_special_tokens
            # The reasoning before a grammar is not a part of it.
            and (not self._keeps_special or isinstance(params.structured, ReasonedOutput))
        )
        self._outputs: dict[int, ChatOutput] = {}  # of each completion that has begun

    def whole(self, ends: Sequence[tuple[Sequence[Delta], RequestOutput]], usage: Usage) -> Chat:
        ((deltas, output),) = ends
        choices = [self._choice(delta, output) for delta in deltas]
        body = Chat(self.id, self._created, self._model, choices, usage)
        if self._request.return_token_ids:
            body.prompt_token_ids = output.prompt_token_ids
        if self._request.prompt_logprobs is not None:
            body.prompt_logprobs = self._texts.prompt_logprobs(output.prompt_logprobs)
        return body

    def chunk(
        self, prompt: int, delta: Delta, output: RequestOutput, usage: OptionalUsage
    ) -> ChatChunk:
        begins = delta.index not in self._outputs
        parser = self._output(delta, output)
        message = parser.message(delta.text, delta.finish_reason)
        choice = ChatChunkChoice(
            delta.index,
            message,
            self._logprobs(delta),
            parser.finish_reason(delta.finish_reason),
            self._token_ids(delta),
        )
        chunk = ChatChunk(self.id, self._created, self._model, [choice], usage)
        if begins:
            message.role = "assistant"
            if self._request.return_token_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
        return chunk

    def _choice(self, delta: Delta, output: RequestOutput) -> ChatChoice:
        """Return a whole completion."""
        parser = self._output(delta, output)
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

    def _output(self, delta: Delta, output: RequestOutput) -> ChatOutput:
        """Return the state of a completion, which may begin now, for what it gains."""
        made = self._outputs.get(delta.index)
        if made is None:
            made = self._outputs[delta.index] = ChatOutput(
                self._parser(output),
                keeps_special=self._keeps_special,
                one_call=self._request.parallel_tool_calls is False,
            )
        if self._hides_special and self._tokenizer is not None:
            special = self._tokenizer.special_ids.intersection(delta.token_ids)
            made.hide(map(TokenTexts(self._tokenizer).text, special))
        return made

    def _parser(self, output: RequestOutput) -> OutputParser | None:
        if not self.is_parsed:
            return None
        in_reasoning = self._ends_in_reasoning(output)
        reasoning = self._service.reasoning_parser
        if self._continued.strip() and not in_reasoning:
            reasoning = None  # the answer has begun
        return make_output_parser(
            self._service.tool_parser, reasoning, tools=self._tools, in_reasoning=in_reasoning
        )

    def _ends_in_reasoning(self, output: RequestOutput) -> bool:
        """Return whether the prompt ends within the reasoning."""
        if self._tokenizer is None:
            return False
        num_tokens = PROMPT_END_TOKENS + len(self._continued.encode())  # of a byte or more each
        end = output.prompt_token_ids[-num_tokens:]
        return ends_in_reasoning(
            self._tokenizer.decode(end, skip_special_tokens=False), self._continued
        )

    def _spells_special(self, params: SamplingParams) -> bool:
        """Return whether special tokens may be a part of what the grammar demands."""
        structured = params.structured
        return (
            self._tokenizer is not None
            and isinstance(structured, StructuredOutput)
            and self._tokenizer.spells_special(structured.source)
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return self._texts.chat_logprobs(delta.logprobs)

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return list(delta.token_ids) if self._request.return_token_ids else UNSET


def _continued(request: ChatRequest) -> str:
    """Return the text of the last message, if the model continues it; empty otherwise."""
    if not (request.continue_final_message and request.messages):
        return ""
    return joined_text(request.messages[-1].get("content"))
