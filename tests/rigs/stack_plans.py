"""Random plans of decoder layers with every trait of the C++ stack, and a rig to run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from stepgraph.cache.arena import Storage
from stepgraph.cache.spec import LayerGroup, group_layers
from stepgraph.runtime.kernels import (
    Experts,
    Kernels,
    RaggedBatch,
    Routing,
    select_kernels,
)
from stepgraph.runtime.kernels.ops.activation import Activate
from stepgraph.runtime.kernels.ops.attention import Attend, AttentionTemperature
from stepgraph.runtime.kernels.ops.layer_plan import LayerPlan, ModelPlan
from stepgraph.runtime.kernels.ops.linear import Linear
from stepgraph.runtime.kernels.ops.norms import Norm, QKNorm
from stepgraph.runtime.kernels.ops.operation import Operation, Residual
from stepgraph.runtime.kernels.ops.parameter import Parameter, Source
from stepgraph.runtime.kernels.ops.rotation import Rotate
from stepgraph.runtime.kernels.weights import MODEL, WeightStorage
from stepgraph.runtime.models.decoder import LayerStack
from stepgraph.runtime.models.rope import Rope
from torch import Tensor

from .expert_cases import expert_operation
from .stack_rig import CPU, Rig

ROPE_KINDS = 2


def parameter(name: str, *shape: int) -> Parameter:
    return Parameter(f"{name}.weight", (Source(name, shape),))


@st.composite
def plans(
    draw: st.DrawFn, all_experts: bool = False, wide: bool = False, ranks: int = 1
) -> ModelPlan:
    """A decoder of one to three layers, each with traits and an MLP or experts of its own.

    With `all_experts` every token uses all experts, so that no rounding can change its choice. A
    `wide` one has work for several threads in each phase, also for one token. It can be split over
    `ranks`.
    """
    hidden = draw(st.integers(300, 400) if wide else st.integers(3, 100))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if ranks > 1 and draw(st.booleans()):
        kv_heads, group = 1, ranks * group  # all ranks hold the same keys
    else:
        kv_heads *= ranks
    head_dim = 2 * draw(st.integers(16, 32) if wide else st.integers(1, 24))
    sizes = (hidden, kv_heads * group, kv_heads, head_dim)
    layers = tuple(
        LayerPlan(tuple(draw(_operations(sizes, all_experts, ranks))))
        for _ in range(draw(st.integers(1, 3)))
    )
    return ModelPlan(
        embedding=parameter("embed_tokens", 8, hidden),
        embedding_scale=1.0,
        layers=layers,
        norm=draw(_norm("norm", hidden)),
        head=Linear(name="head", weight=parameter("embed_tokens", 8, hidden)),
        logit_softcap=0.0,
        logit_scale=1.0,
        rope_kinds=ROPE_KINDS,
    )


@st.composite
def _operations(
    draw: st.DrawFn, sizes: tuple[int, int, int, int], all_experts: bool, ranks: int
) -> list[Operation]:
    hidden, heads, kv_heads, head_dim = sizes
    biased = draw(st.booleans())
    qkv = (heads, kv_heads, kv_heads)
    operations: list[Operation] = []

    def add_perhaps(strategy: st.SearchStrategy[Any]) -> None:
        if draw(st.booleans()):
            operations.append(draw(strategy))

    add_perhaps(_norm("input_norm", hidden))
    operations.append(
        _linear("attention.qkv", sum(qkv) * head_dim, hidden, biased, split=qkv, unit=head_dim)
    )
    add_perhaps(_qk_norm(sizes))
    operations.append(Rotate(name="rotate", kind=draw(st.integers(0, ROPE_KINDS - 1))))
    operations.append(draw(_attend(sizes)))
    operations.append(_linear("attention.output", hidden, heads * head_dim, biased))
    add_perhaps(_norm("attention_output_norm", hidden))
    operations.append(Residual(name="residual", scale=draw(_factors)))
    for mlp in ("mlp", "second_mlp")[: draw(st.sampled_from([1, 1, 1, 0, 2]))]:
        add_perhaps(_norm(f"{mlp}_norm", hidden))
        if mlp == "mlp" and draw(st.booleans()):
            operations.append(draw(_experts(hidden, all_experts, ranks)))
        else:
            inner = ranks * draw(st.one_of(st.integers(1, 100), st.sampled_from([32, 64, 96])))
            up = _linear(f"{mlp}.gate_up", 2 * inner, hidden, biased, split=(inner, inner))
            operations += [up, draw(_activate(inner))]
            operations.append(_linear(f"{mlp}.down", hidden, inner, biased))
        add_perhaps(_norm(f"{mlp}_output_norm", hidden))
        operations.append(Residual(name="residual", scale=draw(_factors)))
    return operations


_factors = st.sampled_from([1.0, 0.22, 1.7])


@st.composite
def _norm(draw: st.DrawFn, name: str, size: int) -> Norm:
    eps = draw(st.sampled_from([1e-6, 1e-5]))
    return Norm(name=name, weight=parameter(name, size), eps=eps, offset=draw(st.booleans()))


@st.composite
def _qk_norm(draw: st.DrawFn, sizes: tuple[int, int, int, int]) -> QKNorm:
    _, heads, kv_heads, head_dim = sizes
    all_heads = draw(st.booleans())
    return QKNorm(
        name="qk_norm",
        q=parameter("attention.q_norm", heads * head_dim if all_heads else head_dim),
        k=parameter("attention.k_norm", kv_heads * head_dim if all_heads else head_dim),
        eps=1e-6,
        offset=draw(st.booleans()),
        all_heads=all_heads,
    )


@st.composite
def _attend(draw: st.DrawFn, sizes: tuple[int, int, int, int]) -> Attend:
    _, heads, kv_heads, head_dim = sizes
    return Attend(
        name="attention",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        window=draw(st.sampled_from([0, 0, 7, 40])),
        chunk=draw(st.sampled_from([0, 0, 16, 131])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        sinks=parameter("attention.sinks", heads) if draw(st.booleans()) else None,
        temperature=draw(st.sampled_from([None, AttentionTemperature(8, 0.1)])),
    )


@st.composite
def routings(draw: st.DrawFn, all_experts: bool = False) -> tuple[Routing, int, bool]:
    """A routing, the number of experts to choose from, and whether there is a correction."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    top_groups = groups if all_experts else draw(st.integers(1, groups))
    correction = draw(st.booleans())
    scores = draw(st.sampled_from(["softmax", "sigmoid"] + ["softmax_chosen"] * (not correction)))
    sums = scores != "softmax_chosen" and draw(st.booleans())
    routing = Routing(
        top_k=groups * size if all_experts else draw(st.integers(1, top_groups * size)),
        scores=scores,
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        top_groups=top_groups,
        group_score="top_2_sum" if sums else "max",
    )
    return routing, groups * size, correction


@st.composite
def _experts(draw: st.DrawFn, hidden: int, all_experts: bool, ranks: int) -> Experts:
    routing, routed, correction = draw(routings(all_experts))
    features = ranks * draw(st.one_of(st.integers(1, 100), st.sampled_from([32, 64, 96])))
    return expert_operation(
        routing,
        draw(_activate(features)),
        hidden,
        routed,
        draw(st.integers(0, 2)),
        biases=draw(st.booleans()),
        correction=correction,
        scaled_inputs=draw(st.booleans()),
    )


@st.composite
def _activate(draw: st.DrawFn, features: int) -> Activate:
    function = draw(st.sampled_from(["silu", "gelu_tanh"]))
    return Activate(
        name="activate",
        function=function,
        features=features,
        limit=draw(st.sampled_from([0.0, 0.5])),
        alpha=draw(st.sampled_from([1.0, 1.702])) if function == "silu" else 1.0,
        up_offset=draw(st.sampled_from([0.0, 1.0])),
    )


def _linear(name: str, rows: int, columns: int, biased: bool, **fields: Any) -> Linear:
    bias = Parameter(f"{name}.bias", (Source(name, (rows,)),)) if biased else None
    return Linear(name=name, weight=parameter(name, rows, columns), bias=bias, **fields)


class PlanDecoder(LayerStack):
    """The layers of a plan, as the kernels run them."""

    def __init__(
        self,
        plan: ModelPlan,
        kernels: Kernels,
        dtype: torch.dtype,
        groups: Sequence[LayerGroup],
        storage: Storage,
    ) -> None:
        super().__init__(plan, (Rope(10.0), Rope(500.0)), kernels, dtype, CPU, groups, storage)

    def decode(self, x_TD: Tensor, arena: Tensor, batch: RaggedBatch) -> Tensor:
        return self.run_layers(x_TD, arena, batch)[0]


def random_tensor(parameter: Parameter, dtype: torch.dtype) -> Tensor:
    """Matrices that keep the size of their inputs; vectors around zero."""
    scale = parameter.shape[1] ** -0.5 if len(parameter.shape) == 2 else 0.5
    return (torch.randn(parameter.shape) * scale).to(parameter.dtype or dtype)


class PlanRig(Rig):
    """A rig over a plan: the plain version shares no operator with the stack."""

    def __init__(
        self,
        plan: ModelPlan,
        dtype: torch.dtype,
        weights: WeightStorage = MODEL,
        storage: Storage = "model",
        seed: int = 0,
    ) -> None:
        self.plan, self.dtype, self.storage = plan, dtype, storage
        torch.manual_seed(seed)
        self.make_cache(group_layers(plan.states), plan.hidden_size, plan.attend.head_dim)
        self.values = {
            p.name: random_tensor(p, dtype) for p in plan.parameters() if p != plan.embedding
        }
        kernels = [select_kernels(CPU, mode, dtype, weights) for mode in ("compile", "eager")]
        native, self.decoder = (
            PlanDecoder(plan, own, dtype, self.groups, storage) for own in kernels
        )
        for decoder in (native, self.decoder):
            decoder.store(self.values.items())
        self.decoder.stack = native.stack
