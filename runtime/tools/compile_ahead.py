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
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from ...profiling.markdown import aligned
from ..config import EngineConfig
from ..errors import ConfigError, StepgraphError
from ..kernels.triton.kernel_calls import INTERPRETED, KernelCall
from .arguments import add_config_flags, config_of, integer

__all__ = ["CompiledKernel", "SHARED_MEMORY_LIMIT", "compile_kernel_calls"]

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Compute capability -> maximum bytes of shared memory per program. Source: CUDA Programming
Guide, "Technical Specifications per Compute Capability"."""

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


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
    ptx: str

    def to_json(self) -> dict[str, Any]:
        """Return everything but the code."""
        values = dataclasses.asdict(self) | {"waits": self.waits, "faults": self.faults}
        del values["ptx"]
        values["constants"] = {
            name: value if isinstance(value, bool | int | float | str | None) else str(value)
            for name, value in self.constants.items()
        }
        return values

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
        calls: as `record_kernel_calls(capability)` returns them; tensors may be on any device,
            "meta" too.
        capability: compute capability times ten, one of `SHARED_MEMORY_LIMIT`.

    Raises:
        ConfigError: kernels are interpreted in this process.
        triton.CompilationError: Triton cannot compile a kernel.
    """
    if INTERPRETED:
        raise ConfigError(
            "kernels are interpreted in this process: start it without TRITON_INTERPRET=1"
        )
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    compiled: dict[str, CompiledKernel] = {}
    for call in calls:
        options = {k: v for k, v in call.options.items() if k not in call.constants}
        # These two are what Triton's launcher does between a call and its cache of kernels.
        bind = create_function_from_signature(call.kernel.signature, call.kernel.params, backend)
        bound, specialization, _ = bind(*call.args, **call.options)
        parsed, signature, values, attributes = call.kernel._pack_args(
            backend, call.options, bound, specialization, options
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
                ptx=made.asm["ptx"],
            )
        yield compiled[key]


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
        raise RuntimeError(f"{program} says nothing: {done.stderr.strip() or done.stdout}")
    registers, stack_bytes, shared_bytes, local_bytes = map(int, usage.groups())
    return registers, stack_bytes, shared_bytes, local_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the kernels of a model and print a table; return 1 where a kernel has faults."""
    options = _parser().parse_args(arguments)
    from .recorded_steps import record_steps  # only the command needs models

    launches: dict[str, Counter[str]] = {}
    kernels: dict[CompiledKernel, dict[str, None]] = {}
    try:
        config = config_of(EngineConfig, options)
        sizes = {"rows": options.rows, "tokens": options.tokens}
        for capability in options.capability:
            steps = record_steps(options.model, config, capability=capability, **sizes)
            for step in steps:
                launches[step.name] = Counter(call.name for call in step.kernel_calls)
            named = [(step.name, call) for step in steps for call in step.kernel_calls]
            compiled = compile_kernel_calls((call for _, call in named), capability)
            for (name, _), kernel in zip(named, compiled, strict=True):
                kernels.setdefault(kernel, {})[name] = None
    except StepgraphError as error:
        print(f"compile_ahead: error: {error}", file=sys.stderr)
        return 1
    for name, counts in launches.items():
        print(f"{name}: {counts.total()} launches", file=sys.stderr)
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
            "steps": [{"name": name, "launches": counts} for name, counts in launches.items()],
            "kernels": [k.to_json() | {"steps": list(names)} for k, names in kernels.items()],
            "faults": faults,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stepgraph.runtime.tools.compile_ahead",
        description="Compile the kernels of a model's steps for a GPU, without a device.",
    )
    parser.add_argument("--model", default="preset:llama-3.2-1b", help="as in bench.py")
    parser.add_argument(
        "--rows", nargs="+", type=integer(1), default=[1, 8, 32], help="decode steps"
    )
    parser.add_argument("--tokens", nargs="*", type=integer(1), default=[512], help="prefill steps")
    parser.add_argument(
        "--capability", nargs="+", type=int, default=[90], choices=SHARED_MEMORY_LIMIT
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    add_config_flags(
        parser.add_argument_group("the engine"),
        EngineConfig,
        defaults={},
        without=("device", "mode", "max_num_seqs"),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
