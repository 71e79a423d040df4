"""Log-probabilities of tokens with their texts, in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence

from ...loading.tokenizer import TextTokenizer
from ...request import TokenLogprobs
from .responses import ChatLogprobs, ChatToken, CompletionLogprobs, TopToken

__all__ = ["TokenTexts"]


class TokenTexts:
    """The texts of the tokens of a model; `token_id:5` without a tokenizer."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._pieces = None if tokenizer is None else tokenizer.pieces

    def text(self, token_id: int) -> str:
        """Return the text of a token; bytes that are no whole character are replaced."""
        if self._pieces is None:
            return f"token_id:{token_id}"
        return self._pieces.of(token_id).decode(errors="replace")

    def completion_logprobs(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int
    ) -> CompletionLogprobs:
        """Return the log-probabilities of tokens of a completion, or of its prompt.

        Args:
            token_ids: consecutive tokens.
            entries: one for each token; None for the first one of a prompt.
            offset: characters before the first token.
        """
        texts = [self.text(token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        values = [None if entry is None else entry.logprob for entry in entries]
        return CompletionLogprobs(texts, values, [self._top(entry) for entry in entries], offsets)

    def chat_logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return the log-probabilities of tokens of an answer."""
        content = []
        for entry in entries:
            top = [TopToken(*self._token(i, logprob)) for i, logprob in entry.top.items()]
            content.append(ChatToken(*self._token(entry.token_id, entry.logprob), top))
        return ChatLogprobs(content)

    def _top(self, entry: TokenLogprobs | None) -> dict[str, float] | None:
        """Return the most probable tokens and the sampled one."""
        if entry is None:
            return None
        top = {self.text(token_id): logprob for token_id, logprob in entry.top.items()}
        top.setdefault(self.text(entry.token_id), entry.logprob)
        return top

    def _token(self, token_id: int, logprob: float) -> tuple[str, float, list[int] | None]:
        data = None if self._pieces is None else list(self._pieces.of(token_id))
        return self.text(token_id), logprob, data
