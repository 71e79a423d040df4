"""What drafters compute outside of their layers, as operators of a CPU (`draft_ops.h`).

Shapes: B rows of the step, R rows of the state, T tokens, G layer groups, F features, D
hidden_size, E head_dim, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.batch import LayerPlace

__all__ = [
    "DraftedInputs",
    "PackedWeight",
    "drafted_inputs",
    "drafter_context",
    "linear_most_likely",
    "newest_tokens",
]

torch.library.define(
    "stepgraph::drafted_inputs",
    "(Tensor rows, Tensor positions, Tensor stops, Tensor block_tables, int block_size, int first,"
    " int count) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "stepgraph::newest_tokens",
    "(Tensor rows, Tensor positions, Tensor first, Tensor token_positions, Tensor token_ids,"
    " Tensor next_ids) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "stepgraph::linear_most_likely",
    "(Tensor x, Tensor packed, Tensor? bias, int out_features, Tensor? scales=None)"
    " -> (Tensor, Tensor)",
)
torch.library.define(
    "stepgraph::drafter_context",
    "(Tensor features, Tensor fuse, Tensor? fuse_scales, Tensor hidden_norm, Tensor context,"
    " Tensor? context_scales, Tensor key_norms, float eps, Tensor cos, Tensor sin, Tensor slots,"
    " Tensor(a!) arena, int[] places, int block_size, str storage) -> ()",
)


class DraftedInputs(NamedTuple):
    """The same number of tokens of each row."""

    positions: Tensor
    """int64 `[T]`; those without a slot have the last position with one."""
    slots: Tensor
    """int64 `[G, T]`: the write index; the null block for tokens without a slot."""
    token_rows: Tensor
    """int64 `[T]`: the row of each token."""


def drafted_inputs(
    rows_B: Tensor,
    positions_R: Tensor,
    stops_B: Tensor,
    block_tables: Tensor,
    block_size: int,
    first: int,
    count: int,
) -> DraftedInputs:
    """Return `count` tokens of each row, the first of them `first` after the row's position.

    `stops_B`: the first position of each row that has no slot. Runs on CPU after `load_cpu_ops`.
    Raises RuntimeError or IndexError for arguments that do not fit together.
    """
    return DraftedInputs(
        *torch.ops.stepgraph.drafted_inputs.default(
            rows_B, positions_R, stops_B, block_tables, block_size, first, count
        )
    )


def newest_tokens(
    rows_B: Tensor,
    positions_R: Tensor,
    first_B: Tensor,
    token_positions_T: Tensor,
    token_ids_T: Tensor,
    next_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return where rows stand after a step; all int64.

    The first result are `next_ids`, `[T]`, with 0 for `NON_FINITE`. Others are `[B]`: the newest
    token of each row, the token before it, and the index of that one among the T tokens.

    `positions_R` are those of the newest tokens. The tokens of a row begin at `first_B`. Runs on
    CPU after `load_cpu_ops`. Raises RuntimeError or IndexError for arguments that do not fit
    together.
    """
    sampled_T, newest_B, previous_B, index_B = torch.ops.stepgraph.newest_tokens.default(
        rows_B, positions_R, first_B, token_positions_T, token_ids_T, next_ids
    )
    return sampled_T, newest_B, previous_B, index_B


def linear_most_likely(
    x_TD: Tensor,
    packed: Tensor,
    bias_V: Tensor | None,
    out_features: int,
    scales_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `fused_most_likely(packed_linear(...))`, without writing the logits.

    Runs and raises as `packed_linear`.
    """
    ids_T, probability_T = torch.ops.stepgraph.linear_most_likely.default(
        x_TD, packed, bias_V, out_features, scales_V
    )
    return ids_T, probability_T


class PackedWeight(NamedTuple):
    """The weight of a linear layer without bias."""

    packed: Tensor
    scales: Tensor | None
    """Of an int8 weight."""


def drafter_context(
    features_TF: Tensor,
    fuse: PackedWeight,
    hidden_norm_D: Tensor,
    context: PackedWeight,
    key_norms_LE: Tensor,
    eps: float,
    cos_TE: Tensor,
    sin_TE: Tensor,
    slots_T: Tensor,
    arena: Tensor,
    places: Sequence[LayerPlace],
    block_size: int,
    storage: str,
) -> None:
    """Store the keys and values that a `BlockDrafter` makes of features, in all of its layers.

    Features pass `fuse`, the norm and `context`, whose outputs are the keys of the first layer, its
    values, and so on. Keys are normed, and rotated by angles with these cosines and sines, float32
    `[T, E / 2]`. Runs on CPU after `load_cpu_ops`. Raises RuntimeError or IndexError for arguments
    that do not fit together.
    """
    torch.ops.stepgraph.drafter_context.default(
        features_TF,
        *fuse,
        hidden_norm_D,
        *context,
        key_norms_LE,
        eps,
        cos_TE,
        sin_TE,
        slots_T,
        arena,
        [place.position for place in places],
        block_size,
        storage,
    )
