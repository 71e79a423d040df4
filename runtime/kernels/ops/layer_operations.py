"""The operations that decoder layers are made of, with traits, shapes and names of parameters.

The operations of a layer are a chain. Each takes the value that the one before it returned: a
tensor `[T, features]`, or a tuple of parts. `Residual` adds the value to the hidden states that the
layer, or the last `Residual`, began with, and the sum is the next value.

Shapes: T tokens, H query heads, G key/value heads, E head_dim, F features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Literal, NamedTuple

from torch import Tensor

Shape = tuple[int, ...]
ActivationName = Literal["silu", "gelu_tanh"]


class Parameter(NamedTuple):
    """A parameter of the model: tensors of a checkpoint stacked along the first dimension.

    Those with two dimensions, and only those, are the weights of linear layers, which kernels may
    quantise and pack; what is read otherwise is stored as it is.
    """

    name: str
    """In the plan of a layer relative to the layer."""
    sources: tuple[str | None, ...]
    """Names in the checkpoint, of a layer likewise; None stands for zeros."""
    source_shapes: tuple[Shape, ...]
    viewed_as: Shape | None = None
    """The shape that the stack is given, if it is another."""

    @property
    def stacked_shape(self) -> Shape:
        """The shape of the stack."""
        return (sum(shape[0] for shape in self.source_shapes), *self.source_shapes[0][1:])

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        return self.viewed_as or self.stacked_shape

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a linear layer."""
        return len(self.shape) == 2

    @property
    def elements(self) -> int:
        """Numbers it holds."""
        return math.prod(self.shape)

    def parts(self, parameter: Tensor) -> Iterator[tuple[str | None, Tensor]]:
        """Yield each source's name and the view of a parameter of this shape that it makes."""
        sizes = [shape[0] for shape in self.source_shapes]
        yield from zip(self.sources, parameter.view(self.stacked_shape).split(sizes), strict=True)

    def within(self, ours: str, theirs: str) -> Parameter:
        """Return the parameter with its name and its sources behind these prefixes."""
        sources = tuple(source if source is None else theirs + source for source in self.sources)
        return self._replace(name=ours + self.name, sources=sources)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a layer."""

    name: str
    """Of its scope in profiles."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """In the order in which checkpoints are read."""
        return ()

    @property
    def title(self) -> str:
        """What a message calls it."""
        return self.name

    @property
    def traits(self) -> frozenset[str]:
        """Names of the fields that are not as they are by default."""
        own = fields(self)
        return frozenset(
            f.name for f in own if f.default is not MISSING and getattr(self, f.name) != f.default
        )


@dataclass(frozen=True, kw_only=True)
class Norm(Operation):
    """Root-mean-square norm over the last dimension."""

    weight: Parameter
    eps: float
    offset: bool = False
    """Multiply by one plus the weight, in float32, and round afterwards."""
    part: int | None = None
    """The part of the value that is normed; None: the value is one tensor."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,)


@dataclass(frozen=True, kw_only=True)
class Linear(Operation):
    """A product with a weight `[out_features, in_features]`, and a bias or none."""

    weight: Parameter
    bias: Parameter | None = None
    split: tuple[int, ...] = ()
    """Sizes of the parts that the result is split into, in units; empty: it stays one tensor."""
    unit: int = 1
    """Elements of a unit; of more than one the parts are `[T, units, unit]`."""
    part: int | None = None
    """The part of the value that is multiplied; None: the value is one tensor."""

    @property
    def out_features(self) -> int:
        """Features of the result."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Features of what is multiplied."""
        return self.weight.shape[1]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, kw_only=True)
class QKNorm(Operation):
    """`Norm` of each head of the queries and of the keys: of the first two parts."""

    q: Parameter
    k: Parameter
    eps: float
    offset: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.q, self.k)


@dataclass(frozen=True, kw_only=True)
class Rotate(Operation):
    """Rotary positions of the queries and keys: of the first two parts."""

    kind: int
    """The first coordinate of cosines and sines."""


@dataclass(frozen=True, kw_only=True)
class Attend(Operation):
    """Write keys and values to the cache, then attend to it: `[T, H * value_dim]`."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    """Elements of a value."""
    scale: float
    """Multiplies q . k."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all before it."""
    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap); 0: they stay."""
    sinks: Parameter | None = None
    """A logit of each head that takes part in the softmax and stands for no value, `[H]`."""
    shared_values: bool = False
    """The first elements of a key are the value: latent attention, whose cache has one side."""

    @property
    def query_features(self) -> int:
        """Elements of the queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Elements of the keys of a token."""
        return self.kv_heads * self.head_dim

    @property
    def features(self) -> int:
        """Elements of the result of a token."""
        return self.heads * self.value_dim

    @property
    def has_plain_softmax(self) -> bool:
        """Whether it is softmax(scale * q . k) over values as wide as keys: torch has it fused."""
        return not self.softcap and self.sinks is None and self.value_dim == self.head_dim

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return () if self.sinks is None else (self.sinks,)

    @property
    def sides(self) -> int:
        """Of the cache: keys and values, or one for both."""
        return 1 if self.shared_values else 2


@dataclass(frozen=True, kw_only=True)
class Activate(Operation):
    """`function(gate) * (up + up_offset)` of the two parts of the value, `[T, F]`."""

    function: ActivationName
    features: int
    limit: float = 0.0
    """The gate is clamped to at most this, up to this on both sides; 0: neither is."""
    alpha: float = 1.0
    """The gate is multiplied by it inside the sigmoid of silu."""
    up_offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Residual(Operation):
    """Add the value to the hidden states."""


class LatentOperation(Operation):
    """Of multi-head latent attention (DeepSeek-V2)."""

    @property
    def title(self) -> str:
        return "latent attention"


@dataclass(frozen=True, kw_only=True)
class LatentRotate(LatentOperation):
    """Of (queries, latent, shared key): rotate the end of each head's queries, and the key.

    The parts are (queries that stay `[T, H, nope]`, rotated queries, latent, rotated key).
    """

    heads: int
    nope: int
    """Elements of a head's queries that are not rotated."""
    rope: int
    """Elements that are."""
    interleaved: bool
    """Whether the elements of a rotated pair are neighbours."""
    kind: int
    """The first coordinate of cosines and sines."""


@dataclass(frozen=True, kw_only=True)
class QueriesToLatent(LatentOperation):
    """Bring the queries to the latent space: (queries `[T, H, E]`, latent, rotated key).

    It and `LatentToValues` share one parameter, `[H, keys + values, rank]`.
    """

    kv_up: Parameter
    keys: int
    """Elements of a head's key."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.kv_up,)


@dataclass(frozen=True, kw_only=True)
class LatentKeys(LatentOperation):
    """Norm the latent and join it with the rotated key: (queries, keys `[T, 1, E]`)."""

    weight: Parameter
    eps: float

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,)


@dataclass(frozen=True, kw_only=True)
class LatentToValues(LatentOperation):
    """Project the values out of what attention returns, `[T, H * rank]`."""

    kv_up: Parameter
    keys: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.kv_up,)


Known = Mapping[type[Operation], frozenset[str]]
"""The kinds of operations that a backend runs, and the traits that it knows of each."""


def unsupported(operation: Operation, known: Known) -> str | None:
    """Return what a backend does not know of an operation, or None if it supports it.

    A trait that is added to an operation is unsupported until a backend lists it.
    """
    if type(operation) not in known:
        return operation.title
    missing = sorted(operation.traits - known[type(operation)])
    return f"{operation.title} with {', '.join(missing)}" if missing else None


UNEQUAL_LAYERS = "layers that differ in more than windows and rotations"
"""What a message calls a plan that is not uniform."""
KNOWN_TO_ATTENTION: Known = {Attend: frozenset({"window", "softcap", "shared_values"})}
"""To the paged attention kernels, of a CPU and of Triton."""
KNOWN_TO_LAYERS: Known = {
    Norm: frozenset({"offset"}),
    Linear: frozenset({"bias", "split", "unit"}),
    QKNorm: frozenset({"offset"}),
    Rotate: frozenset(),
    Attend: frozenset({"window", "softcap"}),
    Activate: frozenset(),
    Residual: frozenset(),
}
"""To the C++ stack of layers and to the Triton kernels of a layer."""
