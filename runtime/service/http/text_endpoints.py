"""The endpoints `/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from typing import cast

import msgspec

from ...bounded_repr import bounded_repr
from ...errors import RequestError
from ...loading.tokenizer import TextTokenizer
from ...prompt_ids import too_long
from ...sampling_params import MAX_TOKEN_ID
from .exchange import Exchange
from .http_errors import HttpError
from .requests import DetokenizeRequest, TokenizeRequest, chat_prompt
from .service import Service
from .token_text import TokenTexts

__all__ = ["Text", "Tokens", "detokenize", "tokenize"]


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
    exchange.param_of = request.param_of
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
