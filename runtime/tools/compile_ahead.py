"""Compiles recorded launches for a GPU, without a device, and reports their resources.

`record_kernel_calls` records the launches of a step. This module compiles each launch for a compute
capability, with the specialisation of Triton's launcher: an integer of 1 is a constant, and
integers and addresses divisible by 16 are marked so. Triton ships the assembler and the program
that reads registers and memory from the result, so no CUDA installation is needed.

    python -m stepgraph.runtime.tools.compile_ahead --model preset:llama-3.2-1b --rows 1 8 32

compiles the kernels of a model's decode and prefill steps, and prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from ...profiling.markdown import aligned
from ..kernels.triton.kernel_calls import INTERPRETED, KernelCall
from .arguments import DTYPES, STORED_DTYPES, integer, speculation_spec

__all__ = [
    "CompileAheadError",
    "CompiledKernel",
    "SHARED_MEMORY_LIMIT",
    "compile_kernel_calls",
]

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Compute capability -> maximum bytes of shared memory per program. Source: CUDA Programming
Guide, "Technical Specifications per Compute Capability"."""

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class CompileAheadError(RuntimeError):
    """Kernels cannot be compiled in this process, or not for this compute capability."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledKernel:
    """A compiled kernel; sizes in bytes, per program or per thread."""

    name: str
    capability: int
    constants: dict[str, Any]
    """Constants, including integers that are 1 and tensors that are None."""
    num_warps: int
    num_stages: int
    registers: int
    """Registers per thread."""
    shared: int
    stack: int
    """Local memory per thread, for spilled registers."""
    local: int
    parameters: tuple[str, ...]
    """Names of the parameters that are not constants."""
    ptx: str
    cubin: bytes

    def to_json(self) -> dict[str, Any]:
        """Return everything but parameters and code."""
        named = ("name", "capability", "num_warps", "num_stages", "shared", "stack", "local")
        constants = {
            name: value if isinstance(value, bool | int | float | str | None) else str(value)
            for name, value in self.constants.items()
        }
        values = {name: getattr(self, name) for name in (*named, "registers", "waits", "faults")}
        return values | {"constants": constants}

    @property
    def title(self) -> str:
        """The name of the kernel, or of the operation that launches it."""
        return str(self.constants.get("NAME", self.name.strip("_")))

    @property
    def choices(self) -> str:
        """The constants that distinguish this kernel from others with its name, as text."""
        constants = [
            f"{name}={value}"
            for name, value in self.constants.items()
            if value and not name.islower() and name not in ("NAME", "PDL")
        ]
        return " ".join([*constants, f"warps={self.num_warps}", f"stages={self.num_stages}"])

    @property
    def waits(self) -> int:
        """Instructions that wait for the kernels before; one in a kernel with dependent launch."""
        return self.ptx.count("griddepcontrol.wait")

    @property
    def faults(self) -> list[str]:
        """Faults: spilled registers, too much shared memory, a missing or a second wait."""
        found = []
        if self.stack or self.local:
            found.append(f"spills ({self.stack} + {self.local} bytes)")
        if self.shared > SHARED_MEMORY_LIMIT[self.capability]:
            found.append("too much shared memory")
        if self.waits != bool(self.constants.get("PDL")):
            found.append(f"waits {self.waits} times")
        return found


def compile_kernel_calls(calls: Iterable[KernelCall], capability: int) -> Iterator[CompiledKernel]:
    """Compile each of the calls, equal ones once; yield a kernel for each call, in order.

    Args:
        calls: as `record_kernel_calls` returns them; tensors may be on any device, "meta" too.
        capability: compute capability times ten, one of `SHARED_MEMORY_LIMIT`.

    Raises:
        CompileAheadError: kernels are interpreted in this process, or the capability is unknown.
        triton.CompilationError: Triton cannot compile a kernel.
    """
    _check(capability)
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    compiled: dict[str, CompiledKernel] = {}
    for call in calls:
        constants = dict(call.constants)
        options: dict[str, Any] = {"num_warps": call.num_warps, "num_stages": call.num_stages}
        # What a call needs of the device.
        if "PDL" in constants:
            constants["PDL"] = capability >= 90
            options["launch_pdl"] = constants["PDL"]
        if "NATIVE_FP8" in constants:
            constants["NATIVE_FP8"] = capability >= 89
        # These two are what Triton's launcher does between a call and its cache of kernels.
        bind = create_function_from_signature(call.kernel.signature, call.kernel.params, backend)
        bound, specialization, _ = bind(*call.args, **constants, **options)
        parsed, signature, values, attributes = call.kernel._pack_args(
            backend, {**constants, **options}, bound, specialization, options
        )
        source = ASTSource(call.kernel, signature, values, attributes)
        key = f"{source.hash()} {options}"
        if key not in compiled:
            made = triton.compile(source, target=target, options=parsed.__dict__)
            names = list(signature)
            registers, stack, static, local = _resources(made.asm["cubin"])
            compiled[key] = CompiledKernel(
                name=call.name,
                capability=capability,
                constants={names[path[0]]: value for path, value in values.items()},
                num_warps=call.num_warps,
                num_stages=call.num_stages,
                registers=registers,
                shared=max(made.metadata.shared, static),
                stack=stack,
                local=local,
                parameters=tuple(n for n, kind in signature.items() if kind != "constexpr"),
                ptx=made.asm["ptx"],
                cubin=made.asm["cubin"],
            )
        yield compiled[key]


def _check(capability: int) -> None:
    """Raise CompileAheadError if kernels cannot be compiled for this capability."""
    if INTERPRETED:
        raise CompileAheadError(
            "kernels are interpreted in this process: start it without TRITON_INTERPRET=1"
        )
    if capability not in SHARED_MEMORY_LIMIT:
        known = ", ".join(map(str, SHARED_MEMORY_LIMIT))
        raise CompileAheadError(f"unknown compute capability {capability}: one of {known}")


def _resources(cubin: bytes) -> tuple[int, int, int, int]:
    """Return registers and bytes of stack, of static shared and of local memory."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [os.fspath(program), "-res-usage", file.name], capture_output=True, text=True
        )
    usage = _USAGE.search(done.stdout)
    if usage is None:
        raise CompileAheadError(f"{program} says nothing: {done.stderr.strip() or done.stdout}")
    registers, stack_bytes, shared_bytes, local_bytes = map(int, usage.groups())
    return registers, stack_bytes, shared_bytes, local_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the kernels of a model and print a table; return 1 where a kernel has faults."""
    options = _parse(arguments)
    # Only the command needs models, which are made of kernels.
    from ..config import EngineConfig
    from ..errors import StepgraphError
    from .recorded_steps import record_steps

    steps: dict[str, dict[str, int]] = {}
    kernels: dict[CompiledKernel, dict[str, None]] = {}
    try:
        config = EngineConfig(
            dtype=options.dtype,
            weight_dtype=options.weight_dtype,
            kv_dtype=options.kv_dtype,
            max_model_len=options.max_model_len,
            batch_invariant=options.batch_invariant,
            speculation=options.speculate,
            structured_output=options.structured_output,
        )
        for capability in options.capability:
            _check(capability)
        for capability in options.capability:
            record = partial(record_steps, options.model, config, capability=capability)
            recorded = record(rows=options.rows, tokens=options.tokens)
            for step in recorded:
                if step.name not in steps:  # of any device there are as many
                    steps[step.name] = Counter(call.name for call in step.kernel_calls)
                    launches = len(step.kernel_calls)
                    print(f"{step.name}: {launches} launches", file=sys.stderr)
            calls = itertools.chain.from_iterable(step.kernel_calls for step in recorded)
            compiled = compile_kernel_calls(calls, capability)
            for step in recorded:
                for kernel in itertools.islice(compiled, len(step.kernel_calls)):
                    kernels.setdefault(kernel, {})[step.name] = None
    except (CompileAheadError, StepgraphError) as error:
        print(f"compile_ahead: error: {error}", file=sys.stderr)
        return 1
    faults = list(
        dict.fromkeys(f"{k.title} sm_{k.capability}: {text}" for k in kernels for text in k.faults)
    )
    head = ("kernel", "constants", "sm", "registers", "shared", "stack", "local")
    cells = [
        (k.title, k.choices, *map(str, (k.capability, k.registers, k.shared, k.stack, k.local)))
        for k in kernels
    ]
    print("\n".join([*aligned(head, cells, text_columns=2), *(faults or ["no faults"])]))
    if options.json is not None:
        document = {
            "model": options.model,
            "steps": [{"name": name, "launches": counts} for name, counts in steps.items()],
            "kernels": [k.to_json() | {"steps": list(names)} for k, names in kernels.items()],
            "faults": faults,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if faults else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stepgraph.runtime.tools.compile_ahead",
        description="Compile the kernels of a model's steps for a GPU, without a device.",
    )
    parser.add_argument("--model", default="preset:llama-3.2-1b", help="as in bench.py")
    parser.add_argument(
        "--rows", nargs="+", type=integer(1), default=[1, 8, 32], help="decode steps"
    )
    parser.add_argument("--tokens", nargs="*", type=integer(1), default=[512], help="prefill steps")
    parser.add_argument("--capability", nargs="+", type=int, default=[90], help="90, 80 ...")
    parser.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="as in bench.py, like the next flags"
    )
    parser.add_argument("--weight-dtype", default="auto", choices=STORED_DTYPES)
    parser.add_argument("--kv-dtype", default="auto", choices=STORED_DTYPES)
    parser.add_argument("--max-model-len", type=int, help="(default: the model's own)")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="of an engine with `batch_invariant`"
    )
    parser.add_argument(
        "--speculate",
        type=speculation_spec,
        metavar="METHOD[:K][=PATH]",
        help="also steps that verify up to K drafts; a drafter's steps propose them",
    )
    parser.add_argument(
        "--structured-output", action="store_true", help="also steps with token masks"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
