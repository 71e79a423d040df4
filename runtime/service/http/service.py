"""`Service`, what the endpoints of one application share, and the endpoints that decode nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec

from ...bounded_repr import bounded_repr
from ...errors import RequestError
from ...loading.tokenizer import TextTokenizer
from ...prompt_ids import too_long
from ...sampling_params import MAX_TOKEN_ID
from ..async_engine import AsyncEngine
from .exchange import Exchange
from .http_errors import HttpError
from .requests import DetokenizeRequest, TokenizeRequest, chat_prompt
from .token_text import TokenTexts
from .unknown_fields import UnknownFields

if TYPE_CHECKING:  # it needs prometheus-client
    from ..metrics import EngineMetrics

__all__ = ["Service", "package_version"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """An engine and the settings of its HTTP service."""

    engine: AsyncEngine
    model_names: tuple[str, ...]
    """Names that requests may give; responses without one have the first."""
    metrics: EngineMetrics | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    """Names for `make_output_parser`."""
    fields: UnknownFields
    """Checks the fields of requests."""
    created: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, given: str | None) -> str:
        """Return the name of the model for the response.

        Raises:
            HttpError: 404, there is no model of this name.
        """
        if given is None:
            return self.model_names[0]
        if given not in self.model_names:
            names = " or ".join(self.model_names)
            raise HttpError(
                404,
                f"the model {bounded_repr(given)} is not served: give {names}, or leave model out",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        return given


def package_version() -> str:
    """Return the version of stepgraph."""
    package = sys.modules[__name__.partition(".")[0]]  # it imports this one, not the reverse
    version: str = package.__version__
    return version


class Model(msgspec.Struct):
    """A name that requests may give as `model`, and the longest sequence in tokens."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "stepgraph"


class Models(msgspec.Struct):
    """The response of `/v1/models`."""

    data: list[Model]
    object: str = "list"


class Health(msgspec.Struct):
    """The response of `/health` and `/ready`; `step_age` is in seconds."""

    phase: str
    live: bool
    ready: bool
    step_age: float | None
    reason: str | None


class Version(msgspec.Struct):
    """The response of `/version`."""

    version: str


async def models(service: Service, exchange: Exchange) -> None:
    """Respond with the names that requests may give as their model."""
    longest = service.engine.max_model_len
    names = [Model(name, service.created, longest) for name in service.model_names]
    await exchange.respond(Models(names))


async def model(service: Service, exchange: Exchange) -> None:
    """Respond with one model."""
    name = service.model_name(exchange.path.removeprefix("/v1/models/"))
    await exchange.respond(Model(name, service.created, service.engine.max_model_len))


async def health(service: Service, exchange: Exchange) -> None:
    """Respond with 200 if the engine lives, also while it loads; else with 503."""
    await _respond_health(service, exchange, live=True)


async def ready(service: Service, exchange: Exchange) -> None:
    """Respond with 200 if requests are served now, else with 503 and the reason."""
    await _respond_health(service, exchange, live=False)


async def version(service: Service, exchange: Exchange) -> None:
    """Respond with the version of stepgraph."""
    await exchange.respond(Version(package_version()))


async def metrics(service: Service, exchange: Exchange) -> None:
    """Respond with the metrics in the format of Prometheus."""
    if service.metrics is None:
        raise HttpError(404, "this service has no metrics", kind="not_found_error")
    accept = exchange.header(b"accept") or ""
    body, content_type = await asyncio.to_thread(service.metrics.exposition, accept)
    await exchange.respond(body, content_type=content_type.encode("latin-1"))


async def _respond_health(service: Service, exchange: Exchange, *, live: bool) -> None:
    state = service.engine.health()
    good = state.live if live else state.ready
    body = Health(state.phase.value, state.live, state.ready, state.step_age, state.reason)
    await exchange.respond(body, status=200 if good else 503)


class Tokens(msgspec.Struct):
    """The response of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    """The response of `/detokenize`."""

    prompt: str


async def tokenize(service: Service, exchange: Exchange) -> None:
    """Respond with the token ids of a text or of a conversation."""
    request = await exchange.read(TokenizeRequest)
    service.model_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise HttpError(400, "give one of prompt and messages", param="prompt")
    tokenizer = _tokenizer(service, "prompt")

    def encode() -> Tokens:
        if request.messages is None:
            text, special = cast(str, request.prompt), request.add_special_tokens is not False
        else:
            text = tokenizer.render(chat_prompt(request, request.tools))
            special = bool(request.add_special_tokens)  # templates write them
        longest = service.engine.max_model_len
        least = tokenizer.least_tokens(text, enough=longest + 1)
        if least > longest:  # it could occupy the thread for seconds
            raise too_long(f"at least {least} tokens", longest)
        token_ids = tokenizer.encode(text, special=special)
        texts = TokenTexts(tokenizer)
        strings = [texts.text(i) for i in token_ids] if request.return_token_strs else None
        return Tokens(len(token_ids), longest, token_ids, strings)

    await exchange.respond(await service.engine.run_in_pool(encode))


async def detokenize(service: Service, exchange: Exchange) -> None:
    """Respond with the text of token ids."""
    request = await exchange.read(DetokenizeRequest)
    service.model_name(request.model)
    longest = service.engine.max_model_len
    if len(request.tokens) > longest:
        raise too_long(f"{len(request.tokens)} tokens", longest, "tokens")
    for index, token_id in enumerate(request.tokens):
        if not 0 <= token_id <= MAX_TOKEN_ID:
            shown = bounded_repr(token_id)
            message = f"tokens[{index}] is {shown}; allowed is 0 to {MAX_TOKEN_ID}"
            raise HttpError(400, message, param="tokens")
    tokenizer = _tokenizer(service, "tokens")

    def decode() -> Text:
        return Text(tokenizer.decode(request.tokens, skip_special_tokens=False))

    await exchange.respond(await service.engine.run_in_pool(decode))


def _tokenizer(service: Service, field: str) -> TextTokenizer:
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        raise RequestError(
            "the checkpoint has no tokenizer.json: prompts must be token ids", field=field
        )
    return tokenizer
