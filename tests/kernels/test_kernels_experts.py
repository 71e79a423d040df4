"""Experts in C++ against plain PyTorch: any routing, number of tokens and threads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels import Routing, packed_experts, reference_experts

from ..rigs.expert_cases import Mixture, make_mixture, packed, simple_route
from ..rigs.stack_plans import routings
from ..rigs.thread_rig import kernel_threads

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

TOKENS = [1, 2, 3, 9, 17, 40, 130, 500]


@pytest.fixture(scope="module", autouse=True)
def _cpu_ops() -> None:
    kernels.load_cpu_ops()


def inputs(tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of about one."""
    generator = torch.Generator().manual_seed(tokens)
    return (torch.randn(tokens, hidden, generator=generator) * 2 * hidden**-0.5).to(dtype)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
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
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        storage=draw(st.sampled_from(["model", "int8"])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60, deadline=None)
@given(mixture=mixtures(), tokens=st.sampled_from(TOKENS))
def test_any_mixture_equals_the_reference(mixture: Mixture, tokens: int) -> None:
    check(mixture, tokens)


def check(mixture: Mixture, tokens: int) -> None:
    """The operator agrees with the reference."""
    op, dtype = mixture.op, mixture.tensors.router.dtype
    x = inputs(tokens, op.router.shape[1], dtype)
    got = packed_experts(op, x, packed(mixture))
    expected = reference_experts(op, x, mixture.tensors)
    size = expected.abs().max().item()
    tolerance = (1e-5 if dtype == torch.float32 else 0.02) * size
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("features", [1, 31, 33, 40, 72])
def test_widths_of_incomplete_blocks(features: int, storage: str, dtype: torch.dtype) -> None:
    for hidden, tokens in itertools.product((1, 33, 95, 160), (1, 13)):
        mixture = make_mixture(
            Routing(3, "sigmoid"),
            hidden=hidden,
            features=features,
            biases=True,
            shared=1,
            dtype=dtype,
            storage=storage,
        )
        check(mixture, tokens)


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(("routed", "top_k"), [(1, 1), (2, 1), (100, 100), (513, 2)])
def test_any_number_of_experts(routed: int, top_k: int, tokens: int) -> None:
    check(make_mixture(Routing(top_k), routed=routed, hidden=33, features=5), tokens)


def test_steps_without_tokens() -> None:
    mixture = make_mixture(Routing(3), shared=1)
    nothing = packed_experts(mixture.op, torch.empty(0, 12), packed(mixture))
    assert nothing.shape == (0, 12)
    for tokens in (1, 16, 100):
        x, live = torch.full((tokens, 12), torch.nan), torch.zeros(tokens, dtype=torch.bool)
        for count in (1, 3):
            with kernel_threads(count):
                assert not packed_experts(mixture.op, x, packed(mixture), live).any()


@settings(max_examples=20, deadline=None)
@given(mixture=mixtures(), tokens=st.sampled_from([9, 130, 500]))
def test_tokens_are_independent_of_batch_and_threads(mixture: Mixture, tokens: int) -> None:
    op, tensors = mixture.op, packed(mixture)
    x = inputs(tokens, op.router.shape[1], tensors.router.dtype)
    expected = packed_experts(op, x, tensors)
    order = torch.randperm(tokens)
    for count in (1, 2, 3):
        with kernel_threads(count):
            assert torch.equal(packed_experts(op, x, tensors), expected)
            assert torch.equal(packed_experts(op, x[order], tensors), expected[order])
            last = packed_experts(op, x[-1:], tensors)
            assert torch.equal(last, expected[-1:])


@settings(max_examples=20, deadline=None)
@given(mixture=mixtures(), data=st.data())
def test_padding_and_experts_that_are_not_chosen_are_not_read(
    mixture: Mixture, data: st.DataObject
) -> None:
    op = mixture.op
    live = torch.tensor(data.draw(st.lists(st.booleans(), min_size=9, max_size=9)))
    x = inputs(9, op.router.shape[1], mixture.tensors.router.dtype)
    expected = packed_experts(op, x, packed(mixture)) * live[:, None]
    if op.shared == 0:
        logits = x.double() @ mixture.exact.router.T
        if mixture.exact.router_bias is not None:
            logits = logits + mixture.exact.router_bias
        extra = mixture.exact.correction
        chosen = {
            expert
            for row in logits[live].tolist()
            for expert in simple_route(op, row, None if extra is None else extra.tolist())
        }
        stacked = mixture.tensors.by_expert(op.total)
        weights = stacked.gate_up if stacked.gate_up_scales is None else stacked.gate_up_scales
        for expert in set(range(op.total)) - chosen:
            weights[expert] = torch.nan  # a view
    garbage = torch.where(live[:, None], x, torch.nan)
    assert torch.equal(packed_experts(op, garbage, packed(mixture), live), expected)


@settings(max_examples=30, deadline=None)
@given(mixture=mixtures(), bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_what_is_not_finite_stays_in_its_token(mixture: Mixture, bad: float) -> None:
    tensors = packed(mixture)
    x = inputs(20, mixture.op.router.shape[1], tensors.router.dtype)
    expected = packed_experts(mixture.op, x, tensors)
    x[5, -1] = bad
    got = packed_experts(mixture.op, x, tensors)
    assert bad == bad or got[5].isnan().all()
    others = torch.arange(20) != 5
    assert torch.equal(got[others], expected[others])


@settings(max_examples=200, deadline=None)
@given(data=st.data(), case=routings())
def test_choice_of_equal_scores(data: st.DataObject, case: tuple[Routing, int, bool]) -> None:
    """Expert e returns the unit vector e, and the router the input: the output is the weights."""
    routing, count, correction = case

    def values(*choices: float) -> list[float]:
        return data.draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))

    largest = 2.0 if correction or routing.group_score != "max" else 200.0
    logits = values(-largest, -1.0, 0.0, 0.5, largest)
    extra = values(0.0, 8.0) if correction else None
    mixture = make_mixture(
        routing, routed=count, hidden=count, features=32, biases=True, correction=correction
    )
    tensors = packed(mixture)._replace(
        router=torch.eye(count),
        router_bias=torch.zeros(count),
        correction=None if extra is None else torch.tensor(extra),
        down=torch.zeros_like(packed(mixture).down),
        down_bias=torch.eye(count).flatten(),
    )
    expected = torch.zeros(count, dtype=torch.float64)
    for expert, weight in simple_route(mixture.op, logits, extra).items():
        expected[expert] = weight
    (got,) = packed_experts(mixture.op, torch.tensor([logits]), tensors)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"router": lambda t: t[:-1]},
        {"router": lambda t: t.double()},
        {"correction": lambda t: t.bfloat16()},
        {"gate_up": lambda t: t[:-1]},
        {"down": lambda t: t[:, :-1]},
        {"down_bias": lambda t: t[1:]},
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    mixture = make_mixture(Routing(2), features=32, correction=True, biases=True)
    tensors = packed(mixture)
    ((name, changed),) = change.items()
    wrong = tensors._replace(**{name: changed(getattr(tensors, name))})
    with pytest.raises(RuntimeError, match="packed_experts"):
        packed_experts(mixture.op, inputs(3, 12, torch.float32), wrong)
