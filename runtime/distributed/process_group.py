"""Collectives over a process group of `torch.distributed`: gloo on CPUs, NCCL on CUDA.

An application may have a default process group of its own, of other processes, or make one later.
So the group of an engine (`OwnProcessGroup`) is not the default one, and is made without it: its
ranks meet at a store on this machine, whose port rank 0 chooses and sends through the segment of
the `RankGroup`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.nn.functional import pad

from ..errors import RankError
from .rank_group import RankGroup

__all__ = ["OwnProcessGroup", "ProcessGroupCollectives", "raise_of_any_rank"]

_HOST = "127.0.0.1"
# The name from torch 2.13 on; torch.compile knows the other one in every version.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class OwnProcessGroup:
    """NCCL over CUDA devices, gloo on CPUs. All ranks make it, and close it."""

    def __init__(self, group: RankGroup, device: torch.device, timeout_seconds: float) -> None:
        """Meet the other ranks.

        Raises:
            RuntimeError: on all ranks, if one of them cannot take part; the message has each
                rank's reason.
            RankError: a rank ended meanwhile.
        """
        self.process_group: Any = None
        self.name = ""
        self._made: list[Any] = []
        error = None
        try:
            self._meet(group, device, timedelta(seconds=timeout_seconds))
        except Exception as failure:  # of sockets, of a library that is missing
            error = f"{type(failure).__name__}: {failure}"[:300]
        raise_of_any_rank(group, error, self.close)

    def _meet(self, group: RankGroup, device: torch.device, timeout: timedelta) -> None:
        store, name = _store(group, timeout)
        self.name = f"stepgraph-{name}"
        self.store = PrefixStore(self.name, store)
        members = dist.ProcessGroup(self.store, group.rank, group.ranks)
        backend, kind = _backend(self.store, group, device, timeout)
        members._register_backend(device, kind, backend)
        members._set_default_backend(kind)
        members._set_group_name(c10d.GroupName(self.name))
        # By this name code that torch.compile has traced finds the group.
        torch._C._distributed_c10d._register_process_group(members.group_name, members)
        self.process_group = members

    def abort(self) -> None:
        """End operations under way, from any thread: those that wait for dead ranks never end."""
        if self.process_group is not None:
            self.process_group.abort()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        members, self.process_group = self.process_group, None
        if members is not None:
            torch._C._distributed_c10d._unregister_process_group(members.group_name)
            members.shutdown()


def _store(group: RankGroup, timeout: timedelta) -> tuple[Store, str]:
    """Return the store of the group and a new name; RuntimeError on all ranks if some fail."""
    store: Any = None
    place: Any = None
    error = None
    try:
        if group.rank == 0:
            store = TCPStore(_HOST, 0, group.ranks, True, timeout=timeout, wait_for_workers=False)
            place = [store.port, secrets.token_hex(8)]
    except Exception as failure:  # of sockets
        error = f"{type(failure).__name__}: {failure}"
    place = group.exchange(place)[0]
    try:
        if place is not None and group.rank:
            store = TCPStore(
                _HOST, place[0], group.ranks, False, timeout=timeout, wait_for_workers=False
            )
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    raise_of_any_rank(group, error)  # a backend would wait for a rank without a store
    return store, place[1]


def _backend(
    store: Store, group: RankGroup, device: torch.device, timeout: timedelta
) -> tuple[Any, Any]:
    kinds = dist.ProcessGroup.BackendType
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, group.rank, group.ranks, timeout), kinds.GLOO
    if not dist.is_nccl_available():
        raise RuntimeError("this build of PyTorch has no NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, group.rank, group.ranks, options), kinds.NCCL


def raise_of_any_rank(group: RankGroup, error: str | None, release: Any = None) -> None:
    """Raise RuntimeError with the errors of all ranks, if there is one; all ranks call it.

    `release` is called before.
    """
    errors = group.exchange(error)
    if any(errors):
        if release is not None:
            release()
        found = {reason: rank for rank, reason in reversed(list(enumerate(errors))) if reason}
        raise RuntimeError("; ".join(f"rank {rank}: {text}" for text, rank in found.items()))


class ProcessGroupCollectives:
    """The `Collectives` of one rank of a process group. Operations wait as long as the group does.

    They work wherever PyTorch does, and are the reference of the other implementations. Each
    operation gathers the parts of all ranks and computes the result from them, so that sums are
    added in float32, in the order of ranks, and rounded once. torch.compile can trace all of them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        release: Callable[[], object],
        abort: Callable[[], object] | None = None,
    ) -> None:
        """Use a group.

        Args:
            group: of all ranks.
            release: called by `close`, once.
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
        if group is not None:
            self._release()

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
