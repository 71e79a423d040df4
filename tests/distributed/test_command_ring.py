"""The ring of commands against lists: any messages, readers at any distance from the writer."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule
from stepgraph.runtime import RankError
from stepgraph.runtime.distributed import command_ring
from stepgraph.runtime.distributed.command_ring import RingReader, RingWriter
from stepgraph.runtime.distributed.segment import (
    MAILBOX_BYTES,
    RING_BYTES,
    SharedSegment,
    open_shared,
    shared_memory,
)

RANKS = 3


def check_of(segment: SharedSegment) -> Callable[[], None]:
    def check() -> None:
        if segment.aborted:
            raise RankError("the group has ended")

    return check


def make_segment() -> SharedSegment:
    memory, descriptor = shared_memory(SharedSegment.nbytes_for(RANKS))
    os.close(descriptor)
    return SharedSegment(memory, RANKS)


class Ring(RuleBasedStateMachine):
    """Readers get every message once, in order, whatever the sizes and the distances."""

    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.segment = make_segment()
        self.writer = RingWriter(self.segment, check_of(self.segment))
        self.readers = [
            RingReader(self.segment, rank, check_of(self.segment)) for rank in range(1, RANKS)
        ]
        self.waiting: list[deque[tuple[int, bytes]]] = [deque() for _ in self.readers]

    def used(self) -> int:
        """Bytes of messages that a reader has not read, at most with their headers."""
        return max(sum(64 + len(message[1]) for message in queue) for queue in self.waiting)

    @rule(
        kind=st.integers(0, 254),
        size=st.one_of(
            st.integers(0, 40), st.integers(0, RING_BYTES // 3), st.just(RING_BYTES // 4)
        ),
        wake=st.booleans(),
    )
    def send(self, kind: int, size: int, wake: bool) -> None:
        if self.used() + size > RING_BYTES // 3:
            return  # the writer would wait
        message = (kind, os.urandom(size))
        self.writer.send(*message, wake=wake)
        for queue in self.waiting:
            queue.append(message)

    @precondition(lambda self: any(self.waiting))
    @rule(reader=st.integers(0, RANKS - 2), count=st.integers(1, 20))
    def receive(self, reader: int, count: int) -> None:
        queue = self.waiting[reader]
        for _ in range(min(count, len(queue))):
            assert self.readers[reader].receive() == queue.popleft()

    @invariant()
    def positions_are_bounded(self) -> None:
        for rank in range(1, RANKS):
            distance = self.segment.published - self.segment.of_rank[rank].consumed
            assert 0 <= distance <= RING_BYTES


Ring.TestCase.settings = settings(max_examples=20, stateful_step_count=50)
TestRing = Ring.TestCase


def test_a_writer_waits_for_the_slowest_reader() -> None:
    segment = make_segment()
    writer = RingWriter(segment, check_of(segment))
    readers = [RingReader(segment, rank, check_of(segment)) for rank in range(1, RANKS)]
    messages = [(k % 200, bytes([k % 251]) * (5000 + 37 * k)) for k in range(200)]
    messages.append((7, os.urandom(3 * RING_BYTES)))
    received: list[list[tuple[int, bytes]]] = [[] for _ in readers]

    def read(index: int) -> None:
        for _ in messages:
            received[index].append(readers[index].receive())

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(readers))]
    for thread in threads:
        thread.start()
    for number, message in enumerate(messages):
        writer.send(*message, wake=number % 50 == 0)
    for thread in threads:
        thread.join()
    assert received == [messages, messages]


def test_a_damaged_command_is_an_error() -> None:
    segment = make_segment()
    writer = RingWriter(segment, check_of(segment))
    reader = RingReader(segment, 1, check_of(segment))
    writer.send(1, b"whole")
    writer.send(2, b"damaged")
    assert reader.receive() == (1, b"whole")
    at = bytes(segment.ring).index(b"damaged")
    segment.ring[at] ^= 4
    with pytest.raises(RankError):
        reader.receive()


def test_the_end_of_the_group_ends_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_ring, "_SLEEP_SECONDS", 0.1)
    segment = make_segment()
    reader = RingReader(segment, 1, check_of(segment))
    writer = RingWriter(segment, check_of(segment))
    timer = threading.Timer(0.05, lambda: segment.abort(2, {"rank": 2, "reason": "x" * 10_000}))
    timer.start()
    with pytest.raises(RankError):
        reader.receive()
    with pytest.raises(RankError):
        writer.send(1)
    (record,) = segment.abort_records()
    assert record["rank"] == 2
    assert record["reason"].startswith("xxx")


def test_memory_is_shared_by_its_descriptor() -> None:
    memory, descriptor = shared_memory(1 << 16)
    memory[5:8] = b"abc"
    opened = open_shared(os.getpid(), descriptor, 1 << 16)
    assert opened[5:8] == b"abc"
    os.close(descriptor)
    with pytest.raises(RankError):
        open_shared(os.getpid(), descriptor, 1 << 16)
    segment = make_segment()
    segment.send(1, 1, b"value")
    assert segment.received(1, 1) == b"value"
    with pytest.raises(ValueError, match="to exchange"):
        segment.send(1, 2, bytes(MAILBOX_BYTES))
