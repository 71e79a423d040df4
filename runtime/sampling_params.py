"""`SamplingParams`: how the tokens of a request are chosen, checked at construction. No torch.

The limits of fields are part of the interface: without them one request could exhaust an engine
that serves others. The tensors of `SamplingState` are sized by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from .arguments import Range, check_fields, check_integer
from .errors import RequestError
from .structured_output import StructuredOutput

MAX_TOKENS_LIMIT = 1 << 20
MAX_TOKEN_ID = (1 << 31) - 1
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_LOGPROBS = 20
MAX_COMPLETIONS = 128
MAX_TRUNCATED_TOKENS = 1 << 18
DEFAULT_MAX_TOKENS = 64

NumTokens = Annotated[int, Range(0, MAX_TOKENS_LIMIT)]
NumLogprobs = Annotated[int, Range(0, MAX_LOGPROBS)]
TokenId = Annotated[int, Range(0, MAX_TOKEN_ID)]


class LogitBias(Mapping[int, float]):
    """Token id → number added to its logit. Immutable and hashable."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = {token_id: float(bias) for token_id, bias in values.items()}

    def __getitem__(self, token_id: int) -> float:
        return self._values[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Values of the fields of `SamplingParams` that a request leaves out, which a model can set.

    Without a model's, nothing is cut off: tokens are drawn from its distribution.
    """

    max_tokens: int | None = None
    """None: 64, or as many as fit in a chat over HTTP."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


NEUTRAL = SamplingDefaults()
_SET_BY_MODELS = tuple(field.name for field in fields(SamplingDefaults))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen.

    Fields that are None have the default of the model, from its `generation_config.json` (see
    `EngineConfig.generation_config`), or else the value given below as neutral. The names are those
    of the OpenAI API and of vLLM. Mappings and sequences are copied into immutable ones, integers
    given for real numbers become floats.

    Attributes:
        max_tokens: maximum tokens to generate. With 0 the request ends with `length` once its
            prompt is computed. None: the model's `max_new_tokens`, or 64, but at least
            `min_tokens`.
        min_tokens: minimum tokens to generate, at most `max_tokens`. Before that, end-of-sequence
            tokens and `stop_token_ids` cannot be drawn, and stop strings within their text are
            ignored.
        temperature: divisor of the logits; 0 takes the most probable token. Neutral: 1.
        top_k: draw from the k most probable tokens; 0 is off, and so is -1, which is stored as 0.
            Neutral: 0.
        top_p: draw from the most probable tokens that together reach this probability. Neutral: 1,
            which is off; 0 is stored as `top_k` 1.
        min_p: draw from tokens at least this fraction as probable as the best one. Neutral: 0,
            which is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occurred
            in prompt or output. Neutral: 1, which is off.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted once for each occurrence in the output.
        allowed_token_ids: the only token ids that can be drawn; None: all. Needs the token masks of
            `EngineConfig.structured_output`.
        bad_words: texts that the output cannot contain as their own tokens, at the beginning of a
            word or within: the last token of one cannot be drawn after the others. Needs token
            masks too.
        logit_bias: added to the logits of these token ids.
        seed: seed of the random draws; `None`: the engine chooses one, and so does -1, which is
            stored as None.
        n: number of completions of the prompt.
        stop: a string, or several, that end the output.
        stop_token_ids: token ids that end the output, in addition to the model's.
        include_stop_str_in_output: end the text after the stop string that ended it, or after the
            text of the stop token, not before.
        ignore_eos: continue after the model's end-of-sequence tokens.
        logprobs: report the log-probability of each token and of this many of the most probable
            ones; `None` reports none.
        logprob_token_ids: with `logprobs`, report the log-probabilities of these token ids in place
            of the most probable ones. While such a request decodes, nothing is drafted and launches
            have one step.
        prompt_logprobs: the same for each token of the prompt, given the tokens before it. The
            prompt is then computed as a whole, even if the prefix cache has its beginning.
        truncate_prompt_tokens: use the last tokens of the prompt only; -1: as many as leave room
            for `max_tokens`. A longer prompt than 2^18 tokens is refused.
        add_special_tokens: whether the tokenizer adds its tokens to a prompt of text, such as one
            that begins it. None: to texts, not to conversations, whose templates write them.
        skip_special_tokens: omit special tokens from the text, unless the grammar of `structured`
            spells one. The token that ends an output has no text, unless
            `include_stop_str_in_output`.
        structured: a `StructuredOutput`, or a mapping of its fields: the grammar that the output
            follows. Needs `EngineConfig.structured_output`. The end-of-sequence token can only be
            drawn where the grammar may end. A request whose grammar allows nothing else before
            `min_tokens`, or with `ignore_eos`, ends there with `stop`. See
            docs/structured-output.md.

    Raises:
        RequestError: a value has a wrong type or is out of range; it names field, value and range.
    """

    max_tokens: NumTokens | None = None
    min_tokens: NumTokens = 0
    temperature: Annotated[float, Range(0, 100)] | None = None
    top_k: Annotated[int, Range(-1, MAX_TOKEN_ID)] | None = None
    top_p: Annotated[float, Range(0, 1)] | None = None
    min_p: Annotated[float, Range(0, 1)] | None = None
    repetition_penalty: Annotated[float, Range(0, 10, above=True)] | None = None
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    allowed_token_ids: Annotated[Sequence[TokenId], Range(1, 1 << 18)] | None = None
    bad_words: Annotated[Sequence[Annotated[str, Range(1, 256)]], Range(0, 256)] = ()
    logit_bias: Annotated[
        Mapping[TokenId, Annotated[float, Range(-100, 100)]], Range(0, MAX_LOGIT_BIAS_ENTRIES)
    ] = LogitBias({})
    seed: Annotated[int, Range(-1, (1 << 63) - 1)] | None = None
    n: Annotated[int, Range(1, MAX_COMPLETIONS)] = 1
    stop: Annotated[Sequence[Annotated[str, Range(1, 1024)]], Range(0, 16)] = ()
    stop_token_ids: Annotated[Sequence[TokenId], Range(0, 16)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: NumLogprobs | None = None
    logprob_token_ids: Annotated[Sequence[TokenId], Range(0, MAX_LOGPROBS)] = ()
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, Range(-1, MAX_TRUNCATED_TOKENS)] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool = True
    structured: StructuredOutput | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_fields(self, RequestError)
        object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.top_p == 0:
            object.__setattr__(self, "top_k", 1)
            object.__setattr__(self, "top_p", 1.0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.max_tokens is not None:
            check_integer("min_tokens", self.min_tokens, 0, self.max_tokens, " (max_tokens)")
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                f"truncate_prompt_tokens must be -1, or 1 to {MAX_TRUNCATED_TOKENS}, not 0",
                field="truncate_prompt_tokens",
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError(
                "logprob_token_ids needs logprobs: give 0 or more", field="logprob_token_ids"
            )
        if self.structured is not None:
            object.__setattr__(self, "structured", StructuredOutput.of(self.structured))

    def resolved(self, defaults: SamplingDefaults = NEUTRAL) -> SamplingParams:
        """Return the parameters with a value in every field that `SamplingDefaults` has.

        Without `defaults` the result does not depend on the model.
        """
        missing = [name for name in _SET_BY_MODELS if getattr(self, name) is None]
        if not missing:
            return self
        values = {name: getattr(defaults, name) for name in missing}
        if "max_tokens" in values:
            default = values["max_tokens"] or DEFAULT_MAX_TOKENS
            values["max_tokens"] = max(default, self.min_tokens)
        return replace(self, **values)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @property
    def uses_penalties(self) -> bool:
        """Whether the tokens that occurred so far change the logits."""
        return (
            self.repetition_penalty not in (None, 1.0)
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_full_sampler(self) -> bool:
        """Whether the request needs more than the argmax of the model's logits."""
        return (
            not self.is_greedy
            or self.uses_penalties
            or len(self.logit_bias) > 0
            or self.min_tokens > 0
            or self.logprobs is not None
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` for a token id that is not in the model's vocabulary."""
        for field, token_ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("logprob_token_ids", self.logprob_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            check_integer(field, max(token_ids, default=0), 0, vocab_size - 1, " (the vocabulary)")

    @property
    def restricts_tokens(self) -> bool:
        """Whether lists of tokens or words restrict what can be drawn, besides a grammar."""
        return self.allowed_token_ids is not None or len(self.bad_words) > 0
