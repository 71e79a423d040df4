"""Experts: plain PyTorch against token-by-token versions in float64, and C++ against that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels import Routing, packed_experts, reference_experts
from stepgraph.runtime.kernels.ops import experts as module
from stepgraph.runtime.kernels.ops.experts import (
    by_expert,
    reference_choice,
    reference_products,
    reference_route,
)
from stepgraph.runtime.kernels.ops.experts_operator import opaque_experts
from stepgraph.runtime.kernels.ops.linear import LinearTensors
from torch.fx.experimental.proxy_tensor import make_fx

from ..rigs.expert_cases import Mixture, make_mixture, packed, simple_experts, simple_route
from ..rigs.stack_plans import routings
from ..rigs.thread_rig import kernel_threads

needs_compiler = pytest.mark.usefixtures("cpu_ops")
FLOAT = [torch.float32]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def _cpu_ops() -> None:
    if kernels.have_compiler():
        kernels.load_cpu_ops()


def inputs(mixture: Mixture, tokens: int) -> torch.Tensor:
    """Hidden states whose logits are about one."""
    hidden = mixture.op.router.shape[1]
    generator = torch.Generator().manual_seed(tokens)
    x_TD = torch.randn(tokens, hidden, generator=generator) * 2 * hidden**-0.5
    return x_TD.to(mixture.tensors.router.dtype)


@st.composite
def mixtures(
    draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES, storages: tuple[str, ...] = ("int8",)
) -> Mixture:
    routing, routed, correction = draw(routings())
    return make_mixture(
        routing,
        routed=routed,
        shared=draw(st.integers(0, 2)),
        hidden=draw(st.integers(1, 100)),
        features=draw(st.one_of(st.integers(1, 100), st.sampled_from([32, 64]))),
        biases=draw(st.booleans()),
        correction=correction,
        scaled_inputs=draw(st.booleans()),
        limit=draw(st.sampled_from([0.0, 0.7])),
        dtype=draw(st.sampled_from(dtypes)),
        storage=draw(st.sampled_from(["model", *storages])),
        seed=draw(st.integers(0, 99)),
    )


def choice(
    mixture: Mixture, x_TD: torch.Tensor, live_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and experts of each token."""
    op, tensors, _ = mixture
    bias = None if tensors.router_bias is None else tensors.router_bias.float()
    logits_TR = torch.nn.functional.linear(x_TD.float(), tensors.router.float(), bias)
    return reference_choice(op, logits_TR, tensors.correction, live_T)


def by_block(
    mixture: Mixture, x_TD: torch.Tensor, live_T: torch.Tensor | None = None
) -> torch.Tensor:
    """The form of devices other than a CPU."""
    op, tensors, _ = mixture
    return module._by_block(op, x_TD, tensors, *choice(mixture, x_TD, live_T))


@settings(max_examples=40, deadline=None)
@given(mixture=mixtures(FLOAT, ("int8", "fp8")), tokens=st.sampled_from([1, 3, 40]))
def test_plain_torch_equals_the_simple_version(mixture: Mixture, tokens: int) -> None:
    x = inputs(mixture, tokens)
    expected = simple_experts(mixture, x)
    limit = 2e-5 * max(1.0, expected.abs().max().item())
    for found in (reference_experts(mixture.op, x, mixture.tensors), by_block(mixture, x)):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=limit)
    alike = x[:1].expand(200, -1)  # all tokens choose the same experts
    for found in (reference_experts(mixture.op, alike, mixture.tensors), by_block(mixture, alike)):
        repeated = expected[:1].expand(200, -1)
        torch.testing.assert_close(found.double(), repeated, rtol=0, atol=limit)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(mixture=mixtures(), tokens=st.sampled_from([1, 2, 3, 9, 17, 40, 130, 500]))
def test_operator_equals_plain_torch(mixture: Mixture, tokens: int) -> None:
    check(mixture, tokens)


def check(mixture: Mixture, tokens: int) -> None:
    """The operator agrees with the reference."""
    x = inputs(mixture, tokens)
    expected = reference_experts(mixture.op, x, mixture.tensors)
    tolerance = (1e-5 if x.dtype == torch.float32 else 0.02) * expected.abs().max().item()
    found = packed_experts(mixture.op, x, packed(mixture))
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(("routed", "top_k"), [(1, 1), (2, 1), (100, 100), (513, 2)])
def test_any_number_of_experts(routed: int, top_k: int, tokens: int) -> None:
    check(make_mixture(Routing(top_k), routed=routed, hidden=133, features=5), tokens)


@settings(max_examples=30, deadline=None)
@given(mixture=mixtures(FLOAT), live=st.lists(st.booleans(), min_size=9, max_size=9))
def test_padding_uses_no_expert(mixture: Mixture, live: list[bool]) -> None:
    op, tensors, _ = mixture
    live_T, x = torch.tensor(live), inputs(mixture, 9)
    expected = reference_experts(op, x, tensors) * live_T[:, None]
    garbage = torch.where(live_T[:, None], x, 1e30)
    torch.testing.assert_close(reference_experts(op, garbage, tensors, live_T), expected)
    torch.testing.assert_close(by_block(mixture, garbage, live_T), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 9, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_router_has_inputs_and_experts_have_scales(tokens: int, dtype: torch.dtype) -> None:
    """As a router of these inputs, and experts whose outputs have the scales."""
    mixture = make_mixture(
        Routing(3, normalised=True), hidden=13, shared=1, dtype=dtype, router_input=True
    )
    op, tensors, _ = mixture
    assert tensors.expert_scales is not None
    x, router_x = inputs(mixture, tokens), inputs(mixture, tokens + 1)[:tokens]
    weights_TK, experts_TK = choice(mixture, router_x)
    scales_E = torch.nn.functional.pad(tensors.expert_scales, (0, op.shared), value=1.0)
    expected = reference_products(op, x, tensors, weights_TK * scales_E[experts_TK], experts_TK)
    operators = [(reference_experts, tensors), (opaque_experts, tensors)]
    if kernels.have_compiler():
        operators.append((packed_experts, packed(mixture)))
    within = (1e-5 if dtype == torch.float32 else 0.02) * expected.abs().max().item()
    for run, own in operators:
        found = run(op, x, own, None, router_x)
        torch.testing.assert_close(found, expected, rtol=0, atol=within)


def test_compiled_steps_call_one_operator() -> None:
    routing = Routing(3, "sigmoid", True, 2.5, 3, 2, "top_2_sum")
    mixture = make_mixture(routing, correction=True, shared=1)
    x, live = torch.randn(5, 12), torch.tensor([True, True, False, True, True])
    compiled = torch.compile(
        lambda x: opaque_experts(mixture.op, x, mixture.tensors, live) + 1,
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(
        compiled(x), reference_experts(mixture.op, x, mixture.tensors, live) + 1
    )


@settings(max_examples=3, deadline=None)
@given(mixture=mixtures(FLOAT), tokens=st.sampled_from([1, 50]))
def test_blocks_need_nothing_from_the_device(mixture: Mixture, tokens: int) -> None:
    """Fake tensors have no values: reading one, or a shape that depends on one, would raise."""
    live, x = torch.ones(tokens, dtype=torch.bool), inputs(mixture, tokens)

    def run(x: torch.Tensor) -> torch.Tensor:
        return by_block(mixture, x, live)

    traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    torch.testing.assert_close(traced(x), run(x))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), case=routings())
def test_choice_of_equal_scores(data: st.DataObject, case: tuple[Routing, int, bool]) -> None:
    """Few values, so that many logits and corrections are equal: the lower numbers come first.

    In C++ expert e returns the unit vector e, and the router the input: the output is the weights.
    """
    routing, count, correction = case

    def values(*choices: float) -> list[float]:
        return data.draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))

    # Equal in float64 and not in float32, or the reverse, are only logits of +-200, and sums of
    # scores and corrections in another order.
    sums = routing.group_score != "max"
    largest = 2.0 if correction or sums else 200.0
    logits = values(*((-3.0, -1.0, 0.5, 2.0) if sums else (-largest, -1.0, 0.0, 0.5, largest)))
    extra = (values(8.0) if sums else values(-8.0, 0.0, 8.0)) if correction else None
    mixture = make_mixture(
        routing, routed=count, hidden=count, features=32, biases=True, correction=correction
    )
    expected = simple_route(mixture.op, logits, extra)
    extra_R = None if extra is None else torch.tensor(extra)
    weights, experts = reference_route(mixture.op, torch.tensor([logits]), extra_R)
    assert (experts.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert experts[0].tolist() == list(expected)
    values_K = torch.tensor(list(expected.values()), dtype=torch.float64)
    torch.testing.assert_close(weights[0].double(), values_K, rtol=1e-5, atol=1e-6)
    if not kernels.have_compiler():
        return
    weight = torch.zeros_like(mixture.tensors.down.weight)
    tensors = mixture.tensors._replace(
        router=torch.eye(count),
        router_bias=torch.zeros(count),
        correction=extra_R,
        down=LinearTensors(weight, bias=torch.eye(count).flatten()),
    )
    tensors = packed(mixture._replace(tensors=tensors))
    (found,) = packed_experts(mixture.op, torch.tensor([logits]), tensors)
    scattered = torch.zeros(count, dtype=torch.float64)
    scattered[list(expected)] = values_K
    torch.testing.assert_close(found.double(), scattered, rtol=1e-5, atol=1e-6)


@needs_compiler
def test_steps_without_tokens() -> None:
    mixture = make_mixture(Routing(3), shared=1)
    nothing = packed_experts(mixture.op, torch.empty(0, 12), packed(mixture))
    assert nothing.shape == (0, 12)
    for tokens in (1, 16, 100):
        x, live = torch.full((tokens, 12), torch.nan), torch.zeros(tokens, dtype=torch.bool)
        for count in (1, 3):
            with kernel_threads(count):
                assert not packed_experts(mixture.op, x, packed(mixture), live).any()


@needs_compiler
@settings(max_examples=20, deadline=None)
@given(
    mixture=mixtures(),
    tokens=st.sampled_from([9, 130, 500]),
    bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
)
def test_tokens_are_independent_of_batch_and_threads(
    mixture: Mixture, tokens: int, bad: float
) -> None:
    op, tensors, x = mixture.op, packed(mixture), inputs(mixture, tokens)
    expected = packed_experts(op, x, tensors)
    order = torch.randperm(tokens)
    for count in (1, 2, 3):
        with kernel_threads(count):
            assert torch.equal(packed_experts(op, x, tensors), expected)
            assert torch.equal(packed_experts(op, x[order], tensors), expected[order])
            last = packed_experts(op, x[-1:], tensors)
            assert torch.equal(last, expected[-1:])
    x[5, -1] = bad
    found = packed_experts(op, x, tensors)
    assert bad == bad or found[5].isnan().all()
    others = torch.arange(tokens) != 5
    assert torch.equal(found[others], expected[others])


@needs_compiler
@settings(max_examples=20, deadline=None)
@given(mixture=mixtures(), live=st.lists(st.booleans(), min_size=9, max_size=9))
def test_padding_and_experts_that_are_not_chosen_are_not_read(
    mixture: Mixture, live: list[bool]
) -> None:
    op, live_T, x = mixture.op, torch.tensor(live), inputs(mixture, 9)
    expected = packed_experts(op, x, packed(mixture)) * live_T[:, None]
    if op.shared == 0:
        _, chosen = choice(mixture, x[live_T])
        stacked = by_expert(mixture.tensors.gate_up, op.total)
        weights = stacked.weight if stacked.scales is None else stacked.scales
        for expert in set(range(op.total)) - set(chosen.flatten().tolist()):
            weights[expert] = torch.nan  # a view
    garbage = torch.where(live_T[:, None], x, torch.nan)
    assert torch.equal(packed_experts(op, garbage, packed(mixture), live_T), expected)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("router", lambda t: t[:-1]),
        ("router", lambda t: t.double()),
        ("correction", lambda t: t.bfloat16()),
        ("gate_up", lambda linear: linear._replace(weight=linear.weight[:-1])),
        ("down", lambda linear: linear._replace(weight=linear.weight[64:])),
        ("down", lambda linear: linear._replace(bias=linear.bias[1:])),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, change: Any) -> None:
    mixture = make_mixture(Routing(2), features=32, correction=True, biases=True)
    tensors = packed(mixture)
    wrong = tensors._replace(**{name: change(getattr(tensors, name))})
    with pytest.raises(RuntimeError):
        packed_experts(mixture.op, inputs(mixture, 3), wrong)
