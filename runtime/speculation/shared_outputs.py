"""Recent outputs of all requests of a salt, from which others of that salt draft. No torch.

A salt separates users whose requests must not reveal anything to each other: the time of a step
shows whether drafts were accepted. So each salt has indexes of its own, and requests without a salt
share one. Outputs are appended to the newer of two indexes, separated by a number that is no token.
When it is full, the older one is dropped: memory is bounded, and no step copies or searches much.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from .suffix_index import Draft, SuffixIndex

__all__ = ["MAX_SALTS", "MAX_SHARED_TOKENS", "SharedOutputs"]

MAX_SALTS = 64
"""Salts with indexes; those that were used last."""

MAX_SHARED_TOKENS = 1 << 14
"""Tokens of each of the two indexes of a salt. An output of more counts with its last ones."""

MAX_WAITING_TOKENS = 1 << 17
"""Tokens of outputs that wait to be indexed; the oldest of more are dropped."""

_SEPARATOR = -1


class SharedOutputs:
    """The outputs of each salt, at most 64 times 32,768 tokens."""

    def __init__(self, least_match: int, candidates: int) -> None:
        """See `SuffixIndex`."""
        self._least_match, self._candidates = least_match, candidates
        self._salts: OrderedDict[str | None, list[SuffixIndex]] = OrderedDict()
        self._waiting: deque[tuple[str | None, list[int]]] = deque()
        self._num_waiting = 0

    @property
    def num_tokens(self) -> int:
        """Indexed and waiting tokens, separators included."""
        indexed = (len(index.tokens) for own in self._salts.values() for index in own)
        return sum(indexed) + self._num_waiting

    def add(self, salt: str | None, output: Sequence[int]) -> None:
        """Add the output of a request that has ended; `index_some` indexes it."""
        tokens = [*output[1 - MAX_SHARED_TOKENS :], _SEPARATOR]
        self._waiting.append((salt, tokens))
        self._num_waiting += len(tokens)
        while self._num_waiting > MAX_WAITING_TOKENS:
            self._num_waiting -= len(self._waiting.popleft()[1])

    def index_some(self, most: int) -> None:
        """Index at most `most` tokens of outputs that wait."""
        while most > 0 and self._waiting:
            salt, tokens = self._waiting[0]
            part = tokens[:most]
            del tokens[:most]
            if not tokens:
                self._waiting.popleft()
            self._num_waiting -= len(part)
            most -= len(part)
            self._newest_index(salt, len(part)).extend(part)

    def propose(self, salt: str | None, newest: list[int], most: int) -> Draft | None:
        """Return at most `most` tokens that followed `newest` in outputs of the salt."""
        indexes = self._salts.get(salt)
        if indexes is None:
            return None
        self._salts.move_to_end(salt)
        best: Draft | None = None
        for index in reversed(indexes):
            draft = index.propose_after(newest, most, _SEPARATOR)
            if draft is not None and (best is None or draft.matched > best.matched):
                best = draft
        return best

    def _newest_index(self, salt: str | None, more: int) -> SuffixIndex:
        """Return the index that takes so many more tokens of a salt."""
        indexes = self._salts.setdefault(salt, [])
        self._salts.move_to_end(salt)
        if len(self._salts) > MAX_SALTS:
            self._salts.popitem(last=False)
        if not indexes or len(indexes[-1].tokens) + more > MAX_SHARED_TOKENS:
            del indexes[:-1]
            indexes.append(SuffixIndex(self._least_match, self._candidates))
        return indexes[-1]
