"""Layers with recurrent state in the C++ stack, against the same layers as modules."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stepgraph.cache.spec import group_layers
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels.ops.activation import Activate, GateOutput
from stepgraph.runtime.kernels.ops.attention import Attend
from stepgraph.runtime.kernels.ops.causal_conv import CausalConv
from stepgraph.runtime.kernels.ops.delta_rule import DeltaRule
from stepgraph.runtime.kernels.ops.layer_plan import LayerPlan, ModelPlan
from stepgraph.runtime.kernels.ops.linear import Linear
from stepgraph.runtime.kernels.ops.norms import GatedNorm, Norm
from stepgraph.runtime.kernels.ops.operation import Operation, Residual
from stepgraph.runtime.kernels.ops.parameter import Parameter, Source
from stepgraph.runtime.kernels.ops.rotation import Rotate
from stepgraph.runtime.kernels.ops.stack import stack_obstacle
from stepgraph.runtime.kernels.ops.state_space import StateSpace
from stepgraph.runtime.kernels.weights import INT8, MODEL, WeightStorage
from torch import Tensor

from ..rigs.row_states import Span, StateRig
from ..rigs.stack_plans import PlanRig, parameter
from ..rigs.stack_rig import BLOCK_SIZE, LENGTH, ROWS
from ..rigs.thread_rig import kernel_threads, other_threads, starved

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

HIDDEN = 72
Hidden = dict[tuple[int, int], Tensor]
"""Hidden states by row and position."""
STEPS: list[list[Span]] = [
    [(0, 0, 21), (2, 0, 70)],
    *[[(0, 21 + i, 1), (2, 70 + i, 1)] for i in range(12)],
    [(0, 33, 4), (1, 0, 9), (2, 82, 30)],
    [(0, 37, 1), (1, 9, 1), (2, 112, 1)],
]
"""Tokens of steps: prefill of chunks, decoding over a block boundary, a mixed step."""


def linear(name: str, rows: int, columns: int, *, biased: bool = False, **fields: Any) -> Linear:
    bias = Parameter(f"{name}.bias", (Source(name, (rows,)),)) if biased else None
    return Linear(name=name, weight=parameter(name, rows, columns), bias=bias, **fields)


def norm(name: str) -> Norm:
    return Norm(name=name, weight=parameter(name, HIDDEN), eps=1e-5)


def attention() -> list[Operation]:
    heads, kv_heads, size = 4, 2, 16
    qkv = (heads, kv_heads, kv_heads)
    return [
        norm("input_norm"),
        linear("attention.qkv", sum(qkv) * size, HIDDEN, split=qkv, unit=size),
        Rotate(name="rotate", kind=0),
        Attend(
            name="attention", heads=heads, kv_heads=kv_heads, head_dim=size, value_dim=size,
            scale=size**-0.5,
        ),
        linear("attention.output", HIDDEN, heads * size),
        Residual(name="residual"),
    ]  # fmt: skip


def convolution(features: int, taps: int, *, biased: bool = False) -> list[Operation]:
    bias = Parameter("conv.kernel.bias", (Source("conv", (features,)),)) if biased else None
    weight = Parameter("conv.kernel.weight", (Source("conv", (features, 1, taps)),))
    return [
        norm("input_norm"),
        linear("conv.inputs", 3 * features, HIDDEN, biased=biased, split=(features,) * 3),
        CausalConv(name="convolution", weight=weight, bias=bias, gated=True),
        linear("conv.output", HIDDEN, features),
        Residual(name="residual"),
    ]


def mlp() -> list[Operation]:
    return [
        norm("mlp_norm"),
        linear("mlp.gate_up", 2 * 96, HIDDEN, split=(96, 96)),
        Activate(name="activate", function="silu", features=96),
        linear("mlp.down", HIDDEN, 96),
        Residual(name="residual"),
    ]


def silu_convolution(features: int, taps: int, *, biased: bool) -> CausalConv:
    bias = Parameter("conv.kernel.bias", (Source("conv", (features,)),)) if biased else None
    weight = Parameter("conv.kernel.weight", (Source("conv", (features, 1, taps)),))
    return CausalConv(name="convolution", weight=weight, bias=bias, silu=True)


def numbers(name: str, *shape: int) -> Parameter:
    return Parameter(f"{name}.weight", (Source(name, shape),), dtype=torch.float32)


def delta_rule(
    key_heads: int, heads: int, key: int, value: int, *, decays: int = 1, **norm_traits: Any
) -> list[Operation]:
    features, values = 2 * key_heads * key + heads * value, heads * value
    split = (features, values, heads * decays, heads)
    return [
        norm("input_norm"),
        linear("delta.inputs", sum(split), HIDDEN, split=split),
        silu_convolution(features, 4, biased=False),
        DeltaRule(
            name="delta_rule",
            a_log=numbers("delta.a_log", heads),
            dt_bias=numbers("delta.dt_bias", heads * decays),
            key_heads=key_heads,
            key_dim=key,
            value_dim=value,
            beta_scale=2.0 if norm_traits else 1.0,
        ),
        GatedNorm(
            name="gated_norm", weight=parameter("delta.norm", value), eps=1e-6, features=values,
            group=value, **norm_traits,
        ),
        linear("delta.output", HIDDEN, values),
        Residual(name="residual"),
    ]  # fmt: skip


def state_space(heads: int, size: int, groups: int, state: int, norm_group: int) -> list[Operation]:
    inner = heads * size
    features = inner + 2 * groups * state
    split = (features, inner, heads)
    gated_norm = GatedNorm(
        name="gated_norm", weight=parameter("mamba.norm", inner), eps=1e-5, features=inner,
        group=norm_group or 1, gate_first=True,
    )  # fmt: skip
    rule = StateSpace(
        name="state_space",
        decay=numbers("mamba.decay", heads),
        time_bias=numbers("mamba.time_bias", heads),
        skip=numbers("mamba.skip", heads),
        head_dim=size,
        groups=groups,
        state_size=state,
        time_limits=(0.01, 1.0),
        gated=not norm_group,
    )
    return [
        norm("input_norm"),
        linear("mamba.inputs", sum(split), HIDDEN, split=split),
        silu_convolution(features, 4, biased=True),
        rule,
        *([gated_norm] if norm_group else []),
        linear("mamba.output", HIDDEN, inner),
        Residual(name="residual"),
    ]


def gated_attention() -> list[Operation]:
    first, qkv, rotate, attend, output, residual = attention()
    return [
        dataclasses.replace(first, writes="normed"),
        *(qkv, rotate, dataclasses.replace(attend, writes="attended")),
        linear("attention.gate", 64, HIDDEN, reads=("normed",), writes="gate"),
        GateOutput(name="gate_output", reads=("attended", "gate"), features=64),
        *(output, residual),
    ]


MIXERS = {
    "short convolution": convolution(HIDDEN, 3),
    "wide convolution": convolution(301, 4, biased=True),
    "delta rule": delta_rule(2, 4, 32, 48),
    "delta rule by channel": delta_rule(3, 3, 24, 5, decays=24, gate="sigmoid", in_float32=True),
    "state space": state_space(8, 16, 2, 32, norm_group=64),
    "state space, heads normed": state_space(5, 64, 1, 16, norm_group=64),
    "state space without norm": state_space(3, 7, 1, 9, norm_group=0),
    "gated attention": gated_attention(),
}


def model(mixer: list[Operation]) -> ModelPlan:
    layers = LayerPlan((*mixer, *mlp())), LayerPlan((*attention(), *mlp()))
    return ModelPlan(
        embedding=parameter("embed_tokens", 8, HIDDEN),
        embedding_scale=1.0,
        layers=(*layers, *layers, layers[0]),
        norm=norm("norm"),
        head=Linear(name="head", weight=parameter("embed_tokens", 8, HIDDEN)),
        logit_softcap=0.0,
        logit_scale=1.0,
        rope_kinds=2,
    )


class HybridRig(PlanRig):
    """Layers with memory for recurrent state, which is poisoned."""

    def __init__(self, plan: ModelPlan, dtype: torch.dtype, weights: WeightStorage = MODEL) -> None:
        assert stack_obstacle(plan) is None
        super().__init__(plan, dtype, weights)
        assert group_layers(plan.states) == self.groups

    def run(self, steps: Sequence[Sequence[Span]], *, stacked: bool) -> Hidden:
        """Run steps; return the hidden states of each row and position."""
        states = StateRig(
            self.plan.row_states, rows=ROWS, columns=LENGTH // BLOCK_SIZE, block_size=BLOCK_SIZE,
            itemsize=self.dtype.itemsize, generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(ROWS, LENGTH, HIDDEN, generator=generator).to(self.dtype)
        arena, stack = self.arena, self.decoder.stack
        self.arena = arena.clone()
        self.decoder.stack = stack if stacked else None
        found = {}
        for spans in steps:
            batch = dataclasses.replace(self.inputs(spans), states=states.states)
            x_TD = torch.cat([inputs[row, at : at + count] for row, at, count in spans])
            with torch.no_grad():
                out_TD = self.decoder.decode(x_TD, self.arena, batch)
            states.advance(spans, decodes=False)
            tokens = ((row, at + i) for row, at, count in spans for i in range(count))
            found |= dict(zip(tokens, out_TD, strict=True))
        self.arena, self.decoder.stack = arena, stack
        return found


@pytest.mark.parametrize("weights", [MODEL, INT8], ids=["model", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_stack_agrees_with_the_modules(
    mixer: str, dtype: torch.dtype, weights: WeightStorage
) -> None:
    rig = HybridRig(model(MIXERS[mixer]), dtype, weights)
    expected = rig.run(STEPS, stacked=False)
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    with kernel_threads(2):
        found = rig.run(STEPS, stacked=True)
    assert found.keys() == expected.keys()
    size = max(float(value.abs().max()) for value in expected.values())
    for token, value in expected.items():
        torch.testing.assert_close(found[token], value, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("mixer", MIXERS)
def test_rows_are_independent_of_steps_and_threads(mixer: str) -> None:
    rig = HybridRig(model(MIXERS[mixer]), torch.bfloat16)
    ends = {
        row: max(at + n for r, at, n in itertools.chain(*STEPS) if r == row) for row in range(3)
    }
    alone: list[list[Span]] = [[(row, at, 1)] for row, end in ends.items() for at in range(end)]
    found = rig.run(STEPS, stacked=True)
    with kernel_threads(2):
        for steps in (STEPS, alone):
            again = rig.run(steps, stacked=True)
            for token, value in found.items():
                assert torch.equal(again[token], value), token


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux' schedulers")
@pytest.mark.parametrize("mixer", ["short convolution", "delta rule", "state space"])
def test_starved_threads_change_nothing(mixer: str) -> None:
    """Threads that lose their core in a unit write neither results nor state afterwards."""
    rig = HybridRig(model(MIXERS[mixer]), torch.bfloat16)
    expected = rig.run(STEPS, stacked=True)
    with kernel_threads(4):
        rig.run(STEPS, stacked=True)
    with kernel_threads(4), starved(other_threads()):
        for _ in range(3):
            found = rig.run(STEPS, stacked=True)
            for token, value in expected.items():
                assert torch.equal(found[token], value), token
