"""Fields of requests that this service lacks.

The table has the fields of the APIs of OpenAI, vLLM, SGLang and llama.cpp that would change the
result. One is refused unless its value asks for what happens anyway. `ServiceConfig.unknown_fields`
says what happens with fields outside the table.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Final, Literal

import msgspec

from ...bounded_repr import bounded_repr
from .exchange import HttpError

__all__ = ["FieldPolicy", "UnknownFields"]

logger = logging.getLogger("stepgraph.runtime")

FieldPolicy = Literal["error", "warn", "ignore"]
MAX_LOGGED_NAMES = 1000
"""Names of which each is logged once; further ones are not logged at all."""


_EMPTY: Final[tuple[Any, ...]] = (None, False, "", [], {}, 0)

_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        (
            # OpenAI
            *("suffix", "functions", "function_call", "reasoning"),
            # vLLM
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("guided_json_object", "guided_whitespace_pattern", "prompt_embeds"),
            *("logits_processors", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"),
            *("use_beam_search", "early_stopping", "repetition_detection", "watermarking"),
            *("mm_processor_kwargs", "media_io_kwargs", "return_prompt_text"),
            *("prompt_logprob_token_ids", "trace_decode_token_ids"),
            # SGLang
            *("regex", "ebnf", "structural_tag", "no_stop_trim", "stop_regex", "lora_path"),
            *("custom_logit_processor", "custom_params", "session_params", "input_ids", "task"),
            *("return_hidden_states", "return_routed_experts", "min_new_tokens"),
            # llama.cpp
            *("grammar", "grammar_lazy", "json_schema", "samplers", "logit_processors", "lora"),
            *("post_sampling_probs", "response_fields", "return_tokens", "n_probs", "n_indent"),
            *("input_prefix", "input_suffix", "input_extra", "min_keep", "mirostat", "top_a"),
            *("eta_cutoff", "epsilon_cutoff", "dry_multiplier", "xtc_probability"),
            *("dynatemp_range", "no_repeat_ngram_size", "penalty_alpha"),
        ),
        _EMPTY,
    ),
    **dict.fromkeys(
        (
            *("audio", "prediction", "web_search_options"),
            *("sampling_seed", "enable_thinking", "thinking"),
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            *("include_reasoning", "spaces_between_special_tokens", "detokenize"),
            *("separate_reasoning", "stream_reasoning", "do_sample"),
        ),
        (None, True),
    ),
    **dict.fromkeys(
        ("length_penalty", "repeat_penalty", "typical_p", "typ_p", "tfs_z", "n_cmpl", "num_beams"),
        (None, 1),
    ),
    **dict.fromkeys(
        (
            *("thinking_token_budget", "max_new_tokens", "n_predict", "adaptive_target"),
            "reasoning_budget",
        ),
        (None, -1),
    ),
    **dict.fromkeys(("top_n_sigma", "t_max_predict_ms"), (None, 0, -1)),
    "modalities": (None, [], ["text"]),
    "verbosity": (None, "medium"),
    "truncation_side": (None, "left"),
    "reasoning_format": (None, "auto"),
}
"""Fields that are refused, and their values that change nothing."""

_INSTEAD: Final = {
    "functions": "tools",
    "function_call": "tool_choice",
    "reasoning": "reasoning_effort",
    **dict.fromkeys(("guided_json", "json_schema"), "response_format or structured_outputs.json"),
    **dict.fromkeys(("guided_regex", "regex"), "structured_outputs.regex"),
    "guided_choice": "structured_outputs.choice",
    **dict.fromkeys(("guided_grammar", "ebnf", "grammar"), "structured_outputs.grammar"),
    "guided_json_object": 'response_format {"type": "json_object"}',
    "min_new_tokens": "min_tokens",
    **dict.fromkeys(("max_new_tokens", "n_predict"), "max_tokens"),
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "input_ids": "prompt of /v1/completions",
    "n_cmpl": "n",
    "n_probs": "logprobs",
    "repeat_penalty": "repetition_penalty",
    "t_max_predict_ms": "timeout",
    "return_tokens": "return_token_ids",
    **dict.fromkeys(("enable_thinking", "thinking"), "chat_template_kwargs"),
    "do_sample": "temperature",
}
"""Fields of this service with the same effect."""

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
        """Refuse or log the unknown fields of a body, which has been decoded as a `kind`."""
        known = self._kinds.get(kind)
        if known is None:
            return
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if given.keys() <= known:
            return
        for name in given.keys() - known:
            self._check_field(name, given[name])

    def _check_field(self, name: str, raw: msgspec.Raw) -> None:
        neutral, instead = _REFUSED.get(name), _INSTEAD.get(name)
        if name in self._all:
            neutral, instead = _EMPTY, "the other endpoint, which has it"
        if neutral is not None:
            value = msgspec.json.decode(raw)
            if not any(_same(value, other) for other in neutral):
                instead = f": use {instead}" if instead else ""
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
