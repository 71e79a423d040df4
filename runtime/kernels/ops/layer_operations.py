"""The operations of decoder layers, with their traits, shapes and parameters.

The operations of a layer are a chain. The input of each is the output of the previous one, called
the value: a tensor `[T, features]`, or a tuple of parts. `Residual` adds the value to the hidden
states, which are the input of the layer or the output of the previous `Residual`. A trait is a
field with another value than its default; backends list the traits that they support.

Shapes: T tokens, H query heads, G key/value heads, E head_dim, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Literal, NamedTuple

from .parameter import Parameter

ActivationName = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a layer."""

    name: str
    """Name of its scope in profiles."""

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


@dataclass(frozen=True, kw_only=True)
class Norm(Operation):
    """Root-mean-square norm over the last dimension."""

    weight: Parameter
    eps: float
    offset: bool = False
    """Whether to multiply by one plus the weight, in float32, and round afterwards."""
    part: int | None = None
    """The part of the value that is normalised; None: the value is one tensor."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,)


@dataclass(frozen=True, kw_only=True)
class JoinNorms(Operation):
    """Norm of the step's embeddings, followed by the norm of the hidden states, `[T, 2 D]`.

    The first operation of a layer (EAGLE-3, arXiv 2503.01840).
    """

    embeddings: Parameter
    hidden: Parameter | None
    """None: the hidden states are not normed."""
    eps: float
    offset: bool = False
    """As in `Norm`."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.embeddings,) if self.hidden is None else (self.embeddings, self.hidden)


@dataclass(frozen=True, kw_only=True)
class Linear(Operation):
    """A product with a weight `[out_features, in_features]`, with an optional bias."""

    weight: Parameter
    bias: Parameter | None = None
    split: tuple[int, ...] = ()
    """Sizes of the parts of the result, in units; empty: one tensor."""
    unit: int = 1
    """Elements of a unit; with more than one, parts are `[T, units, unit]`."""
    part: int | None = None
    """The part of the value that is multiplied; None: the value is one tensor."""

    @property
    def out_features(self) -> int:
        """Features of the result."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Features of the input."""
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
    all_heads: bool = False
    """Whether the elements of all heads of a token are normalised together; the weights then have
    as many elements as the queries and the keys (OLMo 2)."""
    ranks: int = 1
    """Ranks that hold parts of these elements. They add their sums of squares; where several hold
    the same keys, all hold as many of each."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.q, self.k)


@dataclass(frozen=True, kw_only=True)
class Rotate(Operation):
    """Rotary positions of the queries and keys: of the first two parts.

    Pairs of elements that a model does not rotate have frequency zero (see `HeadRows`).
    """

    kind: int
    """The first coordinate of cosines and sines."""


class AttentionTemperature(NamedTuple):
    """Factor of queries at position p, 1 + scale * log(1 + floor((p + 1) / floor)) (Llama 4)."""

    floor: int
    """In tokens."""
    scale: float


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
    """Tokens that a token attends to, itself included; 0: all previous tokens."""
    chunk: int = 0
    """Positions of the chunk that a token attends to, its own only; 0: off (Llama 4)."""
    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap); 0: off."""
    sinks: Parameter | None = None
    """`[H]`: attention sink of each head, a softmax logit without a value."""
    temperature: AttentionTemperature | None = None
    shared_values: bool = False
    """Whether the value is the first elements of the key: latent attention, whose cache has one
    side."""

    @property
    def query_features(self) -> int:
        """Elements of the queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Elements of the keys of a token."""
        return self.kv_heads * self.head_dim

    @property
    def reach(self) -> int:
        """Most tokens that a token attends to, itself included; 0: all previous tokens."""
        return min(filter(None, (self.window, self.chunk)), default=0)

    @property
    def features(self) -> int:
        """Elements of the result of a token."""
        return self.heads * self.value_dim

    @property
    def has_plain_softmax(self) -> bool:
        """Whether it is softmax(scale * q . k) with value_dim = head_dim, as in PyTorch's SDPA."""
        return not self.softcap and self.sinks is None and self.value_dim == self.head_dim

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return () if self.sinks is None else (self.sinks,)

    @property
    def sides(self) -> int:
        """Sides of the cache: 2 for keys and values, 1 if they are shared."""
        return 1 if self.shared_values else 2


@dataclass(frozen=True, kw_only=True)
class Activate(Operation):
    """`function(gate) * (up + up_offset)` of the two parts of the value, `[T, F]`."""

    function: ActivationName
    features: int
    limit: float = 0.0
    """The gate is clamped to at most this value, `up` to +- this value; 0: off."""
    alpha: float = 1.0
    """Factor of the gate inside the sigmoid of silu."""
    up_offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Residual(Operation):
    """Add the value to the hidden states."""

    scale: float = 1.0
    """Factor of the value, which is rounded to the model's dtype before the addition (Granite)."""


@dataclass(frozen=True, kw_only=True)
class AllReduce(Operation):
    """Sum the value over the ranks of a tensor-parallel group; see `Collectives.all_reduce`."""

    ranks: int
    features: int
    """Elements of the value of a token."""


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


class LatentOperation(Operation):
    """An operation of multi-head latent attention (DeepSeek-V2)."""

    @property
    def title(self) -> str:
        return "latent attention"


@dataclass(frozen=True, kw_only=True)
class LatentRotate(LatentOperation):
    """Of (queries, latent, shared key), rotate the last elements of each head's query, and the key.

    The result is (unrotated queries `[T, H, nope]`, rotated queries, latent, rotated key).
    """

    heads: int
    nope: int
    """Elements of a head's queries that are not rotated."""
    rope: int
    """Elements of a head's queries that are rotated."""
    interleaved: bool
    """Whether the elements of a rotated pair are neighbours."""
    kind: int
    """The first coordinate of cosines and sines."""


@dataclass(frozen=True, kw_only=True)
class QueriesToLatent(LatentOperation):
    """Project the queries to the latent space: (queries `[T, H, E]`, latent, rotated key).

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
    """Normalise the latent and concatenate it with the rotated key: (queries, keys `[T, 1, E]`)."""

    weight: Parameter
    eps: float

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,)


@dataclass(frozen=True, kw_only=True)
class LatentToValues(LatentOperation):
    """Project the output of attention, weighted sums of latents `[T, H * rank]`, to values."""

    kv_up: Parameter
    keys: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.kv_up,)


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
