"""The endpoint `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import UNSET

from ...engine.request_output import RequestOutput
from ..request_handle import Delta
from .exchange import Exchange
from .generation import Answer, Service, generate
from .requests import CompletionRequest
from .responses import Completion, CompletionChoice, CompletionLogprobs, OptionalUsage, Usage
from .token_text import ChoiceTokens, TokenTexts

__all__ = ["complete"]

DEFAULT_MAX_TOKENS = 16
"""As in the OpenAI API."""


async def complete(service: Service, exchange: Exchange) -> None:
    """Respond to a request for completions of texts or token ids."""
    request = await exchange.read(CompletionRequest, service.fields)
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
    answer = _Answer(request, model, TokenTexts(service.engine.tokenizer, as_ids=as_ids))
    async with exchange.cancelled_on_disconnect():
        if request.echo and request.truncate_prompt_tokens is None:
            answer.prompt_texts = [await _prompt_text(service, prompt) for prompt in prompts]
        await generate(exchange, service.engine, request, prompts, params, answer)


async def _prompt_text(service: Service, prompt: str | list[int]) -> str:
    tokenizer = service.engine.tokenizer
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        return ""
    return await service.engine.run_in_pool(
        lambda: tokenizer.decode(prompt, skip_special_tokens=False)
    )


class _Answer(Answer):
    """The completions of a request. Choice `i * n + j` is completion j of prompt i."""

    def __init__(self, request: CompletionRequest, model: str, texts: TokenTexts) -> None:
        super().__init__("cmpl", model, Completion)
        self.prompt_texts: Sequence[str] = ()
        """Of each prompt, to begin its completions with; empty without `echo`, and if prompts are
        truncated: their texts are the texts of the tokens that remain."""
        self._request = request
        self._texts = texts
        self._num_chars: dict[int, int] = {}  # of the text of each choice that has begun
        self._tokens: dict[int, ChoiceTokens] = {}  # of those with log-probabilities

    def whole(
        self, ends: Sequence[tuple[Sequence[Delta], RequestOutput]], usage: Usage
    ) -> Completion:
        choices = [
            self._choice(prompt, delta, output)
            for prompt, (deltas, output) in enumerate(ends)
            for delta in deltas
        ]
        return Completion(self.id, self._created, self._model, choices, usage)

    def chunk(
        self, prompt: int, delta: Delta, output: RequestOutput, usage: OptionalUsage
    ) -> Completion:
        choices = [self._choice(prompt, delta, output)]
        return Completion(self.id, self._created, self._model, choices, usage)

    def _choice(self, prompt: int, delta: Delta, output: RequestOutput) -> CompletionChoice:
        request = self._request
        index = prompt * (request.n or 1) + delta.index
        choice = CompletionChoice(index, delta.text, None, delta.finish_reason)
        begins = index not in self._num_chars
        echoed = self._echoed(prompt, output) if begins and request.echo else None
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

    def _echoed(self, prompt: int, output: RequestOutput) -> str:
        """Return the text of a prompt."""
        if self.prompt_texts:
            return self.prompt_texts[prompt]
        tokenizer = self._texts.tokenizer
        if tokenizer is None:
            return ""
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(
        self, index: int, echoed: str | None, delta: Delta, output: RequestOutput
    ) -> CompletionLogprobs:
        """Return the log-probabilities of a delta, before the first also of the echoed prompt."""
        before = None
        tokens = self._tokens.get(index)
        if tokens is None:
            skip = self._request.skip_special_tokens is not False
            prompt_ids = output.prompt_token_ids
            tokens = ChoiceTokens(self._texts, prompt_ids, skip_special_tokens=skip)
            self._tokens[index] = tokens
            if echoed is not None:
                before = tokens.prompt(prompt_ids, output.prompt_logprobs, echoed)
        end = None if delta.finish_reason is None else self._num_chars[index]
        own = tokens.take(delta.token_ids, delta.logprobs, end)
        return own if before is None else before.joined(own)
