"""The start of a tensor-parallel engine: its processes, and what they must agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch

from ...cache.memory.device_memory import DeviceMemory
from ...cache.memory.handler import MemoryPlan
from ..config import EngineConfig
from ..distributed.rank_group import START_PATIENCE, RankGroup
from ..distributed.rank_processes import RankProcess
from ..distributed.segment import SharedSegment, require_futex, shared_memory
from ..distributed.shared_memory_collectives import SharedMemoryCollectives
from ..errors import ConfigError, KernelSelfTestError
from ..execution.step_functions import on_device
from ..kernels import Kernels
from ..kernels.cpu.threads import affine_cores
from ..kernels.ops.collectives import Collectives
from ..loading.loader import OpenedSource, Source
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.drafters.drafter import DrafterConfig
from ..models.plan import fused_layout, plan_of
from ..models.resolved_config import ResolvedConfig
from ..models.sharding import check_ranks
from ..models.transformers.decoder import DecoderModel
from .collectives_self_test import CollectiveCases, check_collectives

__all__ = [
    "agree_on_drafter",
    "agree_on_plan",
    "agree_on_start",
    "agree_on_task",
    "agree_on_weights",
    "check_can_split",
    "decoded_config",
    "encoded_task",
    "ended_by_failures",
    "failed_check",
    "of_rank",
    "open_nccl",
    "serve_collectives",
    "share_of_memory",
    "spawn_group",
    "with_collectives",
]


_START_SECONDS = 10 * START_PATIENCE

"""An operation waits so long while engines start: compilers of ranks take different times."""

_TESTED_ROWS = (1, 8, 32)

"""Rows of decode steps whose sums are tested on CUDA; prefill chunks are too."""


def open_nccl(group: RankGroup, cases: CollectiveCases, limit_seconds: float) -> Collectives:
    """Return the collectives of this rank over NCCL (gloo on a CPU), tested; all ranks call it.

    Args:
        group: the ranks.
        cases: what is tested, on the device of this rank.
        limit_seconds: how long operations wait for another rank.

    Raises:
        KernelSelfTestError: they cannot be opened or are wrong on some rank.
        RankError: a rank ended meanwhile.
    """
    # Some builds of torch lack torch.distributed.
    from ..distributed.process_group import OwnProcessGroup, ProcessGroupCollectives

    try:
        processes = OwnProcessGroup(group, cases.device, limit_seconds)
    except RuntimeError as error:
        raise _no_collectives(group, str(error)) from error
    nccl = ProcessGroupCollectives(processes.process_group, processes.close, processes.abort)
    if (wrong := failed_check(group, nccl, cases)) is not None:
        nccl.close()
        raise _no_collectives(group, wrong)
    return nccl


def _no_collectives(group: RankGroup, error: str) -> KernelSelfTestError:
    return KernelSelfTestError(
        f"tensor_parallel={group.ranks}: collective operations do not work on these devices:"
        f" {error}. Use tensor_parallel=1, or replicas"
    )


def failed_check(group: RankGroup, collectives: Collectives, cases: CollectiveCases) -> str | None:
    """Return why collectives fail on some rank, or None; the same on all ranks."""
    check = check_collectives(collectives, cases)
    found = group.exchange([check.error, check.checksum])
    wrong = [f"rank {r}: {error}" for r, (error, _) in enumerate(found) if error]
    if wrong:
        return "; ".join(wrong)
    if len({checksum for _, checksum in found}) > 1:
        return "results differ between ranks"
    return None


def with_collectives(
    kernels: Kernels, group: RankGroup, model: ModelConfig, config: ResolvedConfig
) -> Kernels:
    """Return the kernels with the collectives of this rank, for its device. All ranks call it.

    Raises:
        KernelBuildError: the C++ operators that they need on a CPU cannot be built.
        KernelSelfTestError: no collectives work on these CUDA devices.
    """
    if config.device.type == "cuda":
        return dataclasses.replace(kernels, collectives=_on_cuda(group, model, config))
    nbytes = SharedMemoryCollectives.bytes_needed(
        group.ranks,
        config.prefill_chunk,
        model.hidden_size,
        config.max_num_seqs,
        model.vocab_size,
        config.dtype,
    )
    shared = SharedMemoryCollectives(
        group.shared_memory(nbytes),
        group.rank,
        group.ranks,
        abort=group.segment.abort_word,
        timeout_seconds=_START_SECONDS,
    )
    return dataclasses.replace(kernels, collectives=shared)


def _on_cuda(group: RankGroup, model: ModelConfig, config: ResolvedConfig) -> Collectives:
    shard = plan_of(model).shard
    assert shard is not None, "ranks have parts of a model"
    cases = CollectiveCases(
        tokens=tuple(sorted({*_TESTED_ROWS, config.prefill_chunk})),
        hidden_size=model.hidden_size,
        vocab_sizes=shard.vocab_sizes,
        dtype=config.dtype,
        device=config.device,
        seed=group.exchange(time.time_ns() % 2**30)[0],
    )
    with on_device(config.device):
        collectives = open_nccl(group, cases, _START_SECONDS)
        torch.cuda.empty_cache()  # the memory plan counts what the device has free
    if group.watch.on_abort is None:
        group.watch.on_abort = getattr(collectives, "abort", None)
    return collectives


def serve_collectives(collectives: Collectives | None, group: RankGroup, seconds: float) -> None:
    """Bound the waits of operations, once engines serve, and end them with the group."""
    own: Any = collectives  # what the protocol does not have
    if hasattr(own, "timeout_seconds"):
        own.timeout_seconds = seconds
    if hasattr(own, "abort") and group.watch.on_abort is None:
        group.watch.on_abort = own.abort  # kernels do not see the abort word of the group


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
    """Raise `ConfigError` if the model, device or platform does not allow this number of ranks."""
    ranks = config.tensor_parallel
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
    ranks = config.tensor_parallel
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
    """Return the CPUs of each rank; None: all of this process, too few to divide."""
    ranks, cores = config.tensor_parallel, affine_cores()
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
    found: Source, config: ResolvedConfig, group: RankGroup
) -> tuple[Source, ResolvedConfig]:
    """Return the model and the configuration of one rank, on the device of its index."""
    assert isinstance(found.config, ModelConfig), "check_can_split allows native families only"
    shard = (group.rank, group.ranks)
    found = dataclasses.replace(found, config=dataclasses.replace(found.config, shard=shard))
    if config.device.type == "cuda":
        config = dataclasses.replace(config, device=torch.device("cuda", group.rank))
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
