"""The endpoints `/v1/completions` and `/v1/chat/completions`: whole responses, and streams."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec import UNSET

from ...bounded_repr import bounded_repr
from ...engine.request_builder import Prompt
from ...engine.request_output import RequestOutput
from ...loading.chat_template import ChatPrompt
from ...sampling_params import SamplingParams
from ...structured_output import StructuredOutput
from ..async_engine import AsyncEngine
from ..consumers import AsyncStream
from ..request_handle import Delta
from .chat_grammars import ReasonedOutput, spells_end_of_reasoning
from .exchange import EVENT_HEADERS, Exchange, HttpError, encode, event
from .output_parsers import OutputParser, ends_in_reasoning, make_output_parser
from .requests import (
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
    StreamOptions,
    UnknownFields,
    chat_prompt,
)
from .responses import (
    Chat,
    ChatChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    OptionalUsage,
    Usage,
)
from .token_text import ChoiceTokens, TokenTexts

if TYPE_CHECKING:  # it needs prometheus-client
    from ..metrics import EngineMetrics

R = TypeVar("R", bound=SamplingRequest)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Service:
    """An engine and the settings of its HTTP service."""

    engine: AsyncEngine
    model_names: tuple[str, ...]  # that requests may give; responses without one have the first
    fields: UnknownFields
    metrics: EngineMetrics | None
    tool_parser: str | None  # names for `make_output_parser`
    reasoning_parser: str | None
    created: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, given: str | None) -> str:
        """Return the name of the model for the response, 404 if no model has it."""
        if given is None:
            return self.model_names[0]
        if given not in self.model_names:
            names = " or ".join(self.model_names)
            raise HttpError(
                404,
                f"the model {bounded_repr(given)} is not served: give {names}, or leave model out",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        return given


@dataclass(frozen=True, slots=True)
class Operation:
    """An endpoint, with the types of what it reads and sends. Its docstring is the summary."""

    handler: Callable[[Service, Exchange], Awaitable[None]]
    response: type | None  # None: text in a format of Prometheus
    body: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None  # of each event, if the response can be a stream
    statuses: tuple[int, ...] = (200,)  # of a response; every other one is an error


class Answer(ABC, Generic[R]):
    """The response to one HTTP request, in the shape of its API; of a stream, its events.

    `event` and `end` follow the OpenAI API; other APIs may replace them.
    """

    def __init__(
        self, id: str, request: R, model: str, body: type[Completion] | type[Chat], kind: str
    ) -> None:
        """`id` begins its id; `kind` is the `object` of each `body`."""
        self.id = f"{id}-{secrets.token_hex(12)}"
        self.request = request
        self._body = body
        self._kind = kind
        self._created = int(time.time())
        self._model = model
        self._extras: dict[str, Any] = {}  # fields of the next body

    @abstractmethod
    def choice(self, prompt: int, delta: Delta, output: RequestOutput) -> msgspec.Struct:
        """Return what a completion of a prompt gained; `output` is the newest."""

    def body(self, choices: list[Any], usage: OptionalUsage) -> msgspec.Struct:
        """Return the response or an event; one without choices only reports the usage."""
        extras, self._extras = self._extras, {}
        head = (self.id, self._created, self._model)
        return self._body(*head, choices, usage, self._kind, **extras)

    def event(self, choice: msgspec.Struct, usage: OptionalUsage) -> bytes:
        """Return the encoded event of a choice."""
        return b"data: %b\n\n" % encode(self.body([choice], usage))  # as `event`, a call less

    def end(self, usage: OptionalUsage) -> bytes:
        """Return the encoded events after the last choice."""
        return DONE if usage is UNSET else event(self.body([], usage)) + DONE


async def generate(
    exchange: Exchange,
    engine: AsyncEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    answer: Answer[Any],
) -> None:
    """Decode prompts, which share their parameters, and send the response.

    A stream begins when the engine has accepted all prompts.
    """
    request_id = f"{exchange.request_id}/{answer.id}"
    exchange.note(request_id=request_id)
    options = answer.request.options(exchange.header(b"traceparent"))
    async with exchange.cancelled_on_disconnect(), AsyncExitStack() as stack:
        streams: list[AsyncStream] = []
        for number, prompt in enumerate(prompts):
            options["request_id"] = f"{request_id}-{number}"
            stream = engine.stream(prompt, params, **options)
            streams.append(await stack.enter_async_context(stream))
        if answer.request.stream:
            for stream in streams:
                await stream.accepted()
            await exchange.start(200, EVENT_HEADERS)
            await _send_events(exchange, answer, streams)
            return
        outputs = await asyncio.gather(*[stream.finish() for stream in streams])
        for output in outputs:
            if output.error is not None:
                raise output.error
        gained = [
            (prompt, delta, output)
            for prompt, output in enumerate(outputs)
            for delta in await streams[prompt].next_deltas()
        ]
        usage = _usage(exchange, streams, sum(len(delta.token_ids) for _, delta, _ in gained))
        await exchange.respond(answer.body([answer.choice(*each) for each in gained], usage))


async def _send_events(
    exchange: Exchange, answer: Answer[Any], streams: Sequence[AsyncStream]
) -> None:
    """Send the deltas of several streams as events of one response, up to its end."""
    num_tokens, options = 0, answer.request.stream_options or StreamOptions()

    async def send_deltas(number: int, stream: AsyncStream) -> None:
        """Send the events of one prompt: the deltas that are ready together, in one message."""
        nonlocal num_tokens
        while deltas := await stream.next_deltas():
            output = stream.output
            assert output is not None
            events = []
            for delta in deltas:
                num_tokens += len(delta.token_ids)
                usage: OptionalUsage = None if options.include_usage else UNSET
                if options.include_usage and options.continuous_usage_stats:
                    usage = _usage(exchange, streams, num_tokens)
                events.append(answer.event(answer.choice(number, delta, output), usage))
            await exchange.send_events(b"".join(events))

    # In tasks of their own: a wake-up would pass through the coroutines of all middleware.
    tasks = [asyncio.create_task(send_deltas(*numbered)) for numbered in enumerate(streams)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        usage = _usage(exchange, streams, num_tokens)
    await exchange.send_events(answer.end(usage if options.include_usage else UNSET), last=True)


def _usage(exchange: Exchange, streams: Sequence[AsyncStream], num_tokens: int) -> Usage:
    """Return the usage of a response so far, and note it for the access log."""
    prompt_tokens = sum(stream.num_prompt_tokens for stream in streams)
    outputs = [stream.output for stream in streams]
    cached = sum(output.cached_tokens for output in outputs if output is not None)
    exchange.note(tokens_in=prompt_tokens, tokens_out=num_tokens)
    return Usage.of(prompt_tokens, num_tokens, cached)


DEFAULT_MAX_TOKENS = 16
"""As in the OpenAI API."""


async def complete(service: Service, exchange: Exchange) -> None:
    """Respond to a request for completions of texts or token ids."""
    request = await exchange.read(CompletionRequest, service.fields.check)
    model = service.model_name(request.model)
    prompts = request.prompts(
        max_prompts=service.engine.config.max_queued_requests,
        max_model_len=service.engine.max_model_len,
    )
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = request.params(max_tokens, request.logprobs)
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=request.logprobs)
    as_ids = bool(request.return_tokens_as_token_ids)
    answer = _CompletionAnswer(request, model, TokenTexts(service.engine.tokenizer, as_ids=as_ids))
    if request.echo and request.truncate_prompt_tokens is None:
        answer.prompt_texts = await service.engine.run_in_pool(
            lambda: [answer.text_of(prompt) for prompt in prompts]
        )
    await generate(exchange, service.engine, prompts, params, answer)


class _CompletionAnswer(Answer[CompletionRequest]):
    """The completions of a request. Choice `i * n + j` is completion j of prompt i."""

    def __init__(self, request: CompletionRequest, model: str, texts: TokenTexts) -> None:
        super().__init__("cmpl", request, model, Completion, "text_completion")
        self.prompt_texts: Sequence[str] = ()
        """Of each prompt, to begin its completions with; empty without `echo`, and if prompts are
        truncated: their texts are the texts of the tokens that remain."""
        self._texts = texts
        self._num_chars: dict[int, int] = {}  # of the text of each choice that has begun
        self._tokens: dict[int, ChoiceTokens] = {}  # of those with log-probabilities

    def choice(self, prompt: int, delta: Delta, output: RequestOutput) -> CompletionChoice:
        request = self.request
        index = prompt * (request.n or 1) + delta.index
        choice = CompletionChoice(index, delta.text, None, delta.finish_reason)
        begins = index not in self._num_chars
        echoed = None
        if begins and request.echo:
            texts = self.prompt_texts
            echoed = texts[prompt] if texts else self.text_of(output.prompt_token_ids)
        choice.text = (echoed or "") + choice.text
        self._num_chars[index] = self._num_chars.get(index, 0) + len(choice.text)
        if request.return_token_ids:
            choice.token_ids = list(delta.token_ids)
            choice.prompt_token_ids = output.prompt_token_ids if begins else UNSET
        if request.prompt_logprobs is not None:
            choice.prompt_logprobs = self._texts.prompt_logprobs(output.prompt_logprobs)
        if request.logprobs is not None:
            choice.logprobs = self._logprobs(index, echoed, delta, output)
        return choice

    def text_of(self, prompt: str | list[int]) -> str:
        """Return the text of a prompt."""
        tokenizer = self._texts.tokenizer
        if isinstance(prompt, str):
            return prompt
        return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)

    def _logprobs(
        self, index: int, echoed: str | None, delta: Delta, output: RequestOutput
    ) -> CompletionLogprobs:
        """Return the log-probabilities of a delta, before the first also of the echoed prompt."""
        before = None
        tokens = self._tokens.get(index)
        if tokens is None:
            skip = self.request.skip_special_tokens is not False
            prompt_ids = output.prompt_token_ids
            tokens = ChoiceTokens(self._texts, prompt_ids, skip_special_tokens=skip)
            self._tokens[index] = tokens
            if echoed is not None:
                before = tokens.prompt(prompt_ids, output.prompt_logprobs, echoed)
        end = None if delta.finish_reason is None else self._num_chars[index]
        own = tokens.take(delta.token_ids, delta.logprobs, end)
        return own if before is None else before.joined(own)


PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that show whether it ends within reasoning."""


async def chat(service: Service, exchange: Exchange) -> None:
    """Respond to a conversation with the model's answers."""
    await converse(service, exchange, await exchange.read(ChatRequest, service.fields.check))


async def converse(service: Service, exchange: Exchange, request: ChatRequest) -> None:
    """Send the answers to a conversation."""
    model = service.model_name(request.model)
    params = request.params(
        request.num_tokens(service.engine.sampling_defaults.max_tokens),
        request.num_logprobs(),
        request.forced_call(service.tool_parser),
    )
    prompt = chat_prompt(request, request.offered_tools())
    params = await _after_reasoning(service, request, prompt, params)
    answer = _ChatAnswer(service, request, model, params)
    if answer.is_parsed:
        params = replace(params, skip_special_tokens=False)
    await generate(exchange, service.engine, [prompt], params, answer)


async def _after_reasoning(
    service: Service, request: ChatRequest, prompt: ChatPrompt, params: SamplingParams
) -> SamplingParams:
    """Let the reasoning end first, if the prompt is in it and the grammar does not have its end."""
    structured, tokenizer = params.structured, service.engine.tokenizer
    if service.reasoning_parser is None or tokenizer is None or structured is None:
        return params
    assert isinstance(structured, StructuredOutput)
    if spells_end_of_reasoning(structured):
        return params
    text = await service.engine.run_in_pool(lambda: tokenizer.render(prompt))
    if not ends_in_reasoning(text, request.continued):
        return params
    return replace(params, structured=ReasonedOutput(content=structured))


class _ChatAnswer(Answer[ChatRequest]):
    """The answers to a conversation."""

    def __init__(
        self, service: Service, request: ChatRequest, model: str, params: SamplingParams
    ) -> None:
        """Take a request.

        Parsers read all of the text, special tokens included, whatever `params` say of these.
        """
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__("chatcmpl", request, model, Chat, kind)
        self._service = service
        self._tokenizer = service.engine.tokenizer
        as_ids = bool(request.return_tokens_as_token_ids)
        self._texts = TokenTexts(self._tokenizer, as_ids=as_ids)
        self._tools = request.offered_tools() if service.tool_parser else None
        self.is_parsed = bool(service.reasoning_parser or self._tools)
        """Whether parsers read the text."""
        structured = params.structured
        self._keeps_special = (  # what the grammar demands may have special tokens
            self._tokenizer is not None
            and isinstance(structured, StructuredOutput)
            and self._tokenizer.spells_special(structured.source)
        )
        self._hides_special = (
            self.is_parsed
            and params.skip_special_tokens
            # The reasoning before a grammar is not a part of it.
            and (not self._keeps_special or isinstance(structured, ReasonedOutput))
        )
        self._outputs: dict[int, OutputParser] = {}  # of each completion that has begun

    def choice(self, prompt: int, delta: Delta, output: RequestOutput) -> ChatChoice:
        request, begins = self.request, delta.index not in self._outputs
        parser = self._output(delta, output)
        message = parser.message(delta.text, last=delta.finish_reason is not None)
        if begins:
            message.role = "assistant"
            if request.return_token_ids:
                self._extras["prompt_token_ids"] = output.prompt_token_ids
            if request.prompt_logprobs is not None:
                found = self._texts.prompt_logprobs(output.prompt_logprobs)
                self._extras["prompt_logprobs"] = found
        choice = ChatChoice(delta.index)
        if request.stream:
            choice.delta = message
        else:
            choice.message = message
            for call in message.tool_calls or ():
                call.index = UNSET  # which streams have
            if message.content is UNSET:
                message.content = None if message.tool_calls else ""
        if request.logprobs:
            choice.logprobs = self._texts.chat_logprobs(delta.logprobs)
        choice.finish_reason = parser.finish_reason(delta.finish_reason)
        if request.return_token_ids:
            choice.token_ids = list(delta.token_ids)
        return choice

    def _output(self, delta: Delta, output: RequestOutput) -> OutputParser:
        """Return the parser of a completion, which may begin now, for what it gains."""
        parser, tokenizer = self._outputs.get(delta.index), self._tokenizer
        if parser is None:
            in_reasoning, reasoning = False, self._service.reasoning_parser
            continued = self.request.continued
            if self.is_parsed and tokenizer is not None:
                # Each token has a byte or more.
                num_tokens = PROMPT_END_TOKENS + len(continued.encode())
                end = output.prompt_token_ids[-num_tokens:]
                text = tokenizer.decode(end, skip_special_tokens=False)
                in_reasoning = ends_in_reasoning(text, continued)
            if continued.strip() and not in_reasoning:
                reasoning = None  # the answer has begun
            parser = self._outputs[delta.index] = make_output_parser(
                self._service.tool_parser,
                reasoning,
                tools=self._tools,
                in_reasoning=in_reasoning,
                keeps_special=self._keeps_special,
                one_call=self.request.parallel_tool_calls is False,
            )
        if self._hides_special and tokenizer is not None:
            special = tokenizer.special_ids.intersection(delta.token_ids)
            parser.hide(map(TokenTexts(tokenizer).text, special))
        return parser


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        complete, Completion, body=CompletionRequest, event=Completion
    ),
    ("POST", "/v1/chat/completions"): Operation(chat, Chat, body=ChatRequest, event=Chat),
}
