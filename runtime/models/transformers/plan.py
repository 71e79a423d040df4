"""The plan of a transformers model, from the record of its forward pass.

The plan lists the attention and the linear layers of each decoder layer. Everything else of a layer
is one `Opaque` operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...kernels.ops.layer_operations import Attend, Linear, Norm, Opaque
from ...kernels.ops.layer_plan import LayerPlan, ModelPlan
from ...kernels.ops.parameter import Parameter, Source
from .parameter_uses import LinearUse
from .probe import AttentionCall, Probe, common_kv_heads

__all__ = ["LinearGroup", "layer_prefixes", "linear_groups", "plan_of_probe"]


class LinearGroup(NamedTuple):
    """Linear layers with the same input, computed as one product."""

    layer: int | None
    """The decoder layer they belong to; None: the head."""
    members: tuple[LinearUse, ...]

    @property
    def name(self) -> str:
        """Path of the first one."""
        return self.members[0].module

    @property
    def in_features(self) -> int:
        """Features of the input."""
        return self.members[0].in_features

    @property
    def out_features(self) -> int:
        """Features of all results."""
        return sum(member.out_features for member in self.members)

    @property
    def bias(self) -> bool:
        """Whether one of them has a bias."""
        return any(member.bias for member in self.members)

    def operation(self) -> Linear:
        """Return the product as an operation of a plan."""
        weights = tuple(
            Source(f"{member.module}.weight", (member.out_features, member.in_features))
            for member in self.members
        )
        biases = tuple(
            Source(f"{member.module}.bias" if member.bias else None, (member.out_features,))
            for member in self.members
        )
        return Linear(
            name=self.name.rpartition(".")[2],
            weight=Parameter(f"{self.name}.weight", weights),
            bias=Parameter(f"{self.name}.bias", biases) if self.bias else None,
        )


def linear_groups(probe: Probe) -> tuple[LinearGroup, ...]:
    """Return the linear layers to replace, those with the same input together, in call order.

    These are the ones of decoder layers, and the head.
    """
    prefixes = layer_prefixes(probe.attention)
    groups: dict[tuple[int | None, int], list[LinearUse]] = {}
    for use in probe.linears:
        layer = _layer_of(use.module, prefixes)
        is_head = use == probe.linears[-1] and use.out_features == probe.vocab_size
        if layer is not None or is_head:
            groups.setdefault((layer, use.input), []).append(use)
    return tuple(LinearGroup(layer, tuple(uses)) for (layer, _), uses in groups.items())


def plan_of_probe(model: Any, probe: Probe) -> ModelPlan:
    """Return the plan of a model, whose parameters may be without data.

    All parameters are in it, once each. Those that are not replaced belong to the `Opaque`
    operation of their layer, or outside of layers to the final norm.
    """
    groups, prefixes = linear_groups(probe), layer_prefixes(probe.attention)
    replaced = {f"{use.module}.{leaf}" for g in groups for use in g.members for leaf in _LEAVES}
    replaced |= {call.sinks for call in probe.attention if call.sinks is not None}
    embedding = _embedding(model, probe)
    others: dict[int | None, list[Source]] = {}
    for name, parameter in model.named_parameters():
        if name not in replaced and name != embedding.name:
            layer = _layer_of(name, prefixes)
            others.setdefault(layer, []).append(Source(name, tuple(parameter.shape)))
    dim = max(max(call.key_dim, call.value_dim) for call in probe.attention)
    kv_heads = common_kv_heads(probe.attention)
    layers = [
        LayerPlan(
            (
                *(group.operation() for group in groups if group.layer == index),
                _attend(call, kv_heads, dim),
                Opaque(
                    name="other_modules",
                    held=_flat("other_modules", others.get(index, ())),
                    activation_bytes=probe.activation_bytes,
                ),
            )
        )
        for index, call in enumerate(probe.attention)
    ]
    head = next((group.operation() for group in groups if group.layer is None), None)
    if head is None or (probe.tied and probe.packed_embedding):
        head = Linear(name="head", weight=embedding, bias=None if head is None else head.bias)
    return ModelPlan(
        embedding=embedding,
        embedding_scale=1.0,
        layers=tuple(layers),
        norm=Norm(name="final_norm", weight=_flat("other_modules", others.get(None, ())), eps=0.0),
        head=head,
        logit_softcap=0.0,
        logit_scale=1.0,
        rope_kinds=1,
    )


_LEAVES = ("weight", "bias")


def _embedding(model: Any, probe: Probe) -> Parameter:
    """The input embeddings; not a matrix where they are not packed."""
    name = f"{probe.embedding}.weight"
    shape = tuple(model.get_submodule(probe.embedding).weight.shape)
    viewed_as = None if probe.packed_embedding else (*shape, 1)
    return Parameter(name, (Source(name, shape),), viewed_as=viewed_as)


def _attend(call: AttentionCall, kv_heads: int, dim: int) -> Attend:
    """An attention call in a cache of `kv_heads` heads of `dim` elements: shorter ones are padded,
    fewer repeated."""
    sinks = None
    if call.sinks is not None:
        sinks = Parameter(call.sinks, (Source(call.sinks, (call.heads,)),))
    return Attend(
        name="attention",
        heads=call.heads,
        kv_heads=kv_heads,
        head_dim=dim,
        value_dim=dim,
        scale=call.scale,
        window=call.mask.window,
        chunk=call.mask.chunk,
        softcap=call.softcap,
        sinks=sinks,
    )


def _flat(name: str, sources: Sequence[Source]) -> Parameter:
    """Parameters as one vector: they are stored unchanged."""
    flat = tuple(Source(s.name, (math.prod(s.shape),)) for s in sources)
    return Parameter(name, flat or (Source(None, (0,)),))


def layer_prefixes(calls: Sequence[AttentionCall]) -> list[str]:
    """Return the path of the layer of each attention module, with a dot.

    The layers of a list differ in one component of their path: `h.0.attn`, `h.1.attn`.
    """
    paths = [call.module.split(".") for call in calls]
    if len(paths) == 1:
        number = next(i for i, part in enumerate(paths[0]) if part.isdigit())
    else:
        number = next(i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1)
    return [".".join(path[: number + 1]) + "." for path in paths]


def _layer_of(name: str, prefixes: Sequence[str]) -> int | None:
    return next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), None)
