"""Greedy drafts. Shapes: B rows, V tokens of the drafter's vocabulary."""

from __future__ import annotations

import torch

from ...kernels.cpu.drafted import linear_most_likely
from ...kernels.cpu.sampling import fused_most_likely
from ..decoder import LayerStack
from ..modules import Projection

__all__ = ["most_likely", "most_likely_after"]


def most_likely_after(
    layers: LayerStack, head: Projection, hidden_BD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `most_likely` does of the logits that a head makes of hidden states."""
    if layers.runs_natively_on_cpu and layers.kernels.pack is not None:
        assert head.weight is not None
        weights = head.weight, head.bias, head.out_features, head.scales
        return linear_most_likely(hidden_BD, *weights)
    return most_likely(layers, head(hidden_BD))


def most_likely(layers: LayerStack, logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely token of each row, int64 `[B]`, and its probability, float32 `[B]`.

    `layers` are those of the drafter: where they run in C++, so does this. If a logit is NaN, any
    token is returned.
    """
    if layers.runs_natively_on_cpu:
        return fused_most_likely(logits_BV)
    logits_BV = logits_BV.float()
    top_B, ids_B = logits_BV.max(-1)
    return ids_B, (top_B - logits_BV.logsumexp(-1)).exp()
