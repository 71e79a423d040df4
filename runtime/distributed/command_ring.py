"""A ring of binary messages from rank 0 to all other ranks, in shared memory.

    record:  length | CRC32 | sequence number | kind | last | payload ..., padded to 8 bytes

The writer publishes the number of bytes written so far, then the number of messages, a futex word.
Each reader publishes the bytes that it has read, so that the writer never overwrites a record that
a rank has not copied. Records do not wrap: a record without payload fills the end of the ring,
unless that is shorter than a header. A long message is split into several records.

A reader spins briefly, because the next command of a busy engine follows within microseconds. Then
it sets its sleeping word and waits on the futex: the writer makes no system call for readers that
spin. Each side writes its word before it reads the other's, but a processor may delay the write, so
that the writer misses a reader that is about to sleep. The first wait is therefore short.

A record whose CRC does not match is read again: on weakly ordered processors its bytes can arrive
after the published number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from struct import Struct
from zlib import crc32

from ..errors import RankError
from .segment import RING_BYTES, SharedSegment, futex_wait, wake_all

__all__ = ["RingReader", "RingWriter"]

_HEADER = Struct("<IIQBB6x")
_BODY = Struct("<QBB")  # what the CRC covers besides the payload
_FILLER = 0xFF
"""Kind of the record at the end of the ring."""
_MOST_PAYLOAD = RING_BYTES // 4 - _HEADER.size

SPIN_SECONDS = 300e-6
"""A reader spins this long: more than the host's part of a step of 64 rows. Rank 0 would spend tens
of microseconds on waking a reader that sleeps."""
_SHORT_SLEEP_SECONDS = 1e-3
"""The first sleep: far longer than a processor delays a write."""
_SLEEP_SECONDS = 1.0
"""A reader that sleeps looks at the abort word this often, even if nothing wakes it."""
_RETRY_SECONDS = 0.05


class RingWriter:
    """Rank 0's end."""

    def __init__(self, segment: SharedSegment, check: Callable[[], None]) -> None:
        """Write to the ring of a segment. `check` raises when the group has ended."""
        self._segment = segment
        self._ring = segment.ring
        self._check = check
        self._readers = range(1, segment.ranks)
        self._end = 0
        """Bytes published."""
        self._free_until = RING_BYTES
        """The ring has room up to this byte, at least."""
        self.messages = 0

    def send(self, kind: int, payload: bytes = b"", *, wake: bool = True) -> None:
        """Publish a message, in order; waits if the slowest rank is a whole ring behind.

        Without `wake` a reader that sleeps does so until a later message, for a second at most.

        Raises:
            RankError: the group has ended.
        """
        if self._segment.aborted:
            self._check()
        begin, length = 0, len(payload)
        while length - begin > _MOST_PAYLOAD:
            self._put(kind, payload[begin : begin + _MOST_PAYLOAD], last=False)
            begin += _MOST_PAYLOAD
        self._put(kind, payload[begin:] if begin else payload, last=True)
        if wake:
            self._wake()

    def _put(self, kind: int, payload: bytes, *, last: bool) -> None:
        size = _record_bytes(len(payload))
        rest = RING_BYTES - self._end % RING_BYTES
        if rest < size:
            if self._end + rest > self._free_until:
                self._wait_for_room(self._end + rest)
            if rest >= _HEADER.size:
                self._write(rest, _FILLER, b"", True)
            else:
                self._end += rest
        if self._end + size > self._free_until:
            self._wait_for_room(self._end + size)
        self._write(size, kind, payload, last)
        self.messages += 1
        self._segment.publish(self._end, self.messages)

    def _write(self, size: int, kind: int, payload: bytes, last: bool) -> None:
        """Write a record that takes `size` bytes; its end is published later."""
        at, position = self._end % RING_BYTES, self._end
        crc = crc32(payload, crc32(_BODY.pack(position, kind, last)))
        _HEADER.pack_into(self._ring, at, len(payload), crc, position, kind, last)
        if payload:
            at += _HEADER.size
            self._ring[at : at + len(payload)] = payload
        self._end += size

    def _wake(self) -> None:
        """Wake the readers that sleep."""
        for rank in self._readers:
            if self._segment.of_rank[rank].sleeping:
                wake_all(self._segment.messages_address)
                return

    def _wait_for_room(self, end: int) -> None:
        pause = 20e-6
        self._wake()
        while True:
            consumed = min(self._segment.of_rank[rank].consumed for rank in self._readers)
            self._free_until = consumed + RING_BYTES
            if end <= self._free_until:
                return
            self._check()
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)


class RingReader:
    """The end of another rank."""

    def __init__(self, segment: SharedSegment, rank: int, check: Callable[[], None]) -> None:
        """Read a ring from its beginning. `check` raises when the group has ended."""
        self._segment = segment
        self._ring = segment.ring
        self._rank = rank
        self._check = check
        self.on_idle: Callable[[], bool] | None = None
        """Called whenever the reader is about to sleep; returns whether to sleep only briefly."""
        self._begin = 0
        """Bytes read."""

    def receive(self) -> tuple[int, bytes]:
        """Wait for the next message; return its kind and payload.

        Raises:
            RankError: the group has ended, or a record is damaged.
        """
        parts: list[bytes] = []
        while True:
            if self._segment.published == self._begin:
                self._wait()
            kind, payload, last = self._record()
            if kind == _FILLER:
                continue
            if last and not parts:
                return kind, payload
            parts.append(payload)
            if last:
                return kind, b"".join(parts)

    def _wait(self) -> None:
        """Wait until something is published."""
        segment, clock = self._segment, time.perf_counter
        spin_until = clock() + SPIN_SECONDS
        while clock() < spin_until:
            if segment.published != self._begin:
                return
        segment.of_rank[self._rank].sleeping = 1
        seconds = _SHORT_SLEEP_SECONDS
        try:
            while True:
                messages = segment.messages
                if segment.published != self._begin:
                    return
                if segment.aborted:
                    self._check()
                if self.on_idle is not None and self.on_idle():
                    seconds = _SHORT_SLEEP_SECONDS
                futex_wait(segment.messages_address, messages, seconds)
                seconds = _SLEEP_SECONDS
        finally:
            segment.of_rank[self._rank].sleeping = 0

    def _record(self) -> tuple[int, bytes, bool]:
        """Return kind and payload of the next record, and whether it ends its message."""
        at = self._begin % RING_BYTES
        if RING_BYTES - at < _HEADER.size:
            self._begin += RING_BYTES - at
            at = 0
        retry_until = 0.0
        while True:
            found = self._parse(at)
            if found is not None:
                size, kind, payload, last = found
                self._begin += size
                self._segment.of_rank[self._rank].consumed = self._begin
                return kind, payload, last
            now = time.perf_counter()
            retry_until = retry_until or now + _RETRY_SECONDS
            if now > retry_until:
                raise RankError(
                    f"rank {self._rank}: the command at byte {self._begin} is damaged, or one is"
                    " missing"
                )

    def _parse(self, at: int) -> tuple[int, int, bytes, bool] | None:
        """Return size, kind, payload and `last` of the record at `at`; None if it is damaged."""
        length, crc, position, kind, last = _HEADER.unpack_from(self._ring, at)
        size = _record_bytes(length)
        if position != self._begin or at + size > RING_BYTES:
            return None
        at += _HEADER.size
        payload = bytes(self._ring[at : at + length])
        if crc != crc32(payload, crc32(_BODY.pack(position, kind, last))):
            return None
        if kind == _FILLER:
            size = RING_BYTES - (at - _HEADER.size)
        return size, kind, payload, bool(last)


def _record_bytes(payload: int) -> int:
    return (_HEADER.size + payload + 7) & ~7
