"""One operation of a layer: its shapes and traits, its parameters, and what it computes.

Each kind is a class that says everything about it: the plain PyTorch computation (`bind`), how the
ranks of a tensor-parallel group split it (`shard`), and what it keeps in memory (`live_bytes`). The
operations of a layer run in order. The input of each is the output of the previous one, called the
value: a tensor `[T, features]`, or a tuple of parts. Where an earlier value is needed again, the
operation that makes it names it (`writes`), and another one takes it by that name (`reads`).
`Residual` adds the value to the hidden states, which are the input of the layer or the output of
the previous `Residual`; `Replace` puts the value in their place. A trait is a field with another
value than its default; backends list the traits that they support.

torch.compile traces what `bind` returns, which runs where a backend has nothing faster. Constants
of an operation are bound once, before the first step.

Shapes: T tokens, H query heads, G key/value heads, E head_dim, F features, K kinds of rotation.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....cache.spec import PagedState, RowPlace, RowState
from ..choice import Kernels
from .batch import LayerPlace, RaggedBatch
from .collectives import Collectives
from .parameter import Parameter, cut, zeros

LAYER_INPUT = "layer_input"
"""The name of the input of a layer, which operations can read."""


class LayerStep(NamedTuple):
    """Inputs that all layers of one step share."""

    cos: Tensor
    """float32 `[K, T, E / 2]`."""
    sin: Tensor
    arenas: tuple[Tensor, ...]
    """The cache of each layout."""
    batch: RaggedBatch
    embeddings: Tensor | None = None
    """`[T, D]`: the embeddings that `JoinNorms` reads."""
    layer_inputs: Tensor | None = None
    """`[T, layers, P]`: an input of each layer that depends on the token (`LayerInputs`)."""


QKV = tuple[Tensor, Tensor, Tensor]
"""The value between the first projection of a layer and attention: queries, keys and values."""
Run = Callable[[Any, LayerStep], Any]
"""A bound operation: the value, a tensor or a tuple of parts, to the next one."""
NeededUnits = Sequence[range | Sequence[range]] | None
"""Units of each part of a value: consecutive ones, or several ranges; None: all."""
Module = Callable[[Parameter, Callable[[], nn.Module]], Any]
"""Returns the module that holds a parameter, made by the second argument if there is none yet."""


class Binding(NamedTuple):
    """What operations of a layer are bound to."""

    module: Module
    """Returns the modules that hold the parameters."""
    kernels: Kernels
    """Of linear layers and attention."""
    places: tuple[LayerPlace, ...]
    """In the cache, of each of the states that it reads."""
    storage: str
    """How the cache stores vectors."""
    row_place: RowPlace | None = None
    """Of its recurrent state."""
    layer: int = 0
    """Index of the layer."""


@dataclass(frozen=True)
class Rank:
    """A rank of a tensor-parallel group, and its share of what the ranks split."""

    rank: int
    ranks: int

    def part(self, size: int) -> range:
        """Return the rank's share of `size` elements; shares differ by at most one."""
        return range(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)

    def kv_heads(self, total: int) -> range:
        """Return the key/value heads, of `total`, that serve the rank's query heads."""
        if total >= self.ranks:
            return self.part(total)
        first = total * self.rank // self.ranks
        return range(first, first + 1)

    def columns(self, weight: Parameter) -> Parameter:
        """Return a weight with the rank's part of its input."""
        rows, columns = weight.stacked_shape
        return cut(weight, [range(rows)], self.part(columns))

    def once(self, bias: Parameter | None) -> Parameter | None:
        """Return a bias that only the first rank adds."""
        return bias if bias is None or self.rank == 0 else zeros(bias)

    def summed(self, part: Operation, features: int) -> Iterator[Operation]:
        """Yield an operation whose results of this many features the ranks add, and the sum."""
        yield replace(part, writes="")
        total = AllReduce(name="all_reduce", ranks=self.ranks, features=features)
        yield replace(total, writes=part.writes)


@dataclass
class ShardedLayer:
    """What the operations of a layer must know of one another when ranks split it."""

    rank: Rank
    heads: int
    """Query heads of the whole layer; 0: it has no attention."""
    kv_heads: int
    is_cut: bool = False
    """Whether each rank has a part of the value at this point."""

    @property
    def rank_heads(self) -> tuple[range, range, range]:
        """The heads of queries, keys and values of the rank."""
        kv_heads = self.rank.kv_heads(self.kv_heads)
        return self.rank.part(self.heads), kv_heads, kv_heads


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a layer."""

    name: str
    """Name of its scope in profiles."""
    reads: tuple[str, ...] = ()
    """Names of the values that it takes, as a tuple if there are several; empty: the previous one.
    `LAYER_INPUT` is the input of the layer."""
    writes: str = ""
    """The name under which later operations take its value; empty: none does."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, in the order in which checkpoints are read."""
        return ()

    @property
    def title(self) -> str:
        """Name of the operation in messages."""
        return self.name

    @property
    def traits(self) -> frozenset[str]:
        """Names of the fields whose values differ from their defaults."""
        own = fields(self)
        return frozenset(
            f.name for f in own if f.default is not MISSING and getattr(self, f.name) != f.default
        )

    @property
    def states(self) -> tuple[PagedState, ...]:
        """What it keeps of each token, in the cache."""
        return ()

    @property
    def row_state(self) -> RowState | None:
        """What it keeps of a sequence beside the cache: recurrent state."""
        return None

    @property
    def source_layer(self) -> int | None:
        """The earlier layer whose states it reads, without any of its own; None: its own."""
        return None

    def bind(self, to: Binding) -> Run:
        """Return the operation as a function of its value and the step, in plain PyTorch."""
        raise TypeError(f"no plain version of {self}")

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        """Yield what keeps a number of ranks from splitting it."""
        return iter(())

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        """Yield the operations of a rank in its place.

        Args:
            layer: updated by operations that cut the value, or sum its parts.
            following: the next operation of the whole layer.
        """
        yield self

    def needed_units(self, split: tuple[int, ...], layer: ShardedLayer) -> NeededUnits:
        """Return the units of each part of its input that a rank needs; None: all of all.

        Args:
            split: units of the parts.
            layer: the whole layer.
        """
        raise TypeError(f"no way to split what comes before {self.name}")

    def kept_features(self, hidden: int) -> int:
        """Return the elements of its value of a token that are kept under the name `writes`."""
        return hidden

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        """Return the bytes of the tensors of one token while it runs, hidden states included.

        Compiled code fuses elementwise operations; eager code makes a tensor of each intermediate
        result, in float32 for norms and rotations.

        Args:
            hidden: features of the hidden states.
            itemsize: bytes of an element of the model's dtype.
            eager: whether it runs uncompiled.
        """
        return 0


@dataclass(frozen=True, kw_only=True)
class Residual(Operation):
    """Add the value to the hidden states."""

    scale: float = 1.0
    """Factor of the value, which is rounded to the model's dtype before the addition (Granite)."""


@dataclass(frozen=True, kw_only=True)
class Replace(Operation):
    """The value becomes the hidden states."""


@dataclass(frozen=True, kw_only=True)
class Add(Operation):
    """The sum of the values that it reads, times a factor."""

    factor: float = 1.0

    def bind(self, to: Binding) -> Run:
        factor = self.factor
        if factor == 1.0:
            return lambda values, step: functools.reduce(operator.add, values)
        return lambda values, step: functools.reduce(operator.add, values) * factor

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return itemsize * (2 + len(self.reads)) * hidden


@dataclass(frozen=True, kw_only=True)
class Multiply(Operation):
    """The value times a weight, of one element or as many as it has, or times a factor."""

    weight: Parameter | None = None
    factor: float = 1.0

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return () if self.weight is None else (self.weight,)

    def bind(self, to: Binding) -> Run:
        factor = self.factor
        if self.weight is None:
            return lambda x, step: x * factor
        weight = to.module(self.weight, Vector)
        return lambda x, step: x * weight.weight


@dataclass(frozen=True, kw_only=True)
class AllReduce(Operation):
    """Sum the value over the ranks of a tensor-parallel group; see `Collectives.all_reduce`."""

    ranks: int
    features: int
    """Elements of the value of a token."""

    def bind(self, to: Binding) -> Run:
        collectives = collectives_of(to.kernels)
        return lambda x_TF, step: collectives.all_reduce(x_TF)

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return (2 * itemsize + 4) * self.features  # the value, the sum in float32, and the result


@dataclass(frozen=True, kw_only=True)
class Opaque(Operation):
    """Operations of a layer that a model of transformers computes itself; no backend knows them."""

    held: Parameter
    """Their parameters as one vector."""
    activation_bytes: int
    """Peak of the tensors of a token in a layer."""

    @property
    def title(self) -> str:
        return "modules of transformers"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.held,)

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if ranks > 1:
            yield "it is run by transformers, and not by a native family"

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return self.activation_bytes


Known = Mapping[type[Operation], frozenset[str]]
"""The kinds of operations that a backend supports, and the supported traits of each."""


def unsupported(operation: Operation, known: Known) -> str | None:
    """Return the name of what a backend does not support of an operation, or None.

    A new trait is unsupported until a backend lists it.
    """
    if type(operation) not in known:
        return operation.title
    missing = sorted(operation.traits - known[type(operation)])
    return f"{operation.title} with {', '.join(missing)}" if missing else None


def collectives_of(kernels: Kernels) -> Collectives:
    """Return the collectives of the group that a shard of a model belongs to."""
    assert kernels.collectives is not None, "the kernels of a rank have its collectives"
    return kernels.collectives


# Plain PyTorch operations whose results do not depend on the other tokens of a step.
#
# PyTorch's products, sums and vectorised functions take another order, or other code for the last
# elements, when the number of tokens changes. Called for one token at a time, on a copy that begins
# at the alignment of every allocation, an operation always gets the same shape and so runs the same
# code. Operations of one rounding for each element (sums, products, conversions) need no such care.


def per_token(kernels: Kernels, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of tensors `[T, ...]` that runs once for each token, in a batch-invariant
    engine; in others, return the function itself."""
    if not kernels.batch_invariant:
        return function

    def run(*tensors: Tensor) -> Tensor:
        return torch.cat(
            [
                function(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in token))
                for token in zip(*(tensor.split(1) for tensor in tensors), strict=True)
            ]
        )

    return run


class Vector(nn.Module):
    """Holds a parameter that is stored unchanged, and perhaps a bias."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype` is the parameter's; None: the model's."""
        super().__init__()
        self.dtype = dtype
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None


def on_part(function: Callable[[Tensor], Tensor], part: int | None) -> Run:
    """Return a function of one part of a value, or of the value, as an operation."""
    if part is None:
        return lambda x, step: function(x)
    return lambda parts, step: (*parts[:part], function(parts[part]), *parts[part + 1 :])
