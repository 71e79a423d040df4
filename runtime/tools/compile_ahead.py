"""Compiles the kernels of a model's steps for a GPU, without a device, and reports their resources.

    python -m stepgraph.runtime.tools.compile_ahead --model preset:llama-3.2-1b --rows 1 8 32

compiles the kernels of decode and prefill steps, and prints a table. `record_steps` records the
launches of steps: the model, its cache and its buffers are made of tensors that have a shape and no
memory (device "meta"); kernel calls are written down, and everything else computes nothing.
`compile_kernel_calls` compiles each launch for a compute capability, with the specialisation of
Triton's launcher: an integer of 1 is a constant, and integers and addresses divisible by 16 are
marked so. Triton ships the assembler and the program that reads registers and memory from the
result, so no CUDA installation is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from ...cache.arena import Arena
from ...cache.spec import group_layers
from ...graphs.buckets import Buckets
from ...graphs.buffers import TensorSpec
from ...profiling.command_line import aligned
from ..config import EngineConfig
from ..engine.memory import StatePlan
from ..engine.startup import find_engine_drafter
from ..errors import ConfigError, StepgraphError
from ..execution.inputs import DeviceRows, DraftInputs, StepInputs, input_layouts
from ..execution.step_functions import DraftStep, StepFunctions
from ..execution.step_key import StepKey, StepSizes
from ..kernels import batch_invariant_kernels, kernels_for, select_kernels
from ..kernels.support import int4_kernels
from ..kernels.triton.causal_conv import triton_causal_conv
from ..kernels.triton.decode_attention import triton_paged_attention
from ..kernels.triton.experts import triton_experts
from ..kernels.triton.kernel_calls import CAPABILITY, INTERPRETED, KernelCall, record_kernel_calls
from ..kernels.triton.recurrence import triton_delta_rule, triton_recurrence
from ..kernels.weights import INT4
from ..loading.drafter_loading import new_drafter
from ..loading.loader import Source, resolve_source
from ..models.decoder import Decoder
from ..models.plan import fused_layout, model_plan, plan_of
from ..models.resolved_config import ResolvedConfig
from .arguments import add_config_flags, config_of, integer
from .memory_report import resolve_absent

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Compute capability -> maximum bytes of shared memory per program. Source: CUDA Programming
Guide, "Technical Specifications per Compute Capability"."""

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_META = torch.device("meta")
_BLOCKS = 2
"""Blocks of the cache; no kernel depends on their number."""


# Kernels -----------------------------------------------------------------------------------------


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
            f"{name}={'/'.join(map(str, value)) if isinstance(value, tuple) else value}"
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
        options = {k: v for k, v in call.options.items() if k not in call.kernel.arg_names}
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
                num_warps=call.options["num_warps"],
                num_stages=call.options["num_stages"],
                registers=registers,
                shared=max(made.metadata.shared, static),
                stack=stack,
                local=local,
                ptx=made.asm["ptx"],
            )
        yield compiled[key]


def _resources(cubin: bytes) -> tuple[int, ...]:
    """Return registers and bytes of stack, of static shared and of local memory."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    usage = _USAGE.search(done.stdout)
    if usage is None:
        raise RuntimeError(f"{program} says nothing: {done.stderr.strip() or done.stdout}")
    return tuple(map(int, usage.groups()))


# Steps -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step and its kernel calls."""

    name: str
    """Phase, number of rows or tokens, and sampler: `decode 8 greedy`, `verify 8x4 sampled` (4
    tokens per row), `decode 8 greedy drafting 3`. Steps with token masks are two: `verify 8x4
    forward` and `sample 8x4 greedy`."""
    kernel_calls: list[KernelCall]
    """All calls of the step, in launch order."""


def record_steps(
    source: str | Path,
    config: EngineConfig,
    *,
    rows: Sequence[int],
    tokens: Sequence[int],
    capability: int = CAPABILITY,
) -> list[RecordedStep]:
    """Record the steps of an engine, without a device and without weights.

    With `config.speculation`, steps that verify drafts are among them; with a drafter, they and
    decode steps propose some, and prefill steps let it follow. With `config.structured_output`,
    steps with token masks are. Prefill steps of the full sampler, whose kernels are the decode
    steps', are left out.

    Args:
        source: as `Engine.from_pretrained`; only the configuration is read, and of a drafter the
            headers of its weights.
        config: of the engine; its device and mode are as for a CUDA device that captures graphs.
        rows: sizes of decode and verify steps.
        tokens: sizes of prefill steps.
        capability: compute capability, times ten, of the device that sizes are chosen for.

    Raises:
        CheckpointError: as `Engine.from_pretrained`.
        ConfigError: the configuration cannot work with this model.
    """
    found = resolve_source(source, config_only=True)
    config = dataclasses.replace(
        config, max_num_seqs=max(rows), max_batch_tokens=None, buckets=None
    )
    config = dataclasses.replace(config, device="cuda", mode="graph")
    resolved = resolve_absent(config, found.native)
    functions = _functions(found, resolved, max(tokens, default=1))
    sizes = dataclasses.replace(
        StepSizes.choose(resolved, functions.model.kernels),
        rows=Buckets(rows),
        # The largest prefill step limits verify steps.
        tokens=Buckets([*tokens, resolved.prefill_chunk]),
        read_blocks=Buckets([resolved.max_blocks_per_row]),
    )

    def is_recorded(key: StepKey) -> bool:
        if key.phase != "prefill":
            return True
        return key.size in tokens and not key.full_sampler

    steps = []
    for key in dict.fromkeys(filter(is_recorded, sizes.keys())):
        with record_kernel_calls(capability) as calls:
            functions.bind(key)()
        verifies = key.phase == "decode" and key.tokens_per_row > 1
        name = f"{'verify' if verifies else key.phase} {key.size}"
        if key.tokens_per_row > 1:
            name += f"x{key.tokens_per_row}"
        kind = "sampled" if key.full_sampler else "greedy"
        if key.masked and key.phase != "sample":
            kind = "forward"
        drafting = f" drafting {key.drafts}" if key.drafts else ""
        steps.append(RecordedStep(f"{name} {kind}{drafting}", calls))
    return steps


def _functions(found: Source, config: ResolvedConfig, prefill_tokens: int) -> StepFunctions:
    """Return the steps of an engine, with tensors and weights that have no memory."""
    model = found.native
    groups = group_layers(plan_of(model).states)
    kernels = select_kernels("cuda", config.mode, config.dtype, config.weights, config.kernels)
    if config.user.batch_invariant:
        kernels = batch_invariant_kernels(kernels)
    if kernels.name == "triton":
        # Without a device, the operators of torch would call no kernel.
        kernels = dataclasses.replace(
            kernels,
            attention=triton_paged_attention,
            experts=triton_experts,
            recurrence=partial(triton_recurrence, batch_invariant=kernels.batch_invariant),
            delta_rule=None if kernels.batch_invariant else triton_delta_rule,
            causal_conv=triton_causal_conv,
        )
    kernels = kernels_for(kernels, model_plan(model))
    arena = Arena(groups, _BLOCKS, config.user.block_size, config.dtype, _META, config.storage)
    layout = fused_layout(model)
    weights = {name: TensorSpec(p.shape, config.dtype) for name, p in layout.items()}
    if config.weights == INT4:
        kernels = int4_kernels(kernels, plan_of(model), config.dtype)
    decoder = Decoder(model, kernels, config.dtype, _META, groups, config.storage)
    decoder.store(_absent(weights).items())
    states = StatePlan.of(plan_of(model), config)
    memory = None if states is None else states.memory(config, _META)
    state = DeviceRows.of(config, model, len(groups), _META, memory)
    inputs = dataclasses.replace(config, prefill_chunk=prefill_tokens)
    layouts = input_layouts(inputs, len(state.block_tables), model.hidden_size)
    drafts: DraftInputs[torch.Tensor] | None = None
    if config.tokens_per_row:
        drafts = DraftInputs(**_absent(layouts["drafts"]))
    drafting: DraftStep | None = None
    drafter = find_engine_drafter(found, config, groups)
    if drafter is not None:
        absent = new_drafter(drafter.config, decoder, decoder.kernels, drafter.layers)
        weights = {p.name: TensorSpec(p.shape, config.dtype) for p in drafter.config.parameters}
        absent.store(_absent(weights).items())
        group = dataclasses.replace(drafter.layers, index=0)
        own = Arena([group], _BLOCKS, config.user.block_size, config.dtype, _META, config.storage)
        drafting = DraftStep(absent, own.tensor, state, config.user.block_size)
    return StepFunctions(
        decoder,
        arena.tensor,
        config.user.block_size,
        state,
        StepInputs(**_absent(layouts["steps"])),
        None,
        compiled=False,
        drafts=drafts,
        drafting=drafting,
    )


def _absent(layout: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Return the tensors of a layout, without memory."""
    return {
        name: torch.empty(spec.shape, dtype=spec.dtype, device=_META)
        for name, spec in layout.items()
    }


# The command -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the kernels of a model and print a table; return 1 where a kernel has faults."""
    parser = argparse.ArgumentParser(
        prog="python -m stepgraph.runtime.tools.compile_ahead",
        description="Compile the kernels of a model's steps for a GPU, without a device.",
    )
    add = parser.add_argument
    add("--model", default="preset:llama-3.2-1b", help="as in bench.py")
    add("--rows", nargs="+", type=integer(1), default=[1, 8, 32], help="decode steps")
    add("--tokens", nargs="*", type=integer(1), default=[512], help="prefill steps")
    add("--capability", nargs="+", type=int, default=[90], choices=SHARED_MEMORY_LIMIT)
    add("--json", type=Path, metavar="FILE", help="write all results to this file")
    engine = parser.add_argument_group("the engine")
    without = ("device", "mode", "max_num_seqs")
    add_config_flags(engine, EngineConfig, defaults={}, without=without)
    options = parser.parse_args(arguments)
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


if __name__ == "__main__":
    sys.exit(main())
