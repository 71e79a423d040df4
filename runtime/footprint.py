"""What a model will need, in bytes, before a weight of it is loaded."""

from __future__ import annotations

import math

import torch

from ..cache.memory import ModelFootprint
from ..cache.spec import LayerGroup
from ..graphs.buffers import CUDA_ALIGNMENT as ALIGNMENT
from .batch import StepInputs
from .config import ResolvedConfig, max_prefill_rows
from .kernels import Kernels, packed_bytes
from .loading import fused_layout
from .models.config import ModelConfig
from .rows import RowState

__all__ = ["model_footprint", "weight_bytes"]

GRAPH_BYTES_PER_STEP = 4 << 20
"""What a captured step keeps beside the tensors of the shared pool: its kernel nodes. A first
guess, which the plan's reconciliation sets against what was measured."""


def weight_bytes(config: ModelConfig, kernels: Kernels, dtype: torch.dtype) -> int:
    """Return the bytes of all parameters as the kernels store them."""
    total = 0
    for fused in fused_layout(config).values():
        if len(fused.shape) == 2 and kernels.pack is not None:
            rows, columns = fused.shape
            total += packed_bytes(rows, columns, dtype)
        else:
            total += math.prod(fused.shape) * dtype.itemsize
    return total


def model_footprint(
    model: ModelConfig,
    config: ResolvedConfig,
    kernels: Kernels,
    groups: tuple[LayerGroup, ...],
    *,
    captured_steps: int,
) -> ModelFootprint:
    """Return every term of the memory plan as a coefficient.

    Activations count what one layer holds at its widest, the two residual streams included, and
    for kernels that gather their reads the copy of the keys and values of a full batch.
    """
    user, size = config.user, config.dtype.itemsize
    max_blocks_per_row = -(-config.max_model_len // user.block_size)
    widest = max(
        model.query_size + 2 * model.kv_size + 2 * (model.query_size + model.kv_size),
        3 * model.intermediate_size,
    )
    per_token = (2 * model.hidden_size + widest) * size + 4 * model.hidden_size
    gathered = 0
    if not kernels.bounded_by_length:
        # Keys and values gathered, and once more with masked positions replaced.
        gathered = 4 * user.max_rows * config.max_model_len * model.kv_size * size
    inputs = StepInputs.layout(
        max_rows=user.max_rows,
        prefill_tokens=1,
        prefill_rows=max_prefill_rows(user.max_rows),
        table_updates=user.max_rows + max_blocks_per_row,
    )
    per_batch_token = ("token_ids", "positions", "token_rows")
    return ModelFootprint(
        weight_bytes=weight_bytes(model, kernels, config.dtype),
        block_bytes=groups[0].spec.block_bytes(user.block_size) * len(groups[0].layers),
        activation_bytes_per_token=per_token,
        activation_bytes_fixed=gathered,
        # In the model's dtype, in float32, and twice more while the sampler sorts probabilities.
        logits_bytes_per_row=model.vocab_size * (size + 3 * 4),
        max_rows=user.max_rows,
        max_model_len=config.max_model_len,
        static_bytes_fixed=RowState.bytes_for(user.max_rows, max_blocks_per_row, model.vocab_size)
        + sum(inputs[name].nbytes + ALIGNMENT for name in inputs if name not in per_batch_token),
        static_bytes_per_batch_token=sum(inputs[name].nbytes for name in per_batch_token),
        mask_bytes_per_token_slot=1,
        masks=kernels.masks,
        graph_bytes=captured_steps * GRAPH_BYTES_PER_STEP,
    )
