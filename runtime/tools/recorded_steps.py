"""The kernels that the steps of a model would call on a GPU, without a GPU and without weights.

The model, its cache and its buffers are made of tensors that have a shape and no memory (device
"meta"), and the steps run in `record_kernel_calls`: kernel calls are written down, and everything
else computes nothing. Needs triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from ...cache.arena import Arena
from ..config import EngineConfig
from ..engine.memory_planning import layer_groups
from ..execution.inputs import StepInputs
from ..execution.row_state import RowState
from ..execution.step_functions import StepFunctions
from ..execution.step_key import StepKey
from ..kernels import (
    AttentionForm,
    LayerPlace,
    RaggedBatch,
    batch_invariant_kernels,
    kernels_for,
    select_kernels,
)
from ..kernels.triton.kernel_calls import CAPABILITY, KernelCall, record_kernel_calls
from ..kernels.triton.paged_attention import triton_paged_attention
from ..kernels.triton.paired_layers import every_pair
from ..kernels.triton.tuning import without_library
from ..loading.loader import resolve_source
from ..models.decoder import Decoder
from ..models.layout import fused_layout
from ..models.plan import model_plan
from .memory_report import resolve_absent

__all__ = ["RecordedStep", "record_paged_attention", "record_steps"]

_META = torch.device("meta")
_BLOCKS = 2
"""Blocks of the cache; no kernel depends on their number."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step and its kernel calls."""

    name: str
    """Phase, number of rows or tokens, and sampler, for example `decode 8 greedy`."""
    kernel_calls: list[KernelCall]
    """All calls of the step, in launch order."""


def record_steps(
    source: str | Path,
    config: EngineConfig,
    *,
    rows: Sequence[int],
    tokens: Sequence[int],
    capability: int = CAPABILITY,
    library: bool = True,
    pairs: bool = False,
) -> list[RecordedStep]:
    """Record the steps of an engine.

    Args:
        source: as `Engine.from_pretrained`; only the configuration is read.
        config: of the engine; its device and mode are those of a CUDA device that captures graphs.
        rows: sizes of decode steps.
        tokens: sizes of prefill steps.
        capability: compute capability, times ten, of the device that sizes are chosen for.
        library: False: Triton kernels compute the products that cuBLAS computes by default; step
            names end in `without library`.
        pairs: fuse every supported pair of products into one kernel
            (`kernels/triton/fused_pair.py`); step names end in `in pairs`.

    Raises:
        CheckpointError: as `Engine.from_pretrained`.
        ConfigError: the configuration cannot work with this model.
    """
    model = resolve_source(source, config_only=True).native
    config = dataclasses.replace(config, device="cuda", mode="graph")
    resolved = dataclasses.replace(resolve_absent(config, model), max_num_seqs=max(rows))
    groups = layer_groups(model, resolved)
    kernels = select_kernels(
        "cuda", resolved.mode, resolved.dtype, resolved.weights, resolved.kernels
    )
    if resolved.batch_invariant:
        kernels = batch_invariant_kernels(kernels)
    kernels = kernels_for(kernels, model_plan(model))
    arena = Arena(groups, _BLOCKS, resolved.block_size, resolved.dtype, _META, resolved.storage)
    decoder = Decoder(model, kernels, resolved.dtype, _META, groups, resolved.storage)
    decoder.store(
        (name, torch.empty(fused.shape, dtype=resolved.dtype, device=_META))
        for name, fused in fused_layout(model).items()
    )
    layout = StepInputs.layout(
        max_num_seqs=resolved.max_num_seqs,
        prefill_tokens=max(tokens, default=1),
        prefill_rows=resolved.max_prefill_rows,
        table_updates=1,
    )
    read_blocks = resolved.max_blocks_per_row
    functions = StepFunctions(
        decoder,
        arena.tensor,
        resolved.block_size,
        RowState.allocate(
            max(rows),
            len(groups),
            read_blocks,
            model.vocab_size,
            _META,
            rope_by_length=decoder.plan.rope_by_length,
        ),
        StepInputs(
            **{
                name: torch.empty(spec.shape, dtype=spec.dtype, device=_META)
                for name, spec in layout.items()
            }
        ),
        None,
        compiled=False,
    )
    keys = [
        *(StepKey("decode", size, read_blocks, full) for size in rows for full in (False, True)),
        *(StepKey("prefill", size, read_blocks, False) for size in tokens),
    ]
    steps: list[RecordedStep] = []
    for key in keys:
        products = contextlib.nullcontext() if library else without_library()
        paired = every_pair() if pairs else contextlib.nullcontext()
        with products, paired, record_kernel_calls(capability) as calls:
            functions.bind(key)()
        sampler = "sampled" if key.full_sampler else "greedy"
        kind = ("" if library else " without library") + (" in pairs" if pairs else "")
        steps.append(RecordedStep(f"{key.phase} {key.size} {sampler}{kind}", calls))
    return steps


def record_paged_attention(
    source: str | Path,
    config: EngineConfig,
    *,
    tokens: Sequence[int],
    capability: int = CAPABILITY,
) -> list[RecordedStep]:
    """Record paged attention over a chunk of one row, and over as many rows of one token each.

    It is the attention of layers that no stack of kernels computes. Recorded steps do not contain
    it: there it is an operation of torch, which calls no Triton kernel without a device.

    Args:
        source: as for `record_steps`.
        config: likewise.
        tokens: sizes of the chunk.
        capability: compute capability, times ten, of the device that sizes are chosen for.

    Raises as `record_steps`.
    """
    model = resolve_source(source, config_only=True).native
    resolved = resolve_absent(dataclasses.replace(config, device="cuda", mode="graph"), model)
    attend = model_plan(model).layers[0].attend
    form = AttentionForm(
        attend.scale, attend.window, attend.softcap, resolved.storage, attend.value_dim
    )
    arena = Arena(
        layer_groups(model, resolved)[:1],
        _BLOCKS,
        resolved.block_size,
        resolved.dtype,
        _META,
        resolved.storage,
    ).tensor
    blocks = resolved.max_blocks_per_row
    table = torch.empty(1, 1, blocks, dtype=torch.int32, device=_META)
    steps: list[RecordedStep] = []
    for size in tokens:
        queries = torch.empty(
            size, attend.heads, attend.head_dim, dtype=resolved.dtype, device=_META
        )
        keys = queries[:, : attend.kv_heads]
        values = None if attend.shared_values else keys
        index = torch.empty(size, dtype=torch.int64, device=_META)
        chunk = RaggedBatch(
            positions=index,
            slots=index[None],
            token_rows=index,
            rows=index[:1],
            block_tables=table,
            read_blocks=blocks,
            block_size=resolved.block_size,
            tokens_per_row=size,
        )
        rows = dataclasses.replace(chunk, rows=index, tokens_per_row=1)
        with record_kernel_calls(capability) as calls:
            for batch in (chunk, rows):
                triton_paged_attention(queries, keys, values, arena, LayerPlace(0, 0), batch, form)
        steps.append(RecordedStep(f"paged attention of {size} tokens", calls))
    return steps
