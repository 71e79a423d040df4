"""The index of a sequence proposes what a search through all of it finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.speculation.request_drafter import MAX_MATCH, Draft, SuffixIndex


def searched(tokens: list[int], least: int, candidates: int, most: int) -> Draft | None:
    """What `SuffixIndex.propose` returns, by looking at every position."""

    def matched(position: int) -> int:
        count = 0
        while count < position and tokens[position - count - 1] == tokens[-count - 1]:
            count += 1
        return count

    found = [p for p in reversed(range(len(tokens))) if matched(p) >= least][:candidates]
    if not found:
        return None
    lengths = {p: min(matched(p), max(MAX_MATCH, least)) for p in found}
    best = max(lengths.values())
    left = [p for p in found if lengths[p] == best]
    drafts: list[int] = []
    agreed = []
    for _ in range(most):
        continued = tokens + drafts
        following = [continued[p + len(drafts)] for p in left]
        votes = {token: following.count(token) for token in following}
        token = max(votes, key=lambda t: (votes[t], -following.index(t)))
        agreed.append(len(votes) == 1)
        left = [p for p, t in zip(left, following, strict=True) if t == token]
        drafts.append(token)
    return Draft(drafts, best, agreed)


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 15),
)
def test_it_is_a_search(tokens: list[int], least: int, candidates: int, most: int) -> None:
    index = SuffixIndex(least, candidates)
    for count, token in enumerate(tokens):
        assert index.propose(most) == searched(tokens[:count], least, candidates, most)
        index.extend([token])
    assert index.propose(most) == searched(tokens, least, candidates, most)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(2, 12))
def test_a_long_match_is_a_search(unit: list[int], times: int) -> None:
    """Loops and repetitions, longer than `MAX_MATCH`."""
    tokens = unit * times
    index = SuffixIndex(2)
    index.extend(tokens)
    assert index.propose(15) == searched(tokens, 2, 8, 15)
