"""Which kernels a layer is: without norms of inputs, with scaled sums, of several kinds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from stepgraph.runtime.kernels import Routing, native_gaps
from stepgraph.runtime.kernels.ops.activation import Activate
from stepgraph.runtime.kernels.ops.attention import Attend
from stepgraph.runtime.kernels.ops.layer_plan import LayerPlan, ModelPlan
from stepgraph.runtime.kernels.ops.linear import Linear
from stepgraph.runtime.kernels.ops.norms import Norm, QKNorm
from stepgraph.runtime.kernels.ops.operation import Operation, Residual
from stepgraph.runtime.kernels.ops.parameter import Parameter, Source
from stepgraph.runtime.kernels.ops.rotation import Rotate
from stepgraph.runtime.kernels.triton.fusion import fuse, fusion_obstacle
from stepgraph.runtime.kernels.weights import STORAGES
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.families import FAMILIES
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import PRESETS
from transformers import AutoConfig

from ..rigs.expert_cases import make_mixture
from ..rigs.tiny_models import BASE, VARIANTS

HIDDEN, FEATURES = 8, 12


def parameter(name: str, *shape: int) -> Parameter:
    return Parameter(name, (Source(name, shape),))


def linear(name: str, rows: int, columns: int) -> Linear:
    return Linear(name=name, weight=parameter(name, rows, columns))


def norm(name: str) -> Norm:
    return Norm(name=name, weight=parameter(name, HIDDEN), eps=1e-6)


ATTEND = Attend(name="attention", heads=2, kv_heads=1, head_dim=4, value_dim=4, scale=0.5)
ACTIVATE = Activate(name="activate", function="silu", features=FEATURES)


def layer(
    *,
    inputs: bool = True,
    outputs: bool = False,
    scale: float = 1.0,
    attend: Attend = ATTEND,
    activate: Activate = ACTIVATE,
) -> LayerPlan:
    """A layer that norms the inputs of attention and the MLP, their outputs, or both."""
    qk = QKNorm(name="n", q=parameter("q", 8), k=parameter("k", 4), eps=1e-6, all_heads=True)
    residual = Residual(name="residual", scale=scale)
    before: list[Operation] = [norm("before")] if inputs else []
    after: list[Operation] = [norm("after"), residual] if outputs else [residual]
    operations: list[Operation] = [
        *(*before, linear("qkv", 16, HIDDEN), qk, Rotate(name="rotate", kind=0), attend),
        *(linear("output", HIDDEN, 8), *after, *before, linear("gate_up", 24, HIDDEN)),
        *(activate, linear("down", HIDDEN, activate.features), *after),
    ]
    return LayerPlan(tuple(operations))


def model(*layers: LayerPlan) -> ModelPlan:
    head = linear("head", 20, HIDDEN)
    return ModelPlan(head.weight, 1.0, layers, norm("final"), head, 0.0, 1.0, 1)


def normed(layer: LayerPlan) -> list[tuple[str, bool]]:
    """The name of each kernel of a layer, and whether it reads a norm of hidden states."""
    return [(name, any(isinstance(op, Norm) for op in ops)) for name, ops in fuse(layer)]


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
def test_norms_of_inputs_and_outputs(inputs: bool, outputs: bool, clamped: bool) -> None:
    """A clamped activation is a kernel of its own."""
    activate = dataclasses.replace(ACTIVATE, limit=7.0) if clamped else ACTIVATE
    plan = layer(inputs=inputs, outputs=outputs, activate=activate)
    mlp = [("norm_linear", inputs), ("activate", False)] if clamped else [("gate_up", inputs)]
    assert normed(plan) == [
        *(("norm_linear", inputs), ("decode_attention", False), ("output", outputs)),
        *(*mlp, ("down", outputs)),
    ]
    assert fusion_obstacle(model(plan)) is None


def test_scaled_sums_after_a_norm_are_not_fused() -> None:
    assert fusion_obstacle(model(layer(scale=0.22))) is None
    assert fusion_obstacle(model(layer(outputs=True, scale=0.22))) == (
        "residual with scale after a norm"
    )


def test_layers_may_differ_in_all_but_their_heads() -> None:
    wide = dataclasses.replace(ACTIVATE, features=2 * FEATURES)
    plan = model(layer(), layer(outputs=True), layer(activate=wide), layer(inputs=False))
    assert fusion_obstacle(plan) is None
    other = dataclasses.replace(ATTEND, heads=4)
    assert fusion_obstacle(model(layer(), layer(attend=other))) == "layers with different heads"


def test_what_has_no_kernel_is_named() -> None:
    plan = layer()
    swapped = LayerPlan((plan.operations[3], *plan.operations))
    assert fusion_obstacle(model(swapped)) == "rotate"
    shared = dataclasses.replace(ATTEND, shared_values=True)
    assert fusion_obstacle(model(layer(attend=shared))) == "attention with shared_values"


def configs_of_all_families() -> dict[str, ModelConfig]:
    """The presets, and odd small models of all families."""
    found = dict(PRESETS)
    for name, changes in VARIANTS.items():
        fields = {"model_type": "llama"} | BASE | changes
        found[f"tiny {name}"] = ModelConfig.from_hf(AutoConfig.for_model(**fields).to_dict())
    return found


NOT_IN_LAYERS: dict[str, set[str]] = {
    "convolutions": set(),  # of other models with recurrent state
    "linear attention": {"minimax"},
    "latent attention": {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"},
    "norms of values or of queries alone": {"gemma4_text", "gemma4_unified_text"},
    "several residual streams (AltUp)": {"gemma3n_text"},
    "attention with value_padding": {"mimo_v2_flash"},
}
"""What the layers of kernels on CUDA lack, and the families that need it."""


def test_which_families_have_no_layers_of_kernels() -> None:
    """What falls back on CUDA, model by model: all else is native."""
    configs = configs_of_all_families()
    unknown_to_transformers = {"mimo"}  # of the layers of qwen2
    assert {config.model_type for config in configs.values()} == set(
        FAMILIES
    ) - unknown_to_transformers
    for name, config in configs.items():
        plan = model_plan(config)
        expected = set()
        for why, kinds in NOT_IN_LAYERS.items():
            convolves = plan.row_states and config.model_type != "minimax"
            if config.model_type in kinds or (why == "convolutions" and convolves):
                expected.add(("decoder layers", f"native layers do not support {why}"))
        if config.family.centred_norms:
            why = "native layers do not support input_norm with centred, writes"
            expected.add(("decoder layers", why))
        if plan.rope_by_length:
            why = "its rotations do not depend on the length of a sequence"
            expected.add(("fused decode step", f"{why}; the layers run one by one"))
        for storage in STORAGES.values():
            assert set(native_gaps("cuda", torch.bfloat16, storage, plan)) == expected, name


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("outputs", [False, True])
def test_layers_of_experts(inputs: bool, outputs: bool) -> None:
    """After dense ones, with norms of their inputs, outputs or both."""
    experts = make_mixture(Routing(top_k=2), shared=1, biases=True, correction=True).op
    dense = layer(inputs=inputs, outputs=outputs)
    mlp = next(i for i, op in enumerate(dense.operations) if op.name == "gate_up")
    rest = dense.operations[mlp + 3 :]
    sparse = LayerPlan((*dense.operations[:mlp], experts, *rest))
    norms = [("norm_rows", inputs)] if inputs or outputs else []
    mixture = [*norms, ("route", False), ("experts", outputs)]
    assert normed(sparse) == [*normed(dense)[:3], *mixture]
    assert fusion_obstacle(model(dense, sparse, sparse)) is None
