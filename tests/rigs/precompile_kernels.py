"""Compiles kernels ahead and launches them, on a CUDA device that is made up; prints JSON.

The parts are `small` (kernels of this file), `step` (of a greedy decode step), `recurrence` (of
models with recurrent layers) and `engine`.

Run by `test_gpu_compile_ahead.py` in a process that does not interpret kernels. A launch there does
everything that Triton does for a launch on a real device but run the machine code.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from row_states import StateRig  # in the folder of this script
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.engine import startup
from stepgraph.runtime.engine.memory import StepMemory
from stepgraph.runtime.kernels.ops.recurrence import recurrent_state
from stepgraph.runtime.kernels.triton.backend import gpu_kernels
from stepgraph.runtime.kernels.triton.decode_attention import triton_paged_attention
from stepgraph.runtime.kernels.triton.filled_memory import FilledMemory
from stepgraph.runtime.kernels.triton.kernel_calls import (
    call_kernel,
    record_kernel_calls,
    wait_for_inputs,
)
from stepgraph.runtime.kernels.triton.precompile import compile_kernels
from stepgraph.runtime.kernels.triton.recurrence import triton_recurrence
from stepgraph.runtime.tools.compile_ahead import compile_kernel_calls, record_steps
from triton.backends.compiler import GPUTarget

compiled: list[tuple[str, str]] = []
"""Name of each kernel that Triton was asked for, and of the thread."""
found: list[str] = []
"""Name of each of them that was on disk."""
launched: Counter[str] = Counter()


@triton.jit
def scale(x_ptr, out_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    tl.store(out_ptr + n, tl.load(x_ptr + n, mask=n < N) * 2, mask=n < N)


@triton.jit
def add(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    total = tl.load(x_ptr + n, mask=n < N) + tl.load(y_ptr + n, mask=n < N)
    tl.store(out_ptr + n, total, mask=n < N)


@triton.jit
def too_wide(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= 64, "a block of at most 64")
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))


class Launcher:
    """In the place of the C code that launches a kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._name = src.name

    def __call__(self, *args: Any) -> None:
        launched[self._name] += 1


DRIVER: Any = SimpleNamespace(
    launcher_cls=Launcher,
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda name, code, shared, device: (1, 2, 32, 0, 1024),
    ),
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)
"""The driver of a Hopper that is made up."""


def count(src: Any, cache_hit: bool, **_: Any) -> None:
    compiled.append((src.name, threading.current_thread().name))
    if cache_hit:
        found.append(src.name)


def steps() -> dict[str, Any]:
    """Launches that Triton tells apart, and some that it does not; and a step that fails."""
    x = torch.zeros(4096, dtype=torch.float32)

    def scaled(tensor: torch.Tensor, n: int, block: int = 128) -> torch.Tensor:
        out = torch.empty_like(tensor)
        call_kernel(scale, (1,), tensor, out, n, BLOCK=block)
        return out

    def first() -> None:
        index = scaled(x, 64).to(torch.int64)
        assert x[index].shape == x.shape, "what no kernel has written is a valid index"
        scaled(x[:2048], 128)  # the same: another length that 16 divides
        scaled(x, 65)
        scaled(x, 1)

    def second() -> None:
        scaled(x[1:], 64)  # a pointer that 16 does not divide
        scaled(x, 64, block=256)
        call_kernel(add, (1,), x, x, torch.empty_like(x), 64, BLOCK=64, num_warps=2)
        first()

    return {"first": first, "second": second}


def wide() -> None:
    x = torch.zeros(256)
    call_kernel(too_wide, (1,), x, torch.empty_like(x), BLOCK=128)


def lost() -> None:
    raise MemoryError("no room for 7 bytes")


def small_kernels() -> dict[str, Any]:
    """Compile ahead what `steps` and two failing steps launch; then launch it."""
    named = steps()
    failing = {"wide": wide, "lost": lost}
    report = compile_kernels([*failing.items(), *named.items()])
    ahead = [*compiled]
    refused = ""
    with FilledMemory(torch.Tensor.zero_):
        for step in named.values():
            step()
    try:
        wide()
    except triton.CompilationError as error:
        refused = str(error)
    again = compile_kernels(named.items())
    return {
        "kernels": report.kernels,
        "threads": report.threads,
        "failures": report.failures,
        "compiled": ahead,
        "found": found,
        "compiled_later": compiled[len(ahead) :],
        "imports_dynamo": "torch._dynamo" in sys.modules,
        "launched": launched,
        "refused": refused,
        "again": [again.kernels, list(again.failures)],
    }


def step_kernels() -> dict[str, Any]:
    """Compile the kernels of a greedy decode step; see `order` below."""
    config = EngineConfig(max_num_seqs=1)
    (step,) = record_steps("demo", config, rows=[1], tokens=[])[:1]
    kernels = list(compile_kernel_calls(step.kernel_calls, 90))
    (decode,) = {kernel for kernel in kernels if kernel.title == "decode_attention"}
    return {
        "step": step.name,
        "kernels": {kernel.title: kernel.to_json() for kernel in kernels},
        "order": memory_order(decode.ptx),
    }


RECURRENCES = {  # key heads, value heads, K, V, decays, delta rule
    "Qwen3-Next": (16, 32, 128, 128, 1, True),
    "OLMo Hybrid": (30, 30, 96, 192, 1, True),
    "Kimi Linear": (32, 32, 128, 128, 128, True),
    "Nemotron 3": (8, 128, 128, 64, 1, False),
    "Jamba": (1, 512, 16, 1, 16, False),
}


def recurrence_kernels() -> dict[str, Any]:
    """Compile the recurrences of decode, verify and prefill steps of models."""
    found: dict[str, Any] = {}
    for name, (groups, heads, key, value, decays, delta) in RECURRENCES.items():
        rig = StateRig(
            [recurrent_state(groups, heads, key, value, decays)], rows=8, columns=8,
            block_size=16, itemsize=2, generator=torch.Generator(), device="meta",
        )  # fmt: skip
        with record_kernel_calls() as calls:
            for count in (1, 4, None):
                spans = [(row, 0, count or 16) for row in range(8)]
                batch = rig.batch(spans, tokens_per_row=count)
                shapes = [(groups, key), (groups, key), (heads, value), (heads, decays)]
                shapes += [(heads,)] * delta
                tokens = len(batch.positions)
                tensors = [torch.empty(tokens, *shape, device="meta") for shape in shapes]
                tensors += [None] * (not delta)
                triton_recurrence(*tensors, batch, rig.places[0])
        kernels = compile_kernel_calls(calls, 90)
        found |= {f"{name} {index}": kernel.to_json() for index, kernel in enumerate(kernels)}
    return found


def memory_order(ptx: str) -> list[str]:
    """Instructions of decode attention, from the last of its stores to partials on: barriers,
    atomic operations, and what touches global memory."""
    pattern = r"^\s*(?:@!?%\w+ )?((?:bar|atom|ld\.global|st\.global)\S*)"
    opcodes = re.findall(pattern, ptx, re.M)
    count = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("atom"))
    before = max(i for i in range(count) if opcodes[i].startswith("st."))
    return opcodes[before:]


def engine_kernels() -> dict[str, Any]:
    """Compile ahead what the steps of an engine launch; then run all of its steps."""
    startup.select_kernels = lambda *arguments, **_: dataclasses.replace(  # type: ignore[assignment]
        gpu_kernels(arguments[3]), attention=triton_paged_attention
    )
    startup.check_kernels = lambda kernels, *_, **__: kernels  # type: ignore[assignment]
    startup.measure_steps = lambda *_, **__: StepMemory({})  # type: ignore[assignment]
    config = EngineConfig(
        device="cpu", mode="eager", dtype="bfloat16", max_num_seqs=1,
        prefill_chunk=16, max_model_len=128, num_blocks=64,
    )  # fmt: skip
    runner = startup.start("demo", config, progress=False).runner
    report = runner.compile_kernels()
    ahead = [*compiled]
    with FilledMemory(torch.Tensor.zero_):
        for key in runner.library.steps:
            runner.library.run(key)
    return {
        "kernels": report.kernels,
        "failures": report.failures,
        "compiled": ahead,
        "compiled_later": compiled[len(ahead) :],
        "launched": launched,
    }


def main() -> None:
    """Print the JSON of the parts that are asked for."""
    triton.runtime.driver.set_active(DRIVER)
    triton.knobs.compilation.listener = count
    parts = {
        "small": small_kernels,
        "step": step_kernels,
        "recurrence": recurrence_kernels,
        "engine": engine_kernels,
    }
    print(json.dumps({part: parts[part]() for part in sys.argv[1:]}))


if __name__ == "__main__":
    main()
