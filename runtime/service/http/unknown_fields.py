"""Fields of requests that this service lacks.

The table has the fields of the APIs of OpenAI, vLLM, SGLang and llama.cpp that would change the
result. One is refused unless its value asks for what happens anyway. `ServiceConfig.unknown_fields`
says what happens with fields outside the table.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import msgspec

from ...bounded_repr import bounded_repr
from .http_errors import HttpError

__all__ = ["FieldPolicy", "UnknownFields"]

logger = logging.getLogger("stepgraph.runtime")

FieldPolicy = Literal["error", "warn", "ignore"]
MAX_LOGGED_NAMES = 1000
"""Names of which each is logged once; further ones are not logged at all."""


class _Field(NamedTuple):
    """A field that is refused."""

    neutral: tuple[Any, ...] = (None, False, "", [], {})
    """Values that are accepted, since they change nothing."""
    instead: str = ""
    """The field of this service with the same effect."""


def _off(*values: Any, instead: str = "") -> _Field:
    """A field that these values switch off."""
    return _Field((None, *values), instead)


_GRAMMAR = _Field(instead="structured_outputs.grammar, in Lark's syntax or as an EBNF with ::=")
_REGEX = _Field(instead="structured_outputs.regex")
_SCHEMA = _Field(instead="response_format or structured_outputs.json")
_CHOICE = _Field(instead="structured_outputs.choice")
_MAX_TOKENS = _off(-1, instead="max_tokens")
_PENALTY = _off(1.0, instead="repetition_penalty")
_REASONING_OUT = _off(True)

_REFUSED: dict[str, _Field] = {
    # OpenAI
    "suffix": _Field(),
    "functions": _Field(instead="tools"),
    "function_call": _Field(instead="tool_choice"),
    "audio": _off(),
    "modalities": _off([], ["text"]),
    "prediction": _off(),
    "web_search_options": _off(),
    "verbosity": _off("medium"),
    "reasoning": _off({}, instead="reasoning_effort"),
    # vLLM
    "guided_json": _SCHEMA,
    "guided_regex": _REGEX,
    "guided_choice": _CHOICE,
    "guided_grammar": _GRAMMAR,
    "guided_json_object": _Field(instead='response_format {"type": "json_object"}'),
    "guided_whitespace_pattern": _Field(),
    "prompt_embeds": _Field(),
    "logits_processors": _Field(),
    "vllm_xargs": _Field(),
    "kv_transfer_params": _Field(),
    "ec_transfer_params": _Field(),
    "use_beam_search": _Field(),
    "length_penalty": _off(1.0),
    "early_stopping": _Field(),
    "repetition_detection": _Field(),
    "thinking_token_budget": _off(-1),
    "include_reasoning": _REASONING_OUT,
    "spaces_between_special_tokens": _off(True),
    "truncation_side": _off("left"),
    "detokenize": _off(True),
    "watermarking": _Field(),
    "mm_processor_kwargs": _Field(),
    "media_io_kwargs": _Field(),
    "return_prompt_text": _Field(),
    "prompt_logprob_token_ids": _Field(),
    "trace_decode_token_ids": _Field(),
    # SGLang
    "regex": _REGEX,
    "ebnf": _GRAMMAR,
    "structural_tag": _Field(),
    "min_new_tokens": _off(0, instead="min_tokens"),
    "max_new_tokens": _off(-1, instead="max_tokens"),
    "sampling_seed": _off(instead="seed"),
    "no_stop_trim": _Field(instead="include_stop_str_in_output"),
    "stop_regex": _Field(),
    "lora_path": _Field(),
    "custom_logit_processor": _Field(),
    "custom_params": _Field(),
    "session_params": _Field(),
    "return_hidden_states": _Field(),
    "return_routed_experts": _Field(),
    "separate_reasoning": _REASONING_OUT,
    "stream_reasoning": _REASONING_OUT,
    "input_ids": _Field(instead="prompt of /v1/completions"),
    "task": _Field(),
    # llama.cpp
    "grammar": _GRAMMAR,
    "grammar_lazy": _Field(),
    "json_schema": _SCHEMA,
    "n_predict": _MAX_TOKENS,
    "n_cmpl": _off(1, instead="n"),
    "n_probs": _off(0, instead="logprobs"),
    "n_indent": _off(0),
    "min_keep": _off(0),
    "repeat_penalty": _PENALTY,
    "mirostat": _off(0),
    "typical_p": _off(1.0),
    "typ_p": _off(1.0),
    "tfs_z": _off(1.0),
    "top_a": _off(0),
    "eta_cutoff": _off(0),
    "epsilon_cutoff": _off(0),
    "top_n_sigma": _off(-1, 0),
    "dry_multiplier": _off(0),
    "xtc_probability": _off(0),
    "dynatemp_range": _off(0),
    "adaptive_target": _off(-1),
    "samplers": _Field(),
    "logit_processors": _Field(),
    "t_max_predict_ms": _off(0, -1, instead="timeout"),
    "post_sampling_probs": _Field(),
    "response_fields": _Field(),
    "return_tokens": _Field(instead="return_token_ids"),
    "lora": _Field(),
    "input_prefix": _Field(),
    "input_suffix": _Field(),
    "input_extra": _Field(),
    "reasoning_format": _off("auto"),
    "reasoning_budget": _off(-1),
    "enable_thinking": _off(instead="chat_template_kwargs"),
    "thinking": _off(instead="chat_template_kwargs"),
    # of several engines
    "num_beams": _off(1),
    "do_sample": _off(True, instead="temperature"),
    "no_repeat_ngram_size": _off(0),
    "penalty_alpha": _off(0),
}
_HARMLESS = frozenset(
    {
        *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "request_id", "rid", "session_id", "stream_interval"),
        *("n_keep", "n_discard", "repeat_last_n"),
        *("cache_prompt", "id_slot", "timings_per_token", "return_progress", "n_cache_reuse"),
        *("sse_ping_interval", "custom_labels", "extra_key"),
        # Settings of methods that a field of the table switches on.
        *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base"),
        *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    }
)
"""Fields that change nothing about the result: they are accepted and have no effect."""


class UnknownFields:
    """Finds the fields of bodies that the type of the request lacks."""

    def __init__(self, policy: FieldPolicy, kinds: Collection[type[msgspec.Struct]]) -> None:
        """Follow a policy. `kinds` are the types of all requests for tokens."""
        self._policy = policy
        self._kinds = {kind: frozenset(kind.__struct_encode_fields__) for kind in kinds}
        self._all = frozenset().union(*self._kinds.values())
        self._logged: set[str] = set()

    def check(self, body: bytes | bytearray, kind: type) -> None:
        """Check the fields of a body, which has been decoded as a request of a type.

        Raises:
            HttpError: a field would change the result; or the policy is `error`, and one is
                unknown.
        """
        known = self._kinds.get(kind)
        if known is None:
            return
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if given.keys() <= known:
            return
        for name in given.keys() - known:
            self._check_field(name, given[name])

    def _check_field(self, name: str, raw: msgspec.Raw) -> None:
        refused = _REFUSED.get(name)
        if refused is None and name in self._all:
            refused = _Field(instead="the other endpoint, which has it")
        if refused is not None:
            value = msgspec.json.decode(raw)
            if not any(_same(value, neutral) for neutral in refused.neutral):
                instead = f": use {refused.instead}" if refused.instead else ""
                shown = bounded_repr(value, 60)
                raise HttpError(
                    400,
                    f"{name} ({shown}) is not supported here, and would change the result{instead}",
                    param=name,
                    code="unsupported_field",
                )
        elif name not in _HARMLESS and self._policy != "ignore":
            self._report(name)

    def _report(self, name: str) -> None:
        shown = bounded_repr(name)
        if self._policy == "error":
            raise HttpError(
                400, f"there is no field {shown}", param=name[:100], code="unknown_field"
            )
        if name not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
            self._logged.add(name)
            logger.warning(
                "requests have the unknown field %s, which is ignored (logged once a name)", shown
            )


def _same(value: object, neutral: object) -> bool:
    """Whether two JSON values are equal; unlike in Python, true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
