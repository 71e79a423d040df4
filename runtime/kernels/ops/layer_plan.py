"""A decoder described once, without tensors: layers of operations between embedding and head.

The shapes that a loader expects, the memory footprint and the bytes of a step follow from it alone;
a `BoundModel` adds the tensors, for backends that run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from .layer_operations import Attend, LatentRotate, Linear, Norm, Operation, Parameter, Rotate


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer."""

    operations: tuple[Operation, ...]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of all operations, each once."""
        return tuple(dict.fromkeys(p for op in self.operations for p in op.parameters))

    @cached_property
    def attend(self) -> Attend:
        """The operation that uses the cache."""
        (found,) = (op for op in self.operations if isinstance(op, Attend))
        return found


@dataclass(frozen=True)
class ModelPlan:
    """A decoder from token ids to logits. Layers that are alike are the same object."""

    embedding: Parameter
    """`[vocab_size, hidden_size]`."""
    embedding_scale: float
    """Embeddings are multiplied by it, rounded to the model's dtype; 1: they stay."""
    layers: tuple[LayerPlan, ...]
    norm: Norm
    """After the last layer."""
    head: Linear
    """To logits; its weight is the embedding where the two are tied."""
    logit_softcap: float
    """Logits l become softcap * tanh(l / softcap); 0: they stay."""
    rope_kinds: int
    """Kinds of rotation."""

    @cached_property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        parts = (op.rope for op in self.operations if isinstance(op, LatentRotate))
        return next(parts, self.layers[0].attend.head_dim)

    @property
    def hidden_size(self) -> int:
        """Features of the hidden states."""
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.embedding.shape[0]

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head.weight == self.embedding

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Those of all kinds of layers, each once."""
        return tuple(dict.fromkeys(op for layer in self.layers for op in layer.operations))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether layers differ in nothing but their windows and kinds of rotation."""

        def comparable(operation: Operation) -> Operation:
            match operation:
                case Attend():
                    return replace(operation, window=0)
                case Rotate() | LatentRotate():
                    return replace(operation, kind=0)
            return operation

        kinds = {tuple(map(comparable, layer.operations)) for layer in set(self.layers)}
        return len(kinds) == 1

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters under their full names, in the order a forward pass needs them."""
        yield self.embedding
        for index, layer in enumerate(self.layers):
            for parameter in layer.parameters:
                yield parameter.within(f"layers.{index}.", f"model.layers.{index}.")
        yield from self.norm.parameters
        if not self.tied:
            yield from self.head.parameters
