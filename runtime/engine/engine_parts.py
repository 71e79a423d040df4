"""The parts of a started engine, and what is reported about its start."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...cache.arena import Arena
from ...cache.memory.handler import MemoryPlan, Reconciliation
from ...cache.memory.memory_plan import format_bytes
from ...cache.spec import LayerGroup
from ..distributed.rank_group import RankGroup
from ..execution.runner import Runner
from ..loading.tokenizer import TextTokenizer
from ..memory.measurement import Phase, StepMemory
from ..models.decoder_model import DecoderModel
from ..resolved_config import ResolvedConfig
from ..sampling_params import SamplingDefaults

if TYPE_CHECKING:
    from ..kernels.triton.precompile import CompiledKernels

__all__ = ["CodeCache", "EngineParts"]

_TERM_OF_PHASE = {"load": "weights", "cache": "cache", "static_buffers": "static_buffers"}
"""The phases of a start that allocate permanent memory of the device, and its term."""


@dataclass(frozen=True, slots=True)
class CodeCache:
    """Hits and misses of the code cache of `torch.compile`."""

    hits: int
    misses: int

    @classmethod
    def now(cls) -> CodeCache:
        """Read the counters of this process, which include other engines that start meanwhile."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        counts = {} if dynamo is None else dynamo.counters["inductor"]
        return cls(counts.get("fxgraph_cache_hit", 0), counts.get("fxgraph_cache_miss", 0))

    def since(self, before: CodeCache) -> CodeCache:
        """Return the difference."""
        return CodeCache(self.hits - before.hits, self.misses - before.misses)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of a started engine."""

    config: ResolvedConfig
    model: DecoderModel
    tokenizer: TextTokenizer | None
    sampling_defaults: SamplingDefaults
    """Of the model, for the fields that requests leave out."""
    groups: tuple[LayerGroup, ...]
    plan: MemoryPlan
    arena: Arena
    runner: Runner
    step_memory: StepMemory
    """Memory of running steps."""
    phases: tuple[Phase, ...]
    """Memory and time of each phase of the start: "kernels", "load", "cache", "host_cache" if there
    is one, "static_buffers", "compile_kernels" on CUDA, "prepare", "measure"."""
    start_seconds: float
    """Seconds of the start, without the calibration for `max_itl_ms`."""
    code_cache: CodeCache
    compiled_kernels: CompiledKernels | None = None
    """Triton kernels that were compiled ahead of the steps; None where there are none."""
    group: RankGroup | None = None
    """The processes of a tensor-parallel engine, of which this is one."""

    @property
    def load_seconds(self) -> float:
        """Seconds to read (and pack) the weights."""
        return sum(phase.seconds for phase in self.phases if phase.name == "load")

    def describe(self) -> str:
        """Return the model, the choices of the configuration and the times, on one line."""
        config, plan = self.config, self.plan
        phases = ", ".join(f"{phase.name} {phase.seconds:.1f} s" for phase in self.phases)
        dtype = str(config.dtype).removeprefix("torch.")
        threads = f", {config.threads} threads" if config.device.type == "cpu" else ""
        ranks = config.user.tensor_parallel
        return (
            f"{self.model.config.model_type} in {dtype} on {config.device}"
            f"{f', {ranks} ranks' if ranks > 1 else ''}, mode {config.mode},"
            f" kernels {self.model.kernels.name}{threads};"
            f" {plan.usable_blocks * plan.block_size:,} tokens of KV cache,"
            f" {config.max_model_len:,} of context, {config.max_num_seqs} concurrent requests;"
            f" {self.start_seconds:.1f} s ({phases})"
        )

    def reconcile(self) -> Reconciliation:
        """Compare the plan with the memory held now and measured for steps.

        On CUDA, weights, cache and static buffers are what torch's allocator counted in their
        phases of the start; on a CPU they are the sizes of the tensors.
        """
        runner, drafter = self.runner, self.runner.drafter
        held = {
            "weights": self.model.weight_bytes + (0 if drafter is None else drafter.weight_bytes),
            "cache": self.arena.nbytes + (0 if drafter is None else drafter.nbytes),
            "static_buffers": runner.nbytes,
        }
        grown = {
            _TERM_OF_PHASE[phase.name]: phase.after - phase.before
            for phase in self.phases
            if phase.name in _TERM_OF_PHASE
        }
        host_buffers = 0
        notes: dict[str, str] = {}
        if self.config.device.type == "cuda":
            host_buffers = runner.host_nbytes
            held = grown
        else:
            # Growth is no measure of a term: pages and code are mapped at their first use.
            notes = {
                term: "size of the tensors; the resident set, code included, grew meanwhile by "
                + format_bytes(size)
                for term, size in grown.items()
            }
        measured = dict(self.step_memory.measured)
        activations = measured.get("activations")
        if self.model.stack is not None and activations is not None:
            # Allocated when the steps were prepared, so it is in no measured step.
            workspace = self.model.stack.workspace_bytes(runner.sizes.tokens.largest)
            measured["activations"] = activations + workspace
        return self.plan.reconcile(
            {
                **held,
                "captured_graphs": 0,
                "host_cache": runner.host_cache_nbytes,
                "host_buffers": host_buffers,
                **measured,
            },
            {
                **notes,
                "reserve": "left free for workspaces and fragmentation",
                **self.step_memory.notes,
            },
        )
