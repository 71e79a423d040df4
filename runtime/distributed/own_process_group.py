"""A process group of `torch.distributed` that belongs to an engine alone.

An application may have a default process group of its own, of other processes, or make one later.
So this group is not the default one, and is made without it: its ranks meet at a store on this
machine, whose port rank 0 chooses and sends through the segment of the `RankGroup`.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from .rank_group import RankGroup

__all__ = ["OwnProcessGroup"]

_HOST = "127.0.0.1"


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
        # By this name symmetric memory finds the group.
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
