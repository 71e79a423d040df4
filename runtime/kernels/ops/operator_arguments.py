"""Layers as lists of tensors, integers and numbers: arguments of the C++ operators over them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .activation import Activate
from .experts import Experts, ExpertTensors, Scores
from .norms import JoinNorms, Norm, QKNorm

__all__ = ["SCORES", "OperatorArguments"]

SCORES: tuple[Scores, ...] = ("softmax", "sigmoid", "softmax_chosen")
"""In the order of `Scores` in `csrc/routing.h`."""


@dataclass
class OperatorArguments:
    """Lists in the order in which `csrc/argument_reader.h` reads them."""

    tensors: list[Tensor | None] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    def add_norm(self, norm: Norm | QKNorm | JoinNorms | None, weight: Tensor | None) -> None:
        """Add a norm and its weight; None: there is none."""
        self.tensors.append(weight)
        self.numbers.append(0.0 if norm is None else norm.eps)
        self.integers.append(norm is not None and norm.offset)

    def add_activate(self, op: Activate) -> None:
        """Add a gated activation; its features are not included."""
        self.integers.append(op.function == "gelu_tanh")
        self.numbers += [op.limit, op.alpha, op.up_offset]

    def add_experts(self, op: Experts, tensors: ExpertTensors) -> None:
        """Add a mixture of experts with packed weights."""
        routing = op.routing
        self.integers += [op.routed, op.shared, op.activate.features, op.scaled_inputs]
        self.integers += [routing.top_k, SCORES.index(routing.scores), routing.normalised]
        self.integers += [routing.groups, routing.top_groups, routing.group_score == "top_2_sum"]
        self.integers.append(op.chooses_by_logits)
        self.numbers.append(routing.scale)
        self.tensors += [*tensors]  # torch 2.11 traces no sum of a list and a named tuple
        self.add_activate(op.activate)
