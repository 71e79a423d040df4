"""Collectives over a process group of `torch.distributed`: gloo on CPUs, NCCL on CUDA.

They work wherever PyTorch does, and are the reference of the other implementations. Each operation
gathers the parts of all ranks and computes the result from them, so that sums are added in float32,
in the order of ranks, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..errors import RankError

__all__ = ["ProcessGroupCollectives"]

# The name from torch 2.13 on; torch.compile knows the other one in every version.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class ProcessGroupCollectives:
    """The `Collectives` of one rank of a process group. Operations wait as long as the group does.

    All operations can be traced by torch.compile.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        release: Callable[[], object] | None = None,
        abort: Callable[[], object] | None = None,
    ) -> None:
        """Use a group.

        Args:
            group: of all ranks.
            release: called by `close`; None: `torch.distributed` has made the group, and `close`
                destroys it.
            abort: ends operations that wait for dead ranks; None: they end by themselves.
        """
        self.rank: int = group.rank()
        self.ranks: int = group.size()
        self._group: dist.ProcessGroup | None = group
        self._release = release
        self._abort = abort

    def all_reduce(self, x_BF: Tensor) -> Tensor:
        """See `Collectives.all_reduce`. Raises RankError."""
        first, *others = self._parts(x_BF)
        total = first.to(torch.float32)
        for part in others:
            total = total + part
        return total.to(x_BF.dtype)

    def gather(self, x_BF: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `Collectives.gather`. Raises RankError."""
        parts = self._parts(pad(x_BF, (0, max(sizes) - sizes[self.rank])))
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def largest(self, values_B: Tensor, ids_B: Tensor) -> tuple[Tensor, Tensor]:
        """See `Collectives.largest`. Raises RankError."""
        values, ids = torch.stack(self._parts(values_B)), torch.stack(self._parts(ids_B))
        best = values.argmax(dim=0, keepdim=True)
        return values.gather(0, best)[0], ids.gather(0, best)[0]

    def close(self) -> None:
        """Leave the process group. Idempotent."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._release is not None:
            self._release()
        else:
            dist.destroy_process_group(group)

    def abort(self) -> None:
        """Let operations end that wait for ranks that have died, from any thread."""
        if self._abort is not None and self._group is not None:
            self._abort()

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tensors of all ranks, in their order."""
        parts = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        if torch.compiler.is_compiling():
            dist.all_gather_into_tensor(parts, x.contiguous(), group=self._group)
        else:
            with self._rank_errors():
                _all_gather(parts, x.contiguous(), group=self._group)
        return parts.chunk(self.ranks)

    @contextmanager
    def _rank_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.ranks}: another rank does not take part in an"
                f" operation of the process group: {str(error)[:300]}"
            ) from error
