"""The head of a decode step: final norm, logits, and the best token of each chunk of them.

Shapes: T rows, D hidden size, V vocabulary, C chunks of neighbouring tokens, one a program.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .launch import num_multiprocessors
from .linear import GpuLinear, LinearConfig, Norm, Pending, default_config
from .linear_kernels import launch_linear
from .norm_linear import reference_norm_linear
from .tuning import is_tight

__all__ = ["head", "reference_head"]


def head(
    x_TD: Tensor,
    norm: Norm,
    linear: GpuLinear,
    softcap: float = 0.0,
    pending: Pending | None = None,
    config: LinearConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits `[T, V]`, and of each chunk the largest and its token, `[T, C]`.

    Logits are in the model's dtype, with `softcap` (0: none) as softcap * tanh(l / softcap);
    maxima are float32, tokens int32, of equal logits the lowest. At most 32 rows.
    """
    tokens, vocab_size = x_TD.shape[0], linear.weight.shape[0]
    if config is None:
        config = default_config(
            "head",
            tokens,
            vocab_size,
            x_TD.shape[1],
            weight_bytes=linear.weight.element_size(),
            multiprocessors=num_multiprocessors(x_TD.device),
            tight=is_tight(pending is not None),
        )
    chunks = triton.cdiv(vocab_size, config.block_n)
    logits_TV = x_TD.new_empty(tokens, vocab_size)
    maxima_TC = torch.empty(tokens, chunks, dtype=torch.float32, device=x_TD.device)
    ids_TC = torch.empty(tokens, chunks, dtype=torch.int32, device=x_TD.device)
    launch_linear(
        "head",
        x_TD,
        linear,
        logits_TV,
        config,
        norm=norm,
        pending=pending,
        softcap=softcap,
        best=(maxima_TC, ids_TC),
    )
    return logits_TV, maxima_TC, ids_TC


def reference_head(
    x_TD: Tensor,
    norm: Norm,
    linear: GpuLinear,
    softcap: float = 0.0,
    pending: Pending | None = None,
    chunk: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `head` does, in plain torch, with chunks of `chunk` tokens."""
    logits_TV = reference_norm_linear(x_TD, norm, linear, pending)
    if softcap:
        logits_TV = (torch.tanh(logits_TV.float() / softcap) * softcap).to(logits_TV.dtype)
    parts = logits_TV.float().split(chunk, dim=1)
    best = [part.max(-1) for part in parts]
    maxima_TC = torch.stack([values for values, _ in best], dim=1)
    ids = [indices + i * chunk for i, (_, indices) in enumerate(best)]
    return logits_TV, maxima_TC, torch.stack(ids, dim=1).to(torch.int32)
