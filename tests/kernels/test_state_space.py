"""State spaces, linear attention and gated norms against the modules of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepgraph.runtime.kernels.choice import Kernels
from stepgraph.runtime.kernels.ops.attention import reference_paged_attention
from stepgraph.runtime.kernels.ops.batch import RaggedBatch
from stepgraph.runtime.kernels.ops.experts import reference_experts
from stepgraph.runtime.kernels.ops.linear import reference_linear
from stepgraph.runtime.kernels.ops.norms import GatedNorm
from stepgraph.runtime.kernels.ops.operation import Binding, LayerStep, Operation
from stepgraph.runtime.kernels.ops.parameter import Parameter, Source
from stepgraph.runtime.kernels.ops.state_space import LinearAttention, StateSpace
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated, mamba2_chunk_scan
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from tests.rigs.row_states import StateRig

LENGTH = 37
KERNELS = Kernels(
    name="torch",
    attention=reference_paged_attention,
    linear=reference_linear,
    experts=reference_experts,
    bounded_by_length=False,
    masks=0,
)


def parameter(name: str, *shape: int) -> Parameter:
    stored = (Source(name, shape),)
    return Parameter(f"{name}.weight", stored, exact=len(shape) > 1, dtype=torch.float32)


def in_steps(op: Operation, value: tuple[torch.Tensor, ...], tensors: dict[str, Any]) -> Any:
    """Run an operation over a sequence: a prefill of 20 tokens, one of 9, then decode steps."""
    state = op.row_state
    assert state is not None
    generator = torch.Generator().manual_seed(0)
    rig = StateRig([state], rows=1, columns=12, block_size=4, itemsize=4, generator=generator)
    run = bound(op, tensors, rig)
    results, at = [], 0
    for count in (20, 9, *[1] * (LENGTH - 29)):
        decodes = count == 1
        batch = rig.batch([(0, at, count)], tokens_per_row=1 if decodes else None)
        results.append(run(tuple(part[at : at + count] for part in value), step_of(batch)))
        rig.advance([(0, at, count)], decodes=decodes)
        at += count
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
    return torch.cat(results)


def bound(op: Operation, tensors: dict[str, Any], rig: StateRig | None = None) -> Any:
    modules = {}
    for name, tensor in tensors.items():
        modules[f"{name}.weight"] = nn.Module()
        modules[f"{name}.weight"].weight = nn.Parameter(tensor)
    place = rig.places[0] if rig is not None else None
    return op.bind(Binding(lambda own, make: modules[own.name], KERNELS, (), "model", place))


def step_of(batch: RaggedBatch) -> LayerStep:
    nothing = torch.empty(0)
    return LayerStep(nothing, nothing, (), batch)


@torch.no_grad()
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.4, 0.9)])
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba_2_equals_transformers(groups: int, limits: tuple[float, float]) -> None:
    torch.manual_seed(groups)
    heads, dim, size = 4, 6, 5
    inner, shared = heads * dim, groups * size
    xbc, gate = torch.randn(LENGTH, inner + 2 * shared), torch.randn(LENGTH, inner)
    dt = torch.randn(LENGTH, heads)
    tensors = {"decay": torch.rand(heads), "bias": torch.randn(heads), "skip": torch.randn(heads)}
    op = StateSpace(
        name="state_space",
        decay=parameter("decay", heads),
        time_bias=parameter("bias", heads),
        skip=parameter("skip", heads),
        head_dim=dim,
        groups=groups,
        state_size=size,
        time_limits=limits,
    )
    x, b, c = xbc.split((inner, shared, shared), dim=-1)
    expected = mamba2_chunk_scan(
        *(x.view(1, LENGTH, heads, dim), dt[None], -tensors["decay"].exp()),
        *(b.view(1, LENGTH, groups, size), c.view(1, LENGTH, groups, size)),
        *(8, tensors["skip"], tensors["bias"], None),
        dt_softplus=True,
        dt_limit=limits,
    )
    found, kept = in_steps(op, (xbc, gate, dt), tensors)
    assert torch.equal(kept, gate)
    torch.testing.assert_close(found, expected[0].flatten(1), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_mamba_1_equals_transformers() -> None:
    torch.manual_seed(0)
    inner, size = 14, 5
    x, gate, dt = (torch.randn(LENGTH, inner) for _ in range(3))
    b, c = (torch.randn(LENGTH, size) for _ in range(2))
    tensors = {
        **{"decay": torch.rand(inner, size), "bias": torch.randn(inner)},
        "skip": torch.randn(inner),
    }
    op = StateSpace(
        name="state_space",
        decay=parameter("decay", inner, size),
        time_bias=parameter("bias", inner),
        skip=parameter("skip", inner),
        head_dim=1,
        groups=1,
        state_size=size,
        gated=True,
    )
    expected = mamba_selective_scan(
        *(x.T[None], dt.T[None], -tensors["decay"].exp(), b.T[None], c.T[None]),
        D=tensors["skip"],
        z=gate.T[None],
        delta_bias=tensors["bias"],
        delta_softplus=True,
    )
    found = in_steps(op, (x, gate, dt, b, c), tensors)
    torch.testing.assert_close(found, expected[0].T, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_linear_attention_equals_transformers() -> None:
    """Up to the norm, which the identity replaces."""
    torch.manual_seed(0)
    heads, dim, hidden, layer = 3, 8, 20, 2
    config = MiniMaxConfig(
        hidden_size=hidden, num_attention_heads=heads, head_dim=dim, num_hidden_layers=5,
        layer_types=["linear_attention"] * 5, block_size=8,
    )  # fmt: skip
    module = MiniMaxLightningAttention(config, layer)
    module.norm = module.out_proj = nn.Identity()
    x = torch.randn(LENGTH, hidden)
    expected = module(x[None], (x, x), None)[0][0]
    slope = 1 - layer / (5 - 1 + 1e-5) + 1e-5
    op = LinearAttention(name="linear_attention", heads=heads, head_dim=dim, slope=slope)
    found, gate = in_steps(op, (module.output_gate(x), module.qkv_proj(x)), {})
    torch.testing.assert_close(gate.sigmoid() * found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norms_equal_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(9, 24), torch.randn(9, 24).to(dtype), torch.randn(24).to(dtype)
    mamba = MambaRMSNormGated(24, 8, eps=1e-3)
    falcon = FalconH1RMSNormGated(24, eps=1e-3, n_groups=3, norm_before_gate=True)
    for module, gate_first in ((mamba, True), (falcon, False)):
        module.to(dtype).weight.copy_(weight)
        op = GatedNorm(
            name="norm", weight=parameter("own", 24), eps=1e-3,
            features=24, group=8, gate_first=gate_first, in_float32=not gate_first,
        )  # fmt: skip
        found = bound(op, {"own": weight})((x.to(dtype), gate), None)
        torch.testing.assert_close(found, module(x.to(dtype), gate))
