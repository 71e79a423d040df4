"""The shared memory of a group of ranks: one anonymous mapping, without a name in any file system.

    header     abort word, published bytes and messages
    ranks      a page each: `RankWords`, and why it aborted
    mailboxes  two for each rank, for `RankGroup.exchange`
    ring       of commands, see `command_ring.py`

Rank 0 creates it with memfd_create(2). The other ranks open it as `/proc/PID/fd/FD`, so nothing
remains when the processes end, however they do. Words are aligned and written by one store each.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import sys
import threading
import time
from typing import Any

from ..errors import ConfigError, RankError

__all__ = [
    "MAILBOX_BYTES",
    "RING_BYTES",
    "SharedSegment",
    "futex_wait",
    "open_shared",
    "require_futex",
    "shared_memory",
    "wake_all",
]

_PAGE = 4096
_ABORT, _PUBLISHED_MESSAGES, _PUBLISHED_BYTES = 0, 64, 72
_REASON = 1024
"""Offset in the page of a rank: length, then the record as JSON."""
_MOST_REASON = _PAGE - _REASON - 4

MAILBOX_BYTES = 1 << 16
RING_BYTES = 1 << 20


def shared_memory(nbytes: int) -> tuple[mmap.mmap, int]:
    """Create zeroed anonymous memory that processes can share; return it and its descriptor.

    Pages are allocated when they are first touched.
    """
    descriptor = os.memfd_create("stepgraph-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def open_shared(process: int, descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the shared memory that another process of this user created.

    Raises:
        RankError: the process is not visible, or belongs to another user.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RankError(
            f"the shared memory of process {process} (rank 0) cannot be opened: {error.strerror}."
            " All ranks must run in one container, as one user"
        ) from error
    try:
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


class RankWords(ctypes.Structure):
    """The words of a rank at the beginning of its page, each in a cache line of its own."""

    heartbeat: int
    """A number that a live rank keeps changing."""
    consumed: int
    """Bytes of the ring that the rank has read."""
    progress: int
    """In the high 32 bits the number of the last step whose tokens it has checked in; in the low
    ones the CRC32 of all tokens so far."""
    process: int
    """Its process id; 0 until it has joined."""
    arrived: int
    """Number of exchanges to which it has sent its value."""
    sleeping: int
    """Whether it waits for messages on the futex."""

    _fields_ = tuple(
        field
        for name in ("heartbeat", "consumed", "progress", "process", "arrived", "sleeping")
        for field in ((name, ctypes.c_uint64), (f"after_{name}", ctypes.c_uint64 * 7))
    )


class SharedSegment:
    """The words of the segment, as a rank reads and writes them."""

    def __init__(self, memory: mmap.mmap, ranks: int) -> None:
        """Take a mapping of `nbytes_for(ranks)` bytes."""
        self.ranks = ranks
        self.memory = memory
        self._aborting = threading.Lock()
        self._view = memoryview(memory)
        self._words = self._view.cast("I")
        self._longs = self._view.cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.of_rank = [RankWords.from_buffer(memory, self._at(rank, 0)) for rank in range(ranks)]
        ring = _PAGE * (1 + ranks) + 2 * ranks * MAILBOX_BYTES
        self.ring = self._view[ring : ring + RING_BYTES]

    @staticmethod
    def nbytes_for(ranks: int) -> int:
        """Bytes of a segment."""
        return _PAGE * (1 + ranks) + 2 * ranks * MAILBOX_BYTES + RING_BYTES

    @property
    def abort_word(self) -> memoryview:
        """The abort word, uint32: 0 until a rank ends the group."""
        return self._view[_ABORT : _ABORT + 4]

    @property
    def aborted(self) -> bool:
        """Whether a rank has ended the group."""
        return self._words[_ABORT] != 0

    @property
    def messages_address(self) -> int:
        """Address of `messages`, for a futex."""
        return self._address + _PUBLISHED_MESSAGES

    @property
    def messages(self) -> int:
        """Number of published messages, modulo 2^32; a futex word."""
        return self._words[_PUBLISHED_MESSAGES >> 2]

    @property
    def published(self) -> int:
        """Bytes that were ever published in the ring."""
        return self._longs[_PUBLISHED_BYTES >> 3]

    def publish(self, nbytes: int, messages: int) -> None:
        """Set the published bytes, then the published messages."""
        self._longs[_PUBLISHED_BYTES >> 3] = nbytes
        self._words[_PUBLISHED_MESSAGES >> 2] = messages & 0xFFFFFFFF

    def send(self, rank: int, number: int, value: bytes) -> None:
        """Put the value of this rank into its mailbox for exchange `number`, from 1.

        Raises:
            ValueError: the value is too long.
        """
        if len(value) > MAILBOX_BYTES - 4:
            raise ValueError(f"{len(value)} bytes to exchange, at most {MAILBOX_BYTES - 4} fit")
        begin = self._mailbox(rank, number)
        self._words[begin >> 2] = len(value)
        self._view[begin + 4 : begin + 4 + len(value)] = value
        self.of_rank[rank].arrived = number

    def received(self, rank: int, number: int) -> bytes:
        """Return the value of a rank that has arrived at exchange `number`."""
        begin = self._mailbox(rank, number)
        length = self._words[begin >> 2]
        return bytes(self._view[begin + 4 : begin + 4 + length])

    @property
    def aborted_by(self) -> int:
        """The rank that set the abort word."""
        return self._words[_ABORT] - 1

    def abort(self, rank: int, record: dict[str, Any]) -> None:
        """End the group, with a record of the reason; no effect after the first of this rank."""
        with self._aborting:  # two threads may find a reason
            begin = self._at(rank, _REASON)
            if self._words[begin >> 2] == 0:
                record = record | {"time": time.monotonic_ns()}
                encoded = json.dumps(record).encode()
                if len(encoded) > _MOST_REASON:
                    excess = len(encoded) - _MOST_REASON
                    record = record | {"reason": record["reason"][: -excess - 1]}
                    encoded = json.dumps(record).encode()
                self._view[begin + 4 : begin + 4 + len(encoded)] = encoded
                self._words[begin >> 2] = len(encoded)
        if not self.aborted:
            self._words[_ABORT] = rank + 1

    def abort_records(self) -> list[dict[str, Any]]:
        """Return the records so far, earliest first. Operators set the abort word without one."""
        records: list[dict[str, Any]] = []
        for rank in range(self.ranks):
            begin = self._at(rank, _REASON)
            length = self._words[begin >> 2]
            if length:
                records.append(json.loads(bytes(self._view[begin + 4 : begin + 4 + length])))
        return sorted(records, key=lambda record: int(record["time"]))

    def _at(self, rank: int, offset: int) -> int:
        return _PAGE * (1 + rank) + offset

    def _mailbox(self, rank: int, number: int) -> int:
        return _PAGE * (1 + self.ranks) + (2 * rank + number % 2) * MAILBOX_BYTES


# Futexes: wait until a word changes, wake everybody who waits for it. Linux only (futex(2)). The
# calls release the GIL. A word is a uint32 at an aligned address. Each process passes the address
# where it has mapped the memory.

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""Number of the system call by machine."""
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _syscall() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
    )
    return call


_call = _syscall()
_number = _NUMBERS.get(platform.machine(), -1)


def require_futex() -> None:
    """Raise `ConfigError` on a platform without futexes."""
    if _call is None:
        raise ConfigError(
            f"tensor_parallel needs Linux on {', '.join(_NUMBERS)}, and this is {sys.platform} on"
            f" {platform.machine()}: use tensor_parallel=1"
        )


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleep while the word is `expected`, at most `seconds`. May return early: check the word."""
    assert _call is not None
    whole = int(seconds)
    timeout = _Timespec(whole, int((seconds - whole) * 1e9))
    status = _call(_number, address, _FUTEX_WAIT, expected, ctypes.addressof(timeout), None, 0)
    if status != 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(ctypes.get_errno(), f"futex wait: {os.strerror(ctypes.get_errno())}")


def wake_all(address: int) -> None:
    """Wake every thread, of any process, that waits for the word."""
    assert _call is not None
    _call(_number, address, _FUTEX_WAKE, _ALL, None, None, 0)
