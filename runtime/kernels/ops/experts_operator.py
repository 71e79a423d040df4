"""A mixture of experts as one operator, which torch.compile does not trace.

Its loops depend on the experts that tokens choose, and on their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .expert_operations import Experts, Routing
from .experts import ExpertTensors, reference_experts
from .layer_operations import Activate
from .operator_arguments import OperatorArguments
from .parameter import Parameter, Source

__all__ = ["define_experts", "opaque_experts", "packed_experts"]

_TENSORS = len(ExpertTensors._fields)

_ARGUMENTS = (
    "Tensor router, Tensor? router_bias, Tensor? correction, Tensor gate_up,"
    " Tensor? gate_up_scales, Tensor? gate_up_bias, Tensor down, Tensor? down_scales,"
    " Tensor? down_bias, int shared, bool scaled_inputs, str function, int features, float limit,"
    " float alpha, float up_offset, int top_k, str scores, bool normalised, float scale,"
    " int groups, int top_groups, str group_score"
)
"""An operation and its tensors, as arguments of an operator."""

RunExperts = Callable[[Experts, Tensor, ExpertTensors, "Tensor | None"], Tensor]
"""Signature of `reference_experts`."""


def packed_experts(
    op: Experts, x_TD: Tensor, tensors: ExpertTensors, live_T: Tensor | None = None
) -> Tensor:
    """As `reference_experts` over packed weights, in C++; needs `load_cpu_ops`.

    The result of a token is bitwise independent of other tokens and of the number of threads. The
    experts of a token are added in their own order, not in the order of the choice.

    Raises RuntimeError for tensors that do not fit the operation.
    """
    lists = OperatorArguments()
    lists.add_experts(op, tensors)
    out: Tensor = torch.ops.stepgraph.packed_experts.default(
        x_TD, live_T, lists.tensors, lists.integers, lists.numbers
    )
    return out


def _numbers(op: Experts) -> tuple[Any, ...]:
    """Return the arguments of the operator that describe an operation."""
    act = op.activate
    activate = (act.function, act.features, act.limit, act.alpha, act.up_offset)
    return (op.shared, op.scaled_inputs, *activate, *op.routing)


def _operation(tensors: ExpertTensors, numbers: tuple[Any, ...]) -> Experts:
    """Inverse of `_numbers`."""
    shared, scaled_inputs, function, features, limit, alpha, up_offset, *routing = numbers

    def parameter(name: str) -> Parameter:
        tensor = getattr(tensors, name)
        return Parameter(name, (Source(None, tuple(tensor.shape)),))

    def optional(name: str) -> Parameter | None:
        return None if getattr(tensors, name) is None else parameter(name)

    return Experts(
        name="experts",
        router=parameter("router"),
        gate_up=parameter("gate_up"),
        down=parameter("down"),
        routing=Routing(*routing),
        activate=Activate(
            name="activate",
            function=function,
            features=features,
            limit=limit,
            alpha=alpha,
            up_offset=up_offset,
        ),
        router_bias=optional("router_bias"),
        correction=optional("correction"),
        gate_up_bias=optional("gate_up_bias"),
        down_bias=optional("down_bias"),
        shared=shared,
        scaled_inputs=scaled_inputs,
    )


def _fake(x_TD: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x_TD)


def define_experts(name: str, implementation: RunExperts, *keys: str) -> RunExperts:
    """Define the operator `stepgraph::<name>`, with this implementation under the dispatch keys;
    return its wrapper."""

    def run(x_TD: Tensor, live_T: Tensor | None, *arguments: Any) -> Tensor:
        tensors = ExpertTensors(*arguments[:_TENSORS])
        return implementation(_operation(tensors, arguments[_TENSORS:]), x_TD, tensors, live_T)

    torch.library.define(f"stepgraph::{name}", f"(Tensor x, Tensor? live, {_ARGUMENTS}) -> Tensor")
    for key in keys:
        torch.library.impl(f"stepgraph::{name}", key, run)
    torch.library.register_fake(f"stepgraph::{name}", _fake)
    operator = getattr(torch.ops.stepgraph, name).default

    def call(
        op: Experts, x_TD: Tensor, tensors: ExpertTensors, live_T: Tensor | None = None
    ) -> Tensor:
        out: Tensor = operator(x_TD, live_T, *tensors, *_numbers(op))
        return out

    return call


opaque_experts = define_experts("experts", reference_experts, "CPU", "CUDA")
"""`reference_experts` as an operator."""

torch.library.define(
    "stepgraph::packed_experts",
    "(Tensor x, Tensor? live, Tensor?[] tensors, int[] integers, float[] numbers) -> Tensor",
)
torch.library.register_fake("stepgraph::packed_experts", _fake)
