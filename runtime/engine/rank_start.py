"""The start of a tensor-parallel engine: its processes, and what they must agree on."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import Popen
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from ...cache.memory.device_memory import DeviceMemory
from ...cache.memory.handler import MemoryPlan
from ..distributed.rank_group import START_SECONDS, Link, RankGroup, start_rank
from ..distributed.shared_memory_collectives import SharedMemoryCollectives
from ..errors import ConfigError, KernelSelfTestError, RankError
from ..execution.step_functions import on_device
from ..kernels import Kernels
from ..kernels.cpu.threads import affine_cores
from ..loading.loader import Source
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.plan import fused_layout, plan_of
from ..models.resolved_config import ResolvedConfig
from ..models.sharding import check_ranks
from ..models.transformers.decoder import DecoderModel

if TYPE_CHECKING:
    from ..distributed.process_group import ProcessGroupCollectives


def open_nccl(
    group: RankGroup, device: torch.device, limit_seconds: float
) -> ProcessGroupCollectives:
    """Return the collectives of this rank over NCCL (gloo on a CPU); all ranks call it.

    Operations wait for another rank no longer than `limit_seconds`.

    Raises:
        KernelSelfTestError: they cannot be opened on some rank.
        RankError: a rank ended meanwhile.
    """
    # Some builds of torch lack torch.distributed.
    from ..distributed.process_group import ProcessGroupCollectives, open_process_group

    try:
        return ProcessGroupCollectives(open_process_group(group, device, limit_seconds))
    except RuntimeError as error:
        raise KernelSelfTestError(
            f"tensor_parallel={group.ranks}: collective operations do not work on these devices:"
            f" {error}. Use tensor_parallel=1, or replicas"
        ) from error


def with_collectives(
    kernels: Kernels, group: RankGroup, model: ModelConfig, config: ResolvedConfig
) -> Kernels:
    """Return the kernels with the collectives of this rank, for its device. All ranks call it.

    Raises:
        KernelBuildError: the C++ operators that they need on a CPU cannot be built.
        KernelSelfTestError: no collectives work on these CUDA devices.
    """
    if config.device.type == "cuda":
        with on_device(config.device):
            collectives = open_nccl(group, config.device, START_SECONDS)
            torch.cuda.empty_cache()  # the memory plan counts what the device has free
        group.collectives = collectives
        return dataclasses.replace(kernels, collectives=collectives)
    hidden = model.hidden_size * config.dtype.itemsize
    logits = -(-model.vocab_size // group.ranks) * config.dtype.itemsize
    most = max(config.prefill_tokens * hidden, config.user.max_num_seqs * logits)
    nbytes = SharedMemoryCollectives.bytes_needed(group.ranks, hidden, most)
    group.collectives = SharedMemoryCollectives(
        group.shared_memory(nbytes), group.rank, group.ranks, START_SECONDS
    )
    return dataclasses.replace(kernels, collectives=group.collectives)


@contextmanager
def ended_by_failures(group: RankGroup | None) -> Iterator[None]:
    """End the group and its processes if the start of this rank fails.

    Raises:
        RankError: another rank has failed; the error here follows from that.
    """
    try:
        yield
    except BaseException as error:
        if group is None:
            raise
        failure = group.end(error)
        group.close()
        if failure is error or not isinstance(error, Exception):
            raise
        raise failure from error


def check_can_split(found: Source, config: ResolvedConfig) -> None:
    """Raise `ConfigError` if the model, device or platform does not allow this number of ranks."""
    ranks = config.user.tensor_parallel
    if sys.platform != "linux":
        raise ConfigError(
            f"tensor_parallel={ranks} needs Linux, and this is {sys.platform}: use"
            " tensor_parallel=1",
            field="tensor_parallel",
        )
    check_ranks(plan_of(found.config), ranks)
    if config.device.type != "cuda":
        return
    if ":" in config.user.device:
        raise ConfigError(
            f"tensor_parallel={ranks} uses the devices cuda:0 to cuda:{ranks - 1}, so device must"
            f" be 'cuda', not {config.user.device!r}: choose devices by CUDA_VISIBLE_DEVICES",
            field="tensor_parallel",
        )
    devices = torch.cuda.device_count()
    if devices < ranks:
        raise ConfigError(
            f"tensor_parallel={ranks} needs {ranks} CUDA devices, and there are {devices}",
            field="tensor_parallel",
        )


def spawn_group(found: Source, config: ResolvedConfig) -> RankGroup:
    """Start the other ranks as processes of the worker; return the group, of which this is rank 0.

    Raises:
        ConfigError: no process can be started.
    """
    ranks, cores = config.user.tensor_parallel, _cores_of_ranks(config)
    started: list[tuple[Link, Popen[bytes]]] = []
    try:
        for rank in range(1, ranks):
            started.append(start_rank(rank, ranks, cores[rank]))
    except BaseException:
        for _, process in started:
            process.kill()
            process.wait()
        raise
    links, processes = zip(*started, strict=True)
    group = RankGroup(0, ranks, links, processes)
    with ended_by_failures(group):
        group.exchange((found.place, dataclasses.replace(config.user, threads=config.threads)))
    return group


def _cores_of_ranks(config: ResolvedConfig) -> list[list[int] | None]:
    """Return the CPUs of each rank; None: all of this process, too few to divide."""
    ranks, cores = config.user.tensor_parallel, affine_cores()
    each = len(cores) // ranks
    if config.device.type != "cpu" or each < config.threads:
        return [None] * ranks
    parts = [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
    return [[cpu for core in part for cpu in core] for part in parts]


def of_rank(
    found: Source, config: ResolvedConfig, group: RankGroup
) -> tuple[Source, ResolvedConfig]:
    """Return the model and the configuration of one rank, on the device of its index."""
    assert isinstance(found.config, ModelConfig), "check_can_split allows native families only"
    shard = (group.rank, group.ranks)
    found = dataclasses.replace(found, config=dataclasses.replace(found.config, shard=shard))
    if config.device.type == "cuda":
        config = dataclasses.replace(config, device=torch.device("cuda", group.rank))
    return found, config


def agree_on_plan(
    group: RankGroup, memory: DeviceMemory, plan: Callable[[DeviceMemory], MemoryPlan]
) -> MemoryPlan:
    """Return the plan that rank 0 makes for the rank with the least memory. All ranks call it."""
    sizes = group.exchange((memory.available, memory.host_available))
    available, host_available = (min(column) for column in zip(*sizes, strict=True))
    least = dataclasses.replace(memory, available=available, host_available=host_available)
    agreed: MemoryPlan = group.exchange(None if group.rank else plan(least))[0]
    return agreed


def agree_on_weights(group: RankGroup, model: DecoderModel) -> None:
    """Check that all ranks have the same config and replicated weights; raise `RankError` if not.

    The files of a checkpoint can change while the ranks read them.
    """
    assert isinstance(model, Decoder)
    # Rank 1's layout: its biases of partial sums are zero, because only the first rank adds them.
    layout = fused_layout(dataclasses.replace(model.config, shard=(1, group.ranks)))
    checksum = crc32(repr(model.config.whole).encode())
    for name, parameter in model.named_parameters():
        fused = layout.get(name)
        if fused is None or fused.cut is not None or any(s.name is None for s in fused.sources):
            continue
        stored = parameter.detach().contiguous().view(-1).view(torch.uint8).cpu()
        checksum = crc32(stored.numpy().data, checksum)
    for rank, other in enumerate(checksums := group.exchange(checksum)):
        if other != checksums[0]:
            raise RankError(f"rank {rank} has read another config or other weights than rank 0")
