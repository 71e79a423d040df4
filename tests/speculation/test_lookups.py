"""Lookups in known tokens: an index of a sequence, and outputs that requests of a salt share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.speculation.request_drafter import (
    MAX_MATCH,
    MAX_SALTS,
    MAX_SHARED_TOKENS,
    MAX_WAITING_TOKENS,
    Draft,
    SharedOutputs,
    SuffixIndex,
)


def matched(tokens: list[int], position: int, newest: list[int]) -> int:
    """How many tokens before a position are those at the end of `newest`."""
    count = 0
    while count < min(position, len(newest)) and tokens[position - count - 1] == newest[-count - 1]:
        count += 1
    return count


def searched(tokens: list[int], least: int, candidates: int, most: int) -> Draft | None:
    """What `SuffixIndex.propose` returns, by looking at every position."""
    counts = {p: matched(tokens, p, tokens) for p in reversed(range(len(tokens)))}
    found = [p for p, count in counts.items() if count >= least][:candidates]
    if not found:
        return None
    lengths = {p: min(counts[p], max(MAX_MATCH, least)) for p in found}
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
def test_an_index_is_a_search(tokens: list[int], least: int, candidates: int, most: int) -> None:
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


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", None]), st.lists(st.integers(0, 2), max_size=12)),
        max_size=6,
    ),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(1, 3),
)
def test_shared_outputs_are_a_search_in_the_outputs_of_the_salt(
    outputs: list[tuple[str | None, list[int]]], newest: list[int], most: int
) -> None:
    shared = SharedOutputs(2, 100)
    for salt, output in outputs:
        shared.add(salt, output)
        shared.index_some(5)
    shared.index_some(1000)
    for salt in ("a", "b", None, "c"):
        own = [output for other, output in outputs if other == salt]
        draft = shared.propose(salt, newest, most)
        counts = [matched(output, p, newest) for output in own for p in range(2, len(output))]
        longest = max(counts, default=0)
        assert (0 if draft is None else draft.matched) == (longest if longest >= 2 else 0)
        if draft is not None:
            assert 0 < len(draft.tokens) <= most
            assert len(draft.agreed) == len(draft.tokens)
            found = newest[len(newest) - longest :] + draft.tokens
            assert any(found == output[i : i + len(found)] for output in own for i in range(12))


def test_shared_outputs_take_bounded_memory() -> None:
    shared = SharedOutputs(3, 8)
    for number in range(3 * MAX_SALTS):
        shared.add(f"{number % (2 * MAX_SALTS)}", [number] * 2000)
        shared.index_some(2001)
    assert shared.num_tokens <= MAX_SALTS * 2001 * 2
    for number in range(20):
        shared.add("one", [number, 1, 2] * 20_000)
        shared.index_some(20_000)
        assert shared.num_tokens < MAX_WAITING_TOKENS + 2 * MAX_SHARED_TOKENS + MAX_SALTS * 4002
    assert shared.propose("one", [19, 1, 2], 3) is not None
    assert shared.propose("0", [64, 64, 64], 3) is None, "the salt that was used first is dropped"
