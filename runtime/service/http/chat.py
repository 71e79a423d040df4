"""The endpoint `/v1/chat/completions`, and conversations for other APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from msgspec import UNSET

from ...engine.request_builder import Prompt
from ...engine.request_output import RequestOutput
from ...loading.chat_template import ChatPrompt
from ...sampling_params import SamplingParams
from ...structured_output import StructuredOutput
from ..request_handle import Delta
from .chat_grammars import ReasonedOutput, spells_end_of_reasoning
from .exchange import Exchange
from .generation import Answer, Operation, Service, generate
from .output_parsers import REASONING_FORMATS, OutputParser, make_output_parser
from .requests import ChatRequest, chat_prompt
from .responses import Chat, ChatChoice, Usage
from .token_text import TokenTexts

PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that show whether it ends within reasoning."""


async def chat(service: Service, exchange: Exchange) -> None:
    """Respond to a conversation with the model's answers."""
    await converse(service, exchange, await exchange.read(ChatRequest, service.fields.check))


async def converse(
    service: Service,
    exchange: Exchange,
    request: ChatRequest,
    make_answer: Callable[[Service, ChatRequest, str, SamplingParams], ChatAnswer] | None = None,
    prompt: Prompt | None = None,
) -> None:
    """Send the answers to a conversation; `make_answer` gives them the shape of another API.

    A `prompt` takes the place of the messages.
    """
    exchange.param_of = request.param_of
    model = service.model_name(request.model)
    params = request.params(
        request.num_tokens(service.engine.sampling_defaults.max_tokens),
        request.num_logprobs(),
        request.forced_call(service.parsers[0]),
    )
    if prompt is None:
        prompt = chat_prompt(request)
    if isinstance(prompt, ChatPrompt):
        params = await _after_reasoning(service, request, prompt, params)
    answer = (make_answer or ChatAnswer)(service, request, model, params)
    if answer.is_parsed:
        params = replace(params, skip_special_tokens=False)
    await generate(exchange, service.engine, [prompt], params, answer)


async def _after_reasoning(
    service: Service, request: ChatRequest, prompt: ChatPrompt, params: SamplingParams
) -> SamplingParams:
    """Let the reasoning end first, if the prompt is in it and the grammar does not have its end."""
    structured, tokenizer = params.structured, service.tokenizer()
    reasoning = REASONING_FORMATS.get(service.parsers[1] or "")
    if reasoning is None or structured is None:
        return params
    assert isinstance(structured, StructuredOutput)
    if spells_end_of_reasoning(structured, reasoning.close):
        return params
    text = await service.engine.run_in_pool(lambda: tokenizer.render(prompt))
    if not reasoning.ends_in_reasoning(text, request.continued):
        return params
    is_call = request.tool_choice not in (None, "none", "auto")
    end = reasoning.before_call if is_call and reasoning.before_call else reasoning.close
    return replace(params, structured=ReasonedOutput.after(end, structured))


class ChatAnswer(Answer[ChatRequest]):
    """The answers to a conversation.

    An API of another shape derives from it, and makes its events and its body of the choices.
    """

    def __init__(
        self, service: Service, request: ChatRequest, model: str, params: SamplingParams
    ) -> None:
        """Take a request.

        Parsers read all of the text, special tokens included, whatever `params` say of these.
        """
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__("chatcmpl", request, model, Chat, kind)
        self._service = service
        self._tool_parser, self._reasoning_parser = service.parsers
        self._tokenizer = service.tokenizer()
        as_ids = bool(request.return_tokens_as_token_ids)
        self._texts = TokenTexts(self._tokenizer, as_ids=as_ids)
        self._tools = request.offered_tools() if self._tool_parser else None
        self.is_parsed = bool(self._reasoning_parser or self._tools)
        """Whether parsers read the text."""
        structured = params.structured
        self._keeps_special = (  # what the grammar demands may have special tokens
            isinstance(structured, StructuredOutput)
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

    def event(self, choice: ChatChoice, usage: Callable[[], Usage]) -> bytes:
        return super().event(choice, usage) if choice.has_news else b""

    def _output(self, delta: Delta, output: RequestOutput) -> OutputParser:
        """Return the parser of a completion, which may begin now, for what it gains."""
        parser, tokenizer = self._outputs.get(delta.index), self._tokenizer
        if parser is None:
            in_reasoning, reasoning = False, self._reasoning_parser
            continued = self.request.continued
            if reasoning is not None:
                # Each token has a byte or more.
                num_tokens = PROMPT_END_TOKENS + len(continued.encode())
                end = output.prompt_token_ids[-num_tokens:]
                text = tokenizer.decode(end, skip_special_tokens=False)
                in_reasoning = REASONING_FORMATS[reasoning].ends_in_reasoning(text, continued)
            if continued.strip() and not in_reasoning:
                reasoning = None  # the answer has begun
            parser = self._outputs[delta.index] = make_output_parser(
                self._tool_parser,
                reasoning,
                tools=self._tools,
                in_reasoning=in_reasoning,
                keeps_special=self._keeps_special,
                one_call=self.request.parallel_tool_calls is False,
            )
        if self._hides_special:
            special = tokenizer.special_ids.intersection(delta.token_ids)
            parser.hide(map(TokenTexts(tokenizer).text, special))
        return parser


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(chat, Chat, body=ChatRequest, event=Chat),
}
