"""Mixtures of experts of any traits, with random tensors and a simple float64 version."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from stepgraph.runtime.kernels import Experts, Routing, pack_linear
from stepgraph.runtime.kernels.ops.activation import Activate
from stepgraph.runtime.kernels.ops.experts import ExpertTensors
from stepgraph.runtime.kernels.ops.parameter import Parameter, Source
from stepgraph.runtime.kernels.weights import STORAGES, dequantise
from torch import Tensor


class Mixture(NamedTuple):
    """An operation, its tensors, and the weights that they represent."""

    op: Experts
    tensors: ExpertTensors
    exact: ExpertTensors
    """float64, dequantised."""

    def to(self, device: str | torch.device) -> Mixture:
        """The same with its tensors on a device."""
        moved = (None if t is None else t.to(device) for t in self.tensors)
        return self._replace(tensors=ExpertTensors(*moved))


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
) -> Experts:
    """A mixture whose parameters have the names that they have in a layer."""
    total, features = routed + shared, activate.features

    def parameter(name: str, *shape: int, **fields: Any) -> Parameter:
        return Parameter(f"experts.{name}", (Source(name, shape),), **fields)

    def bias(name: str, size: int) -> Parameter | None:
        return parameter(f"{name}.bias", size) if biases else None

    added = parameter("correction.weight", routed, dtype=torch.float32)
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

    fields = {name: getattr(op, name, None) for name in ExpertTensors._fields}
    exact = ExpertTensors(**{n: None if p is None else random(p) for n, p in fields.items()})
    tensors = exact
    if storage != "model":
        stored = {}
        for name in ("gate_up", "down"):
            stored[name], stored[f"{name}_scales"] = STORAGES[storage].quantise(
                getattr(exact, name)
            )
        tensors = exact._replace(**stored)
        exact = exact._replace(
            gate_up=dequantise(stored["gate_up"], stored["gate_up_scales"]),
            down=dequantise(stored["down"], stored["down_scales"]),
        )
    doubles = ExpertTensors(*(None if t is None else t.double() for t in exact))
    return Mixture(op, tensors, doubles)


def packed(mixture: Mixture) -> ExpertTensors:
    """The tensors with packed weights."""
    tensors, total = mixture.tensors, mixture.op.total
    return tensors._replace(
        gate_up=torch.cat([pack_linear(w) for w in tensors.gate_up.chunk(2 * total)]),
        down=torch.cat([pack_linear(w) for w in tensors.down.chunk(total)]),
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
            inner = t.gate_up[at] @ (x * weight if op.scaled_inputs else x)
            if t.gate_up_bias is not None:
                inner = inner + t.gate_up_bias[at]
            gate, up = inner.chunk(2)
            if act.limit:
                gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            inner = gate * torch.sigmoid(act.alpha * gate) * (up + act.up_offset)
            at = slice(expert * hidden, (expert + 1) * hidden)
            y = t.down[at] @ inner + (0.0 if t.down_bias is None else t.down_bias[at])
            row += y if op.scaled_inputs else weight * y
    return out
