"""The start of a tensor-parallel engine: its processes, and what they must agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
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
from ..kernels.result_check import Fallback
from ..kernels.triton.peer_exchange import slot_bytes_for
from ..loading.loader import OpenedSource, Source
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.decoder_model import DecoderModel
from ..models.drafters.drafter import DrafterConfig
from ..models.plan import fused_layout, plan_of
from ..models.sharding import check_ranks
from ..resolved_config import ResolvedConfig
from .collectives_self_test import CollectiveCases, check_collectives

if TYPE_CHECKING:
    from ..distributed.peer_memory import SumChoice
    from ..distributed.process_group import OwnProcessGroup

__all__ = [
    "ChosenCollectives",
    "agree_on_drafter",
    "agree_on_plan",
    "agree_on_start",
    "agree_on_task",
    "agree_on_weights",
    "check_can_split",
    "choose_collectives",
    "choose_sums",
    "decoded_config",
    "encoded_task",
    "ended_by_failures",
    "failed_candidates",
    "of_rank",
    "serve_collectives",
    "share_of_memory",
    "spawn_group",
    "with_collectives",
]


# Which collectives the ranks of a group of GPUs use: chosen at the start, by test and by time.
#
# Candidates are the Triton kernels over peer memory, with each of their algorithms, and NCCL. A
# candidate that cannot be opened on some rank, whose results are wrong, or whose bits differ
# between ranks is rejected on all ranks. Each size uses the fastest algorithm. NCCL is used if all
# kernels are rejected, with a warning, or if it is faster for the sums of one row.

logger = logging.getLogger("stepgraph.runtime")

NAME = "collectives"

"""Of the fallback."""

_SELF_TEST_SECONDS = 120.0

"""Ranks may take different times to compile the kernels."""

_MOST_PEERS = 32

"""Threads of a warp, which set the flags of all ranks."""

_OPERATIONS, _REPLAYS = 20, 7

"""All-reduces in a captured graph that is timed, and its replays."""


@dataclasses.dataclass(frozen=True)
class ChosenCollectives:
    """The collectives of a rank, and why."""

    collectives: Collectives
    report: dict[str, Any]
    """For `Engine.stats`: `used`, `reason`, and microseconds of sums by candidate and bytes."""
    fallback: Fallback | None
    """Why NCCL replaces the kernels; None: it does not."""


Times = dict[str, dict[int, float]]

"""Candidate -> bytes of a tensor -> microseconds of a sum over ranks."""


def choose_collectives(
    group: RankGroup, cases: CollectiveCases, slot_bytes: int, limit_seconds: float
) -> ChosenCollectives:
    """Open, test and time the candidates; all ranks call it, and choose the same.

    Args:
        group: the ranks.
        cases: what is tested and timed, on the device of this rank.
        slot_bytes: see `open_peer_memory`.
        limit_seconds: how long operations wait for another rank afterwards.

    Raises:
        KernelSelfTestError: no candidate works.
        RankError: a rank ended meanwhile.
    """
    # Some builds of torch lack torch.distributed.
    from ..distributed.process_group import OwnProcessGroup, ProcessGroupCollectives

    errors: dict[str, str] = {}
    times: Times = {}
    try:
        processes = OwnProcessGroup(group, cases.device, limit_seconds)
    except RuntimeError as error:
        errors["NCCL"] = errors["peer memory"] = str(error)
        raise _none_works(group, errors) from error
    nccl = ProcessGroupCollectives(processes.process_group, processes.close, processes.abort)
    errors |= failed_candidates(group, {"NCCL": nccl}, cases)
    peers = _open_peers(group, processes, cases, slot_bytes, errors)
    if peers is not None:
        if group.watch.on_abort is None:
            group.watch.on_abort = peers.abort  # kernels do not see the abort word of the group
        candidates = _algorithms(peers, cases.device)
        errors |= failed_candidates(group, candidates, cases)
        working = {name: c for name, c in candidates.items() if name not in errors}
        if not working:
            errors["peer memory"] = "; ".join(f"{n}: {errors[n]}" for n in candidates)
            peers = None
        times = {name: measured(group, c, cases) for name, c in working.items()}
    if "NCCL" not in errors:
        times["NCCL"] = measured(group, nccl, cases)
    sums = choose_sums({name: found for name, found in times.items() if name != "NCCL"})
    reason = _why_nccl(times, errors if peers is None else {})
    if "NCCL" not in errors and (peers is None or reason is not None):
        report = {"used": "NCCL", "reason": reason, "us": times, "errors": errors}
        shape = f"{group.ranks} ranks"
        return ChosenCollectives(nccl, report, Fallback(NAME, shape, reason or "unknown"))
    if peers is None:
        nccl.close()
        raise _none_works(group, errors)
    group.exchange(None)  # no rank is within an operation
    nccl.close()
    chosen = peers.with_sums(sums)
    chosen.timeout_seconds = limit_seconds
    used = ", ".join(f"{c.algorithm} up to {c.most_bytes:g} bytes" for c in sums)
    report = {"used": f"peer memory: {used}", "reason": "fastest", "us": times, "errors": errors}
    logger.info("collectives: %s", report)
    return ChosenCollectives(chosen, report, None)


def _none_works(group: RankGroup, errors: dict[str, str]) -> KernelSelfTestError:
    found = "; ".join(f"{name}: {error}" for name, error in errors.items())
    return KernelSelfTestError(
        f"tensor_parallel={group.ranks}: no collective operations work on these devices: {found}."
        " Use tensor_parallel=1, or replicas"
    )


def _open_peers(
    group: RankGroup,
    processes: OwnProcessGroup,
    cases: CollectiveCases,
    slot_bytes: int,
    errors: dict[str, str],
) -> Any:
    """Return the collectives over peer memory, None (and an error) where there is none."""
    if find_spec("triton") is None:
        errors["peer memory"] = "Triton is not installed"
        return None
    if group.ranks > _MOST_PEERS:
        errors["peer memory"] = f"the kernels take at most {_MOST_PEERS} ranks"
        return None
    from ..distributed.peer_memory import PeerMemoryCollectives, SumChoice, open_peer_memory

    try:
        regions = open_peer_memory(group, processes, cases.device, slot_bytes, _SELF_TEST_SECONDS)
    except RuntimeError as error:
        errors["peer memory"] = str(error)
        return None
    return PeerMemoryCollectives(regions, [SumChoice(float("inf"), "one_shot")])


def _algorithms(peers: Any, device: torch.device) -> dict[str, Any]:
    """The collectives with each algorithm for all sizes."""
    from ..distributed.peer_memory import SumChoice

    names = ["one_shot", "two_shot"]
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if peers.regions.multicast and hopper:
        names.append("multimem")
    return {name: peers.with_sums([SumChoice(float("inf"), name)]) for name in names}  # type: ignore[arg-type]


def failed_candidates(
    group: RankGroup, candidates: dict[str, Any], cases: CollectiveCases
) -> dict[str, str]:
    """Return the errors of the candidates that fail on some rank; the same on all ranks.

    A failure leaves the flags of peer memory out of step, so they are reset.
    """
    errors: dict[str, str] = {}
    for name, candidate in candidates.items():
        check = check_collectives(candidate, cases)
        found = group.exchange([check.error, check.checksum])
        wrong = [f"rank {r}: {error}" for r, (error, _) in enumerate(found) if error]
        if wrong:
            errors[name] = "; ".join(wrong)
        elif len({checksum for _, checksum in found}) > 1:
            errors[name] = "results differ between ranks"
        if name in errors and hasattr(candidate, "reset"):
            group.exchange(None)  # all ranks have given up
            candidate.reset()
            group.exchange(None)
    return errors


def measured(group: RankGroup, collectives: Any, cases: CollectiveCases) -> dict[int, float]:
    """Return the microseconds of sums of each size, in captured graphs: those of the slowest rank.

    Where that cannot be captured on some rank, times are infinite.
    """
    times: dict[int, float] = {}
    for tokens in cases.tokens:
        x_TD = cases.part(group.rank, 0, tokens, cases.hidden_size)
        graph = None
        try:
            graph = _captured(partial(collectives.all_reduce, x_TD))
        except RuntimeError as error:
            logger.warning("a sum over ranks cannot be captured: %s", error)
        seconds = float("inf")
        if all(group.exchange(graph is not None)) and graph is not None:
            seconds = max(float(s) for s in group.exchange(repr(_replay_seconds(graph))))
        times[x_TD.nbytes] = round(1e6 * seconds, 2)
    return times


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return the graph of some calls."""
    run()  # compiled and loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_OPERATIONS):
            run()
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the median seconds of a call in a replay."""
    replays: list[float] = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        replays.append(begin.elapsed_time(end) / 1e3 / _OPERATIONS)
    return statistics.median(replays)


def choose_sums(times: Times) -> list[SumChoice]:
    """Return the fastest algorithm of each size; it changes midway between measured sizes.

    Midway is the geometric mean. Without times there is no choice.
    """
    if not times:
        return []
    from ..distributed.peer_memory import SumChoice

    sizes: Sequence[int] = sorted(set().union(*times.values()))
    choices: list[SumChoice] = []
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        best: Any = min(times, key=lambda name: times[name][size])
        limit = float("inf") if following is None else (size * following) ** 0.5
        if choices and choices[-1].algorithm == best:
            choices.pop()
        choices.append(SumChoice(limit, best))
    return choices


def _why_nccl(times: Times, errors: dict[str, str]) -> str | None:
    """Return why NCCL replaces the kernels, None where it does not."""
    if "peer memory" in errors:
        return f"peer memory cannot be used: {errors['peer memory']}"
    others = [found for name, found in times.items() if name != "NCCL"]
    if "NCCL" not in times or not others:
        return None
    smallest = min(times["NCCL"])
    best = min(found[smallest] for found in others)
    if times["NCCL"][smallest] >= best:
        return None
    return f"NCCL is faster: {times['NCCL'][smallest]:g} µs and {best:g} µs for {smallest} bytes"


# The collectives of a rank, for its device.

_START_SECONDS = 10 * START_PATIENCE

"""An operation waits so long while engines start: compilers of ranks take different times."""

_MEASURED_ROWS = (1, 8, 32)

"""Rows of decode steps whose sums are tested and timed on CUDA; prefill chunks are too."""


def with_collectives(
    kernels: Kernels, group: RankGroup, model: ModelConfig, config: ResolvedConfig
) -> tuple[Kernels, Fallback | None]:
    """Return the kernels with the collectives of this rank; with a fallback where NCCL replaces
    the collective kernels. All ranks call it.

    Raises:
        KernelBuildError: the C++ operators that they need on a CPU cannot be built.
        KernelSelfTestError: no collectives work on these CUDA devices.
    """
    if config.device.type == "cuda":
        return _on_cuda(kernels, group, model, config)
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
    return dataclasses.replace(kernels, collectives=shared), None


def _on_cuda(
    kernels: Kernels, group: RankGroup, model: ModelConfig, config: ResolvedConfig
) -> tuple[Kernels, Fallback | None]:

    shard = plan_of(model).shard
    assert shard is not None, "ranks have parts of a model"
    cases = CollectiveCases(
        tokens=tuple(sorted({*_MEASURED_ROWS, config.prefill_chunk})),
        hidden_size=model.hidden_size,
        vocab_sizes=shard.vocab_sizes,
        dtype=config.dtype,
        device=config.device,
        seed=group.exchange(time.time_ns() % 2**30)[0],
    )
    slot_bytes = slot_bytes_for(
        group.ranks, config.prefill_chunk, model.hidden_size, model.vocab_size, config.dtype
    )
    ends_by_itself = group.watch.on_abort is not None
    with on_device(config.device):
        chosen = choose_collectives(group, cases, slot_bytes, _START_SECONDS)
        torch.cuda.empty_cache()  # the memory plan counts what the device has free
    if not ends_by_itself:
        group.watch.on_abort = getattr(chosen.collectives, "abort", None)
    fallback = chosen.fallback
    if fallback is not None and config.user.kernels == "native":
        raise KernelSelfTestError(
            f"kernels='native', and NCCL would replace the collective kernels: {fallback.error}."
            " Use kernels='auto'"
        )
    kernels = dataclasses.replace(
        kernels, collectives=chosen.collectives, collectives_report=chosen.report
    )
    return kernels, fallback


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
    """Return the CPUs of each rank; None: all of this process, too few to divide."""
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
