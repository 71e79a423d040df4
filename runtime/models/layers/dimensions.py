"""Dimensions of the kinds of layers: ranges of their numbers, and what all of them have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from ...arguments import Range, check_fields
from ...errors import ConfigError
from ...kernels.ops.operation import Operation

# Wide enough for any real model, and finite.

MOST_SIZE = 2**31 - 1

Size = Annotated[int, Range(1, MOST_SIZE)]
"""Of dimensions and positions: a product of two fits 64 bits."""

Number = Annotated[float, Range(1e-18, 1e18)]
"""Of scales and caps: float32 holds their squares."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Fields of a model's config that describe one thing. Raises `ConfigError`."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


@dataclass(frozen=True, kw_only=True)
class Mixer(Dimensions, ABC):
    """What mixes the tokens of a sequence in a layer, other than attention. Raises `ConfigError`.

    Its fields are keys of `config.json`, except for those in `Family.mixer`.
    """

    @abstractmethod
    def operations(self, hidden: int, eps: float) -> Iterator[Operation]:
        """Yield the operations of a layer, from the norm of its input to what is added to it.

        `hidden` is the hidden size, `eps` the epsilon of the model's norms.
        """

    def of_layers(self, layers: Sequence[int]) -> Self:
        """Return the mixer of a model that has only these layers, in this order."""
        return self
