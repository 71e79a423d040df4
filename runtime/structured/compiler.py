"""Compiles grammars with llguidance, within limits of size and time, and caches them by content.

A grammar becomes an automaton over the tokenizer's vocabulary in the thread that adds the request:
of an `AsyncEngine` one of its threads for grammars. The work itself runs in a thread of its own, so
that a caller gives up at the deadline. The limits of llguidance end what was given up.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import ConfigError, GrammarError, RequestError
from ..loading.tokenizer import TextTokenizer
from ..structured_output import StructuredOutput
from .compile_threads import NotCompiledError, compile_until
from .json_formats import without_custom_formats
from .matcher import MASK_SECONDS, TokenMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["GrammarCompiler", "check_installed"]

logger = logging.getLogger("stepgraph.runtime")

COMPILE_SECONDS: Final = 5.0
"""Seconds until a grammar is refused, the wait for other compilations included."""
MAX_CACHED: Final = 64
MAX_CACHED_BYTES: Final = 1 << 20
MAX_CACHED_SECONDS: Final = 2.0
"""Compiled grammars that are kept, the bytes of their texts, and the processor time that they took,
which grows as their memory does: up to about 200 MB a second. A grammar that alone takes more than
a quarter of a limit is not kept."""

_MAX_REASON_CHARS = 300
_WHITE_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,16}"
"""Between the parts of a JSON text, where a model could otherwise go on forever."""


def check_installed() -> None:
    """Raise `ConfigError` if llguidance cannot be imported."""
    try:
        import llguidance  # noqa: F401  # an optional package
    except ImportError as error:
        raise ConfigError(
            "structured_output needs the package llguidance, which cannot be imported"
            f" ({bounded_text(error)}): install stepgraph[structured]"
        ) from error


class _Compiled(NamedTuple):
    """A grammar that is kept."""

    matcher: LLMatcher
    size: int
    """Bytes of its text."""
    seconds: float
    """Processor time of its compilation."""


class GrammarCompiler:
    """The grammars of one tokenizer. Any thread may call it at any time."""

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Build the automaton's alphabet: the bytes of each token.

        Args:
            tokenizer: of the checkpoint.
            vocab_size: of the model; tokens without an entry in the tokenizer are never allowed,
                nor are those of the tokenizer beyond it.
            eos_token_ids: tokens that end the model's output. Those that the tokenizer or the model
                lacks are left out.
        """
        self._obstacle: str | None = None
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self.counts = {"compiled": 0, "found": 0, "refused": 0}
        """Grammars that were compiled, found in the cache, and refused."""
        known_ids = tokenizer.id_bound
        ends = [token_id for token_id in eos_token_ids if token_id < min(known_ids, vocab_size)]
        if not ends:
            self._obstacle = (
                "the model has no end-of-sequence token, which ends an output"
                if not eos_token_ids
                else "the tokenizer has none of the model's end-of-sequence tokens"
                f" {bounded_repr(list(eos_token_ids))}"
            )
            self._warn()
            return
        from llguidance import LLParserLimits, LLTokenizer  # an optional package

        self._limits: LLParserLimits = LLParserLimits(
            max_grammar_size=200_000,
            max_lexer_states=50_000,  # about 100 MB
            initial_lexer_fuel=1_000_000,  # about 20 ms
            step_lexer_fuel=200_000,  # about 15 ms of a mask
            step_max_items=50_000,  # about 3 ms of a mask
            verbose_errors=False,
        )
        try:
            self._tokenizer = LLTokenizer(
                tokenizer.definition, n_vocab=max(vocab_size, known_ids), eos_token=ends
            )
        except Exception as error:  # of any type, according to what is missing in the definition
            self._obstacle = f"llguidance cannot read the tokenizer: {bounded_text(error)}"
            self._warn()

    def _warn(self) -> None:
        logger.warning("structured output is not possible: %s", self._obstacle)

    def matchers(self, structured: StructuredOutput, count: int) -> list[TokenMatcher]:
        """Return a matcher at the beginning of the grammar for each of `count` completions.

        Raises:
            GrammarError: the grammar is invalid, too complex, or not compiled in time.
            RequestError: grammars cannot be used with this tokenizer or model.
        """
        if self._obstacle is not None:
            raise RequestError(
                f"structured output is not possible: {self._obstacle}. Leave out structured"
            )
        assert self._tokenizer is not None
        key = structured.kind, structured.source
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                self.counts["found"] += 1
        if found is None:
            found = self._compile(*key)
            self._keep(key, found)
        tokens = self._eos_token_ids, self._vocab_size, self._tokenizer.vocab_size
        return [TokenMatcher(found.matcher, *tokens) for _ in range(count)]

    def _keep(self, key: tuple[str, str], compiled: _Compiled) -> None:
        with self._lock:
            self.counts["compiled"] += 1
            if 4 * compiled.size > MAX_CACHED_BYTES or 4 * compiled.seconds > MAX_CACHED_SECONDS:
                return
            self._compiled[key] = compiled
            while (
                len(self._compiled) > MAX_CACHED
                or sum(kept.size for kept in self._compiled.values()) > MAX_CACHED_BYTES
                or sum(kept.seconds for kept in self._compiled.values()) > MAX_CACHED_SECONDS
            ):
                self._compiled.popitem(last=False)

    def _compile(self, kind: str, source: str) -> _Compiled:
        """Compile in another thread, and wait for it until the deadline."""

        def work() -> _Compiled:
            began = time.thread_time()
            matcher = self._made(kind, source)
            return _Compiled(matcher, len(source.encode()), time.thread_time() - began)

        try:
            return compile_until(work, COMPILE_SECONDS)
        except (NotCompiledError, ValueError, TypeError, RecursionError) as error:
            raise self._refusal(kind, str(error) or type(error).__name__) from error

    def _made(self, kind: str, source: str) -> LLMatcher:
        from llguidance import LLMatcher

        assert self._tokenizer is not None
        grammar = _grammar(kind, source)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one builds states that all copies need
        if not matcher.is_error():
            _check_speed(matcher.deep_copy())
        if matcher.is_error():
            raise ValueError(matcher.get_error().removesuffix("<non-verbose/>").strip())
        return matcher

    def _refusal(self, kind: str, reason: str) -> GrammarError:
        with self._lock:
            self.counts["refused"] += 1
        name = {"json": "JSON schema", "regex": "regular expression"}.get(kind, kind)
        return GrammarError(
            f"the {name} of structured cannot be used:"
            f" {bounded_text(reason, _MAX_REASON_CHARS)}; give a valid, simpler one"
        )


def _check_speed(matcher: LLMatcher) -> None:
    """Raise `ValueError` if the first mask takes too long whenever it is computed."""
    seconds = MASK_SECONDS
    for _ in range(2):  # the first may have met a busy processor
        began = time.thread_time()
        matcher.compute_bitmask()
        seconds = time.thread_time() - began
        if seconds <= MASK_SECONDS:
            return
    raise ValueError(
        f"a token mask takes {1e3 * seconds:.0f} ms, and all requests of a step wait for it;"
        f" allowed are {1e3 * MASK_SECONDS:g} ms: repeat less, such as a{{10}} for a{{1000}}"
    )


def _grammar(kind: str, source: str) -> str:
    """Return a grammar as llguidance reads it."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json" and source in ("true", "false"):  # which have no room for options
        source = "{}" if source == "true" else '{"not": {}}'
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(
            without_custom_formats(source), defaults={"whitespace_pattern": _WHITE_SPACE}
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        texts = dict.fromkeys(json.loads(source))
        quoted = (
            json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # not read otherwise
            for text in texts
        )
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
    return grammar_from("grammar", source)  # a grammar with "::=" is EBNF, any other is Lark
