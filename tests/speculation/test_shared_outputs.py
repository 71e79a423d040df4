"""Outputs that requests of a salt share: found within the salt, bounded, and nowhere else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.speculation.request_drafter import (
    MAX_SALTS,
    MAX_SHARED_TOKENS,
    MAX_WAITING_TOKENS,
    SharedOutputs,
)

Outputs = list[tuple[str | None, list[int]]]


def longest_match(outputs: list[list[int]], newest: list[int], least: int) -> int:
    """Tokens at the end of `newest` that occur in an output, before its end; 0 if too few."""
    longest = 0
    for output in outputs:
        for position in range(least, len(output)):
            matched = 0
            while (
                matched < min(position, len(newest))
                and output[position - matched - 1] == newest[-matched - 1]
            ):
                matched += 1
            longest = max(longest, matched)
    return longest if longest >= least else 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", None]), st.lists(st.integers(0, 2), max_size=12)),
        max_size=6,
    ),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(1, 3),
)
def test_it_is_a_search_in_the_outputs_of_the_salt(
    outputs: Outputs, newest: list[int], most: int
) -> None:
    shared = SharedOutputs(2, 100)
    for salt, output in outputs:
        shared.add(salt, output)
        shared.index_some(5)
    shared.index_some(1000)
    for salt in ("a", "b", None, "c"):
        own = [output for other, output in outputs if other == salt]
        draft = shared.propose(salt, newest, most)
        matched = longest_match(own, newest, 2)
        assert (0 if draft is None else draft.matched) == matched
        if draft is not None:
            assert 0 < len(draft.tokens) <= most
            assert len(draft.agreed) == len(draft.tokens)
            found = newest[len(newest) - matched :] + draft.tokens
            assert any(found == output[i : i + len(found)] for output in own for i in range(12))


def test_memory_is_bounded() -> None:
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
