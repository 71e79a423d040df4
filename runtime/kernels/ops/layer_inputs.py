"""Inputs of every layer that depend on the token: per-layer embeddings (Gemma 3n, Gemma 4).

A second embedding has a row of L * P elements for each token. Its sum with a projection of the
token's first embedding is an input of each of the L layers, in which it multiplies a gate.

Shapes: T tokens, D hidden_size, L layers, P elements of an input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .activation import Activate, gated_activation
from .linear import projection
from .norms import RMSNorm
from .operation import Binding, LayerStep, Operation, Run, per_token
from .parameter import Parameter


@dataclass(frozen=True, kw_only=True)
class LayerInputs(Operation):
    """The inputs of all layers, `[T, L, P]`, from the tokens and their embeddings `[T, D]`.

    Tokens beyond the table have the row of token 0, and so have embeddings that replace tokens.
    """

    table: Parameter
    """`[tokens, L * P]`."""
    projection: Parameter
    """`[L * P, D]`."""
    norm: Parameter
    """`[P]`, of the projected embeddings."""
    eps: float
    vocab_size: int
    """Tokens of the model."""

    @property
    def title(self) -> str:
        return "per-layer embeddings"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.table, self.projection, self.norm

    def bind(self, to: Binding) -> Run:
        table, project = projection(to, self.table), projection(to, self.projection)
        norm = per_token(to.kernels, to.module(self.norm, lambda: RMSNorm(self.eps)))
        tokens, (size,) = self.table.shape[0], self.norm.shape
        covers_all, scale = tokens >= self.vocab_size, self.projection.shape[1] ** -0.5

        def run(x_TD: Tensor, step: LayerStep) -> Tensor:
            ids_T = step.batch.token_ids
            assert ids_T is not None, "layers with embeddings need the ids of the tokens"
            if not covers_all:
                ids_T = ids_T.masked_fill(ids_T >= tokens, 0)
            rows_TLP = (table.rows(ids_T) * size**0.5).unflatten(1, (-1, size))
            projected_TLP: Tensor = norm((project(x_TD) * scale).unflatten(1, (-1, size)))
            summed_TLP: Tensor = (projected_TLP + rows_TLP) * 2**-0.5
            return summed_TLP

        return run

    def kept_features(self, hidden: int) -> int:
        return self.projection.shape[0]

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        features = self.projection.shape[0]
        return itemsize * (hidden + 3 * features) + (12 * features if eager else 0)


@dataclass(frozen=True, kw_only=True)
class LayerInput(Operation):
    """`projection(activation(gate(x)) * input)` with the layer's input of the token: `[T, D]`."""

    gate: Parameter
    """`[P, D]`."""
    projection: Parameter
    """`[D, P]`."""
    activate: Activate

    @property
    def title(self) -> str:
        return "per-layer embeddings"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.gate, self.projection

    def bind(self, to: Binding) -> Run:
        gate, project = projection(to, self.gate), projection(to, self.projection)
        gated: Callable[[Tensor, Tensor], Tensor]
        gated, layer = per_token(to.kernels, gated_activation(self.activate)), to.layer

        def run(x_TD: Tensor, step: LayerStep) -> Tensor:
            assert step.layer_inputs is not None, "made before the first layer"
            out_TD: Tensor = project(gated(gate(x_TD), step.layer_inputs[:, layer]))
            return out_TD

        return run

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return itemsize * (3 * hidden + 4 * self.gate.shape[0])
