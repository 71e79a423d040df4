"""Collectives over a process group of `torch.distributed`: gloo on CPUs, NCCL on CUDA.

An application may have a default process group of its own, of other processes, or make one later.
So the group of an engine is not the default one, and is made without it: its ranks meet at a store
on this machine, whose port rank 0 chooses and sends to the others of the `RankGroup`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.nn.functional import pad

from ..errors import RankError
from .rank_group import RankGroup

T = TypeVar("T")

_HOST = "127.0.0.1"
# The name from torch 2.13 on; torch.compile knows the other one in every version.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def open_process_group(group: RankGroup, device: torch.device, seconds: float) -> Any:
    """Return NCCL over CUDA devices, gloo on CPUs; operations wait `seconds`. All ranks call it.

    Raises:
        RuntimeError: on all ranks, if one of them cannot take part; the message has each rank's
            reason.
        RankError: a rank ended meanwhile.
    """
    timeout = timedelta(seconds=seconds)

    def store_at(port: int) -> TCPStore:
        serves = group.rank == 0
        return TCPStore(_HOST, port, group.ranks, serves, timeout=timeout, wait_for_workers=False)

    own = _on_all(group, lambda: None if group.rank else store_at(0))
    place = None if own is None else [own.port, f"stepgraph-{secrets.token_hex(8)}"]
    port, name = group.exchange(place)[0]
    store = PrefixStore(name, _on_all(group, lambda: own or store_at(port)))
    members = dist.ProcessGroup(store, group.rank, group.ranks)
    backend, kind = _on_all(group, lambda: _backend(store, group, device, timeout))
    members._register_backend(device, kind, backend)
    members._set_default_backend(kind)
    members._set_group_name(c10d.GroupName(name))
    # By this name code that torch.compile has traced finds the group.
    torch._C._distributed_c10d._register_process_group(members.group_name, members)
    return members


def _on_all(group: RankGroup, make: Callable[[], T]) -> T:
    """Return what `make` returns; RuntimeError on all ranks if it raises on one of them."""
    made = error = None
    try:
        made = make()
    except Exception as failure:  # of sockets, of a library that is missing
        error = f"{type(failure).__name__}: {failure}"[:300]
    errors = group.exchange(error)
    if any(errors):  # a backend would wait for a rank that has failed
        found = {reason: rank for rank, reason in reversed(list(enumerate(errors))) if reason}
        raise RuntimeError("; ".join(f"rank {rank}: {text}" for text, rank in found.items()))
    return cast("T", made)


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


class ProcessGroupCollectives:
    """The `Collectives` of one rank of a process group. Operations wait as long as the group does.

    They work wherever PyTorch does, and are the reference of the other implementations. Each
    operation gathers the parts of all ranks and computes the result from them, so that sums are
    added in float32, in the order of ranks, and rounded once. torch.compile can trace all of them.
    """

    communicator = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Use the group of all ranks, until `close`."""
        self.rank: int = group.rank()
        self.ranks: int = group.size()
        self._group: dist.ProcessGroup | None = group

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

    def close(self) -> None:
        """Leave the process group. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            torch._C._distributed_c10d._unregister_process_group(group.group_name)
            group.shutdown()

    def abort(self) -> None:
        """End operations under way, from any thread: those that wait for dead ranks never end."""
        if (group := self._group) is not None:
            group.abort()

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tensors of all ranks, in their order."""
        parts = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        if torch.compiler.is_compiling():
            dist.all_gather_into_tensor(parts, x.contiguous(), group=self._group)
        else:
            try:
                _all_gather(parts, x.contiguous(), group=self._group)
            except RuntimeError as error:
                raise RankError(
                    f"rank {self.rank} of {self.ranks}: another rank does not take part in an"
                    f" operation of the process group: {str(error)[:300]}"
                ) from error
        return parts.chunk(self.ranks)
