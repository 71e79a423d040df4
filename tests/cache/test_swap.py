"""The blocks of the host: who waits in which."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepgraph.cache.blocks import HostBlocks, SwappedRequest

REQUESTS = st.sampled_from("abcd")


class HostMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(0, 8))
    def make(self, num_blocks: int) -> None:
        self.host = HostBlocks(num_blocks)
        self.num_blocks = num_blocks
        self.waiting: dict[str, SwappedRequest] = {}

    @rule(
        request=REQUESTS,
        columns=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=5),
    )
    def put(self, request: str, columns: list[tuple[int, int]]) -> None:
        if request in self.waiting:
            with pytest.raises(AssertionError, match="swapped already"):
                self.host.put(request, 7, columns)
            return
        taken = self.host.put(request, 7, columns)
        held = [host for swapped in self.waiting.values() for _, _, host in swapped.blocks]
        if len(columns) > self.num_blocks - len(held):
            assert taken is None
            return
        assert taken is not None
        assert not set(taken) & set(held)
        assert set(taken) <= set(range(self.num_blocks))
        pairs = zip(columns, taken, strict=True)
        blocks = [(group, column, host) for (group, column), host in pairs]
        self.waiting[request] = SwappedRequest(7, blocks)

    @rule(request=REQUESTS)
    def drop(self, request: str) -> None:
        self.host.drop(request)
        self.waiting.pop(request, None)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.check_integrity()
        assert self.host.num_blocks == self.num_blocks
        held = sum(len(swapped.blocks) for swapped in self.waiting.values())
        assert self.host.num_free == self.num_blocks - held
        for request in "abcd":
            assert self.host.find(request) == self.waiting.get(request)


HostMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestHost = HostMachine.TestCase


def test_a_request_that_needs_no_block_can_wait_without_any() -> None:
    # Its next token reads nothing: a window of 1, at the beginning of a block.
    host = HostBlocks(0)
    assert host.put("a", 4, []) == []
    assert host.find("a") == SwappedRequest(4, [])
    assert host.put("b", 4, [(0, 0)]) is None
    assert host.find("b") is None
