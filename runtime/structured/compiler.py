"""Compiles grammars with llguidance, within limits of size and time, and caches them by content.

A grammar becomes an automaton over the tokenizer's vocabulary in the thread that adds the request:
of an `AsyncEngine` one of its threads for grammars. The work itself runs in a thread of its own, so
that a caller gives up at the deadline. The limits of llguidance end what was given up.
"""

from __future__ import annotations

import _thread
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, cast

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import ConfigError, GrammarError, OverloadedError, RequestError
from ..loading.tokenizer import TextTokenizer
from ..structured_output import StructuredOutput
from .grammars import MAX_FORCED_CHARS, grammar_text
from .matcher import TokenMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

logger = logging.getLogger("stepgraph.runtime")

MAX_COMPILATIONS: Final = 4
"""Grammars of this process that compile at the same time, those that were given up included."""
STACK_BYTES: Final = 512 << 20
"""Stack of a compilation; only what is used takes memory. llguidance recurses along references
between rules and schemas, of which there are thousands in the largest text that is accepted. An
overflow would end the process."""
INTERRUPT_SECONDS: Final = 0.01
"""Until an interrupt is raised again; the call that it met takes microseconds."""
COMPILE_SECONDS: Final = 5.0
"""Seconds until a grammar is refused, the wait for other compilations included."""
MAX_CACHED: Final = 64
MAX_CACHED_SECONDS: Final = 2.0
"""Compiled grammars that are kept, and the processor time that they took, which grows as their
memory does: up to about 200 MB a second. A grammar that alone takes more than a quarter of it is
not kept."""

_MAX_REASON_CHARS = 300
_PLACE: Final = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\n +\d+ \|.*", re.S)
"""A place in a grammar in Lark, which is of no use to a caller who gave another."""


_slots = threading.BoundedSemaphore(MAX_COMPILATIONS)
_starting = threading.Lock()


def check_installed() -> None:
    """Raise `ConfigError` if llguidance cannot be imported."""
    try:
        import llguidance  # noqa: F401  # an optional package
    except ImportError as error:
        raise ConfigError(
            f"structured_output=True needs {_missing(error)}, or leave it out",
            field="structured_output",
        ) from error


def _missing(error: ImportError) -> str:
    return (
        f"the package llguidance, which cannot be imported ({bounded_text(error)}): install"
        " stepgraph[structured]"
    )


_Key = tuple[str, str]
"""Kind and text of a grammar."""
_NAMES: Final = {
    "json": "JSON schema",
    "regex": "regular expression",
    "calls": "grammar of tool calls",
    "reasoned": "grammar after the reasoning",
}


class GrammarCompiler:
    """The grammars of one tokenizer. Any thread may call it at any time."""

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Build the automaton's alphabet: the bytes of each token.

        Tokens that either the model, with `vocab_size`, or the tokenizer lacks are never allowed.
        Raises `RequestError` if llguidance is not installed.
        """
        self._obstacle: str | None = None
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._tokenizers: GrammarTokenizers | None = None
        self._token_ids = tokenizer.added_tokens
        self._compiled: OrderedDict[_Key, Future[tuple[LLMatcher, float]]] = OrderedDict()
        """A matcher and the processor time of its compilation; others wait for the same one."""
        self._lock = threading.Lock()
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
        try:
            from llguidance import LLParserLimits  # an optional package
        except ImportError as error:
            raise RequestError(
                f"structured needs {_missing(error)} on the machine of the engine",
                field="structured",
            ) from error
        self._limits: LLParserLimits = LLParserLimits(
            max_grammar_size=200_000,
            max_lexer_states=50_000,  # about 100 MB
            initial_lexer_fuel=1_000_000,  # about 20 ms
            step_lexer_fuel=200_000,  # about 15 ms of a mask
            step_max_items=50_000,  # about 3 ms of a mask
            verbose_errors=False,
        )
        try:
            self._tokenizers = GrammarTokenizers(tokenizer, vocab_size, ends)
        except Exception as error:  # of any type, according to what is missing in the definition
            self._obstacle = f"llguidance cannot read the tokenizer: {bounded_text(error)}"
            self._warn()

    def _warn(self) -> None:
        logger.warning("structured output is not possible: %s", self._obstacle)

    def has_compiled(self, structured: StructuredOutput) -> bool:
        """Return whether `matchers` takes microseconds."""
        with self._lock:
            known = self._compiled.get((structured.kind, structured.source))
            return known is not None and known.done()

    def matchers(self, structured: StructuredOutput, count: int) -> list[TokenMatcher]:
        """Return a matcher at the beginning of the grammar for each of `count` completions.

        Raises `GrammarError` for a grammar that is invalid, too complex or not compiled in time,
        `OverloadedError` while too many others compile, and `RequestError` for this model.
        """
        if self._obstacle is not None:
            raise RequestError(
                f"structured output is not possible: {self._obstacle}. Leave out structured",
                field="structured",
            )
        assert self._tokenizers is not None
        key = structured.kind, structured.source
        own: Future[tuple[LLMatcher, float]] = Future()
        with self._lock:
            found = self._compiled.setdefault(key, own)
            self._compiled.move_to_end(key)
        if found is own:
            try:
                _start(partial(self._compile, key, own))
            except BaseException:
                self._give_up(key, own)
                raise
        try:
            matcher, _ = found.result(COMPILE_SECONDS)
        except (TimeoutError, CancelledError):
            if self._give_up(key, found):
                raise OverloadedError(
                    f"a grammar cannot be compiled now: {MAX_COMPILATIONS} others have been"
                    f" compiling for {COMPILE_SECONDS:g} s"
                ) from None
            reason = f"it did not compile within {COMPILE_SECONDS:g} s"
            raise _grammar_error(key[0], reason) from None
        tokens = self._eos_token_ids, self._vocab_size, self._tokenizers.plain.vocab_size
        return [TokenMatcher(matcher, *tokens) for _ in range(count)]

    def _give_up(self, key: _Key, result: Future[tuple[LLMatcher, float]]) -> bool:
        """Drop a compilation, and return True, unless it has begun: it then ends by itself."""
        with self._lock:
            dropped = result.cancel()
            if dropped and self._compiled.get(key) is result:
                del self._compiled[key]
        return dropped

    def _compile(self, key: _Key, result: Future[tuple[LLMatcher, float]]) -> None:
        """Compile, once there is a place, for all that wait for the result; keep what is fast."""
        made = None
        failure: Exception | None = None
        with _slots:
            if not result.set_running_or_notify_cancel():
                return
            try:
                made = self._made(*key)
            except (ValueError, TypeError, RecursionError) as error:
                failure = _grammar_error(key[0], str(error) or type(error).__name__)
            except Exception as error:
                failure = error
            except BaseException as error:  # a panic of llguidance
                failure = _grammar_error(key[0], f"llguidance failed: {bounded_repr(error)}")
        with self._lock:
            if made is None:
                result.set_exception(failure)
            else:
                result.set_result(made)
            if made is None or 4 * made[1] > MAX_CACHED_SECONDS:
                del self._compiled[key]
            kept = {name: f.result()[1] for name, f in self._compiled.items() if f.done()}
            while len(kept) > MAX_CACHED or sum(kept.values()) > MAX_CACHED_SECONDS:
                oldest = next(iter(kept))
                del kept[oldest], self._compiled[oldest]

    def _made(self, kind: str, source: str) -> tuple[LLMatcher, float]:
        """Return the matcher of a grammar, and the processor time that it took."""
        from llguidance import LLMatcher

        assert self._tokenizers is not None
        began = time.thread_time()
        grammar = grammar_text(kind, source, self._token_ids)
        tokenizer = self._tokenizers.of_grammar(source)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one builds states that all copies need
        forced = 0 if matcher.is_error() else len(matcher.compute_ff_tokens())
        if matcher.is_error():
            reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
            reason = reason.partition(". Enable '")[0]  # options that schemas do not have here
            if "NoExtensionBias" in reason:
                reason = "no text can follow it"
            raise ValueError(reason if kind == "grammar" else _PLACE.sub("", reason))
        if forced > MAX_FORCED_CHARS:
            raise ValueError(f"it forces a text of {forced} tokens; allowed are {MAX_FORCED_CHARS}")
        return matcher, time.thread_time() - began


def _grammar_error(kind: str, reason: str) -> GrammarError:
    shown = bounded_text(reason, _MAX_REASON_CHARS)
    return GrammarError(
        f"the {_NAMES.get(kind, kind)} of structured cannot be used: {shown}; give a valid, simpler"
        " one",
        field="structured",
    )


def _start(run: Callable[[], None]) -> None:
    """Start a thread with a large stack. Its size is a setting of the process for a moment."""
    thread = threading.Thread(target=run, name="stepgraph-grammar", daemon=True)
    with _starting:
        try:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise RequestError(
                f"the grammar of structured cannot be compiled: no thread with a stack of"
                f" {STACK_BYTES >> 20} MiB can be started ({error}). Raise the limits of threads"
                " and virtual memory of the process, or leave out structured",
                field="structured",
            ) from error


class GrammarTokenizers:
    """The vocabulary as grammars see it: which tokens are text, and the tokens of a forced text.

    llguidance takes all added tokens such as `<think>` for control tokens, which no text of a
    grammar matches. But the tokenizer makes them of such a text, and models are trained on them. So
    added tokens are text here, with two exceptions:

    - Tokens that end the output never are. A grammar that spells one gets ordinary tokens.
    - Tokens that `skip_special_tokens` omits are text in grammars that spell one of these. In other
      grammars, text that the user would not see must not match `.` or a JSON string.
    """

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Read the bytes of each token; raises any `Exception` if llguidance cannot read it.

        `vocab_size` is the model's; `eos_token_ids` are tokens of both that end the output.
        """
        from llguidance import LLTokenizer  # an optional package

        self._tokenizer = tokenizer
        self._eos_token_ids = list(eos_token_ids)
        self._base = LLTokenizer(
            tokenizer.definition,
            n_vocab=max(vocab_size, tokenizer.id_bound),
            eos_token=self._eos_token_ids,
            slices=[],  # which make masks faster; this one only tokenises
        )
        self._text_ids = {
            token_id
            for token_id in tokenizer.added_tokens.values()
            if token_id < vocab_size and token_id not in self._eos_token_ids
        }
        self.plain = self._with_text(self._text_ids - tokenizer.special_ids)
        """Of grammars that spell no special token."""

    @cached_property
    def _spelling(self) -> LLTokenizer:
        return self._with_text(self._text_ids)

    def of_grammar(self, source: str) -> LLTokenizer:
        """Return the tokenizer for a grammar with this source."""
        return self._spelling if self._tokenizer.spells_special(source) else self.plain

    def _with_text(self, text_ids: set[int]) -> LLTokenizer:
        """Return a tokenizer in which these added tokens are text."""
        from llguidance import LLTokenizer

        tokenize = _Tokenize(self._base, text_ids, self._eos_token_ids[0])
        return LLTokenizer(cast("TokenizerWrapper", tokenize), eos_token=self._eos_token_ids)


MAX_KNOWN_TEXTS: Final = 4096
MAX_KNOWN_CHARS: Final = 256
"""Forced texts whose tokens are kept, and the length of the longest one: some megabytes at most."""


class _Tokenize:
    """A tokenizer as `LLTokenizer` takes it; see `llguidance.TokenizerWrapper`.

    It keeps the tokens of short texts: the names of properties are forced in every object and every
    request with the same schema, and tokenising them takes longer than a mask.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, base: LLTokenizer, text_ids: set[int], eos_token_id: int) -> None:
        self._base = base
        self.eos_token_id = eos_token_id
        special = [
            token_id for token_id in range(base.vocab_size) if base.is_special_token(token_id)
        ]
        self.special_token_ids = [token_id for token_id in special if token_id not in text_ids]
        self._special_ids = frozenset(self.special_token_ids)
        self._known: dict[str, list[int]] = {}
        self.tokens = [base.decode_bytes([token_id]) for token_id in range(base.vocab_size)]
        for token_id, token in enumerate(self.tokens):
            if token == b"<[%d]>" % token_id and not base.is_special_token(token_id):
                self.tokens[token_id] = b""  # an id without a token

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that a grammar forces."""
        known = self._known.get(text)
        return self._tokenized(text) if known is None else known

    def _tokenized(self, text: str) -> list[int]:
        try:
            token_ids: list[int] = self._base.tokenize_str(text)
        except KeyboardInterrupt:  # llguidance would take it for a failure: raise it after its call
            threading.Timer(INTERRUPT_SECONDS, _thread.interrupt_main).start()
            return self._base.greedy_tokenize(text)
        # Some added tokens also take the white space around them.
        is_text = b"".join([self.tokens[token_id] for token_id in token_ids]) == text.encode()
        if not (is_text and self._special_ids.isdisjoint(token_ids)):
            token_ids = self._base.greedy_tokenize(text)
        if len(text) <= MAX_KNOWN_CHARS:
            if len(self._known) >= MAX_KNOWN_TEXTS:
                self._known.clear()
            self._known[text] = token_ids
        return token_ids
