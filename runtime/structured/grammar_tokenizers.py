"""The vocabulary as grammars see it: which tokens are text, and the tokens of a forced text.

llguidance takes all added tokens such as `<think>` for control tokens, which no text of a grammar
matches. But the tokenizer makes them of such a text, and models are trained on them. So added
tokens are text here, with two exceptions:

- Tokens that end the output never are. A grammar that spells one gets ordinary tokens.
- Tokens that `skip_special_tokens` omits are text in grammars that spell one of these. In other
  grammars, text that the user would not see must not match `.` or a JSON string.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, cast

from ..loading.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

__all__ = ["GrammarTokenizers"]

INTERRUPT_SECONDS: Final = 0.01
"""Until an interrupt is raised again; the call that it met takes microseconds."""


class GrammarTokenizers:
    """The tokenizers of llguidance for one tokenizer of a checkpoint."""

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Read the bytes of each token.

        Args:
            tokenizer: of the checkpoint.
            vocab_size: of the model; the tokenizer may have more tokens.
            eos_token_ids: tokens of both that end the output; at least one.

        Raises:
            Exception: of any type, if llguidance cannot read the tokenizer.
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
        self._tokens = [self._bytes(token_id) for token_id in range(self._base.vocab_size)]
        self.plain = self._with_text(self._text_ids - tokenizer.special_ids)
        """Of grammars that spell no special token."""

    @cached_property
    def _spelling(self) -> LLTokenizer:
        return self._with_text(self._text_ids)

    def of_grammar(self, source: str) -> LLTokenizer:
        """Return the tokenizer for a grammar with this source."""
        return self._spelling if self._tokenizer.spells_special(source) else self.plain

    def _bytes(self, token_id: int) -> bytes:
        token: bytes = self._base.decode_bytes([token_id])
        is_empty = token == b"<[%d]>" % token_id and not self._base.is_special_token(token_id)
        return b"" if is_empty else token

    def _with_text(self, text_ids: set[int]) -> LLTokenizer:
        """Return a tokenizer in which these added tokens are text."""
        from llguidance import LLTokenizer

        is_special = self._base.is_special_token
        special_ids = [i for i in range(len(self._tokens)) if is_special(i) and i not in text_ids]
        tokenize = _Tokenize(self._base, self._tokens, special_ids, self._eos_token_ids[0])
        return LLTokenizer(cast("TokenizerWrapper", tokenize), eos_token=self._eos_token_ids)


class _Tokenize:
    """A tokenizer as `LLTokenizer` takes it; see `llguidance.TokenizerWrapper`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        base: LLTokenizer,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_id: int,
    ) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self._special_ids = frozenset(special_token_ids)
        self._base = base

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that a grammar forces."""
        try:
            token_ids: list[int] = self._base.tokenize_str(text)
            is_text = self._special_ids.isdisjoint(token_ids) and (
                # Some added tokens also take the white space around them.
                b"".join([self.tokens[token_id] for token_id in token_ids]) == text.encode()
            )
        except KeyboardInterrupt:  # llguidance would take it for a failure: raise it after its call
            threading.Timer(INTERRUPT_SECONDS, _thread.interrupt_main).start()
            is_text = False
        return token_ids if is_text else self._base.greedy_tokenize(text)
