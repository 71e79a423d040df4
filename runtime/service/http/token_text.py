"""Log-probabilities of tokens with their texts, in the shapes of the OpenAI API and of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...loading.text_stream import TextStream
from ...loading.tokenizer import TextTokenizer
from ...request import TokenLogprobs
from .responses import (
    ChatLogprobs,
    ChatToken,
    CompletionLogprobs,
    PromptEntry,
    PromptToken,
    TopToken,
)

_LOOKAHEAD_CHARS = 16
"""How far the text of a token may be from the end of the one before, after an unknown token."""


class TokenTexts:
    """The texts of the tokens of a model.

    They are unambiguous: `token_id:5` without a tokenizer, or if ids are asked for;
    `bytes:\\xe2\\x80` for bytes that are not whole characters, as in the OpenAI API.
    """

    def __init__(self, tokenizer: TextTokenizer | None, *, as_ids: bool = False) -> None:
        """Take a tokenizer; `as_ids` is `return_tokens_as_token_ids`."""
        self.tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None

    def text(self, token_id: int) -> str:
        """Return the text of a token."""
        if self.tokenizer is None or self.as_ids:
            return f"token_id:{token_id}"
        piece = self.tokenizer.pieces.of(token_id)
        text = whole_text(piece)
        if text is not None:
            return text
        return "bytes:" + "".join(chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02x}" for b in piece)

    def chat_logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return the log-probabilities of tokens of an answer."""
        content = []
        for entry in entries:
            top = [TopToken(*self._token(i, logprob)) for i, logprob in entry.top.items()]
            content.append(ChatToken(*self._token(entry.token_id, entry.logprob), top))
        return ChatLogprobs(content)

    def prompt_logprobs(self, entries: Sequence[TokenLogprobs | None]) -> list[PromptEntry]:
        """Return the log-probabilities of a prompt, by token id as in vLLM."""
        return [None if entry is None else self._prompt_entry(entry) for entry in entries]

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, PromptToken]:
        found = {
            str(token_id): PromptToken(logprob, rank, self.text(token_id))
            for rank, (token_id, logprob) in enumerate(entry.top.items(), 1)
        }
        own = PromptToken(entry.logprob, None, self.text(entry.token_id))
        found.setdefault(str(entry.token_id), own)
        return found

    def _token(self, token_id: int, logprob: float) -> tuple[str, float, list[int] | None]:
        tokenizer = self.tokenizer
        data = None if tokenizer is None else list(tokenizer.pieces.of(token_id))
        return self.text(token_id), logprob, data


class ChoiceTokens:
    """The tokens of one completion of `/v1/completions`, each with its place in the text."""

    def __init__(
        self, texts: TokenTexts, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        """Begin before the first token, after the tokens of the prompt."""
        self._texts = texts
        self._num_chars = 0  # of the text, up to the last whole character
        self._stream: TextStream | None = None
        if texts.tokenizer is not None:
            self._stream = texts.tokenizer.text_stream(
                prompt_ids, skip_special_tokens=skip_special_tokens
            )

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str
    ) -> CompletionLogprobs:
        """Return the log-probabilities of a prompt, whose text the completion begins with.

        A token without a place in the text, such as one that the tokenizer adds, is where the next
        one begins.
        """
        entries = entries or [None] * len(token_ids)  # of a request that ended before them
        strings, offsets, at = [], [], 0
        tokenizer = self._texts.tokenizer
        stream = None if tokenizer is None else tokenizer.text_stream([], skip_special_tokens=False)
        for token_id in token_ids:
            own = self._texts.text(token_id)
            begin = at
            if stream is not None and tokenizer is not None:
                visible = tokenizer.pieces.is_visible(token_id, skip_special_tokens=True)
                if visible or text.startswith(own, at):
                    begin, added = _found(stream.push(token_id), text, at)
                    at = min(begin + len(added), len(text))
                    own = self._named(token_id, own, added)
            strings.append(own)
            offsets.append(begin)
        self._num_chars = len(text)
        return self._logprobs(token_ids, strings, entries, offsets)

    def take(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], end: int | None
    ) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens of the completion.

        `end` is the length of the whole text, if no more follow: a stop string is not part of it.
        """
        strings, offsets = [], []
        for token_id in token_ids:
            own = self._texts.text(token_id)
            begin = self._num_chars
            if self._stream is not None:
                added = self._stream.push(token_id)
                self._num_chars += len(added)
                named = self._named(token_id, own, added)
                if named == own and added.endswith(own):
                    begin = self._num_chars - len(own)  # after the rest of a broken character
                own = named
            offsets.append(begin if end is None else min(begin, end))
            strings.append(own)
        return self._logprobs(token_ids, strings, entries, offsets)

    def _named(self, token_id: int, own: str, added: str) -> str:
        """Return the text of a token that has added to a text.

        Decoders drop the space of a first word, and some join words with spaces.
        """
        tokenizer = self._texts.tokenizer
        if self._texts.as_ids or tokenizer is None or not added or added.endswith(own):
            return own
        is_whole = whole_text(tokenizer.pieces.of(token_id)) is not None
        return added if is_whole else own

    def _logprobs(
        self,
        token_ids: Sequence[int],
        strings: list[str],
        entries: Sequence[TokenLogprobs | None],
        offsets: list[int],
    ) -> CompletionLogprobs:
        values = [None if entry is None else entry.logprob for entry in entries]
        tops = [
            None if entry is None else self._top(entry, string)
            for entry, string in zip(entries, strings, strict=False)
        ]
        return CompletionLogprobs(strings, values, tops, offsets)

    def _top(self, entry: TokenLogprobs, sampled: str) -> dict[str, float]:
        """Return the most probable tokens and the sampled one, whose text is `sampled`."""
        top: dict[str, float] = {}
        probable: Mapping[int, float] = entry.top
        for token_id, logprob in probable.items():
            if token_id == entry.token_id:
                top[sampled] = entry.logprob
                continue
            text = self._texts.text(token_id)
            if text == sampled or text in top:
                text = f"token_id:{token_id}"
            top[text] = logprob
        top.setdefault(sampled, entry.logprob)
        return top


def _found(added: str, text: str, at: int) -> tuple[int, str]:
    """Return where the text of a token begins, from `at` on, and what of it is there.

    A tokenizer can add a space before a word, drop characters and normalise them.
    """
    for candidate in (added, added.lstrip(" ")):
        if candidate and text.startswith(candidate, at):
            return at, candidate
    if not added.strip():
        return at, ""
    begin = text.find(added, at, at + len(added) + _LOOKAHEAD_CHARS)
    return max(begin, at), added


def whole_text(piece: bytes) -> str | None:
    """Return the text of bytes; None if they are not whole characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
