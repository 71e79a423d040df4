"""`PromptBlocks`: the block hashes of the prompt in a request's body, as engines compute them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from ...engine.request_builder import Prompt, RequestBuilder
from ...errors import StepgraphError
from ...loading.loader import resolve_source
from ...loading.tokenizer import load_tokenizer
from ..http.exchange import HttpError
from ..http.requests import ChatRequest, CompletionRequest, chat_prompt
from .options import ReplicaOptions
from .routing import fingerprints

__all__ = ["PromptBlocks"]

_KINDS: Mapping[str, type[CompletionRequest | ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


class PromptBlocks:
    """Reads prompts with the tokenizer and templates of the model, without its weights."""

    def __init__(self, options: ReplicaOptions) -> None:
        """Load the tokenizer.

        Raises:
            CheckpointError, ConfigError: there is no such model.
        """
        engine = options.engine
        found = resolve_source(
            options.model, tied=engine.tie_word_embeddings, model_impl=engine.model_impl
        )
        tokenizer = None
        if found.directory is not None:
            tokenizer = load_tokenizer(found.directory, eos_token_ids=found.config.eos_token_ids)
        self._builder = RequestBuilder(
            found.config,
            tokenizer,
            longest_sequence=engine.max_model_len or found.config.longest_context,
            seed=engine.seed,
            prefix_block_size=engine.block_size if engine.prefix_cache else None,
            embeds_dtype=None,
        )
        self._most_bytes = options.routing.max_prompt_bytes

    async def of(self, path: str, body: bytes) -> bytes:
        """Return the fingerprints of a prompt's full blocks; of several prompts, of the first.

        There are none for other paths, for larger bodies than `max_prompt_bytes`, and for invalid
        requests, which a replica answers.
        """
        kind = _KINDS.get(path)
        if kind is None or len(body) > self._most_bytes:
            return b""
        return await asyncio.to_thread(self._fingerprints, kind, body)

    def _fingerprints(self, kind: type[CompletionRequest | ChatRequest], body: bytes) -> bytes:
        try:
            request = msgspec.json.decode(body, type=kind)
            prompt: Prompt
            if isinstance(request, ChatRequest):
                prompt = chat_prompt(request, request.offered_tools())
            else:
                prompt = request.prompts(max_prompts=1 << 20, max_model_len=1 << 40)[0]
            group = self._builder.accept("prompt", prompt, cache_salt=request.cache_salt)
        except (StepgraphError, HttpError, ValueError, RecursionError):  # the replica's to answer
            return b""
        hashes = group.requests[0].prefix_hashes
        if hashes is None:
            return b""
        return fingerprints(hashes[block] for block in range(len(hashes)))
