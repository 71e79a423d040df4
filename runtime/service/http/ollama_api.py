"""The endpoints of Ollama: `/api/chat`, `/api/generate`, and what models there are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType, defstruct

from ...engine.request_builder import Prompt
from ...engine.request_output import RequestOutput
from ...loading.fill_in_middle import fills_in_middle, middle_ends, middle_prompt
from ..request_handle import Delta
from .chat import ChatAnswer, converse
from .exchange import Dialect, Exchange, HttpError, encode, invalid
from .generation import Operation, Service
from .requests import (
    ChatRequest,
    Entries,
    ResponseFormat,
    SamplingFields,
    TokenId,
    allowed,
    call_arguments,
    chat_prompt,
)
from .responses import ChatChoice, ChatMessage, Function, Usage

VERSION = "0.12.0"
"""The release of Ollama whose API this is: clients compare it with what they need."""
Object = dict[str, Any]
R = TypeVar("R", bound="OllamaRequest")


class Options(
    SamplingFields,
    kw_only=True,
    rename={"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"},
):
    """How tokens are chosen; null is the default of the checkpoint."""

    max_tokens: int | None = None  # negative: no limit
    repetition_penalty: Annotated[float, allowed("repetition_penalty")] | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The common fields of requests for tokens; a stream is the default."""

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | Object | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: float | str | None = None

    def chat(self, service: Service, messages: list[Object], **fields: Any) -> ChatRequest:
        """Return the request in the shape of OpenAI's API, with more of its `fields`."""
        fields |= msgspec.structs.asdict(self.options or Options())
        if fields["max_tokens"] is not None and fields["max_tokens"] < 0:
            fields["max_tokens"] = None
        if isinstance(self.format, dict):
            fields["response_format"] = ResponseFormat("json_schema", schema=self.format)
        elif self.format:
            fields["response_format"] = ResponseFormat("json_object")
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        fields |= {"stream": self.stream is not False, "return_timings": True}
        return ChatRequest(model=service.model_name(self.model), messages=messages, **fields)


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of `/api/chat`."""

    messages: Entries | None = None
    tools: Entries | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of `/api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[TokenId] | None = None


class OllamaShowRequest(msgspec.Struct):
    """The body of `/api/show`."""

    model: str | None = None
    name: str | None = None


_TIMES = ("load_duration", "prompt_eval_duration", "eval_duration", "total_duration")  # in ns
_COUNTS = (*_TIMES, "prompt_eval_count", "eval_count")
OllamaResponse = defstruct(
    "OllamaResponse",
    [
        *(("model", str), ("created_at", str), ("done", bool)),
        *((name, str | None, None) for name in ("response", "thinking", "done_reason")),
        *(("message", Object | None, None), ("context", list[int] | None, None)),
        *((name, int | None, None) for name in _COUNTS),
    ],
)
OllamaModels = defstruct("OllamaModels", [("models", list[Object])])
OllamaModel = defstruct(
    "OllamaModel", [("details", Object), ("model_info", Object), ("capabilities", list[str])]
)
OllamaVersion = defstruct("OllamaVersion", [("version", str)])


class OllamaError(msgspec.Struct):
    """The body of an error response, and the line that ends a stream."""

    error: str


class _OllamaDialect(Dialect):
    error_body = OllamaError
    stream_type = b"application/x-ndjson"
    fields: tuple[tuple[str, str], ...] = (
        ("temperature|top_[kp]|min_p|seed|stop|(presence|frequency)_penalty", r"options.\g<0>"),
        ("repetition_penalty", "options.repeat_penalty"),
        ("max_tokens", "options.num_predict"),
        ("response_format.*", "format"),
        ("reasoning_effort|chat_template_kwargs", "think"),
    )

    def error(self, error: HttpError, request_id: str) -> OllamaError:
        return OllamaError(self.named(error))

    def error_event(self, error: HttpError, request_id: str) -> bytes:
        return encode(self.error(error, request_id)) + b"\n"


class _GenerateDialect(_OllamaDialect):
    fields = (*_OllamaDialect.fields, ("messages.*", "prompt"))


async def _read(service: Service, exchange: Exchange, kind: type[R]) -> R:
    def check(body: bytearray, kind: type) -> None:
        service.fields.check(body, kind)
        options = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("options")
        if options is not None and bytes(options) != b"null":
            service.fields.check(bytes(options), Options)

    return await exchange.read(kind, check)


def _reply(model: str, message: Object, is_chat: bool, **ending: Any) -> Object:
    """Return a response, or a line of a stream; the last one has the fields of the `ending`."""
    if is_chat:
        placed: Object = {"message": {"role": "assistant", **message}}
    else:
        placed = {"response": message.pop("content"), **message}
    head = {"model": model, "created_at": datetime.now(UTC).isoformat(), "done": bool(ending)}
    return {**head, **placed, **ending}


async def ollama_chat(service: Service, exchange: Exchange) -> None:
    """Respond to a conversation as Ollama does; without messages, that the model is loaded."""
    request = await _read(service, exchange, OllamaChatRequest)
    chat = request.chat(service, _messages(request.messages or []), tools=request.tools)
    if chat.messages:
        await converse(service, exchange, chat, OllamaAnswer)
    else:
        loaded = _reply(str(chat.model), {"content": ""}, True, done_reason="load")
        await exchange.respond(loaded)


def _messages(messages: list[Object]) -> list[Object]:
    """Return the messages of a chat; calls get ids, and results the ids of the calls in order."""
    made: list[Object] = []
    waiting: list[str] = []  # ids of calls without a result
    for index, message in enumerate(messages):
        if message.get("images"):
            where = f"messages[{index}].images"
            raise invalid(where, f"{where} are not supported: leave them out, only text is read")
        given = {"name": message.get("tool_name"), **message}
        match message.get("tool_calls"):
            case [*calls] if all(isinstance(call, dict) for call in calls):
                ids = [f"call{index:03}{number:02}" for number in range(len(calls))]
                given["tool_calls"] = [
                    {"id": id, "type": "function", **call}
                    for id, call in zip(ids, calls, strict=True)
                ]
                waiting += ids
        if message.get("role") == "tool" and waiting:
            given.setdefault("tool_call_id", waiting.pop(0))
        made.append(given)
    return made


async def ollama_generate(service: Service, exchange: Exchange) -> None:
    """Respond to a prompt as Ollama does; without one, that the model is loaded."""
    request = await _read(service, exchange, OllamaGenerateRequest)
    texts = {"system": request.system, "user": request.prompt}
    messages = [{"role": role, "content": text} for role, text in texts.items() if text]
    chat = request.chat(service, messages)
    if not (request.prompt or request.suffix):
        loaded = _reply(str(chat.model), {"content": ""}, False, done_reason="load")
        await exchange.respond(loaded)
        return
    tokenizer, text = service.tokenizer(), request.prompt
    if request.suffix:
        text = middle_prompt(tokenizer, text or "", request.suffix)
        chat.stop_token_ids = list(middle_ends(tokenizer))
    elif not request.raw and (tokenizer.chat_templates or request.system):
        text = None
    if text is not None:  # in the place of a conversation, whose answer has no parts
        service = replace(service, parser_names=(None, None))
    prompt: Prompt | None = text
    if request.context:
        follows = chat_prompt(chat) if text is None else text
        prompt = [*request.context, *await service.encode(follows)]
    await converse(service, exchange, chat, GenerateAnswer, prompt)


class OllamaAnswer(ChatAnswer):
    """The answer to a conversation as lines, with whole calls."""

    is_chat = True

    def __init__(self, *arguments: Any) -> None:
        """Take the arguments of a `ChatAnswer`."""
        super().__init__(*arguments)
        self._calls: list[Function] = []
        self._ending: Object = {}  # fields of the last line

    def choice(self, prompt: int, delta: Delta, output: RequestOutput) -> ChatChoice:
        choice = super().choice(prompt, delta, output)
        if (reason := choice.finish_reason) is not None:
            self._ending["done_reason"] = "stop" if reason == "tool_calls" else reason
            if not self.is_chat:
                self._ending["context"] = output.prompt_token_ids + output.token_ids
        message = choice.delta or choice.message
        for call in (message and message.tool_calls) or ():
            if call.id:
                self._calls.append(call.function)
            else:
                self._calls[-1].arguments += call.function.arguments
        return choice

    def body(self, choices: list[ChatChoice], usage: Any) -> Object:
        return self._line(choices[0].message, self._calls, usage)

    def event(self, choice: ChatChoice, usage: Callable[[], Usage]) -> bytes:
        message = choice.delta
        has_text = message and (message.content or message.reasoning_content)
        return encode(self._line(message)) + b"\n" if has_text else b""

    def end(self, usage: Usage) -> bytes:
        lines = [self._line(calls=self._calls)] if self._calls else []
        return b"".join([encode(line) + b"\n" for line in (*lines, self._line(usage=usage))])

    def _line(
        self,
        gained: ChatMessage | UnsetType = UNSET,
        calls: list[Function] | None = None,
        usage: Usage | None = None,
    ) -> Object:
        """Return a line; with a `usage` the last one, or the whole response."""
        message: Object = {"content": (gained and gained.content) or ""}
        if gained and gained.reasoning_content:
            message["thinking"] = gained.reasoning_content
        if calls:
            made = [{"name": c.name, "arguments": call_arguments(c.arguments)} for c in calls]
            message["tool_calls"] = [{"function": function} for function in made]
        ending = {} if usage is None else {**self._ending, **_counts(usage)}
        return _reply(self.model, message, self.is_chat, **ending)


class GenerateAnswer(OllamaAnswer):
    """The answer to a prompt."""

    is_chat = False


def _counts(usage: Usage) -> dict[str, int]:
    """Return the times and tokens of a response."""
    times = [0.0, 0.0, 0.0]
    if usage.timings:
        first = usage.timings[0]
        times = [first.queue_ms, first.prefill_ms, sum(first.inter_token_ms)]
    ns = [int(1e6 * ms) for ms in (*times, sum(times))]
    return dict(zip(_COUNTS, (*ns, usage.prompt_tokens, usage.completion_tokens), strict=True))


async def _models(service: Service) -> list[Object]:
    """Return the description of the model under each of its names."""
    stats = await service.engine.stats()
    about, weights = stats["model"], stats["memory"].get("weights", {})
    kind, number, length = about["type"], about["parameters"], stats["max_model_len"]
    size = weights.get("planned", 0)
    levels = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    details = {
        "family": kind,
        "families": [kind],
        "parameter_size": f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.0f}M",
        "quantization_level": levels.get(about["weights"], about["weights"].upper()),
    }
    info = {"general.architecture": kind, "general.parameter_count": number}
    return [
        {
            "name": name,
            "model": name,
            "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
            "expires_at": "9999-12-31T00:00:00+00:00",  # it stays loaded
            "size": size,
            "size_vram": size if stats["device"].startswith("cuda") else 0,
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "details": details,
            "model_info": {**info, f"{kind}.context_length": length},
            "context_length": length,
        }
        for name in service.model_names
    ]


async def ollama_models(service: Service, exchange: Exchange) -> None:
    """Respond with the names of the model, which is loaded."""
    await exchange.respond({"models": await _models(service)})


async def ollama_version(service: Service, exchange: Exchange) -> None:
    """Respond with the release of Ollama whose API this is."""
    await exchange.respond({"version": VERSION})


async def ollama_show(service: Service, exchange: Exchange) -> None:
    """Respond with what the model is and can do."""
    request = await exchange.read(OllamaShowRequest)
    name = service.model_name(request.model or request.name)
    tokenizer = service.engine.tokenizer
    templates = {} if tokenizer is None else tokenizer.chat_templates
    tools, thinking = service.parsers
    can = {
        "completion": True,
        "tools": tools and any("tools" in source for source in templates.values()),
        "thinking": thinking,
        "insert": tokenizer is not None and fills_in_middle(tokenizer),
    }
    (model,) = [model for model in await _models(service) if model["name"] == name]
    model["capabilities"] = [capability for capability, has in can.items() if has]
    await exchange.respond({**model, "template": templates.get("default", "")})


OLLAMA = _OllamaDialect()
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/api/tags"): Operation(ollama_models, OllamaModels, dialect=OLLAMA),
    ("GET", "/api/ps"): Operation(ollama_models, OllamaModels, dialect=OLLAMA),
    ("GET", "/api/version"): Operation(ollama_version, OllamaVersion, dialect=OLLAMA),
    ("POST", "/api/show"): Operation(ollama_show, OllamaModel, OllamaShowRequest, dialect=OLLAMA),
    ("POST", "/api/chat"): Operation(
        ollama_chat, OllamaResponse, OllamaChatRequest, OllamaResponse, dialect=OLLAMA
    ),
    ("POST", "/api/generate"): Operation(
        ollama_generate,
        OllamaResponse,
        OllamaGenerateRequest,
        OllamaResponse,
        dialect=_GenerateDialect(),
    ),
}
