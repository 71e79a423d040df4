"""Parts of checkpoint tensors that make up the stacked weights of experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .parameter import Shape

__all__ = ["ExpertRows", "Slice"]


@dataclass(frozen=True)
class ExpertRows:
    """Rows of one expert of a stacked tensor `[experts, rows, ...]`.

    If `transposed`, the tensor is `[experts, columns, rows]`.
    """

    expert: int
    start: int
    """First row."""
    count: int
    step: int = 1
    """Distance between rows: 2 where those of gate and up alternate."""
    transposed: bool = False

    def shape(self, stored: Shape) -> Shape:
        return (self.count, stored[1]) if self.transposed else (self.count, *stored[2:])

    def read(self, stored: Tensor) -> Tensor:
        rows = slice(self.start, self.start + self.count * self.step, self.step)
        if self.transposed:
            return stored[self.expert, :, rows].T
        return stored[self.expert, rows]

    def write(self, stored: Tensor, part: Tensor) -> None:
        self.read(stored).copy_(part)


@dataclass(frozen=True)
class Slice:
    """Consecutive rows (`dim` 0) or columns (1) of a tensor."""

    dim: int
    start: int
    count: int

    def shape(self, stored: Shape) -> Shape:
        return (*stored[: self.dim], self.count, *stored[self.dim + 1 :])

    def read(self, stored: Tensor) -> Tensor:
        return stored.narrow(self.dim, self.start, self.count)

    def write(self, stored: Tensor, part: Tensor) -> None:
        self.read(stored).copy_(part)
