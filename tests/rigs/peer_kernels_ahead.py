"""Compiles the kernels that exchange data between GPUs for sm_90, and prints them as JSON.

Run by `test_peer_kernels.py` in a process that does not interpret kernels.
"""

from __future__ import annotations

import json

import torch
from stepgraph.runtime.kernels.triton.all_reduce import all_reduce, sum_rows
from stepgraph.runtime.kernels.triton.kernel_calls import record_kernel_calls
from stepgraph.runtime.kernels.triton.linear import GpuNorm
from stepgraph.runtime.kernels.triton.peer_exchange import PROGRAMS, PeerRegions
from stepgraph.runtime.kernels.triton.peer_gather import gather_columns, largest, pick_of_ranks
from stepgraph.runtime.tools.compile_ahead import compile_kernel_calls


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def main() -> None:
    """Print the JSON."""
    int64, float32 = torch.int64, torch.float32
    regions = PeerRegions(
        rank=1,
        ranks=4,
        slot_bytes=65536,
        region=empty(1, dtype=torch.uint8),
        bases=empty(4, dtype=int64),
        epochs=empty(PROGRAMS, dtype=torch.int32),
        control=empty(3, dtype=int64),
        multicast=1 << 40,
    )
    x_TD, norm = empty(4, 4096), GpuNorm(empty(4096), 1e-5)
    with record_kernel_calls() as calls:
        for dtype in (torch.bfloat16, torch.float16, float32):
            all_reduce(regions, empty(4, 4096, dtype=dtype), "multimem")
        for dtype in (torch.bfloat16, float32):
            all_reduce(regions, empty(4, 4096, dtype=dtype), "one_shot")
            all_reduce(regions, empty(4, 4096, dtype=dtype), "two_shot")
        sum_rows(regions, x_TD, x_TD, None, norm, x_TD, x_TD)
        sum_rows(regions, x_TD, x_TD, norm, norm, x_TD, x_TD, scale=0.5)
        gather_columns(regions, empty(4, 1000), [1001, 1000, 1000, 999])
        largest(regions, empty(4, dtype=float32), empty(4, dtype=int64))
        ids_TC = empty(4, 100, dtype=torch.int32)
        pick_of_ranks(regions, empty(4, 100, dtype=float32), ids_TC, 1000)
    compiled = compile_kernel_calls(calls, 90)
    print(json.dumps([{**k.to_json(), "title": k.name, "ptx": k.ptx} for k in compiled]))


if __name__ == "__main__":
    main()
