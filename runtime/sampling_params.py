"""`SamplingParams`: how the tokens of a request are chosen, checked at construction. No torch.

The limits below are part of the interface: without them one request could exhaust an engine that
serves others. The tensors of `SamplingState` are sized by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import RequestError
from .structured_output import StructuredOutput

__all__ = ["NEUTRAL", "LogitBias", "SamplingDefaults", "SamplingParams"]

MAX_TOKENS_LIMIT = 1 << 20
MAX_TEMPERATURE = 100.0
MAX_TOKEN_ID = (1 << 31) - 1
MAX_REPETITION_PENALTY = 10.0
MAX_ADDITIVE_PENALTY = 2.0
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_LOGIT_BIAS = 100.0
MAX_SEED = (1 << 63) - 1
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 16
MAX_LOGPROBS = 20
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_TRUNCATED_TOKENS = 1 << 18

DEFAULT_MAX_TOKENS = 64

_MAX_SHOWN_CHARS = 80


class LogitBias(Mapping[int, float]):
    """Token id → number added to its logit. Immutable and hashable."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = dict(values)

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
        max_tokens: maximum tokens to generate, 0 to 2^20. With 0 the request ends with `length`
            once its prompt is computed. None: the model's `max_new_tokens`, or 64, but at least
            `min_tokens`.
        min_tokens: minimum tokens to generate, 0 to `max_tokens`. Before that,
            end-of-sequence tokens and `stop_token_ids` cannot be drawn, and stop strings within
            their text are ignored.
        temperature: divisor of the logits, 0 to 100; 0 takes the most probable token. Neutral: 1.
        top_k: draw from the k most probable tokens; 0 is off, and so is -1, which is stored as 0.
            Neutral: 0.
        top_p: draw from the most probable tokens that together reach this probability, above 0 to
            1. Neutral: 1, which is off.
        min_p: draw from tokens at least this fraction as probable as the best one, 0 to 1. Neutral:
            0, which is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occurred
            in prompt or output, above 0 to 10. Neutral: 1, which is off.
        presence_penalty: subtracted from the logits of tokens in the output, -2 to 2.
        frequency_penalty: subtracted once for each occurrence in the output, -2 to 2.
        allowed_token_ids: the only token ids that can be drawn, 1 to 2^18 of them; None: all. Needs
            the token masks of `EngineConfig.structured_output`.
        bad_words: up to 256 texts of 1 to 256 characters that the output cannot contain as their
            own tokens, at the beginning of a word or within: the last token of one cannot be drawn
            after the others. Needs token masks too.
        logit_bias: added to the logits of these token ids, at most 300 of them, -100 to 100.
        seed: seed of the random draws, 0 to 2^63 - 1; `None`: the engine chooses one.
        n: number of completions of the prompt, 1 to 128.
        stop: a string, or up to 16, of 1 to 1024 characters each, that end the output.
        stop_token_ids: up to 16 token ids that end the output, in addition to the model's.
        include_stop_str_in_output: end the text after the stop string that ended it, or after the
            text of the stop token, not before.
        ignore_eos: continue after the model's end-of-sequence tokens.
        logprobs: report the log-probability of each token and of this many of the most probable
            ones, 0 to 20; `None` reports none.
        logprob_token_ids: with `logprobs`, report the log-probabilities of these token ids, at most
            20, in place of the most probable ones. While such a request decodes, nothing is drafted
            and launches have one step.
        prompt_logprobs: the same for each token of the prompt, given the tokens before it. The
            prompt is then computed as a whole, even if the prefix cache has its beginning.
        truncate_prompt_tokens: use the last tokens of the prompt only, 1 to 2^18 of them; -1: as
            many as leave room for `max_tokens`. A longer prompt than 2^18 tokens is refused.
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

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logit_bias: Mapping[int, float] = LogitBias({})
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool = True
    structured: StructuredOutput | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        most = MAX_TOKENS_LIMIT
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, MAX_TOKENS_LIMIT)
            most = self.max_tokens
        _check_int("min_tokens", self.min_tokens, 0, most)
        if self.top_k is not None:
            _check_int("top_k", self.top_k, -1, MAX_TOKEN_ID)
            object.__setattr__(self, "top_k", max(self.top_k, 0))
        _check_int("n", self.n, 1, MAX_N)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), 0, MAX_LOGPROBS)
        for field in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, field), bool):
                raise _refusal(field, getattr(self, field), "True or False")
        if not isinstance(self.add_special_tokens, bool | None):
            raise _refusal("add_special_tokens", self.add_special_tokens, "True, False or None")
        if self.truncate_prompt_tokens is not None:
            field, most = "truncate_prompt_tokens", MAX_TRUNCATED_TOKENS
            _check_int(field, self.truncate_prompt_tokens, -1, most)
            if not self.truncate_prompt_tokens:
                raise _refusal(field, 0, f"-1, or 1 to {most}")

        self._set_real("temperature", 0.0, MAX_TEMPERATURE)
        self._set_real("top_p", 0.0, 1.0, above=True)
        self._set_real("min_p", 0.0, 1.0)
        self._set_real("repetition_penalty", 0.0, MAX_REPETITION_PENALTY, above=True)
        self._set_real("presence_penalty", -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)
        self._set_real("frequency_penalty", -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)

        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set_strings("stop", stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
        self._set_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        self._set_token_ids("stop_token_ids", MAX_STOP_TOKEN_IDS)
        self._set_token_ids("logprob_token_ids", MAX_LOGPROBS)
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError(
                "SamplingParams: logprob_token_ids needs logprobs: give 0 or more",
                field="logprob_token_ids",
            )
        if self.allowed_token_ids is not None:
            self._set_token_ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, least=1)
        if self.structured is not None:
            object.__setattr__(self, "structured", StructuredOutput.of(self.structured))

    def _set_real(self, field: str, low: float, high: float, *, above: bool = False) -> None:
        """Checks a real field and stores it as a float; `above` leaves `low` itself out."""
        value = getattr(self, field)
        if value is not None or field not in _SET_BY_MODELS:
            checked = _checked_real(field, value, low, high, above=above)
            object.__setattr__(self, field, checked)

    def _set_strings(self, field: str, value: object, most: int, most_chars: int) -> None:
        """Checks a sequence of strings and stores it as a tuple."""
        allowed = f"a sequence of at most {most} strings of 1 to {most_chars} characters"
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
            raise _refusal(field, value, allowed)
        if len(value) > most:
            raise _refusal(f"len({field})", len(value), f"at most {most}")
        for string in value:
            if not isinstance(string, str) or not 1 <= len(string) <= most_chars:
                raise _refusal(field, string, allowed)
        object.__setattr__(self, field, tuple(value))

    def _set_token_ids(self, field: str, most: int, *, least: int = 0) -> None:
        """Checks a sequence of token ids and stores it as a tuple."""
        value = getattr(self, field)
        allowed = f"a sequence of {least} to {most} token ids"
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
            raise _refusal(field, value, allowed)
        if not least <= len(value) <= most:
            raise _refusal(f"len({field})", len(value), f"{least} to {most}")
        for token_id in value:
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
                _check_int(field, token_id, 0, MAX_TOKEN_ID)
        object.__setattr__(self, field, tuple(value))

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
        """Checks the token ids named by this request against the model's vocabulary.

        Raises:
            RequestError: a field of token ids has one that is not in it.
        """
        for field, token_ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("logprob_token_ids", self.logprob_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            largest = max(token_ids, default=0)
            if largest >= vocab_size:
                raise _refusal(field, largest, f"a token id from 0 to {vocab_size - 1}")

    @property
    def restricts_tokens(self) -> bool:
        """Whether lists of tokens or words restrict what can be drawn, besides a grammar."""
        return self.allowed_token_ids is not None or len(self.bad_words) > 0


def _checked_bias(value: Mapping[int, float]) -> LogitBias:
    entries = f"a mapping of at most {MAX_LOGIT_BIAS_ENTRIES} token ids to numbers"
    if not isinstance(value, Mapping):
        raise _refusal("logit_bias", value, entries)
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise _refusal("len(logit_bias)", len(value), f"at most {MAX_LOGIT_BIAS_ENTRIES}")
    checked = {}
    for token_id, bias in value.items():
        _check_int("logit_bias", token_id, 0, MAX_TOKEN_ID)
        checked[token_id] = _checked_real(
            f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS
        )
    return LogitBias(checked)


def _check_int(field: str, value: object, low: int, high: int) -> None:
    # bool is a subclass of int, but `top_k=True` is a mistake and not a 1.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refusal(field, value, f"an integer from {low} to {high}")


def _checked_real(
    field: str, value: object, low: float, high: float, *, above: bool = False
) -> float:
    allowed = f"a number {f'above {low:g} and up' if above else f'from {low:g}'} to {high:g}"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _refusal(field, value, allowed)
    # NaN compares false with everything, so it fails here; an int too large for a float does too.
    if not low <= value <= high or (above and value == low):
        raise _refusal(field, value, allowed)
    return float(value)


def _refusal(field: str, value: object, allowed: str) -> RequestError:
    name = field.removeprefix("len(").rstrip(")").partition("[")[0]
    return RequestError(
        f"SamplingParams: {field} is {_shown(value)}; allowed is {allowed}", field=name
    )


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return "an enormous integer"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."
