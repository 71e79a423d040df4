"""Compiles small kernels, right and wrong ones, and prints what is said of them as JSON.

Run by `test_gpu_compile_ahead.py` in a process that does not interpret kernels.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import triton
import triton.language as tl
from stepgraph.runtime.kernels import AttentionForm, LayerPlace, RaggedBatch
from stepgraph.runtime.kernels.triton.decode_attention import decode_attention
from stepgraph.runtime.kernels.triton.kernel_calls import (
    MULTIPROCESSORS,
    call_kernel,
    let_dependents_start,
    record_kernel_calls,
    wait_for_inputs,
)
from stepgraph.runtime.kernels.triton.linear import (
    GpuLinear,
    GpuNorm,
    bounded_prefetch,
    default_config,
)
from stepgraph.runtime.kernels.triton.linear_kernels import gate_up
from stepgraph.runtime.kernels.triton.rotated_heads import HeadRotation
from stepgraph.runtime.kernels.triton.split_attention import new_counters, new_partials
from stepgraph.runtime.tools.compile_ahead import CompiledKernel, compile_kernel_calls


@triton.jit
def right(w_ptr, x_ptr, out_ptr, N, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    k = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + tl.program_id(0) * K + k).to(tl.float32)
    let_dependents_start(PDL)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + k).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0) * N, tl.sum(w * x))


@triton.jit
def never_waits(w_ptr, x_ptr, out_ptr, N, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    k = tl.arange(0, BLOCK)
    let_dependents_start(PDL)
    product = tl.load(w_ptr + k).to(tl.float32) * tl.load(x_ptr + k + K).to(tl.float32)
    tl.store(out_ptr + N, tl.sum(product))


@triton.jit
def spills(w_ptr, x_ptr, out_ptr, N, K, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + k).to(tl.float32)
    total = tl.sum(w)
    largest = tl.max(w * total)
    x = tl.load(x_ptr + k).to(tl.float32) * largest
    tl.store(out_ptr + k * N + K, w * tl.sum(x) + x)


def decode_kernel(capability: int, *next_weights: torch.Tensor) -> CompiledKernel:
    """Compile decode attention with counters, and with weights that it prefetches."""
    rows, heads, kv_heads, size = 8, 32, 8, 64

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    model, angles = torch.bfloat16, empty(rows, size // 2, dtype=torch.float32)
    tables = empty(1, rows, 32, dtype=torch.int32)
    batch = RaggedBatch(
        empty(rows), empty(1, rows), empty(rows), empty(rows), tables, 32, 16, tokens_per_row=1
    )
    with record_kernel_calls() as calls:
        decode_attention(
            empty(rows, (heads + 2 * kv_heads) * size, dtype=model),
            empty(1, 2, 2, kv_heads, 16, size, dtype=model), LayerPlace(0, 0),
            HeadRotation(None, None, 1e-5, False, angles, angles), batch,
            AttentionForm(0.125, 0, 0.0, "model", size),
            new_partials(rows, heads, 4, size, torch.device("meta")),
            new_counters(torch.device("meta")), empty(rows, heads * size, dtype=model),
            next_weights=next_weights,
        )  # fmt: skip
    (kernel,) = compile_kernel_calls(calls, capability)
    assert not kernel.faults
    return kernel


def memory_order(capability: int) -> list[str]:
    """Instructions of decode attention, from the last of its stores to partials on: barriers,
    atomic operations, and what touches global memory."""
    kernel = decode_kernel(capability)
    opcodes = re.findall(
        r"^\s*(?:@!?%\w+ )?((?:bar|atom|ld\.global|st\.global)\S*)", kernel.ptx, re.M
    )
    count = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("atom"))
    before = max(i for i in range(count) if opcodes[i].startswith("st."))
    return opcodes[before:]


def bounded_prefetches() -> list[dict[str, Any]]:
    """Gate and up of Llama-3.2-1B for 1 and 4 rows, with 24 MiB of the weight prefetched."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    linear, sizes = GpuLinear(empty(2 * 8192, 2048)), ("gate_up", 8192, 2048, 2)
    with record_kernel_calls() as calls:
        for rows in (1, 4):
            config = default_config("gate_up", rows, *sizes[1:], MULTIPROCESSORS)
            gate_up(
                empty(rows, 2048), GpuNorm(empty(2048), 1e-5), linear, empty(rows, 8192),
                gelu=False, config=bounded_prefetch(config, *sizes, 24 << 20),
            )  # fmt: skip
    kernels = list(compile_kernel_calls(calls, 90))
    return [
        kernel.to_json() | {"requests": kernel.ptx.count("cp.async.bulk.prefetch.L2")}
        for kernel in kernels
    ]


def weights_ahead() -> list[dict[str, Any]]:
    """Decode attention with no next weight, one, two, and a second one beyond the budget."""
    small = torch.empty(2048, 2048, dtype=torch.bfloat16, device="meta")
    large = torch.empty(16384, 2048, dtype=torch.bfloat16, device="meta")
    cases = ((), (small,), (small, large), (large, small))
    kernels = [decode_kernel(90, *weights) for weights in cases]
    return [
        kernel.to_json()
        | {"parameters": kernel.parameters, "requests": kernel.ptx.count("prefetch.global.L2")}
        for kernel in kernels
    ]


KERNELS = (right, never_waits)


def main() -> None:
    """Print the JSON."""
    w_NK = torch.empty(64, 1024, dtype=torch.bfloat16, device="meta")
    x_K = torch.empty(2048, dtype=torch.bfloat16, device="meta")
    out_N = torch.empty(65536, device="meta")
    with record_kernel_calls() as calls:
        for kernel in KERNELS:
            call_kernel(kernel, (64,), w_NK, x_K, out_N, 1, 1024, BLOCK=1024)
        call_kernel(spills, (1,), w_NK, x_K, out_N, 1, 1024, num_warps=1, BLOCK=8192)
    document: dict[str, Any] = {}
    for capability in (90, 80):
        kernels = list(compile_kernel_calls(calls, capability))
        document[str(capability)] = {
            "kernels": [kernel.to_json() for kernel in kernels],
            "machine_code": all(kernel.cubin[:4] == b"\x7fELF" for kernel in kernels),
            "combining": memory_order(capability),
        }
    document["bounded_prefetch"] = bounded_prefetches()
    document["weights_ahead"] = weights_ahead()
    print(json.dumps(document))


if __name__ == "__main__":
    main()
