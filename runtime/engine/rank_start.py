"""The start of a tensor-parallel engine: its processes, and what they must agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch

from ...cache.memory.device_memory import DeviceMemory
from ...cache.memory.handler import MemoryPlan
from ..config import EngineConfig
from ..distributed.futex import require_futex
from ..distributed.rank_group import RankGroup
from ..distributed.rank_processes import RankProcess
from ..distributed.segment import SharedSegment, shared_memory
from ..errors import ConfigError
from ..kernels import Kernels
from ..kernels.cpu.threads import affine_cores
from ..loading.loader import Source
from ..loading.opened_source import OpenedSource
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.decoder_model import DecoderModel
from ..models.drafters.drafter_config import DrafterConfig
from ..models.layout import fused_layout
from ..models.plan import plan_of
from ..models.sharding import check_ranks
from ..resolved_config import ResolvedConfig

__all__ = [
    "agree_on_drafter",
    "agree_on_task",
    "decoded_config",
    "agree_on_plan",
    "agree_on_start",
    "agree_on_weights",
    "check_can_split",
    "encoded_task",
    "ended_by_failures",
    "of_rank",
    "share_of_memory",
    "spawn_group",
]

Task = dict[str, Any]


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
    """Raise `ConfigError` if the model, the device or the platform does not allow so many ranks."""
    ranks = config.user.tensor_parallel
    require_futex()
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
    ranks = config.user.tensor_parallel
    memory, descriptor = shared_memory(SharedSegment.nbytes_for(ranks))
    children: list[RankProcess] = []
    cores = _cores_of_ranks(config)
    try:
        try:
            for rank in range(1, ranks):
                arguments = [str(n) for n in (os.getpid(), descriptor, rank, ranks)]
                children.append(RankProcess(rank, arguments, cores[rank]))
            group = RankGroup(memory, 0, ranks, children)
        except BaseException:
            for child in children:
                child.end()
            raise
        with ended_by_failures(group):
            task = encoded_task(found, config)
            group.exchange(task)
            agree_on_task(group, task)
    finally:
        os.close(descriptor)
    return group


def _cores_of_ranks(config: ResolvedConfig) -> list[list[int] | None]:
    """Return the CPUs of each rank; None: those of this process, which are too few to divide."""
    ranks, cores = config.user.tensor_parallel, affine_cores()
    each = len(cores) // ranks
    if config.device.type != "cpu" or each < config.threads:
        return [None] * ranks
    parts = [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
    return [[cpu for core in part for cpu in core] for part in parts]


def encoded_task(found: Source, config: ResolvedConfig) -> Task:
    """Return what the ranks have to do, as JSON: versions, source, configuration."""
    fields = {
        field.name: getattr(config.user, field.name) for field in dataclasses.fields(EngineConfig)
    }
    fields["threads"] = config.threads
    if config.speculation is not None:
        fields["speculation"] = dataclasses.asdict(config.speculation)
    return {
        "version": sys.modules["stepgraph"].__version__,
        "torch": torch.__version__,
        "source": found.place,
        "config": fields,
    }


def decoded_config(task: Task) -> EngineConfig:
    """Return the configuration of a task."""
    fields = dict(task["config"])
    if fields["buckets"] is not None:
        fields["buckets"] = tuple(fields["buckets"])
    return EngineConfig(**fields)


def agree_on_task(group: RankGroup, task: Task) -> None:
    """Check that all ranks have the same task; raise `RankError` with both values if not."""
    names = {"version": "stepgraph version", "torch": "torch version", "source": "source"}
    items = {text: task[name] for name, text in names.items()}
    group.agree_on(items | {f"EngineConfig.{k}": value for k, value in task["config"].items()})


def of_rank(
    found: Source, config: ResolvedConfig, group: RankGroup, device: int | None = None
) -> tuple[Source, ResolvedConfig]:
    """Return the model and the configuration of one rank; `device`: index of its device."""
    assert isinstance(found.config, ModelConfig), "check_can_split allows native families only"
    shard = (group.rank, group.ranks)
    found = dataclasses.replace(found, config=dataclasses.replace(found.config, shard=shard))
    if config.device.type == "cuda":
        index = group.rank if device is None else device
        config = dataclasses.replace(config, device=torch.device("cuda", index))
    return found, config


def agree_on_start(group: RankGroup, opened: OpenedSource, kernels: Kernels) -> None:
    """Check that all ranks found the same model, and run the same kernels."""
    assert isinstance(opened.config, ModelConfig)
    digest = hashlib.sha256(repr(opened.config.whole).encode())
    if opened.reader is not None:
        headers = opened.reader.headers()
        for name in sorted(headers):
            digest.update(f"{name} {headers[name].dtype} {headers[name].shape}".encode())
    fallbacks = [fallback.name for fallback in kernels.fallbacks]  # numbers in errors may differ
    group.agree_on(
        {
            "config.json or safetensors headers (SHA-256)": digest.hexdigest(),
            "kernels": json.dumps([kernels.name, kernels.sampler, fallbacks]),
        }
    )


def agree_on_drafter(group: RankGroup, drafter: DrafterConfig) -> None:
    """Check that all ranks found the same drafter."""
    found = (drafter.kind, drafter.model, drafter.taps, drafter.parameters)
    digest = hashlib.sha256(repr(found).encode())
    group.agree_on(
        {"config.json or safetensors headers of the drafter (SHA-256)": digest.hexdigest()}
    )


def share_of_memory(memory: DeviceMemory, ranks: int) -> DeviceMemory:
    """Return the memory of one rank: ranks divide what they all use, such as the host's."""
    available = memory.available // ranks if memory.shared_with_os else memory.available
    return DeviceMemory(available, memory.shared_with_os, memory.host_available // ranks)


def agree_on_plan(
    group: RankGroup, plan: MemoryPlan, replan: Callable[[int, int], MemoryPlan]
) -> MemoryPlan:
    """Return the plan with the fewest blocks and batch tokens of all ranks.

    `replan` makes a plan of these numbers.
    """
    plans = group.exchange([plan.num_blocks, plan.max_batch_tokens, plan.host_blocks])
    blocks, tokens, host_blocks = (min(column) for column in zip(*plans, strict=True))
    if (blocks, tokens) != (plan.num_blocks, plan.max_batch_tokens):
        agreed = replan(blocks, tokens)
        plan = dataclasses.replace(agreed, budget_bytes=plan.budget_bytes, capped=plan.capped)
    return dataclasses.replace(plan, host_blocks=host_blocks)


def agree_on_weights(group: RankGroup, model: DecoderModel) -> None:
    """Check that replicated weights are the same on all ranks."""
    assert isinstance(model, Decoder)
    # That of rank 1, whose biases of partial sums are zero: only the first rank adds them.
    layout = fused_layout(dataclasses.replace(model.config, shard=(1, group.ranks)))
    checksum = 0
    for name, parameter in model.named_parameters():
        fused = layout.get(name)
        if fused is None or fused.cut is not None or any(s.name is None for s in fused.sources):
            continue
        stored = parameter.detach().contiguous().view(-1).view(torch.uint8).cpu()
        checksum = crc32(stored.numpy().data, checksum)
    group.agree_on({"checksum of replicated weights": f"{checksum:08x}"})
