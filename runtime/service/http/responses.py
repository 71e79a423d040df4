"""Bodies of responses, and of the events of streams."""

from __future__ import annotations

from operator import add

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import astuple


class PromptDetails(msgspec.Struct):
    """Tokens of the prompts that were in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a request, all of its prompts and completions together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

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


class ChatToken(msgspec.Struct):
    """A token of an answer, and the most probable ones at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
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


class ChatChoice(msgspec.Struct):
    """One of the answers to a conversation; in streams, what it gained."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    """In streams, in the place of `message`."""
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


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
