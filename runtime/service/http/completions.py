"""The endpoint `/v1/completions`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from msgspec import UNSET

from ...engine.request_output import RequestOutput
from ...loading.fill_in_middle import middle_ends, middle_prompt
from ..request_handle import Delta
from .exchange import Exchange, invalid
from .generation import Answer, Operation, Service, generate
from .requests import CompletionRequest
from .responses import Completion, CompletionChoice, CompletionLogprobs, OptionalUsage
from .token_text import ChoiceTokens, TokenTexts

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
    tokenizer = service.engine.tokenizer
    if request.suffix:
        if request.echo or request.truncate_prompt_tokens is not None:
            field = "echo" if request.echo else "truncate_prompt_tokens"
            raise invalid("suffix", f"suffix is not available with {field}: leave one of them out")
        if tokenizer is None or not isinstance(prompts[0], str):
            raise invalid("suffix", "suffix needs a prompt of text, and a model with a tokenizer")
        prompts = [middle_prompt(tokenizer, str(text), request.suffix) for text in prompts]
        ends = {*params.stop_token_ids, *middle_ends(tokenizer)}
        params = replace(params, stop_token_ids=tuple(ends))
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=request.logprobs)
    as_ids = bool(request.return_tokens_as_token_ids)
    answer = _CompletionAnswer(request, model, TokenTexts(tokenizer, as_ids=as_ids))
    if request.echo and request.truncate_prompt_tokens is None:
        answer.prompt_texts = await service.engine.run_in_pool(
            lambda: [answer.text_of(prompt) for prompt in prompts]
        )
    await generate(exchange, service.engine, prompts, params, answer)


class _CompletionAnswer(Answer[CompletionRequest]):
    """The completions of a request. Choice `i * n + j` is completion j of prompt i.

    With `best_of` more are decoded, and numbered in the same way until the best ones are chosen.
    """

    def __init__(self, request: CompletionRequest, model: str, texts: TokenTexts) -> None:
        super().__init__("cmpl", request, model, Completion, "text_completion")
        self.prompt_texts: Sequence[str] = ()
        """Of each prompt, to begin its completions with; empty without `echo`, and if prompts are
        truncated: their texts are the texts of the tokens that remain."""
        self._texts = texts
        self._num_chars: dict[int, int] = {}  # of the text of each choice that has begun
        self._tokens: dict[int, ChoiceTokens] = {}  # of those with log-probabilities
        self._means: dict[int, float] = {}  # of the log-probabilities, to choose by

    def choice(self, prompt: int, delta: Delta, output: RequestOutput) -> CompletionChoice:
        request = self.request
        index = prompt * request.num_decoded + delta.index
        if request.best_of is not None and delta.logprobs:
            self._means[index] = fmean(entry.logprob for entry in delta.logprobs)
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

    def body(self, choices: list[CompletionChoice], usage: OptionalUsage) -> object:
        decoded, returned = self.request.num_decoded, self.request.n or 1
        if decoded > returned:
            ranked = sorted(choices, key=lambda c: -self._means.get(c.index, -math.inf))
            chosen: dict[int, list[CompletionChoice]] = {}
            for choice in ranked:
                chosen.setdefault(choice.index // decoded, []).append(choice)
            choices = [c for prompt in sorted(chosen) for c in chosen[prompt][:returned]]
            for index, choice in enumerate(choices):
                choice.index = index
        return super().body(choices, usage)

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


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        complete, Completion, body=CompletionRequest, event=Completion
    ),
}
