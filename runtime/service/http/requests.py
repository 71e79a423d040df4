"""Bodies of requests, and their conversations as chat templates read them.

Types are strict; null is the default. Fields of the APIs of OpenAI, vLLM, SGLang and llama.cpp that
this service lacks and that would change the result are refused, unless their value asks for what
happens anyway. `ServiceConfig.unknown_fields` says what happens with other unknown fields.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from ...arguments import allowed_values
from ...bounded_repr import bounded_repr
from ...engine.request_builder import MAX_SALT_CHARS
from ...errors import GrammarError, RequestError
from ...loading.chat_template import MAX_DEPTH, ChatPrompt
from ...prompt_ids import too_long
from ...sampling_params import (
    MAX_COMPLETIONS,
    MAX_LOGPROBS,
    MAX_TOKENS_LIMIT,
    MAX_TRUNCATED_TOKENS,
    SamplingParams,
)
from ...structured_output import StructuredOutput
from ..request_handle import MAX_SECONDS, MAX_TENANT_CHARS, RequestOptions
from .chat_grammars import errors_of, tool_call_grammar
from .exchange import invalid

logger = logging.getLogger("stepgraph.runtime")


def allowed(field: str, *, entry: bool = False) -> Meta:
    """Return the limits of a field of `SamplingParams`, which checks them, or of each `entry`.

    They are for the OpenAPI document.
    """
    values = allowed_values(SamplingParams)[field]
    values = values.entry if entry and values.entry is not None else values
    assert values.range is not None, field
    low, high = values.range.low, values.range.high
    units: dict[type, str] = {str: "Length", Sequence: "Items", Mapping: "Properties"}
    names = "exclusiveMinimum" if values.range.above else "minimum", "maximum"
    if (unit := units.get(values.kind)) is not None:
        names = f"min{unit}", f"max{unit}"
    return Meta(extra_json_schema={names[0]: low, names[1]: high})


Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
TokenId = Annotated[int, allowed("stop_token_ids", entry=True)]
StopString = Annotated[str, allowed("stop", entry=True)]
BadWord = Annotated[str, allowed("bad_words", entry=True)]
Biases = Annotated[
    dict[TokenId, Annotated[float, allowed("logit_bias", entry=True)]],
    allowed("logit_bias"),
    Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
]
Prompts = str | list[str | TokenId | list[TokenId]]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Entries = Annotated[list[dict[str, Any]], Meta(max_length=1 << 14)]
"""Messages, tools or documents."""

_PARAMETERS = {
    "deadline": "timeout",
    "first_token_deadline": "first_token_timeout",
    "tenant": "user",
    "template_kwargs": "chat_template_kwargs",
}
"""Fields for parameters of the engine that have another name."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of the OpenAI API, with vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`response_format.json_schema` of the OpenAI API. The output follows it, `strict` or not."""

    schema: dict[str, Any] | bool
    name: str | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format` of the OpenAI API: `text`, `json_object` or `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None
    """A schema in the place of `json_schema.schema`, as llama.cpp has it; also of `json_object`."""

    def structured(self) -> StructuredOutput | None:
        """Return what the output must be."""
        if self.type == "text":
            return None
        if self.type == "json_object" and self.schema is None:
            return StructuredOutput(json_object=True)
        schema, field = self.schema, "response_format.schema"
        if schema is None:
            if self.json_schema is None:
                field = "response_format.json_schema"
                raise invalid(field, f"{field} is missing: the type json_schema needs a schema")
            schema, field = self.json_schema.schema, "response_format.json_schema.schema"
        with errors_of(field):
            return StructuredOutput(json=schema)


class SamplingFields(msgspec.Struct, kw_only=True):
    """How tokens are chosen, under the names that the APIs of OpenAI and Ollama share."""

    temperature: Annotated[float, allowed("temperature")] | None = None
    top_p: Annotated[float, allowed("top_p")] | None = None
    top_k: Annotated[int, allowed("top_k")] | None = None
    min_p: Annotated[float, allowed("min_p")] | None = None
    presence_penalty: Annotated[float, allowed("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, allowed("frequency_penalty")] | None = None
    seed: Annotated[int, allowed("seed")] | None = None
    stop: StopString | Annotated[list[StopString], allowed("stop")] | None = None


class SamplingRequest(SamplingFields, kw_only=True):
    """The common fields of requests for tokens."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, allowed("max_tokens")] | None = None
    min_tokens: Annotated[int, allowed("min_tokens")] | None = None
    repetition_penalty: Annotated[float, allowed("repetition_penalty")] | None = None
    logit_bias: Biases | None = None
    n: Annotated[int, allowed("n")] | None = None
    stop_token_ids: Annotated[list[TokenId], allowed("stop_token_ids")] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], allowed("allowed_token_ids")] | None = None
    bad_words: Annotated[list[BadWord], allowed("bad_words")] | None = None
    prompt_logprobs: Annotated[int, allowed("prompt_logprobs")] | None = None
    logprob_token_ids: Annotated[list[TokenId], allowed("logprob_token_ids")] | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, allowed("truncate_prompt_tokens")] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    timeout: Seconds | None = None
    """Seconds until the last token."""
    first_token_timeout: Seconds | None = None
    """Seconds until the first token."""
    user: Annotated[str, Meta(max_length=MAX_TENANT_CHARS)] | None = None
    """The tenant, for fairness."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    """One of `json`, `regex`, `choice`, `grammar` and `json_object`, as in vLLM."""

    def params(
        self, max_tokens: int, logprobs: int | None, forced: StructuredOutput | None = None
    ) -> SamplingParams:
        """Return how tokens are chosen; `forced` is what another field demands of the output."""
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "prompt_logprobs is not available with stream")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options needs stream")
        structured = self._structured(forced)
        names = SamplingRequest.__struct_fields__ & allowed_values(SamplingParams).keys()
        given = {name: getattr(self, name) for name in names}
        fields = {name: value for name, value in given.items() if value is not None}
        fields |= {"max_tokens": max_tokens, "logprobs": logprobs, "structured": structured}
        return SamplingParams(**fields)

    def _structured(self, forced: StructuredOutput | None) -> StructuredOutput | None:
        form, fields = self.response_format, self.structured_outputs
        demands = {
            "tool_choice": forced,
            "response_format": None if form is None else form.structured(),
        }
        if fields is not None:
            with errors_of("structured_outputs"):
                kinds = {kind: value for kind, value in fields.items() if value is not None}
                demands["structured_outputs"] = StructuredOutput.of(kinds)
        given = [name for name, structured in demands.items() if structured is not None]
        if len(given) > 1:
            raise invalid(given[1], f"{' and '.join(given)} contradict each other: give one")
        return demands[given[0]] if given else None

    def param_of(self, error: RequestError) -> str | None:
        """Return the field that an error of the engine is about; None if it is about none."""
        if error.field == "structured":
            if self.response_format is not None and self.response_format.type != "text":
                return "response_format"
            if self.structured_outputs is not None:
                return "structured_outputs"
            return "tools" if isinstance(error, GrammarError) else "tool_choice"
        return None if error.field is None else _PARAMETERS.get(error.field, error.field)

    def options(self, traceparent: str | None) -> RequestOptions:
        """Return the options for an `AsyncEngine`; `traceparent` is a header of the request."""
        return RequestOptions(
            priority=self.priority or 0,
            deadline=self.timeout,
            first_token_deadline=self.first_token_timeout,
            cache_salt=self.cache_salt,
            tenant=self.user,
            traceparent=traceparent,
        )


class CompletionRequest(SamplingRequest, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: Prompts
    suffix: str | None = None
    """Text after the completion, for models that fill in the middle; empty: none."""
    logprobs: Annotated[int, allowed("logprobs")] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_COMPLETIONS)] | None = None
    """Completions to decode; the `n` with the largest mean log-probability are returned."""

    @property
    def num_decoded(self) -> int:
        """Completions of each prompt that are decoded; the `n` best ones are returned."""
        return self.best_of or self.n or 1

    def params(
        self, max_tokens: int, logprobs: int | None, forced: StructuredOutput | None = None
    ) -> SamplingParams:
        """See `SamplingRequest.params`."""
        num_returned = self.n or 1
        if self.num_decoded < num_returned:
            raise invalid("best_of", f"best_of is {self.best_of}; allowed is n or more: {self.n}")
        if self.num_decoded == num_returned:
            return super().params(max_tokens, logprobs, forced)
        if self.stream:
            raise invalid("best_of", "best_of is not available with stream: give n")
        params = super().params(max_tokens, logprobs or 0, forced)
        return replace(params, n=self.num_decoded)

    def prompts(self, *, max_prompts: int, max_model_len: int) -> list[str] | list[list[int]]:
        """Return the prompts, all of them texts or all of them token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        is_one = bool(prompt) and isinstance(prompt[0], int)
        if len(prompt) > max_prompts and not is_one:
            raise invalid("prompt", f"prompt has {len(prompt)} prompts, more than {max_prompts}")
        most = max_model_len if self.truncate_prompt_tokens is None else MAX_TRUNCATED_TOKENS
        for item in [prompt] if is_one else prompt:
            if isinstance(item, list) and len(item) > most:
                raise too_long(f"{len(item)} tokens", most)
        kinds = {type(item) for item in prompt}
        if kinds == {int}:
            return [cast(list[int], prompt)]
        if kinds in ({str}, {list}):
            return cast(list[str] | list[list[int]], prompt)
        raise invalid(
            "prompt",
            "prompt must be a text, token ids, or a list of texts or of token ids: it is empty or"
            " mixes them",
        )


class ChatRequest(SamplingRequest, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: Entries
    max_completion_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Entries | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    documents: Entries | None = None
    chat_template: str | None = None
    """The name of a template of the checkpoint."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None

    def param_of(self, error: RequestError) -> str | None:
        """See `SamplingRequest.param_of`."""
        if error.field == "logprobs":
            return "top_logprobs"
        if error.field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if error.field == "prompt" else super().param_of(error)

    @property
    def continued(self) -> str:
        """The text of the last message, if the model continues it; empty otherwise."""
        if not (self.continue_final_message and self.messages):
            return ""
        where = f"messages[{len(self.messages) - 1}].content"
        return "\n".join(content_texts(self.messages[-1].get("content"), where))

    def template_kwargs(self) -> dict[str, Any]:
        """Return the variables of the template, `reasoning_effort` among them as in vLLM."""
        effort, given = self.reasoning_effort, self.chat_template_kwargs or {}
        if effort is None:
            return given
        return {"reasoning_effort": effort, "enable_thinking": effort != "none", **given}

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the model may call."""
        for index, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                field = f"tools[{index}].function.name"
                raise invalid(field, f"{field} must be a string")
        return None if self.tool_choice == "none" else self.tools or None

    def forced_call(self, tool_parser: str | None) -> StructuredOutput | None:
        """Return the form of an answer that must be a call, as the service's parser reads it."""
        choice = self.tool_choice
        if choice is None or choice in ("none", "auto"):
            return None
        name = None
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
        tools = {
            index: tool["function"]
            for index, tool in enumerate(self.offered_tools() or ())
            if choice == "required" or tool["function"]["name"] == name
        }
        if not tools:
            raise invalid("tool_choice", "tool_choice demands a call, but tools has no such tool")
        return tool_call_grammar(tools, tool_parser)

    def num_tokens(self, default: int | None) -> int:
        """Return the maximum tokens of an answer, without any `default` the longest sequence."""
        for given in (self.max_completion_tokens, self.max_tokens, default):
            if given is not None:
                return given
        return MAX_TOKENS_LIMIT

    def num_logprobs(self) -> int | None:
        """Return how many of the most probable tokens to report; None for no report at all."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs")
        return None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Entries | None = None
    tools: Entries | None = None
    documents: Entries | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def param_of(self, error: RequestError) -> str | None:
        """See `SamplingRequest.param_of`."""
        if error.field in ("prompt", "text"):
            return "prompt" if self.messages is None else "messages"
        return None if error.field is None else _PARAMETERS.get(error.field, error.field)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


def chat_prompt(request: ChatRequest | TokenizeRequest) -> ChatPrompt:
    """Return the prompt of a conversation."""
    begins = request.add_generation_prompt
    tools, kwargs = request.tools, request.chat_template_kwargs or {}
    if isinstance(request, ChatRequest):
        tools, kwargs = request.offered_tools(), request.template_kwargs()
    return ChatPrompt(
        template_messages(request.messages or ()),
        tools=tools,
        documents=request.documents,
        add_generation_prompt=not request.continue_final_message if begins is None else begins,
        continue_final_message=bool(request.continue_final_message),
        chat_template=request.chat_template,
        template_kwargs=kwargs,
    )


TEXT_PARTS = frozenset(
    {"text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"}
)
"""Types of the parts of contents in the APIs of OpenAI; Anthropic's have the first one."""
MAX_ARGUMENTS_DEPTH = MAX_DEPTH - 8
"""Of nested values; they are themselves nested in the messages that a template gets."""


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose parts have type `text`, and whose calls have objects as arguments.

    Arguments that are not a JSON object become an empty one: a model may have written them, and
    the conversation can then continue.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    converted = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = content_texts(content, f"{where}.content")
        converted["content"] = [{"type": "text", "text": text} for text in texts]
    elif content is None:
        converted["content"] = ""
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise invalid(f"{where}.tool_calls", f"{where}.tool_calls must be a list")
        converted["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return converted


def content_texts(content: object, where: str) -> list[str]:
    """Return the texts of a content: a text, a list of parts, or null, which has none.

    Raises:
        HttpError: it is something else, or a part is not a text; `param` names it.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | None):
        raise invalid(where, f"{where} must be a text or a list of parts")
    return [_text(part, f"{where}[{index}]") for index, part in enumerate(content or ())]


def _text(part: object, where: str) -> str:
    """Return the text of a part of a content."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
        shown = bounded_repr(part, 60)
        problem = f"{where} ({shown}) is not supported: the parts of a content must be texts"
        raise invalid(where, problem, "unsupported_field")
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", f"{where}.text must be a string")
    return text


def _tool_call(call: object, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments decoded; OpenAI sends them as a string of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise invalid(f"{where}.function", f"{where}.function must be an object")
    arguments = call_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def call_arguments(given: object) -> dict[str, Any]:
    """Return the arguments of a call as an object: an empty one if they are another JSON text."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, Any])
        except (ValueError, RecursionError):
            return {}
    return given if isinstance(given, dict) and not _is_deep(given, MAX_ARGUMENTS_DEPTH) else {}


def _is_deep(value: object, most: int) -> bool:
    """Return whether objects and arrays nest deeper than `most` levels."""
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deep(item, most - 1) for item in items)


Policy = Literal["error", "warn", "ignore"]
MAX_LOGGED_NAMES = 1000
"""Names of which each is logged once; further ones are not logged at all."""


_EMPTY: Final[tuple[Any, ...]] = (None, False, "", [], {}, 0)


def _named(names: str, *neutral: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), neutral)


_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    # Of OpenAI, vLLM, SGLang, llama.cpp and others, grouped by their neutral values.
    **_named(
        "functions function_call reasoning conversation"
        " guided_json guided_regex guided_choice"
        " guided_grammar guided_json_object guided_whitespace_pattern prompt_embeds"
        " logits_processors vllm_xargs kv_transfer_params ec_transfer_params use_beam_search"
        " early_stopping repetition_detection watermarking mm_processor_kwargs media_io_kwargs"
        " return_prompt_text prompt_logprob_token_ids trace_decode_token_ids regex ebnf"
        " structural_tag no_stop_trim stop_regex lora_path custom_logit_processor custom_params"
        " session_params input_ids task return_hidden_states return_routed_experts min_new_tokens"
        " grammar grammar_lazy json_schema samplers logit_processors lora post_sampling_probs"
        " response_fields return_tokens n_probs n_indent input_prefix input_suffix input_extra"
        " min_keep mirostat top_a eta_cutoff epsilon_cutoff dry_multiplier xtc_probability"
        " dynatemp_range no_repeat_ngram_size penalty_alpha mcp_servers container template images",
        *_EMPTY,
    ),
    **_named("audio prediction web_search_options sampling_seed enable_thinking thinking", None),
    **_named("modalities", None, [], ["text"]),
    **_named("verbosity", None, "medium"),
    **_named("include_reasoning spaces_between_special_tokens detokenize", None, True),
    **_named("separate_reasoning stream_reasoning do_sample", None, True),
    **_named("truncation_side", None, "left"),
    **_named("penalize_newline", None, True),
    **_named("length_penalty repeat_penalty typical_p typ_p tfs_z n_cmpl num_beams", None, 1),
    **_named("best_of", None, 1),
    **_named("thinking_token_budget max_new_tokens n_predict adaptive_target", None, -1),
    **_named("reasoning_budget", None, -1),
    **_named("top_n_sigma t_max_predict_ms", None, 0, -1),
    **_named("reasoning_format", None, "auto"),
}
"""Fields that are refused, and their values that change nothing."""

_INSTEAD: Final = {
    "functions": "tools",
    "function_call": "tool_choice",
    "reasoning": "reasoning_effort",
    "conversation": "previous_response_id of /v1/responses",
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
    _named(
        "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention"
        " request_id rid session_id stream_interval n_keep n_discard repeat_last_n cache_prompt"
        " id_slot timings_per_token return_progress n_cache_reuse sse_ping_interval custom_labels"
        " extra_key cache_control inference_geo diagnostics speed context_management"
        # Of Ollama: settings of its runner.
        " num_ctx num_batch num_gpu main_gpu low_vram f16_kv vocab_only use_mmap use_mlock"
        " num_thread num_keep numa"
        # Settings of methods that a field of the table switches on.
        " mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length"
        " dry_penalty_last_n dry_sequence_breakers"
    )
)
"""Fields that change nothing about the result: they are accepted and have no effect."""


class UnknownFields:
    """Finds the fields of bodies that the type of the request lacks."""

    def __init__(self, policy: Policy, kinds: Collection[type[msgspec.Struct]]) -> None:
        """Follow a policy. `kinds` are the types of all requests for tokens."""
        self._policy = policy
        chats = [kind for kind in kinds if issubclass(kind, SamplingRequest)]
        self._all = frozenset().union(*[kind.__struct_fields__ for kind in chats])
        self._logged: set[str] = set()

    def check(self, body: bytes | bytearray, kind: type[Any]) -> None:
        """Refuse or log the unknown fields of a body, which has been decoded as a `kind`."""
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in given.keys() - {*kind.__struct_encode_fields__}:
            self._check_field(name, given[name])

    def _check_field(self, name: str, raw: msgspec.Raw) -> None:
        neutral, instead = _REFUSED.get(name), _INSTEAD.get(name)
        if name in self._all and name not in _HARMLESS:
            neutral = neutral or _EMPTY
            instead = instead or "the other endpoint, which has it"
        if neutral is not None:
            value = msgspec.json.decode(raw)
            # Unlike in Python, true is not 1.
            if (type(value) is bool, value) not in [(type(n) is bool, n) for n in neutral]:
                instead = f": use {instead}" if instead else ""
                shown = bounded_repr(value, 60)
                raise invalid(
                    name,
                    f"{name} ({shown}) is not supported here, and would change the result{instead}",
                    "unsupported_field",
                )
        elif name in _HARMLESS or self._policy == "ignore":
            return
        elif self._policy == "error":
            shown = bounded_repr(name)
            raise invalid(name[:100], f"there is no field {shown}", "unknown_field")
        elif name not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
            self._logged.add(name)
            logger.warning(
                "requests have the unknown field %s, which is ignored (logged once a name)",
                bounded_repr(name),
            )
