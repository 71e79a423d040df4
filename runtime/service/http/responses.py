"""Bodies of responses, and of the events of streams."""

from __future__ import annotations

from operator import add

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import astuple

from ....profiling.stats import RequestTiming, Summary
from ..request_handle import RequestRecord


class PromptDetails(msgspec.Struct):
    """Tokens of the prompts that were in the prefix cache."""

    cached_tokens: int


class Timings(msgspec.Struct):
    """Times of a completion, in milliseconds."""

    queue_ms: float
    """From its arrival until the engine took it."""
    prefill_ms: float
    """From then to the first token."""
    inter_token_ms: list[float]
    """Before each token after the first; 0 for an accepted draft, which comes with another."""
    inter_token_p50_ms: float | None
    """None without a second token."""
    inter_token_p99_ms: float | None
    """None for fewer than 100 gaps."""
    accepted_drafts: int

    @classmethod
    def of(cls, record: RequestRecord) -> list[Timings]:
        """Return the times of the completions of a request that have a token."""
        started = record.started_ns
        if started is None:
            return []
        queue_ms = (started - record.submitted_ns) / 1e6
        found = []
        for times in filter(None, record.token_ns):
            gaps = RequestTiming(started, times).itl_ms
            summary = Summary.of(gaps) if gaps else None
            found.append(
                cls(
                    queue_ms,
                    (times[0] - started) / 1e6,
                    [round(gap, 3) for gap in gaps],
                    None if summary is None else summary.p50,
                    None if summary is None else summary.p99,
                    len(times) - len({*times}),
                )
            )
        return found


class Usage(msgspec.Struct):
    """Tokens of a request, all of its prompts and completions together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    timings: list[Timings] | UnsetType = UNSET
    """Of each completion, with `return_timings`."""

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """Return the usage of a response; `cached` tokens of the prompt were in the cache."""
        return cls(prompt, completion, prompt + completion, PromptDetails(cached))


OptionalUsage = Usage | None | UnsetType
"""`UNSET`: the stream reports none. None: this event reports none."""


class PromptToken(msgspec.Struct):
    """A token that a prompt has, or could have, at a position, in vLLM's shape."""

    logprob: float
    rank: int | None
    """1 for the most probable token; None for a token that is not among those reported."""
    decoded_token: str


PromptEntry = dict[str, PromptToken] | None
"""By token id; None for the first token of a prompt, which has no probability."""


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of tokens, in parallel lists; None for the first token of a prompt.

    `top_logprobs` has each token as in `tokens`, and the sampled one always. `text_offset` is where
    the text of a token begins in `text`, in characters: of a token that has no text there, such as
    one of a stop string, where the next one would.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def joined(self, following: CompletionLogprobs) -> CompletionLogprobs:
        """Return these and the following ones."""
        return CompletionLogprobs(*map(add, astuple(self), astuple(following)))


class CompletionChoice(msgspec.Struct):
    """A completion, or what it gained."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptEntry] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The response of `/v1/completions`, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: OptionalUsage = UNSET
    object: str = "text_completion"


class TopToken(msgspec.Struct):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(TopToken):
    """A token of an answer, and the most probable ones at its position."""

    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of an answer."""

    content: list[ChatToken]


class Function(msgspec.Struct):
    """A function that the model calls, and what its arguments gained, as JSON text."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    """A call; in streams those after the first of each `index` only have arguments."""

    function: Function
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """An answer, or what it gained."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same; clients read either name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET
    """What an earlier call gained is before the other parts, and calls that begin follow them."""

    def calls(self, *, begin: bool) -> list[ToolCall]:
        """Return the calls that begin here, or else what earlier ones gained."""
        return [call for call in self.tool_calls or () if bool(call.function.name) is begin]


class ChatChoice(msgspec.Struct):
    """One of the answers to a conversation; in streams, what it gained."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    """In streams, in the place of `message`."""
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET

    @property
    def has_news(self) -> bool:
        """Whether it has anything to say as an event: a parser may withhold the text."""
        parts = (self.finish_reason, self.logprobs, self.token_ids)
        return any(parts) or self.delta != _NO_NEWS


_NO_NEWS = ChatMessage()


class Chat(msgspec.Struct):
    """The response of `/v1/chat/completions`, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OptionalUsage = UNSET
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptEntry] | UnsetType = UNSET
