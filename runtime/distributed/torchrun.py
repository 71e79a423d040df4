"""Ranks that torchrun, or anything that sets the same environment, has started."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import secrets
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, RankError
from .segment import SharedSegment, open_shared, shared_memory

__all__ = ["TorchrunProcess"]

_MEET_SECONDS = 120.0
_TOKEN_BYTES = 16
_meetings = itertools.count()


@dataclass(frozen=True, slots=True)
class TorchrunProcess:
    """This process, as the environment describes it."""

    rank: int
    ranks: int
    device: int
    """Index of its device, of those of this machine."""
    address: str
    port: int

    @classmethod
    def of_environment(cls) -> TorchrunProcess | None:
        """Read `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`.

        None without `RANK` and `WORLD_SIZE`.

        Raises:
            ConfigError: a variable is missing or no number, or the ranks are on several machines.
        """
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank, ranks, port = map(_number, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
        if not 1 <= port <= 65535:
            raise ConfigError(f"MASTER_PORT={port} must be from 1 to 65535")
        if not 0 <= rank < ranks:
            raise ConfigError(f"RANK={rank} must be from 0 to WORLD_SIZE - 1 = {ranks - 1}")
        here = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))
        if here != str(ranks):
            raise ConfigError(
                f"WORLD_SIZE={ranks}, but {here} of these ranks run on this machine"
                " (LOCAL_WORLD_SIZE): tensor_parallel works within one machine; use replicas past"
                " it"
            )
        return cls(rank, ranks, local, os.environ.get("MASTER_ADDR", "127.0.0.1"), port)

    def check(self, tensor_parallel: int) -> None:
        """Raise `ConfigError` unless there are as many ranks as the configuration needs."""
        if self.ranks != tensor_parallel:
            raise ConfigError(
                f"tensor_parallel={tensor_parallel}, but torchrun started WORLD_SIZE={self.ranks}"
                f" processes: use --nproc-per-node {tensor_parallel}, or start the engine without"
                " torchrun (unset RANK and WORLD_SIZE), and it starts its processes itself"
            )

    def meet(self) -> mmap.mmap:
        """Return the segment of a new group; all ranks call it equally often.

        Raises:
            RankError: the store at `MASTER_ADDR` cannot be reached or made, or a rank did not come.
        """
        nbytes = SharedSegment.nbytes_for(self.ranks)
        key = f"stepgraph/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_meetings)}"
        store = _store(self.address, self.port, self.ranks, self.rank == 0)
        place = f"MASTER_ADDR={self.address} MASTER_PORT={self.port}"
        try:
            if self.rank == 0:
                memory, descriptor = shared_memory(nbytes)
                token = secrets.token_hex(_TOKEN_BYTES)
                memory[-_TOKEN_BYTES:] = bytes.fromhex(token)
                try:
                    store.set(key, json.dumps([os.getpid(), descriptor, token]))
                    store.wait([f"{key}/{rank}" for rank in range(1, self.ranks)])
                finally:
                    os.close(descriptor)
                return memory
            process, descriptor, token = json.loads(store.get(key))
            memory = open_shared(process, descriptor, nbytes)
            if memory[-_TOKEN_BYTES:] != bytes.fromhex(token):
                raise RankError(
                    f"process {process} is not rank 0 of this group: all ranks must run in one"
                    " container"
                )
            store.set(f"{key}/{self.rank}", "")
        except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
            raise RankError(
                f"the ranks did not meet at {place} within {_MEET_SECONDS:g} s: {error}. All of"
                " them must make their engines in the same order"
            ) from error
        return memory


@cache
def _store(address: str, port: int, ranks: int, is_first: bool) -> Any:
    """Return the key-value store of the ranks, which the agent of torchrun provides, or rank 0."""
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            ranks,
            is_master=is_first and not of_agent,
            timeout=timedelta(seconds=_MEET_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        place = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise RankError(f"the port of {place} is in use: choose another MASTER_PORT") from error
        raise RankError(
            f"the store at {place} cannot be reached: {error}. Check both variables, and that rank"
            " 0 runs"
        ) from error


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ConfigError(
            f"{name}={value!r} in the environment must be a number: start the ranks with torchrun"
        )
    return int(value)
