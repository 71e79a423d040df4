"""The drafts of one request, and what proposes them. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from ..config import MAX_DRAFTS

# Finds what followed earlier occurrences of the newest tokens of a sequence. No torch.
#
# The index maps each n-gram to the position after its latest occurrence, and each such position to
# the one before it. A lookup walks this chain, newest first, and compares backwards:
#
#     0 1 2 3 4 5 6 7 8 9             n = 2, newest tokens (b c)
#     a b c d x b c e b c             chain of (b c): 7, 3
#                                     at 7: matched 2 (x b c and e b c differ), continues e b c ...
#                                     at 3: matched 2, continues d x b ...
#
# Each draft is the token that most of the longest matches continue with, the latest of them at a
# tie, and the matches that continue otherwise are dropped. A match that reaches the end of the
# sequence continues with the drafts themselves, so that a loop is drafted to any length.

MAX_MATCH = 32
"""Longer matches count as this long."""

MAX_CANDIDATES = 8
"""Occurrences that a lookup compares, the latest ones."""

_NONE = 0
"""No position follows an n-gram at 0."""

_SEPARATOR = -1
"""Between sequences that share an index: no token."""


class Draft(NamedTuple):
    """Drafted tokens, and how each of them was found."""

    tokens: list[int]
    matched: int
    """Tokens before the first draft that the occurrence shares, at most `MAX_MATCH`."""
    agreed: list[bool]
    """Whether all occurrences that the drafts so far agree with continue with this draft."""

    @property
    def kinds(self) -> list[int]:
        """The class of each draft, by length of the match before it and `agreed`."""
        classes = _CLASS_OF[self.matched : self.matched + len(self.agreed)]
        return list(map(add, classes, self.agreed))


class SuffixIndex:
    """An index of one sequence that grows. Takes 150 to 400 bytes a token."""

    def __init__(self, least_match: int, candidates: int = MAX_CANDIDATES) -> None:
        """Index n-grams of `least_match` tokens, and compare at most `candidates` occurrences."""
        assert least_match >= 1
        assert candidates >= 1
        self.tokens: list[int] = []
        self._n = least_match
        self._candidates = candidates
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> position after it
        self._previous: list[int] = []  # position after an n-gram -> that after the one before

    def extend(self, tokens: list[int]) -> None:
        """Append tokens: the n-gram that ends before each of them now has a continuation."""
        known, n = self.tokens, self._n
        first = max(len(known), n)
        self._previous += [_NONE] * (min(len(known) + len(tokens), n) - len(known))
        known += tokens
        latest, previous = self._latest, self._previous
        grams = zip(*(known[first - n + i : i - n] for i in range(n)), strict=True)
        for position, gram in enumerate(grams, first):
            previous.append(latest.get(gram, _NONE))
            latest[gram] = position

    def forget(self) -> None:
        """Drop all tokens."""
        self.tokens.clear()
        self._latest.clear()
        self._previous.clear()

    def propose(self, most: int, newest: list[int] | None = None) -> Draft | None:
        """Return at most `most` drafts; None if the newest tokens have not occurred before.

        They follow the end of the sequence, or of `newest`, tokens of another one. The latter end
        before a separator, and where the tokens of the index end.
        """
        tokens, n = self.tokens, self._n
        separator = None if newest is None else _SEPARATOR
        if newest is None:
            newest = tokens[-max(MAX_MATCH, n) :]
        position = self._latest.get(tuple(newest[-n:]), _NONE)
        found: list[int] = []  # positions after the longest matches
        best, left, longest = n, self._candidates, len(newest)
        tail = newest[-best:]
        while position != _NONE and left:
            if tokens[position - best : position] == tail and tokens[position] != separator:
                matched, possible = best, min(longest, position)
                while matched < possible and tokens[position - matched - 1] == newest[-matched - 1]:
                    matched += 1
                if matched > best:
                    best, tail, found = matched, newest[-matched:], []
                found.append(position)
            position = self._previous[position]
            left -= 1
        return self._continued(found, best, most, separator) if found else None

    def _continued(
        self, positions: Sequence[int], matched: int, most: int, separator: int | None
    ) -> Draft:
        """Return the drafts that the occurrences agree on; see the top of this file.

        Without a separator, drafts follow the end of the sequence.
        """
        tokens, end = self.tokens, len(self.tokens)
        following = tokens[positions[0] : positions[0] + most]
        if (
            len(following) == most
            and separator not in following
            and all(tokens[p : p + most] == following for p in positions[1:])
        ):
            return Draft(following, matched, [True] * most)
        drafts: list[int] = []
        agreed: list[bool] = []
        for done in range(most):
            if separator is None:
                following = [
                    tokens[p + done] if p + done < end else drafts[p + done - end]
                    for p in positions
                ]
            else:
                positions = [
                    p for p in positions if p + done < end and tokens[p + done] != separator
                ]
                if not positions:
                    break
                following = [tokens[p + done] for p in positions]
            token = following[0]
            unanimous = following.count(token) == len(following)
            if not unanimous:
                token = max(following, key=following.count)  # the first, hence latest, of them
                positions = [p for p, t in zip(positions, following, strict=True) if t == token]
            drafts.append(token)
            agreed.append(unanimous)
        return Draft(drafts, matched, agreed)


# Measured acceptance of drafts, by how they were found. No torch.
#
# A draft is counted whether or not a step verifies it: once its row has sampled the token in its
# place, that token says whether it would have been accepted. So rows that verify nothing keep
# measuring, at the cost of a comparison.

AHEAD = 2
"""Times as many drafts are proposed as a step verifies, so that searches can be left out."""

_LONGEST = (3, 5, 8, 16)
"""Tokens of the longest match of each class; longer matches are the last class."""

_CLASS_OF = tuple(
    2 * bisect_left(_LONGEST, length) for length in range(MAX_MATCH + AHEAD * MAX_DRAFTS + 1)
)

"""Class by length of match: even where occurrences differ, the next odd number where they agree."""

LOOKUP_RATES = (0.1, 0.15, 0.15, 0.3, 0.3, 0.5, 0.4, 0.7, 0.5, 0.85)
"""Acceptance of drafts of the host that is assumed for each of `Draft.kinds` at first."""

PROBABILITY_RATES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
"""For each `probability_class` of a draft of the device: a drafter is assumed to know how often it
is right."""

POSITION_RATES = (0.6,) * MAX_DRAFTS
"""For each number of a draft that is verified before the host has read its probability."""

_FIRST_WEIGHT = 4.0
"""Drafts that an assumed rate counts as, and the rate of all rows in that of a row."""


class Acceptance:
    """Acceptance rates of drafts by class: of all rows, or of one, which begins with their rates.

    Classes are of one kind, such as `Draft.kinds`, and begin at 0.
    """

    def __init__(
        self, rates: Sequence[float], most: float, everywhere: Acceptance | None = None
    ) -> None:
        """Measure all rows, of which `rates` are assumed; or one row, and `everywhere` with it.

        After `most` drafts of a class its counts are halved, so that a change is noticed.
        """
        weight = _FIRST_WEIGHT if everywhere is None else 0.0
        self._everywhere, self._most = everywhere, most
        self._trials = [weight] * len(rates)
        self._hits = [weight * rate for rate in rates]

    def of_row(self, most: float) -> Acceptance:
        """Return the rates of a new row."""
        return Acceptance(self._hits, most, self)  # of as many classes, with nothing assumed

    def rate(self, kind: int) -> float:
        """Return the expected acceptance of a draft of a class, if those before it are accepted."""
        if self._everywhere is None:
            return self._hits[kind] / self._trials[kind]
        prior = _FIRST_WEIGHT * self._everywhere.rate(kind)
        return (self._hits[kind] + prior) / (self._trials[kind] + _FIRST_WEIGHT)

    def chances(self, kinds: Iterable[int]) -> list[float]:
        """Return, for each draft, the probability that it is accepted and all before it are."""
        chance, chances, rate, last = 1.0, [], 0.0, -1
        for kind in kinds:
            if kind != last:  # mostly the same as for the draft before
                rate, last = self.rate(kind), kind
            chance *= rate
            chances.append(chance)
        return chances

    def judge(self, kinds: Iterable[int], drafts: Sequence[int], tokens: Sequence[int]) -> None:
        """Count the drafts in whose places `tokens` were sampled, up to the first wrong one."""
        hits, last = 0, -1
        for kind, draft, token in zip(kinds, drafts, tokens, strict=False):
            if kind != last:  # mostly the same as for the draft before
                self._count(last, hits, hits)
                hits, last = 0, kind
            if draft != token:
                self._count(kind, hits + 1, hits)
                return
            hits += 1
        self._count(last, hits, hits)

    def _count(self, kind: int, trials: int, hits: int) -> None:
        """Count drafts of a class, of which `hits` were right."""
        if not trials:
            return
        if self._trials[kind] >= self._most:
            self._trials[kind] /= 2
            self._hits[kind] /= 2
        self._trials[kind] += trials
        self._hits[kind] += hits
        if self._everywhere is not None:
            self._everywhere._count(kind, trials, hits)


def probability_class(probability: float) -> int:
    """Return the index in `PROBABILITY_RATES` of a probability; 0 for NaN."""
    classes = len(PROBABILITY_RATES)
    return int(min(probability, 0.999) * classes) if probability > 0 else 0


class Guess(NamedTuple):
    """Tokens that may follow the newest one of a request."""

    tokens: Sequence[int]
    chances: Sequence[float]
    """Of each token: the probability that a step accepts it."""

    def first(self, most: int) -> Guess:
        """Return at most the first `most` tokens."""
        return self if len(self.tokens) <= most else Guess(self.tokens[:most], self.chances[:most])


NOTHING = Guess((), ())


@dataclass(slots=True)
class RowDrafts:
    """What a drafter on the device has proposed last for one request."""

    at: int
    """Known tokens of the request when they were proposed, which they follow."""
    tokens: list[int]
    """As the row keeps them on the device."""
    probabilities: list[float]
    """Of the tokens for which the drafter had slots; the others are worthless."""
    chances: list[float]
    """Of the same tokens, that a step accepts them."""
    acceptance: Acceptance
    """Of the request."""


# Recent outputs of all requests of a salt, from which others of that salt draft. No torch.
#
# A salt separates users whose requests must not reveal anything to each other: the time of a step
# shows whether drafts were accepted. So each salt has indexes of its own, and requests without a
# salt share one. Outputs are appended to the newer of two indexes, separated by a number that is no
# token. When it is full, the older one is dropped: memory is bounded, and no step copies or
# searches much.

MAX_SALTS = 64
"""Salts with indexes; those that were used last."""

MAX_SHARED_TOKENS = 1 << 14
"""Tokens of each of the two indexes of a salt. An output of more counts with its last ones."""

MAX_WAITING_TOKENS = 1 << 17
"""Tokens of outputs that wait to be indexed; the oldest of more are dropped."""


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
            draft = index.propose(most, newest)
            if draft is not None and (best is None or draft.matched > best.matched):
                best = draft
        return best

    def _newest_index(self, salt: str | None, more: int) -> SuffixIndex:
        """Return the index that takes this many more tokens of a salt."""
        indexes = self._salts.setdefault(salt, [])
        self._salts.move_to_end(salt)
        if len(self._salts) > MAX_SALTS:
            self._salts.popitem(last=False)
        if not indexes or len(indexes[-1].tokens) + more > MAX_SHARED_TOKENS:
            del indexes[:-1]
            indexes.append(SuffixIndex(self._least_match, self._candidates))
        return indexes[-1]


MAX_INDEXED_TOKENS = 1 << 17
"""Tokens of a request that are indexed, then indexing starts over; of a long prompt the last half
of so many."""


class RequestDrafter:
    """Keeps the proposer of a request up to date, and measures its acceptance."""

    def __init__(
        self,
        proposer: SuffixIndex,
        acceptance: Acceptance,
        most: int,
        first: int,
        shared: SharedOutputs | None = None,
        salt: str | None = None,
    ) -> None:
        """Draft at most `most` tokens.

        The proposer sees the tokens from position `first` on. Outputs of other requests of the same
        `salt` in `shared` are looked up where it has no draft, or one with a shorter match.
        """
        self.acceptance = acceptance
        self.draft: Draft | None = None
        """What followed the tokens that the proposer has seen."""
        self.guess = NOTHING
        """What may follow the tokens known at the last `catch_up`."""
        self._chances: list[float] = []
        """Of what is left of the draft."""
        self._proposer = proposer
        self._most = most
        self._shared, self._salt = shared, salt
        self.seen = first
        """Tokens of the request that the proposer has seen, or never will."""
        self._followed = 0
        """Known tokens after them, all of which the draft has in their places."""
        self._indexed = 0

    def catch_up(self, known: int, tokens_of: Callable[[int, int], list[int]], most: int) -> int:
        """Guess what follows the `known` tokens of the request, if the proposer has seen them.

        While the tokens match the draft, its rest is the guess, and nothing is searched.
        Otherwise shows the proposer at most `most` more tokens, and returns how many. `tokens_of`:
        see `Request.tokens`.
        """
        seen, draft = self.seen, self.draft
        if draft is not None:
            reached = known - seen
            if reached == self._followed or self._follows(draft, reached, tokens_of):
                return 0
        elif known == seen:
            return 0
        stop = min(known, seen + most)
        if self._indexed + stop - seen > MAX_INDEXED_TOKENS:
            self._proposer.forget()
            self._indexed, self.draft = 0, None
        tokens = tokens_of(seen, stop)
        if self.draft is not None:
            self.acceptance.judge(self.draft.kinds, self.draft.tokens, tokens)
        self._proposer.extend(tokens)
        self.seen, self._followed = stop, 0
        self._indexed += stop - seen
        self.draft, self.guess = None, NOTHING
        if stop == known:
            self._propose(known, tokens_of)
        return stop - seen

    def read(self, stop: int, tokens_of: Callable[[int, int], list[int]], most: int) -> None:
        """Show the proposer at most `most` tokens before position `stop`, if it has not seen them.

        For prompts: nothing is guessed.
        """
        stop = min(stop, self.seen + most, self.seen + MAX_INDEXED_TOKENS - self._indexed)
        if self.draft is None and stop > self.seen:
            self._proposer.extend(tokens_of(self.seen, stop))
            self._indexed += stop - self.seen
            self.seen = stop

    def _follows(
        self, draft: Draft, reached: int, tokens_of: Callable[[int, int], list[int]]
    ) -> bool:
        """Guess the rest of the draft, if it is long enough and has the new tokens in its place."""
        followed, seen = self._followed, self.seen
        if len(draft.tokens) - reached < self._most:
            return False
        if draft.tokens[followed:reached] != tokens_of(seen + followed, seen + reached):
            return False
        new = reached - followed
        certain = 1 / self._chances[new - 1]
        self._followed = reached
        self._guess(draft, [chance * certain for chance in self._chances[new:]])
        return True

    def _guess(self, draft: Draft, chances: list[float]) -> None:
        """Guess the next tokens of the draft, whose chances these are."""
        first, most = self._followed, self._most
        self._chances = chances
        self.guess = Guess(draft.tokens[first : first + most], chances[:most])

    def _propose(self, known: int, tokens_of: Callable[[int, int], list[int]]) -> None:
        most = AHEAD * self._most
        draft = self._proposer.propose(most)
        if self._shared is not None and (draft is None or draft.matched < MAX_MATCH):
            newest = tokens_of(max(0, known - MAX_MATCH), known)
            other = self._shared.propose(self._salt, newest, most)
            if other is not None and (draft is None or other.matched > draft.matched):
                draft = other
        self.draft = draft
        if draft is not None:
            self._guess(draft, self.acceptance.chances(draft.kinds))
