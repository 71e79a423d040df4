"""Recurrences and convolutions over the state of rows in C++; see `csrc/recurrence.h`.

They need `load_cpu_ops`. Decode and prefill steps give the same bits for a token. Raises
RuntimeError for inconsistent arguments, and IndexError for an entry or a row that is out of range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....cache.spec import RowPlace
from ..ops.batch import RaggedBatch
from ..ops.row_states import SCHEMA, StateBatch

torch.library.define(
    "stepgraph::cpu_recurrence",
    f"(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, {SCHEMA}) -> Tensor",
)
torch.library.define(
    "stepgraph::cpu_causal_conv",
    f"(Tensor x, Tensor weight, Tensor? bias, bool silu, {SCHEMA}) -> Tensor",
)
torch.library.register_fake("stepgraph::cpu_recurrence", lambda q, k, v, *_: torch.empty_like(v))
torch.library.register_fake("stepgraph::cpu_causal_conv", lambda x, *_: torch.empty_like(x))


def cpu_recurrence(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_THX: Tensor,
    beta_TH: Tensor | None,
    batch: RaggedBatch,
    place: RowPlace,
) -> Tensor:
    """See `ops.recurrence.Recurrence`."""
    out_THV: Tensor = torch.ops.stepgraph.cpu_recurrence.default(
        *(q_TGK, k_TGK, v_THV, g_THX, beta_TH), *StateBatch.of(batch, place)
    )
    return out_THV


def cpu_causal_conv(
    x_TF: Tensor,
    weight: Tensor,
    bias_F: Tensor | None,
    silu: bool,
    batch: RaggedBatch,
    place: RowPlace,
) -> Tensor:
    """See `ops.convolution.Convolution`."""
    out_TF: Tensor = torch.ops.stepgraph.cpu_causal_conv.default(
        *(x_TF, weight, bias_F, silu), *StateBatch.of(batch, place)
    )
    return out_TF
