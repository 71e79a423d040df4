"""Measures the constants that docs/gpu-predictions.md assumes, in about five seconds.

    python .ci/probe.py      # with the package installed, or in `.ci/gpu`

Prints one JSON object a line:

    device      name, memory, versions, L2 cache
    read_gb_s   bandwidth of a streaming kernel, by programs per multiprocessor
    edge_us     time between two dependent kernels of a captured chain, dependent launch off and on
    replay_us   time of a graph of one tiny kernel, alone and with the copy of one number to pinned
                memory and an event

Without a CUDA device it only compiles the kernels, for compute capability 9.0.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from stepgraph.graphs.steps import CudaGraphCapturer
from stepgraph.profiling.bandwidth import seconds_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PROGRAMS = (1, 132, 512)
PER_MULTIPROCESSOR = (2, 4, 8, 16)
CHAIN, SHORT_CHAIN = 220, 20
BLOCK = 2048


@triton.jit
def add_one(x_ptr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1.0)


@triton.jit
def sum_all(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, n, step):
        total += tl.load(x_ptr + start + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """Return what replays a graph of `work`, which has run once before."""
    capturer = CudaGraphCapturer("cuda")
    capturer.warm_up(work)
    return capturer.capture(work).replay


def median_us(work: Callable[[], Any], times: int = 30) -> float:
    """Return the median of several runs."""
    device = torch.device("cuda", torch.cuda.current_device())
    return statistics.median(1e6 * seconds_of(work, device) for _ in range(times))


def tell(**values: Any) -> None:
    """Print a result."""
    print(json.dumps(values), flush=True)


def probe_device() -> None:
    """Print name, sizes and versions."""
    found = torch.cuda.get_device_properties(0)
    tell(
        device=found.name,
        capability=[found.major, found.minor],
        memory_gib=round(found.total_memory / 2**30, 1),
        multiprocessors=found.multi_processor_count,
        l2_mib=round(found.L2_cache_size / 2**20, 1),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=triton.__version__,
        python=sys.version.split()[0],
    )


def probe_reads() -> None:
    """Print the bandwidth of reading 1 GiB of random numbers, far more than the L2 cache holds."""
    x = torch.rand(1 << 28, device="cuda")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for each in PER_MULTIPROCESSOR:
        programs = each * multiprocessors
        out = torch.empty(programs, device="cuda")
        replay = captured(
            lambda: sum_all[(programs,)](x, out, x.numel(), BLOCK=BLOCK, num_warps=4)  # noqa: B023
        )
        us = median_us(replay)
        off = float((out.double().sum() / x.double().sum() - 1).abs())
        tell(read_gb_s=round(x.nbytes / us / 1e3), programs_per_multiprocessor=each, off=off)


def probe_edges() -> None:
    """Print the time between two kernels, from chains of two lengths."""
    for programs in PROGRAMS:
        x = torch.randint(1000, (programs * 128,), device="cuda").float()  # sums stay exact
        for pdl in (False, True):

            def chain(n: int) -> None:
                for _ in range(n):
                    add_one[(programs,)](x, PDL=pdl, num_warps=4, launch_pdl=pdl)  # noqa: B023

            long, short = captured(lambda: chain(CHAIN)), captured(lambda: chain(SHORT_CHAIN))
            before = x.clone()
            long()
            wrong = int((x != before + CHAIN).sum())
            us = (median_us(long) - median_us(short)) / (CHAIN - SHORT_CHAIN)
            tell(edge_us=round(us, 3), programs=programs, dependent_launch=pdl, wrong=wrong)


def probe_replays(times: int = 200) -> None:
    """Print the time of a replay when the host only replays, and when it also copies a result."""
    x, host = torch.rand(128, device="cuda"), torch.empty(1, pin_memory=True)
    one = captured(lambda: add_one[(1,)](x, PDL=False))
    for copies in (False, True):

        def replay() -> None:
            for _ in range(times):
                one()
                if copies:  # noqa: B023
                    host.copy_(x[:1], non_blocking=True)
                    torch.cuda.Event().record()

        replay()
        tell(replay_us=round(median_us(replay, 5) / times, 2), copies=copies)


def compile_only() -> None:
    """Compile the kernels for compute capability 9.0, without a device."""
    target = GPUTarget("cuda", 90, 32)
    for kernel, signature, constants in (
        (add_one, {"x_ptr": "*fp32", "PDL": "constexpr"}, {"PDL": True}),
        (
            sum_all,
            {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"},
            {"BLOCK": BLOCK},
        ),
    ):
        made = triton.compile(ASTSource(kernel, signature, constants), target=target)
        tell(compiled=kernel.__name__, bytes=len(made.asm["cubin"]))


def main() -> None:
    """Run every probe; one that fails leaves the others."""
    if not torch.cuda.is_available():
        compile_only()
        return
    for probe in (probe_device, probe_reads, probe_edges, probe_replays):
        try:
            probe()
        except Exception as error:  # the next one may still tell something
            tell(failed=probe.__name__, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
