"""Which collectives the ranks of a group of GPUs use: chosen at the start, by test and by time.

Candidates are the Triton kernels over peer memory, with each of their algorithms, and NCCL. A
candidate that cannot be opened on some rank, whose results are wrong, or whose bits differ between
ranks is rejected on all ranks. Each size uses the fastest algorithm. NCCL is used if all kernels
are rejected, with a warning, or if it is faster for the sums of one row.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ..distributed.own_process_group import OwnProcessGroup
from ..distributed.process_group_collectives import ProcessGroupCollectives
from ..distributed.rank_group import RankGroup
from ..errors import KernelSelfTestError
from ..kernels.ops.collectives import Collectives
from ..kernels.result_check import Fallback
from .collectives_self_test import CollectiveCases, check_collectives

if TYPE_CHECKING:
    from ..distributed.peer_memory_collectives import SumChoice

__all__ = ["ChosenCollectives", "choose_sums", "choose_collectives", "failed_candidates"]

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
    errors: dict[str, str] = {}
    times: Times = {}
    nccl: ProcessGroupCollectives | None = None
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
    from ..distributed.peer_memory import open_peer_memory
    from ..distributed.peer_memory_collectives import PeerMemoryCollectives, SumChoice

    try:
        regions = open_peer_memory(group, processes, cases.device, slot_bytes, _SELF_TEST_SECONDS)
    except RuntimeError as error:
        errors["peer memory"] = str(error)
        return None
    return PeerMemoryCollectives(regions, [SumChoice(float("inf"), "one_shot")])


def _algorithms(peers: Any, device: torch.device) -> dict[str, Any]:
    """The collectives with each algorithm for all sizes."""
    from ..distributed.peer_memory_collectives import SumChoice

    names = ["one_shot", "two_shot"]
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if peers.regions.multicast and hopper:
        names.append("multimem")
    return {name: peers.with_sums([SumChoice(float("inf"), name)]) for name in names}  # type: ignore[arg-type]


def failed_candidates(
    group: RankGroup, candidates: dict[str, Any], cases: CollectiveCases
) -> dict[str, str]:
    """Return the errors of the candidates that fail on some rank; the same on all ranks.

    A failure leaves the flags of peer memory out of step: they begin anew.
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
    from ..distributed.peer_memory_collectives import SumChoice

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
