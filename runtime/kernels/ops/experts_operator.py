"""Layers as lists of tensors, integers and numbers, the arguments of C++ operators over them.

A mixture of experts is one operator, which torch.compile does not trace: its loops depend on the
experts that tokens choose, and on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .activation import Activate, ActivationName
from .experts import Experts, ExpertTensors, Routing, Scores, reference_experts
from .linear import LinearTensors
from .norms import JoinNorms, Norm, QKNorm
from .parameter import Parameter, Source

SCORES: tuple[Scores, ...] = ("softmax", "sigmoid", "softmax_chosen")
"""In the order of `Scores` in `csrc/routing.h`."""
_FUNCTIONS: tuple[ActivationName, ...] = ("silu", "gelu_tanh", "relu2")
"""The C++ operators have the first two, which are gated."""


@dataclass
class OperatorArguments:
    """Lists in the order in which `csrc/stack_ops.h` reads them."""

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
        self.integers.append(_FUNCTIONS.index(op.function))
        self.numbers += [op.limit, op.alpha, op.up_offset]

    def add_experts(self, op: Experts, tensors: ExpertTensors) -> None:
        """Add a mixture of experts with packed weights."""
        routing = op.routing
        self.integers += [op.routed, op.shared, op.activate.features, op.scaled_inputs]
        self.integers += [routing.top_k, SCORES.index(routing.scores), routing.normalised]
        self.integers += [routing.groups, routing.top_groups, routing.group_score == "top_2_sum"]
        self.integers.append(op.chooses_by_logits)
        self.numbers.append(routing.scale)
        router, bias, correction, scales, gate_up, down = tensors
        # torch 2.11 traces no sum of a list and a named tuple.
        self.tensors += [router, bias, correction, scales, *gate_up, *down]
        self.add_activate(op.activate)


RunExperts = Callable[[Experts, Tensor, ExpertTensors, "Tensor | None", "Tensor | None"], Tensor]
"""Signature of `reference_experts`."""


def _operation(
    tensors: ExpertTensors, integers: Sequence[int], numbers: Sequence[float]
) -> Experts:
    """Inverse of `OperatorArguments.add_experts`, but for biases, which are read as tensors."""
    _, shared, features, scaled_inputs, top_k, scores, normalised, *groups, _, function = integers
    scale, limit, alpha, up_offset = numbers
    count, top_groups, sums = groups
    router, _, correction, scales, gate_up, down = tensors
    shaped: dict[str, Tensor | None] = {
        **{"router": router, "gate_up": gate_up.weight, "down": down.weight},
        **{"correction": correction, "expert_scales": scales},
    }
    parameters: dict[str, Any] = {
        name: Parameter(name, (Source(None, tuple(tensor.shape)),))
        for name, tensor in shaped.items()
        if tensor is not None
    }
    return Experts(
        name="experts",
        routing=Routing(
            top_k,
            SCORES[scores],
            bool(normalised),
            scale,
            count,
            top_groups,
            "top_2_sum" if sums else "max",
        ),
        activate=Activate(
            name="activate",
            function=_FUNCTIONS[function],
            gated=_FUNCTIONS[function] != "relu2",
            features=features,
            limit=limit,
            alpha=alpha,
            up_offset=up_offset,
        ),
        shared=shared,
        scaled_inputs=bool(scaled_inputs),
        **parameters,
    )


def define_experts(
    name: str, implementation: RunExperts = reference_experts, *keys: str
) -> RunExperts:
    """Define the operator `stepgraph::<name>`, with this implementation under the dispatch keys;
    return its wrapper."""

    def run(
        x_TD: Tensor,
        live_T: Tensor | None,
        router_TD: Tensor | None,
        tensors: Sequence[Any],
        integers: Sequence[int],
        numbers: Sequence[float],
    ) -> Tensor:
        router, bias, correction, scales, *linears = tensors
        gate_up, down = LinearTensors(*linears[:3]), LinearTensors(*linears[3:])
        named = ExpertTensors(router, bias, correction, scales, gate_up, down)
        op = _operation(named, integers, numbers)
        return implementation(op, x_TD, named, live_T, router_TD)

    torch.library.define(
        f"stepgraph::{name}",
        "(Tensor x, Tensor? live, Tensor? router_x, Tensor?[] tensors, int[] integers,"
        " float[] numbers) -> Tensor",
    )
    for key in keys:
        torch.library.impl(f"stepgraph::{name}", key, run)
    torch.library.register_fake(f"stepgraph::{name}", lambda x_TD, *_: torch.empty_like(x_TD))
    operator = getattr(torch.ops.stepgraph, name).default

    def call(
        op: Experts,
        x_TD: Tensor,
        tensors: ExpertTensors,
        live_T: Tensor | None = None,
        router_TD: Tensor | None = None,
    ) -> Tensor:
        lists = OperatorArguments()
        lists.add_experts(op, tensors)
        arguments = lists.tensors, lists.integers, lists.numbers
        out: Tensor = operator(x_TD, live_T, router_TD, *arguments)
        return out

    return call


opaque_experts = define_experts("experts", reference_experts, "CPU", "CUDA")
"""`reference_experts` as an operator."""

packed_experts = define_experts("packed_experts")
"""As `reference_experts` over packed weights, in C++; needs `load_cpu_ops`.

The result of a token is bitwise independent of other tokens and of the number of threads. The
experts of a token are added in their own order, not in the order of the choice.

Raises RuntimeError for tensors that do not fit the operation.
"""
