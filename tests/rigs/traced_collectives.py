"""Collectives as operators, which torch.compile does not look into."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from stepgraph.runtime.kernels.ops.collectives import Collectives

_groups: list[Collectives] = []
"""The traced ones; operators know them by their index."""


@torch.library.custom_op("stepgraph_tests::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, group: int) -> torch.Tensor:
    return _groups[group].all_reduce(x)


@torch.library.custom_op("stepgraph_tests::gather", mutates_args=())
def _gather(x: torch.Tensor, group: int, sizes: Sequence[int]) -> torch.Tensor:
    return _groups[group].gather(x, sizes)


@torch.library.custom_op("stepgraph_tests::largest", mutates_args=())
def _largest(
    values: torch.Tensor, ids: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _groups[group].largest(values, ids)


_all_reduce.register_fake(lambda x, group: torch.empty_like(x))
_gather.register_fake(lambda x, group, sizes: x.new_empty(x.shape[0], sum(sizes)))
_largest.register_fake(lambda values, ids, group: (values.clone(), ids.clone()))


class _Traced:
    """`Collectives` that call the operators."""

    def __init__(self, group: Collectives, index: int) -> None:
        self.rank, self.ranks, self._index = group.rank, group.ranks, index

    def all_reduce(self, x_BF: torch.Tensor) -> torch.Tensor:
        return _all_reduce(x_BF, self._index)

    def gather(self, x_BF: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return _gather(x_BF, self._index, list(sizes))

    def largest(
        self, values_B: torch.Tensor, ids_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _largest(values_B, ids_B, self._index)

    def close(self) -> None:
        pass


def traced(group: Collectives) -> Collectives:
    """Return the collectives as operators."""
    _groups.append(group)
    return _Traced(group, _groups.index(group))
