"""Checks a prompt and its parameters, and makes the requests that are queued."""

from __future__ import annotations

import copy
import hashlib
import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from ...cache.blocks import PrefixHashes
from ..arguments import MAX_PRIORITY, check_integer
from ..detokenizer import IncrementalDetokenizer
from ..errors import RequestError
from ..loading.chat_template import ChatPrompt
from ..loading.tokenizer import TextTokenizer
from ..logprobs import PromptLogprobs
from ..models.config import DecoderConfig
from ..models.decoder import rope_lengths
from ..models.resolved_config import ResolvedConfig
from ..prompt_embeds import EmbeddedSpan, PromptEmbeds, check_spans
from ..prompt_ids import plain_token_ids, too_long, type_name
from ..request import OutputMatcher, Request, RequestGroup
from ..sampling.sampling_state import MAX_ROW_STOP_IDS
from ..sampling_params import (
    MAX_TRUNCATED_TOKENS,
    NEUTRAL,
    SamplingDefaults,
    SamplingParams,
)
from ..structured.compiler import GrammarCompiler
from ..structured.matcher import ListMatcher, TokenLists, word_tokens
from ..structured_output import StructuredOutput

Prompt = str | Sequence[int] | np.ndarray | torch.Tensor | PromptEmbeds | ChatPrompt
"""Text, token ids (see `plain_token_ids` for the types), `PromptEmbeds`, or a conversation."""

MAX_SALT_CHARS = 256


class RequestBuilder:
    """Checks prompts and parameters against the limits of an engine."""

    def __init__(
        self,
        config: DecoderConfig,
        tokenizer: TextTokenizer | None,
        engine: ResolvedConfig,
        defaults: SamplingDefaults = NEUTRAL,
    ) -> None:
        """Accept requests for a model; parameters that they leave out have the `defaults`."""
        self._config = config
        self._tokenizer = tokenizer
        self._engine = engine
        self._longest = engine.max_model_len
        """Maximum tokens of a sequence, prompt and output."""
        self._defaults = defaults
        self._grammars: GrammarCompiler | None = None
        """Made for the first grammar; see `make_grammars`."""
        self._grammars_lock = threading.Lock()
        self._rope_lengths = rope_lengths(config)
        self._arrivals = itertools.count(1)  # atomic: prompts arrive from any thread

    def for_model(
        self, config: DecoderConfig, tokenizer: TextTokenizer | None, defaults: SamplingDefaults
    ) -> RequestBuilder:
        """Return a builder for a model of the same sizes; it continues the order of arrivals."""
        other = copy.copy(self)
        other._config, other._tokenizer, other._defaults = config, tokenizer, defaults
        other._grammars = None
        if self._grammars is not None:
            other.make_grammars()
        return other

    def make_grammars(self) -> GrammarCompiler | None:
        """Return the compiler of grammars; None without a tokenizer. The first call makes it.

        Raises `RequestError` if llguidance is not installed.
        """
        with self._grammars_lock:
            if self._grammars is None and self._tokenizer is not None:
                self._grammars = GrammarCompiler(
                    self._tokenizer, self._config.vocab_size, self._config.eos_token_ids
                )
            return self._grammars

    def accept(
        self,
        group_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestGroup:
        """Return the requests of a prompt, one for each of `params.n` completions.

        Raises `RequestError` for an invalid prompt, parameter, priority or salt, and without a
        tokenizer for text; `GrammarError` for a grammar that is invalid or too complex.
        """
        check_integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        if params is None:
            params = SamplingParams()
        if not issubclass(type(params), SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, not {type_name(params)}", field="params"
            )
        params = params.resolved(self._defaults)
        assert params.max_tokens is not None
        prompt_ids, embeds = self._prompt(prompt, params)
        if params.stop:
            self._tokenizer_for("stop")
        params.check_vocabulary(self._config.vocab_size)
        arrival_ns = time.perf_counter_ns()
        arrival = next(self._arrivals)
        base = params.seed if params.seed is not None else _derive(self._engine.user.seed, arrival)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self._config.eos_token_ids)
        if params.min_tokens and len(stops) > MAX_ROW_STOP_IDS:
            raise RequestError(
                f"min_tokens allows at most {MAX_ROW_STOP_IDS} stop token ids, the model's"
                f" included, and there are {len(stops)}: give fewer in stop_token_ids",
                field="stop_token_ids",
            )
        if cache_salt is not None:
            _check_salt(cache_salt)
        hashes, lengths = None, self._rope_lengths
        if self._engine.user.prefix_cache:
            variant = b"" if lengths is None else lengths.variant(len(prompt_ids))
            hashes = PrefixHashes(self._engine.user.block_size, cache_salt or "", variant)
        matchers = self._matchers(params)
        requests = [
            Request(
                id=f"{group_id}/{index}",
                prompt_ids=prompt_ids,
                params=params,
                seed=_derive(base, index),
                order=(priority, arrival * 1_000_000 + index),
                max_tokens=min(max(params.max_tokens, 1), self._longest - len(prompt_ids)),
                stop_token_ids=frozenset(stops),
                detokenizer=self._detokenizer(prompt_ids, params),
                arrival_ns=arrival_ns,
                embeds=embeds,
                rope_length=len(prompt_ids),
                matcher=matchers[index],
                salt=cache_salt,
            )
            for index in range(params.n)
        ]
        if params.prompt_logprobs is not None:
            requests[0].prompt_logprobs = PromptLogprobs(
                prompt_ids,
                params.prompt_logprobs,
                [range(span.position, span.stop) for span in embeds],
            )
        requests[0].prefix_hashes = hashes
        requests[0].hashes_of(len(prompt_ids))
        for request in requests:
            request.siblings = [other for other in requests if other is not request]
            if hashes is not None:
                request.prefix_hashes = hashes.copy()
        return RequestGroup(group_id, prompt_ids, requests)

    def has_compiled(self, structured: StructuredOutput) -> bool:
        """Return whether a grammar is in the cache."""
        return self._grammars is not None and self._grammars.has_compiled(structured)

    def _matchers(self, params: SamplingParams) -> Sequence[OutputMatcher | None]:
        """Return what restricts the output of each completion."""
        restrictions = ("structured", "allowed_token_ids", "bad_words")
        field = next((name for name in restrictions if getattr(params, name)), None)
        if field is None:
            return [None] * params.n
        if not self._engine.structured_output:
            raise RequestError(
                f"{field} needs token masks, which this engine was started without: set"
                " structured_output=True in its EngineConfig",
                field=field,
            )
        grammars: Sequence[OutputMatcher | None] = [None] * params.n
        if params.structured is not None:
            assert isinstance(params.structured, StructuredOutput)
            self._tokenizer_for("structured")
            compiler = self.make_grammars()
            assert compiler is not None
            grammars = compiler.matchers(params.structured, params.n)
        if not params.restricts_tokens:
            return grammars
        banned = set[tuple[int, ...]]()
        for word in params.bad_words:
            encode = partial(self._tokenizer_for("bad_words").encode, special=False)
            banned |= word_tokens(word, encode)
        lists = TokenLists(self._config.vocab_size, params.allowed_token_ids, banned)
        return [ListMatcher(lists, grammar) for grammar in grammars]

    def _detokenizer(
        self, prompt_ids: list[int], params: SamplingParams
    ) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        skips = params.skip_special_tokens
        if isinstance(params.structured, StructuredOutput):  # whose text must be complete
            skips = skips and not self._tokenizer.spells_special(params.structured.source)
        return IncrementalDetokenizer(
            self._tokenizer.text_stream(prompt_ids, skip_special_tokens=skips).push,
            params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )

    def _prompt(
        self, prompt: object, params: SamplingParams
    ) -> tuple[list[int], tuple[EmbeddedSpan, ...]]:
        """Return the tokens of a prompt, and the embeddings that replace some of them."""
        special, field = params.add_special_tokens, "prompt"
        most = self._longest if params.truncate_prompt_tokens is None else MAX_TRUNCATED_TOKENS + 1
        spans: tuple[EmbeddedSpan, ...] = ()
        try:
            if isinstance(prompt, PromptEmbeds):
                if params.truncate_prompt_tokens is not None:
                    raise RequestError(
                        "truncate_prompt_tokens cannot cut a prompt with embeddings",
                        field="truncate_prompt_tokens",
                    )
                if not self._engine.user.prompt_embeds:
                    raise RequestError(
                        "the prompt has embeddings, but this engine has no buffer for them:"
                        " set prompt_embeds=True in its EngineConfig",
                        field=field,
                    )
                token_ids = self.check_token_ids(prompt.token_ids)
                size, dtype = self._config.hidden_size, self._engine.dtype
                spans = check_spans(prompt.spans, len(token_ids), size, dtype)
            elif isinstance(prompt, ChatPrompt):
                field = "messages"
                rendered = self._tokenizer_for(field).render(prompt)
                token_ids = self._encode(rendered, bool(special), most, field)
            elif isinstance(prompt, str):
                token_ids = self._encode(str(prompt), special is not False, most, field)
            else:
                token_ids = plain_token_ids(prompt, self._config.vocab_size, most)
            token_ids = self._truncated(token_ids, params)
        except RequestError:
            raise
        except Exception as error:  # raised by an object of the user
            raise RequestError(
                f"the prompt of type {type_name(prompt)} cannot be read: {type_name(error)}",
                field=field,
            ) from error
        if not token_ids:
            raise RequestError("the prompt is empty: it must have at least one token", field=field)
        return token_ids, spans

    def _tokenizer_for(self, field: str) -> TextTokenizer:
        """Return the tokenizer, which a field of a request needs."""
        if self._tokenizer is None:
            is_text = field in ("prompt", "messages")
            remedy = "give a list of token ids" if is_text else f"leave out {field}"
            raise RequestError(
                f"{field} needs a tokenizer, and the checkpoint has no tokenizer: {remedy}",
                field=field,
            )
        return self._tokenizer

    def _truncated(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Return the last tokens of a prompt, if `truncate_prompt_tokens` limits them."""
        kept = params.truncate_prompt_tokens
        if kept is None:
            return token_ids
        if kept < 0:
            room = params.max_tokens or 1
            kept = self._longest - (room if room < self._longest else 1)
        if kept >= self._longest:
            raise RequestError(
                f"truncate_prompt_tokens is {kept}, but a prompt may have at most"
                f" {self._longest - 1} tokens: give -1, or fewer",
                field="truncate_prompt_tokens",
            )
        return token_ids[-kept:]

    def _encode(self, text: str, special: bool, most: int, field: str) -> list[int]:
        tokenizer = self._tokenizer_for(field)
        if not text:  # before the tokenizer adds a token of its own
            return []
        least = tokenizer.least_tokens(text)
        if least >= most:
            raise too_long(f"at least {least} tokens", most, field)
        try:
            token_ids = tokenizer.encode(text, special=special)
        except RequestError as error:
            raise RequestError(str(error), field=field) from error
        if len(token_ids) >= most:
            raise too_long(f"{len(token_ids)} tokens", most, field)
        if max(token_ids, default=0) >= self._config.vocab_size:
            token_id = next(i for i in token_ids if i >= self._config.vocab_size)
            raise RequestError(
                f"the prompt has token {token_id}, {tokenizer.spelling(token_id)}, of the tokenizer"
                f" that is outside the model's vocabulary of {self._config.vocab_size}",
                field=field,
            )
        return token_ids

    def check_token_ids(self, prompt: object) -> list[int]:
        """Return the tokens as plain integers, fewer than a sequence may have."""
        return plain_token_ids(prompt, self._config.vocab_size, self._longest)


def _check_salt(salt: object) -> None:
    """Raise `RequestError` for an invalid salt, without its text."""
    with suppress(UnicodeEncodeError):
        if isinstance(salt, str) and salt.encode() and len(salt) <= MAX_SALT_CHARS:
            return
    length = f" of {len(salt)} characters" if isinstance(salt, str) else ""
    raise RequestError(
        f"cache_salt must be a string of 1 to {MAX_SALT_CHARS} characters in valid Unicode, not a"
        f" {type_name(salt)}{length}",
        field="cache_salt",
    )


def _derive(seed: int, index: int) -> int:
    """Return a seed of 63 bits for stream `index`, independent of other streams."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
