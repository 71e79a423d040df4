"""Input embeddings whose rows a projection stores.

The class of an embedding may do something with the rows, such as to scale them (Gemma). It stays
the model's: only its lookup is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..modules import Projection

__all__ = ["store_rows"]


class _RowsOfProjection(nn.Embedding):
    """The lookup of an embedding: the last base of its class before `nn.Embedding`."""

    projection: Projection

    def forward(self, input: Tensor) -> Tensor:
        rows: Tensor = self.projection.rows(input.reshape(-1)).unflatten(0, input.shape)
        return rows


def store_rows(embedding: Any, projection: Projection) -> None:
    """Make an `nn.Embedding` look up rows of a projection that has the values of its weight.

    Its weight becomes a tensor without elements, of which models read the dtype or the device.
    """
    assert projection.weight is not None
    del embedding.weight
    embedding.projection = projection
    empty = torch.empty(0, dtype=projection.dtype, device=projection.weight.device)
    embedding.register_buffer("weight", empty, persistent=False)
    own = type(embedding)
    bases = (_RowsOfProjection,) if own is nn.Embedding else (own, _RowsOfProjection)
    embedding.__class__ = type(own.__name__, bases, {})
