"""Collectives of the processes of one machine on CPUs, in C++ over memory that they share."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import RankError
from ..kernels import load_cpu_ops
from ..kernels.cpu.collectives import LINE_BYTES
from ..kernels.ops.collectives import CollectiveFailure

_LARGEST_PART = 1 << 20
"""Bytes; what ranks exchange at once. Longer tensors are exchanged in pieces."""
_SMALLEST_PART = 4096


class SharedMemoryCollectives:
    """The `Collectives` of one rank, over a region that the processes of all ranks map.

    A rank that does not take part within the timeout, or runs another operation, ends the group:
    the abort word becomes 1 + the rank that noticed, and all ranks raise RankError, also from later
    operations. Operations inside compiled code and inside the C++ stack raise RuntimeError instead,
    which `rank_errors` converts.
    """

    def __init__(
        self,
        buffer: mmap.mmap | memoryview,
        rank: int,
        ranks: int,
        timeout_seconds: float,
    ) -> None:
        """Join a group; builds and loads the C++ operators.

        Args:
            buffer: writable shared memory of `bytes_needed` bytes, the same on all ranks, at a
                multiple of 128 bytes; zero before the first rank joins. It begins with the abort
                word, and stays exported until the collectives are closed and no stack uses them.
            rank: of this process.
            ranks: of the group, 2 to 64.
            timeout_seconds: how long an operation waits for another rank.

        Raises:
            KernelBuildError: the C++ operators cannot be built.
            RuntimeError: the buffer is too small or not aligned.
        """
        load_cpu_ops()
        self.rank, self.ranks = rank, ranks
        memory = torch.frombuffer(memoryview(buffer), dtype=torch.uint8)  # exported as it lives
        abort = memory[:4].view(torch.int32)
        self.communicator: int = torch.ops.stepgraph.communicator_create.default(
            memory[LINE_BYTES:], abort, rank, ranks, timeout_seconds
        )
        self._abort_word: Tensor | None = abort
        # A tensor, so that compiled code does not depend on the number.
        self._handle = torch.tensor(self.communicator, device="cpu")
        self._close = weakref.finalize(
            self, torch.ops.stepgraph.communicator_destroy.default, self.communicator
        )

    @staticmethod
    def bytes_needed(ranks: int, row_bytes: int, most_bytes: int) -> int:
        """Return the bytes of shared memory of a group, up to about 2 MiB a rank.

        Its tensors have rows of `row_bytes` and at most `most_bytes`.
        """
        most = max(row_bytes, min(max(most_bytes, _SMALLEST_PART), _LARGEST_PART))
        part = -(-most // LINE_BYTES) * LINE_BYTES
        return LINE_BYTES + ranks * (LINE_BYTES + 2 * part)

    def set_timeout(self, seconds: float) -> None:
        """Let operations wait for another rank as long from now on."""
        torch.ops.stepgraph.communicator_set_timeout.default(self.communicator, seconds)

    @property
    def failure(self) -> CollectiveFailure | None:
        """Why this rank gave up waiting for the others; None: it did not."""
        if not self._close.alive:
            return None
        found = CollectiveFailure(
            *torch.ops.stepgraph.communicator_failure.default(self.communicator)
        )
        return found if found.reason else None

    @contextmanager
    def rank_errors(self) -> Iterator[None]:
        """Convert errors of operations in compiled code and in the C++ stack to RankError."""
        try:
            yield
        except RuntimeError as error:
            if (failure := self.failure) is None:
                raise
            raise RankError(f"rank {self.rank} of {self.ranks}: {failure}") from error

    def all_reduce(self, x_BF: Tensor) -> Tensor:
        """See `Collectives.all_reduce`; for float32, bfloat16 and float16, also inside compiled
        code. Raises RankError."""
        return self._run(torch.ops.stepgraph.all_reduce.default, x_BF)

    def gather(self, x_BF: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `Collectives.gather`; also inside compiled code. Raises RankError."""
        return self._run(torch.ops.stepgraph.gather_columns.default, x_BF, list(sizes))

    def _run(self, operation: Callable[..., Tensor], *arguments: object) -> Tensor:
        if torch.compiler.is_compiling():
            return operation(*arguments, self._handle)
        with self.rank_errors():
            return operation(*arguments, self._handle)

    def abort(self) -> None:
        """End operations under way on all ranks, from any thread."""
        if (word := self._abort_word) is not None and not word[0]:
            word[0] = 1 + self.rank

    def close(self) -> None:
        """Release the memory, once no stack uses it; operations raise RuntimeError afterwards."""
        self._abort_word = None
        self._close()
