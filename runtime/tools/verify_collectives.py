"""Runs the collectives of tensor-parallel ranks on the GPUs of this machine, and checks them.

    python -m stepgraph.runtime.tools.verify_collectives [--ranks 2] [--json FILE]

A process for each rank makes the choice that an engine makes at its start: NCCL and each algorithm
over peer memory against plain PyTorch, with times. Then it captures the fused operations of a
decode step, replays them and compares the bits of all replays and ranks; and one rank stays away
from an operation, which has to end on the others nevertheless. At last the demo model decodes on
all ranks and on one device, and tokens are compared.

With fewer than two GPUs nothing runs, which is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ..config import EngineConfig
from ..distributed.rank_group import RankGroup
from ..distributed.rank_processes import RankProcess
from ..distributed.segment import SharedSegment, open_shared, shared_memory
from ..engine.collectives_self_test import CollectiveCases
from ..engine.engine import Engine
from ..engine.rank_start import choose_collectives
from ..kernels.result_check import brief, disagreement, tolerance
from ..kernels.triton.linear import GpuNorm
from ..kernels.triton.peer_exchange import slot_bytes_for
from ..sampling_params import SamplingParams

__all__ = ["main"]

MODULE = "stepgraph.runtime.tools.verify_collectives"
_HIDDEN, _VOCABULARY, _TOKENS = 4096, 128_256, 2048
"""Of Llama-3.1-8B, with long chunks of prompts."""
_ROWS = (1, 8, 32)
_REPLAYS = 1000
_LIMIT_SECONDS = 60.0
_ABSENT_SECONDS = 2.0
"""How long the others wait for the rank that stays away."""
_PROMPTS = [[5, 1, 19, 7, 30, 2, 11], [9, 4, 2]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, help="of the group (default: all GPUs, at most 8)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    devices = torch.cuda.device_count()
    ranks = options.ranks or min(devices, 8)
    if devices < 2 or ranks > devices:
        named = f"{devices} device" + "s" * (devices != 1)
        print(f"skipped: {named}")
        entries: list[dict[str, Any]] = [{"check": "collectives", "skipped": named}]
    else:
        entries = [*_checked_by_ranks(ranks), *_tokens_of_engines(ranks)]
    if options.json is not None:
        options.json.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
    return int(not all(entry.get("passed", True) for entry in entries))


def _checked_by_ranks(ranks: int) -> Iterator[dict[str, Any]]:
    """Start the other ranks; yield what this one, rank 0, finds with them."""
    memory, descriptor = shared_memory(SharedSegment.nbytes_for(ranks))
    children = [
        RankProcess(rank, [str(n) for n in (os.getpid(), descriptor, rank, ranks)], module=MODULE)
        for rank in range(1, ranks)
    ]
    group = RankGroup(memory, 0, ranks, children)
    try:
        for entry in _checks(group):
            print(json.dumps(entry, ensure_ascii=False), flush=True)
            yield entry
    except Exception as error:
        group.fail(error)
        yield {"check": "ranks", "passed": False, "error": brief(error)}
    finally:
        group.close()
        os.close(descriptor)


def _follow(process: int, descriptor: int, rank: int, ranks: int) -> None:
    """Be another rank."""
    group = RankGroup(
        open_shared(process, descriptor, SharedSegment.nbytes_for(ranks)), rank, ranks
    )
    try:
        for _ in _checks(group):
            pass
    except BaseException as error:
        group.fail(error)
        raise
    finally:
        group.close()


def _checks(group: RankGroup) -> Iterator[dict[str, Any]]:
    """Yield what all ranks found, check after check; all ranks run it."""
    device = torch.device("cuda", group.rank)
    torch.cuda.set_device(device)
    sizes = [_VOCABULARY * (r + 1) // group.ranks - _VOCABULARY * r // group.ranks
             for r in range(group.ranks)]  # fmt: skip
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        cases = CollectiveCases((*_ROWS, _TOKENS), _HIDDEN, tuple(sizes), dtype, device, seed=1)
        slot_bytes = slot_bytes_for(group.ranks, _TOKENS, _HIDDEN, _VOCABULARY, dtype)
        chosen = choose_collectives(group, cases, slot_bytes, _LIMIT_SECONDS)
        yield {
            "check": f"choice {str(dtype).removeprefix('torch.')}",
            "passed": not chosen.report["errors"],
            **chosen.report,
        }
        if dtype != torch.bfloat16 or chosen.fallback is not None:
            chosen.collectives.close()
    peers: Any = chosen.collectives
    if chosen.fallback is not None:
        return
    for rows in _ROWS:
        yield _fused(group, peers, cases, rows)
    yield _absent_rank(group, peers, cases)


def _fused(group: RankGroup, peers: Any, cases: CollectiveCases, rows: int) -> dict[str, Any]:
    """Check the sum with residual and norm, replayed, and greedy tokens."""
    shape = (rows, _HIDDEN)
    parts = [cases.part(rank, 50, *shape) for rank in range(group.ranks)]
    residual_TD, weight_D = cases.part(99, 51, *shape), cases.part(98, 52, _HIDDEN)
    norm = GpuNorm(weight_D, 1e-5)
    sum_TD, out_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    maxima_TC = cases.part(group.rank, 53, rows, 64, dtype=torch.float32)
    ids_TC = torch.arange(64, device=cases.device, dtype=torch.int32).expand(rows, -1).contiguous()

    def run() -> Tensor:
        peers.sum_rows(parts[group.rank], residual_TD, None, norm, sum_TD, out_TD)
        tokens_T: Tensor = peers.pick_greedy(maxima_TC, ids_TC, 64 * group.rank)
        return tokens_T

    tokens_T, different, checksum = _replayed(group, run, (sum_TD, out_TD))
    total = sum((part.float() for part in parts[1:]), parts[0].float()).to(cases.dtype)
    x_TD = (residual_TD + total).float()
    normed = x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + norm.eps)
    limit = tolerance(cases.dtype)
    every_TC = torch.cat(
        [cases.part(r, 53, rows, 64, dtype=torch.float32) for r in range(group.ranks)], dim=1
    )
    problem = disagreement(sum_TD, residual_TD + total, limit) or disagreement(
        out_TD, weight_D * normed.to(cases.dtype), limit
    )
    if problem is None and not torch.equal(tokens_T, every_TC.argmax(-1)):
        problem = "wrong tokens"
    if problem is None and peers.failure is not None:
        problem = str(peers.failure)
    if problem is None and different:
        problem = f"{different} replays differ"
    found = group.exchange([problem, checksum])
    problems = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(found) if error]
    if len({checksum for _, checksum in found}) > 1:
        problems.append("bits differ between ranks")
    error = "; ".join(problems) or None
    return {"check": f"fused, {rows} rows", "passed": error is None, "error": error}


def _replayed(
    group: RankGroup, run: Callable[[], Tensor], written: Sequence[Tensor]
) -> tuple[Tensor, int, int]:
    """Capture and replay; return the result, how many replays differ, and a checksum of bits."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    group.exchange(None)
    graph.replay()
    first = [tensor.clone() for tensor in (*written, result)]
    different = torch.zeros((), dtype=torch.int64, device=result.device)
    for _ in range(_REPLAYS):
        graph.replay()
        pairs = zip((*written, result), first, strict=True)
        different += torch.stack([(now != then).any() for now, then in pairs]).any()
    stored = b"".join(bytes(t.view(-1).view(torch.uint8).cpu().numpy()) for t in first)
    return first[-1], int(different), crc32(stored)


def _absent_rank(group: RankGroup, peers: Any, cases: CollectiveCases) -> dict[str, Any]:
    """The last rank stays away from a sum: it ends on the others, who know why."""
    group.exchange(None)
    peers.timeout_seconds = _ABSENT_SECONDS
    began, error = time.monotonic(), None
    if group.rank < group.ranks - 1:
        peers.all_reduce(cases.part(group.rank, 60, 1, _HIDDEN))
        torch.cuda.synchronize()
        waited = time.monotonic() - began
        if peers.failure is None or peers.failure.rank != group.ranks - 1:
            error = f"rank {group.rank}: after {waited:.1f} s its failure is {peers.failure}"
    errors = [found for found in group.exchange(error) if found]
    return {"check": "absent rank", "passed": not errors, "error": "; ".join(errors) or None}


def _tokens_of_engines(ranks: int) -> Iterator[dict[str, Any]]:
    """Compare greedy tokens of the demo model on one device, and on two (it has few heads)."""
    tokens: list[list[list[int]]] = []
    entry: dict[str, Any] = {"check": "tokens of the demo model", "passed": True, "error": None}
    try:
        for tensor_parallel in (1, min(2, ranks)):
            config = EngineConfig(
                device="cuda", dtype="float32", tensor_parallel=tensor_parallel, max_model_len=256
            )
            with Engine.from_pretrained("demo", config) as engine:
                params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True).resolved()
                tokens.append([list(o.token_ids) for o in engine.generate(_PROMPTS, params)])
                entry["choice"] = engine.stats()["collectives_choice"]
        if tokens[0] != tokens[1]:
            entry |= {"passed": False, "error": f"{tokens[0]} and {tokens[1]}"}
    except Exception as error:
        entry |= {"passed": False, "error": brief(error)}
    print(json.dumps(entry, ensure_ascii=False), flush=True)
    yield entry


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) == 4 and all(argument.isdecimal() for argument in given):
        _follow(*map(int, given))
    else:
        sys.exit(main())
