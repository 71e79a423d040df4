"""Mixtures of experts of any traits, with random tensors and a simple float64 version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from stepgraph.runtime.kernels import Experts, Routing
from stepgraph.runtime.kernels.ops.activation import Activate
from stepgraph.runtime.kernels.ops.experts import ExpertTensors
from stepgraph.runtime.kernels.ops.linear import LinearTensors
from stepgraph.runtime.kernels.ops.parameter import Parameter, Source
from stepgraph.runtime.kernels.weights import STORAGES, GroupedWeight, dequantise
from stepgraph.runtime.kernels.weights.grouped import INT8, Scales
from torch import Tensor

from .packed_weights import packed as packed_weight


class Mixture(NamedTuple):
    """An operation, its tensors, and the weights that they represent."""

    op: Experts
    tensors: ExpertTensors
    exact: ExpertTensors
    """float64, dequantised."""

    def to(self, device: str | torch.device) -> Mixture:
        """The same with its tensors on a device."""
        return self._replace(tensors=mapped(self.tensors, lambda t: t.to(device)))


def mapped(tensors: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Named tuples of tensors, and of such tuples, with a function applied to each tensor."""
    if isinstance(tensors, tuple):
        return type(tensors)(*(mapped(each, function) for each in tensors))
    return None if tensors is None else function(tensors)


def expert_operation(
    routing: Routing,
    activate: Activate,
    hidden: int,
    routed: int,
    shared: int = 0,
    *,
    biases: bool = False,
    correction: bool = False,
    scaled_inputs: bool = False,
    router_input: bool = False,
) -> Experts:
    """A mixture whose parameters have the names that they have in a layer."""
    total, features = routed + shared, activate.features

    def parameter(name: str, *shape: int, **fields: Any) -> Parameter:
        return Parameter(f"experts.{name}", (Source(name, shape),), **fields)

    def bias(name: str, size: int) -> Parameter | None:
        return parameter(f"{name}.bias", size) if biases else None

    added = parameter("correction.weight", routed, dtype=torch.float32)
    scales = parameter("scales.weight", routed, dtype=torch.float32)
    return Experts(
        name="experts",
        router=parameter("router.weight", routed, hidden, exact=True),
        gate_up=parameter("gate_up.weight", 2 * total * features, hidden, matrices=2 * total),
        down=parameter("down.weight", total * hidden, features, matrices=total),
        routing=routing,
        activate=activate,
        router_bias=bias("router", routed),
        correction=added if correction else None,
        gate_up_bias=bias("gate_up", 2 * total * features),
        down_bias=bias("down", total * hidden),
        shared=shared,
        scaled_inputs=scaled_inputs,
        expert_scales=scales if router_input else None,
        router_input=router_input,
    )


def make_mixture(
    routing: Routing,
    *,
    routed: int = 6,
    shared: int = 0,
    hidden: int = 12,
    features: int = 10,
    limit: float = 0.0,
    dtype: torch.dtype = torch.float32,
    storage: str = "model",
    seed: int = 0,
    **traits: bool,
) -> Mixture:
    """A mixture with random weights; with `limit`, the clamped activation of gpt-oss."""
    activate = Activate(name="activate", function="silu", features=features)
    if limit:
        activate = replace(activate, limit=limit, alpha=1.702, up_offset=1.0)
    op = expert_operation(routing, activate, hidden, routed, shared, **traits)
    generator = torch.Generator().manual_seed(seed)

    def random(parameter: Parameter) -> Tensor:
        values = 0.5 * torch.randn(*parameter.shape, generator=generator)
        return values.to(parameter.dtype or dtype)

    def optional(parameter: Parameter | None) -> Tensor | None:
        return None if parameter is None else random(parameter)

    tensors = exact = ExpertTensors(
        random(op.router),
        optional(op.router_bias),
        optional(op.correction),
        optional(op.expert_scales),
        LinearTensors(random(op.gate_up), None, optional(op.gate_up_bias)),
        LinearTensors(random(op.down), None, optional(op.down_bias)),
    )
    if storage != "model":
        for name, linear in (("gate_up", exact.gate_up), ("down", exact.down)):
            weight, scales = STORAGES[storage].quantise(linear.weight)
            stored = LinearTensors(weight, scales, linear.bias)
            tensors = tensors._replace(**{name: stored})
            exact = exact._replace(**{name: linear._replace(weight=dequantise(weight, scales))})
    return Mixture(op, tensors, mapped(exact, Tensor.double))


def packed(mixture: Mixture) -> ExpertTensors:
    """The tensors with packed weights."""
    tensors, total = mixture.tensors, mixture.op.total
    gate_up, down = (
        linear._replace(
            weight=torch.cat(list(_matrices(linear, matrices, tensors.router.dtype))),
            scales=None,
        )
        for linear, matrices in ((tensors.gate_up, 2 * total), (tensors.down, total))
    )
    return tensors._replace(gate_up=gate_up, down=down)


def _matrices(linear: LinearTensors, count: int, dtype: torch.dtype) -> Iterator[Tensor]:
    if linear.scales is None:
        yield from (packed_weight([w], dtype) for w in linear.weight.chunk(count))
        return
    for data, scales in zip(linear.weight.chunk(count), linear.scales.chunk(count), strict=True):
        codes = data.view(torch.uint8)
        yield packed_weight(
            [GroupedWeight(INT8, codes, data.shape[1], Scales(scales[:, None]))], dtype
        )


def simple_route(
    op: Experts, logits: list[float], correction: list[float] | None
) -> dict[int, float]:
    """The chosen experts of one token and their weights, in order, in Python's arithmetic."""
    routing, count = op.routing, len(logits)
    if routing.scores == "softmax":
        top = max(logits)
        powers = [math.exp(x - top) for x in logits]
        scores = [p / sum(powers) for p in powers]
    elif routing.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        scores = logits
    by = logits if op.chooses_by_logits else scores
    if correction is not None:
        by = [score + extra for score, extra in zip(by, correction, strict=True)]
    size = count // routing.groups

    def group_score(group: int) -> float:
        members = sorted(by[group * size : (group + 1) * size], reverse=True)
        return members[0] if routing.group_score == "max" else members[0] + members[1]

    groups = sorted(range(routing.groups), key=lambda g: -group_score(g))[: routing.top_groups]
    allowed = [e for e in range(count) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -by[e])[: routing.top_k]
    weights = [scores[e] for e in chosen]
    if routing.scores == "softmax_chosen":
        powers = [math.exp(w - max(weights)) for w in weights]
        weights = [p / sum(powers) for p in powers]
    if routing.normalised:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return {e: w * routing.scale for e, w in zip(chosen, weights, strict=True)}


def simple_experts(mixture: Mixture, x_TD: Tensor) -> Tensor:
    """The output of a mixture in float64, token by token and expert by expert."""
    op, t = mixture.op, mixture.exact
    features, hidden = op.activate.features, x_TD.shape[1]
    act = op.activate
    out = torch.zeros(x_TD.shape, dtype=torch.float64)
    for row, x in zip(out, x_TD.double(), strict=True):
        logits = t.router @ x + (0.0 if t.router_bias is None else t.router_bias)
        correction = None if t.correction is None else t.correction.tolist()
        chosen = simple_route(op, logits.tolist(), correction)
        chosen |= dict.fromkeys(range(op.routed, op.routed + op.shared), 1.0)
        for expert, weight in chosen.items():
            at = slice(expert * 2 * features, (expert + 1) * 2 * features)
            inner = t.gate_up.weight[at] @ (x * weight if op.scaled_inputs else x)
            if t.gate_up.bias is not None:
                inner = inner + t.gate_up.bias[at]
            gate, up = inner.chunk(2)
            if act.limit:
                gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            inner = gate * torch.sigmoid(act.alpha * gate) * (up + act.up_offset)
            at = slice(expert * hidden, (expert + 1) * hidden)
            y = t.down.weight[at] @ inner + (0.0 if t.down.bias is None else t.down.bias[at])
            row += y if op.scaled_inputs else weight * y
    return out
