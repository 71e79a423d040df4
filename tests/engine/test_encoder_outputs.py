"""The encoder-output cache against a plain model of a byte-bounded LRU."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepgraph.cache.encoder_outputs import EncoderOutputCache, content_key

KEYS = st.sampled_from([content_key(bytes([i]), "test") for i in range(6)])


class EncoderOutputMachine(RuleBasedStateMachine):
    """The oracle: (key, tensor) pairs, least recently used first."""

    @initialize(max_bytes=st.integers(0, 400))
    def make(self, max_bytes: int) -> None:
        self.cache = EncoderOutputCache(max_bytes)
        self.kept: list[tuple[bytes, torch.Tensor]] = []
        self.hits = self.misses = self.evictions = 0

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        found = [pair for pair in self.kept if pair[0] == key]
        got = self.cache.get(key)
        if not found:
            assert got is None
            self.misses += 1
            return
        assert got is found[0][1]
        self.kept = [pair for pair in self.kept if pair[0] != key] + found
        self.hits += 1

    @rule(key=KEYS, elements=st.integers(1, 60))
    def put(self, key: bytes, elements: int) -> None:
        tensor = torch.rand(elements)
        fits = tensor.nbytes <= self.cache.max_bytes
        assert self.cache.put(key, tensor) is fits
        if not fits:
            return
        self.kept = [pair for pair in self.kept if pair[0] != key]
        while sum(t.nbytes for _, t in self.kept) + tensor.nbytes > self.cache.max_bytes:
            self.kept.pop(0)
            self.evictions += 1
        self.kept.append((key, tensor))

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        assert len(self.cache) == len(self.kept)
        assert self.cache.num_bytes == sum(tensor.nbytes for _, tensor in self.kept)
        counts = (self.cache.hits, self.cache.misses, self.cache.evictions)
        assert counts == (self.hits, self.misses, self.evictions)


EncoderOutputMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestEncoderOutputs = EncoderOutputMachine.TestCase
