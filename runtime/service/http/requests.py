"""Bodies of requests. Types are strict; other fields are ignored; null is the default."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from ...loading.chat_template import ChatPrompt
from ...sampling_params import SamplingParams
from ..async_engine import RequestOptions
from .chat_messages import template_messages
from .http_errors import HttpError

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "SamplingRequest",
    "StreamOptions",
    "TokenizeRequest",
    "chat_prompt",
]

Prompts = str | list[str | int | list[int]]

_SAMPLING_FIELDS = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "seed", "n", "stop"),
    *("stop_token_ids", "ignore_eos", "skip_special_tokens"),
)
_REFUSED = (
    *("suffix", "functions", "function_call", "audio", "prediction", "web_search_options"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("prompt_embeds", "logits_processors", "use_beam_search"),
)
"""Fields whose effect cannot be left out silently."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of the OpenAI API, with vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str


class SamplingRequest(msgspec.Struct, kw_only=True):
    """The common fields of requests for tokens."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    """Seconds until the last token."""
    first_token_timeout: float | None = None
    """Seconds until the first token."""
    user: str | None = None
    """The tenant, for fairness."""
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    response_format: _ResponseFormat | None = None
    suffix: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_embeds: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None

    def params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return how tokens are chosen.

        Raises:
            HttpError: a field is not supported.
            RequestError: a value is out of range.
        """
        self._check_supported()
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        fields = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**fields, max_tokens=max_tokens, logprobs=logprobs)

    def options(self) -> RequestOptions:
        """Return the options of the request for an `AsyncEngine`."""
        for name in ("timeout", "first_token_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise HttpError(400, f"{name} must be above 0 seconds", param=name)
        return RequestOptions(
            priority=self.priority or 0,
            deadline=self.timeout,
            first_token_deadline=self.first_token_timeout,
            cache_salt=self.cache_salt,
            tenant=self.user,
        )

    def usage_reports(self) -> tuple[bool, bool]:
        """Return whether a stream ends with its usage, and whether each event has it."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return False, False
        return True, bool(options.continuous_usage_stats)

    def _check_supported(self) -> None:
        for name in _REFUSED:
            if getattr(self, name):
                raise HttpError(400, f"{name} is not supported", param=name)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise HttpError(400, "best_of is not supported: give n", param="best_of")
        form = self.response_format
        if form is not None and form.type != "text":
            raise HttpError(
                400, "response_format is not supported, except text", param="response_format"
            )
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options needs stream", param="stream_options")


class CompletionRequest(SamplingRequest, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: Prompts
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, all of them texts or all of them token ids.

        Raises:
            HttpError: there is none, or the list mixes texts, tokens and lists.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        kinds = {type(item) for item in prompt}
        if kinds == {int}:
            return [cast(list[int], prompt)]
        if kinds in ({str}, {list}):
            return cast(list[str] | list[list[int]], prompt)
        raise HttpError(
            400,
            "prompt must be a text, token ids, or a list of texts or of token ids: it is empty or"
            " mixes them",
            param="prompt",
        )


class ChatRequest(SamplingRequest, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    """The name of a template of the checkpoint."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the model may call.

        Raises:
            HttpError: a call of a tool is demanded, which needs constrained decoding.
        """
        choice = self.tool_choice
        if choice is not None and choice not in ("none", "auto"):
            raise HttpError(
                400,
                "tool_choice must be 'none' or 'auto': others are not supported",
                param="tool_choice",
            )
        return None if choice == "none" else self.tools or None

    def num_logprobs(self) -> int | None:
        """Return how many of the most probable tokens to report; None for no report at all."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
        return None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


def chat_prompt(
    request: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]] | None
) -> ChatPrompt:
    """Return the prompt of a conversation.

    Raises:
        HttpError: as `template_messages`.
    """
    begins = request.add_generation_prompt
    return ChatPrompt(
        template_messages(request.messages or ()),
        tools=tools,
        documents=request.documents,
        add_generation_prompt=not request.continue_final_message if begins is None else begins,
        continue_final_message=bool(request.continue_final_message),
        chat_template=request.chat_template,
        template_kwargs=request.chat_template_kwargs or {},
    )
