"""The kernels that the steps of a model would call on a GPU, without a GPU and without weights.

The model, its cache and its buffers are made of tensors that have a shape and no memory (device
"meta"), and the steps run in `record_kernel_calls`: kernel calls are written down, and everything
else computes nothing. Needs triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from ...cache.arena import Arena
from ...cache.spec import LayerGroup, group_layers
from ...graphs.buckets import Buckets
from ...graphs.buffers import TensorSpec
from ..config import EngineConfig
from ..engine.startup import find_engine_drafter
from ..execution.inputs import DraftInputs, RowState, StepInputs
from ..execution.step_functions import DraftStep, StepFunctions
from ..execution.step_key import StepKey, StepSizes
from ..kernels import batch_invariant_kernels, kernels_for, select_kernels
from ..kernels.triton.decode_attention import triton_paged_attention
from ..kernels.triton.experts import triton_experts
from ..kernels.triton.kernel_calls import CAPABILITY, KernelCall, record_kernel_calls
from ..loading.drafter_loading import new_drafter
from ..loading.loader import Source, resolve_source
from ..models.decoder import Decoder
from ..models.drafters.drafter import DraftModel
from ..models.plan import fused_layout, model_plan, plan_of
from ..models.resolved_config import ResolvedConfig
from .memory_report import resolve_absent

__all__ = ["RecordedStep", "record_steps"]

_META = torch.device("meta")
_BLOCKS = 2
"""Blocks of the cache; no kernel depends on their number."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step and its kernel calls."""

    name: str
    """Phase, number of rows or tokens, and sampler: `decode 8 greedy`, `verify 8x4 sampled` (4
    tokens per row), `decode 8 greedy drafting 3`. Steps with token masks are two: `verify 8x4
    forward` and `verify 8x4 greedy masked`."""
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
    """Record the steps of an engine.

    With `config.speculation`, steps that verify drafts are among them; with a drafter, they and
    decode steps propose some, and prefill steps let it follow. With `config.structured_output`,
    steps with token masks are.

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
    config = dataclasses.replace(config, device="cuda", mode="graph")
    resolved = resolve_absent(config, found.native)
    resolved = dataclasses.replace(resolved, max_num_seqs=max(rows))
    functions = _functions(found, resolved, max(tokens, default=1))
    steps: list[RecordedStep] = []
    for key in _keys(resolved, rows, tokens):
        with record_kernel_calls(capability) as calls:
            functions.bind(key)()
        steps.append(RecordedStep(_name(key), calls))
    return steps


def _keys(config: ResolvedConfig, rows: Sequence[int], tokens: Sequence[int]) -> list[StepKey]:
    """Return the keys of the steps of an engine, without prefill steps of the full sampler, whose
    kernels are the decode steps'."""
    sizes = StepSizes(
        rows=Buckets(rows),
        # The largest prefill step limits verify steps.
        tokens=Buckets([*tokens, config.prefill_chunk]),
        read_blocks=Buckets([config.max_blocks_per_row]),
        tokens_per_row=config.tokens_per_row,
        proposed=config.proposed_drafts,
        masked=config.structured_output,
        prefill_rows=config.max_prefill_rows,
    )

    def is_recorded(key: StepKey) -> bool:
        if key.phase == "decode":
            return True
        if key.part == "sample":
            return len(tokens) > 0
        return key.size in tokens and not key.full_sampler

    return list(dict.fromkeys(filter(is_recorded, sizes.keys())))


def _name(key: StepKey) -> str:
    """Return the name of a step; see `RecordedStep.name`."""
    name = f"{key.phase} {key.size}"
    if key.tokens_per_row > 1:
        name = f"verify {key.size}x{key.tokens_per_row}"
    kind = "sampled" if key.full_sampler else "greedy"
    if key.part == "forward":
        kind = "forward"
    elif key.part == "sample":
        kind += " masked"
    return f"{name} {kind}" + (f" drafting {key.drafts}" if key.drafts else "")


def _functions(found: Source, config: ResolvedConfig, prefill_tokens: int) -> StepFunctions:
    """Return the steps of an engine, with tensors and weights that have no memory."""
    model = found.native
    groups = group_layers(plan_of(model).states)
    kernels = select_kernels("cuda", config.mode, config.dtype, config.weights, config.kernels)
    if config.batch_invariant:
        kernels = batch_invariant_kernels(kernels)
    if kernels.name == "triton":
        # Without a device, the operators of torch would call no kernel.
        kernels = dataclasses.replace(
            kernels, attention=triton_paged_attention, experts=triton_experts
        )
    kernels = kernels_for(kernels, model_plan(model))
    arena = Arena(groups, _BLOCKS, config.block_size, config.dtype, _META, config.storage)
    decoder = Decoder(model, kernels, config.dtype, _META, groups, config.storage)
    weights = {name: TensorSpec(p.shape, config.dtype) for name, p in fused_layout(model).items()}
    decoder.store(_absent(weights).items())
    state = RowState.of(config, model, len(groups), _META)
    inputs = StepInputs.layout(
        max_num_seqs=config.max_num_seqs,
        prefill_tokens=prefill_tokens,
        prefill_rows=config.max_prefill_rows,
        table_updates=1,
    )
    drafts: DraftInputs[torch.Tensor] | None = None
    if config.tokens_per_row:
        most = max(config.tokens_per_row) - 1
        layout = DraftInputs.layout(max_num_seqs=config.max_num_seqs, drafts=most)
        drafts = DraftInputs(**_absent(layout))
    return StepFunctions(
        decoder,
        arena.tensor,
        config.block_size,
        state,
        StepInputs(**_absent(inputs)),
        None,
        compiled=False,
        drafts=drafts,
        drafting=_drafting(found, config, groups, decoder, state),
    )


def _absent(layout: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Return the tensors of a layout, without memory."""
    return {
        name: torch.empty(spec.shape, dtype=spec.dtype, device=_META)
        for name, spec in layout.items()
    }


def _drafting(
    found: Source,
    config: ResolvedConfig,
    groups: Sequence[LayerGroup],
    target: Decoder,
    state: RowState,
) -> DraftStep | None:
    """Return what runs the drafter of an engine, without weights; None if it has none."""
    drafter = find_engine_drafter(found, config, groups)
    if drafter is None:
        return None
    absent = new_drafter(drafter.config, target, target.kernels, drafter.layers)
    weights = {p.name: TensorSpec(p.shape, config.dtype) for p in drafter.config.parameters}
    module = absent.decoder if isinstance(absent, DraftModel) else absent
    module.store(_absent(weights).items())
    group = dataclasses.replace(drafter.layers, index=0)
    arena = Arena([group], _BLOCKS, config.block_size, config.dtype, _META, config.storage)
    return DraftStep(absent, arena.tensor, state, config.block_size)
