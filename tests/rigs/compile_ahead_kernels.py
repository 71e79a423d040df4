"""Compiles decode attention, and prints as JSON in which order it touches memory.

Run by `test_gpu_compile_ahead.py` in a process that does not interpret kernels.
"""

from __future__ import annotations

import json
import re

import torch
from stepgraph.runtime.kernels import AttentionForm, LayerPlace, RaggedBatch
from stepgraph.runtime.kernels.triton.decode_attention import decode_attention
from stepgraph.runtime.kernels.triton.kernel_calls import (
    record_kernel_calls,
)
from stepgraph.runtime.kernels.triton.rotated_heads import HeadRotation
from stepgraph.runtime.kernels.triton.split_attention import new_counters, new_partials
from stepgraph.runtime.tools.compile_ahead import CompiledKernel, compile_kernel_calls


def decode_kernel(capability: int) -> CompiledKernel:
    """Compile decode attention with counters."""
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


if __name__ == "__main__":
    print(json.dumps({capability: memory_order(capability) for capability in (90, 80)}))
