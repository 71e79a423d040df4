"""Routing and experts in plain PyTorch against token-by-token versions in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.kernels import (
    Routing,
    reference_experts,
    reference_route,
)
from stepgraph.runtime.kernels.ops import experts as module
from stepgraph.runtime.kernels.ops.experts_operator import opaque_experts
from torch.fx.experimental.proxy_tensor import make_fx

from ..rigs.expert_cases import Mixture, make_mixture, simple_experts, simple_route

CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"routing": Routing(2, normalised=True)},
    "one of all": {"routing": Routing(1)},
    "all": {"routing": Routing(6, normalised=True)},
    "gpt-oss": {"routing": Routing(3, "softmax_chosen"), "biases": True, "limit": 0.7},
    "deepseek-v2": {
        "routing": Routing(2, scale=4.0, groups=3, top_groups=2),
        "shared": 2,
        "features": 7,
    },
    "deepseek-v3": {
        "routing": Routing(3, "sigmoid", True, 2.5, 3, 2, "top_2_sum"),
        "correction": True,
        "shared": 1,
    },
    "llama4": {"routing": Routing(2, "sigmoid"), "shared": 1, "scaled_inputs": True},
    "one expert": {"routing": Routing(1), "routed": 1, "biases": True},
}


def close(got: torch.Tensor, mixture: Mixture, x: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(
        got.double(), simple_experts(mixture, x), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("storage", ["model", "int8", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_both_forms_equal_the_simple_version(name: str, storage: str, tokens: int) -> None:
    mixture = make_mixture(**CASES[name], storage=storage, seed=tokens)
    x = torch.randn(tokens, 12, generator=torch.Generator().manual_seed(tokens))
    close(reference_experts(mixture.op, x, mixture.tensors), mixture, x, x.dtype)
    weights, experts = module._chosen(mixture.op, x, mixture.tensors, None)
    by_block = module._by_block(mixture.op, x, mixture.tensors, weights, experts)
    close(by_block, mixture, x, x.dtype)


@pytest.mark.parametrize("name", CASES)
def test_padding_uses_no_expert(name: str) -> None:
    mixture = make_mixture(**CASES[name])
    op, tensors = mixture.op, mixture.tensors
    x = torch.randn(7, 12)
    live = torch.tensor([True, False, True, True, False, True, False])
    expected = reference_experts(op, x, tensors) * live[:, None]
    garbage = torch.where(live[:, None], x, 1e30)
    weights, experts = module._chosen(op, garbage, tensors, live)
    assert (experts[~live] == op.total).all()
    torch.testing.assert_close(reference_experts(op, garbage, tensors, live), expected)
    torch.testing.assert_close(module._by_block(op, garbage, tensors, weights, experts), expected)
    nothing = torch.zeros(7, dtype=torch.bool)
    assert not reference_experts(op, x, tensors, nothing).any()


@pytest.mark.parametrize("name", CASES)
def test_all_tokens_may_use_one_expert(name: str) -> None:
    mixture = make_mixture(**CASES[name])
    x = torch.randn(1, 12).expand(200, -1)
    expected = simple_experts(mixture, x[:1]).expand(200, -1).float()
    weights, experts = module._chosen(mixture.op, x, mixture.tensors, None)
    for run in (module._by_expert, module._by_block):
        got = run(mixture.op, x, mixture.tensors, weights, experts)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_compiled_steps_call_one_operator() -> None:
    mixture = make_mixture(**CASES["deepseek-v3"])
    x, live = torch.randn(5, 12), torch.tensor([True, True, False, True, True])
    compiled = torch.compile(
        lambda x: opaque_experts(mixture.op, x, mixture.tensors, live) + 1,
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(
        compiled(x), reference_experts(mixture.op, x, mixture.tensors, live) + 1
    )


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routing, int, bool]:
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    top_groups = draw(st.integers(1, groups))
    correction = draw(st.booleans())
    scores = draw(st.sampled_from(["softmax", "sigmoid"] + ["softmax_chosen"] * (not correction)))
    routing = Routing(
        top_k=draw(st.integers(1, top_groups * size)),
        scores=scores,
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        top_groups=top_groups,
        group_score="max"
        if scores == "softmax_chosen"
        else draw(st.sampled_from(["max", "top_2_sum"])),
    )
    return routing, groups * size, correction


@settings(max_examples=200, deadline=None)
@given(data=st.data(), case=routings())
def test_routing_with_equal_scores(data: st.DataObject, case: tuple[Routing, int, bool]) -> None:
    """Few values, so that many logits and corrections are equal: the lower numbers come first."""
    routing, count, correction = case

    def values(*choices: float) -> list[float]:
        return data.draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))

    # Equal in float64 and not in float32, or the reverse, are only logits of +-200, and sums of
    # scores and corrections in another order.
    sums = routing.group_score != "max"
    largest = 2.0 if correction or sums else 200.0
    logits = values(*((-3.0, -1.0, 0.5, 2.0) if sums else (-largest, -1.0, 0.0, 0.5, largest)))
    extra = values(8.0) if sums else values(-8.0, 0.0, 8.0)
    if not correction:
        extra = None
    op = make_mixture(routing, routed=count, correction=correction).op
    weights, experts = reference_route(
        op, torch.tensor([logits]), None if extra is None else torch.tensor(extra)
    )
    expected = simple_route(op, logits, extra)
    assert experts.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert experts[0].tolist() == list(expected)
    torch.testing.assert_close(
        weights[0].double(),
        torch.tensor(list(expected.values()), dtype=torch.float64),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("name", CASES)
def test_blocks_need_nothing_from_the_device(name: str, tokens: int) -> None:
    """Fake tensors have no values: reading one, or a shape that depends on one, would raise."""
    op, tensors, _ = make_mixture(**CASES[name])
    live = torch.ones(tokens, dtype=torch.bool)

    def run(x: torch.Tensor) -> torch.Tensor:
        weights, experts = module._chosen(op, x, tensors, live)
        return module._by_block(op, x, tensors, weights, experts)

    x = torch.randn(tokens, 12)
    traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    torch.testing.assert_close(traced(x), run(x))
