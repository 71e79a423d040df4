"""Outputs of requests, and their changes since the previous output."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...profiling.stats import RequestTiming
from ..request import FinishReason, Request, RequestGroup, RequestStatus, TokenLogprobs

_FINISHED = RequestStatus.FINISHED


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The new text and tokens of a completion since the previous output of its request.

    The deltas of a completion, concatenated over all outputs, are its final text and tokens.
    Text may come later than its tokens: a character that is split over tokens appears with the last
    of them, and text that may be the start of a stop string is held back.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry a token; empty unless `SamplingParams.logprobs` was given."""


class CompletionOutput:
    """One completion at the time of its output; later steps do not change it."""

    __slots__ = (
        "_first_char",
        "_first_token",
        "_num_chars",
        "_num_tokens",
        "_request",
        "finish_reason",
    )

    def __init__(self, request: Request) -> None:
        """Take the present state of a request."""
        detokenizer = request.detokenizer
        self.finish_reason: FinishReason | None = request.finish_reason
        self._request = request  # its tokens and text only grow, so their lengths are a snapshot
        self._num_tokens = request.num_output
        self._num_chars = 0 if detokenizer is None else detokenizer.num_chars
        self._first_token = request.num_reported_tokens
        self._first_char = request.num_reported_chars

    @property
    def text(self) -> str:
        """The text of the output tokens."""
        detokenizer = self._request.detokenizer
        return "" if detokenizer is None else detokenizer.text[: self._num_chars]

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None if something else did."""
        detokenizer = self._request.detokenizer
        return detokenizer.stopped if self.finish_reason == "stop" and detokenizer else None

    @property
    def delta(self) -> OutputDelta:
        """What is new since the previous output of the request."""
        return self.delta_since(self._first_token, self._first_char)

    def delta_since(self, token: int, char: int) -> OutputDelta:
        """Return the tokens from number `token`, and the text from character `char`.

        Any thread may call it while the engine runs steps.
        """
        detokenizer = self._request.detokenizer
        text = "" if detokenizer is None else detokenizer.text_between(char, self._num_chars)
        token_ids = self._request.output_slice(token, self._num_tokens)
        logprobs = tuple(self._request.logprobs[token : self._num_tokens])
        return OutputDelta(text, token_ids, logprobs)

    def token_ns_since(self, token: int) -> tuple[int, ...]:
        """Return when the host received the tokens from number `token`; see `RequestTiming`."""
        return self._request.token_ns_slice(token, self._num_tokens)

    @property
    def token_ids(self) -> list[int]:
        """The output tokens, including a token that ended it."""
        return self._request.output_ids[: self._num_tokens]

    @property
    def num_tokens(self) -> int:
        """The length of `token_ids`, without making the list."""
        return self._num_tokens

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One entry a token; empty unless `SamplingParams.logprobs` was given."""
        return self._request.logprobs[: self._num_tokens]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """See `RequestOutput.prompt_logprobs`; empty for other completions than number 0."""
        known = self._request.prompt_logprobs
        return [] if known is None else known.entries()

    @property
    def timing(self) -> RequestTiming | None:
        """Arrival and token times; None before the first token."""
        times = self._request.token_ns[: self._num_tokens]
        return RequestTiming(self._request.arrival_ns, times) if times else None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(text={self.text!r}, token_ids={self.token_ids},"
            f" finish_reason={self.finish_reason!r})"
        )


@dataclass(slots=True, eq=False)
class RequestOutput:
    """The output of a request so far. `text`, `token_ids` … describe completion 0.

    A step makes one for each row, so most attributes are computed when they are read.
    """

    request_id: str
    _prompt_ids: list[int] = field(repr=False)
    completions: tuple[CompletionOutput, ...]
    """`SamplingParams.n` of them; none if the request was refused."""
    finished: bool
    """Whether every completion has ended."""
    num_preemptions: int = 0
    """How often completions were preempted."""
    cached_tokens: int = 0
    """Tokens of the prompt that completion 0 found in the cache."""
    error: Exception | None = None
    """Why it ended with `finish_reason` `error`."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt. A copy, since the engine may have to prefill it again."""
        return self._prompt_ids.copy()

    @property
    def text(self) -> str:
        """The text of completion 0 (empty for a checkpoint without a tokenizer)."""
        return self.completions[0].text if self.completions else ""

    @property
    def token_ids(self) -> list[int]:
        """The output tokens of completion 0."""
        return self.completions[0].token_ids if self.completions else []

    @property
    def delta(self) -> OutputDelta:
        """The new text and tokens of completion 0 since the previous output."""
        return self.completions[0].delta if self.completions else OutputDelta()

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of completion 0."""
        return self.completions[0].logprobs if self.completions else []

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """One entry for each token of the prompt, given the tokens before it.

        None for the first token and for embeddings. The list is empty unless
        `SamplingParams.prompt_logprobs` was given, and if the request ended before its prompt was
        computed. A new list at each call.
        """
        return self.completions[0].prompt_logprobs if self.completions else []

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why completion 0 ended; None before."""
        return self.completions[0].finish_reason if self.completions else "error"

    @property
    def timing(self) -> RequestTiming | None:
        """Arrival and token times of completion 0; None before its first token."""
        return self.completions[0].timing if self.completions else None

    @classmethod
    def of(cls, group: RequestGroup) -> RequestOutput:
        """Return the present state of a group of requests; the next deltas begin after it."""
        requests = group.requests
        completions = tuple(map(CompletionOutput, requests))
        finished, num_preemptions, error = True, 0, None
        for request in requests:  # once for each row of every step, so without function calls
            request.num_reported_tokens = request.num_output
            if request.detokenizer is not None:
                request.num_reported_chars = request.detokenizer.num_chars
            finished = finished and request.status is _FINISHED
            num_preemptions += request.num_preemptions
            error = request.error if error is None else error
        return cls(
            group.id,
            group.prompt_ids,
            completions,
            finished,
            num_preemptions,
            requests[0].num_cached_tokens or 0,
            error,
        )
