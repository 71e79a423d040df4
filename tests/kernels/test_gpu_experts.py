"""Mixtures of experts as kernels: choice, products of few and of many tokens, padding, ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from stepgraph.runtime.kernels import Experts, Routing
from stepgraph.runtime.kernels.ops.experts import reference_choice
from stepgraph.runtime.kernels.triton.expert_blocks import (
    block_rows,
    num_blocks,
    product_of_rows_by_expert,
    sort_pairs,
)
from stepgraph.runtime.kernels.triton.expert_routing import (
    choose_experts,
    reference_routing,
    router_logits,
)
from stepgraph.runtime.kernels.triton.experts import (
    ExpertSizes,
    default_tiles,
    experts,
    triton_experts,
)
from stepgraph.runtime.kernels.triton.linear import EXPERT_PRODUCTS

from ..rigs.expert_cases import Mixture, make_mixture, simple_experts
from ..rigs.gpu_references import DEVICE, error, poisoned, tolerance
from ..rigs.stack_plans import routings

TOP_2 = Routing(top_k=2)
ROUTINGS = {
    "softmax": Routing(top_k=3, normalised=True),
    "all": Routing(top_k=6, scale=2.5),
    "one": Routing(top_k=1, scores="sigmoid"),
    "chosen": Routing(top_k=4, scores="softmax_chosen"),
    "groups": Routing(top_k=2, groups=3, top_groups=2),
    "sums": Routing(
        top_k=3, scores="sigmoid", normalised=True, scale=1.7, groups=2, top_groups=1,
        group_score="top_2_sum",
    ),
}  # fmt: skip


def same_choice(
    op: Experts, logits: Tensor, correction: Tensor | None = None, live: Tensor | None = None
) -> None:
    found = choose_experts(op, logits, correction, live)
    weights, experts = reference_choice(op, logits, correction, live)
    assert torch.equal(found.experts, experts.int())
    torch.testing.assert_close(found.weights, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_choices(routing: Routing, shared: int, correction: bool) -> None:
    op = make_mixture(routing, shared=shared, correction=correction).op
    logits = 3 * torch.randn(9, 6, device=DEVICE)
    bias = torch.randn(6, device=DEVICE) if correction else None
    same_choice(op, logits, bias)
    same_choice(op, logits, bias, torch.rand(9, device=DEVICE) < 0.5)
    same_choice(op, 100 + 100 * logits, bias)  # scores that are 0 and 1


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), case=routings())
def test_ties_go_to_the_first(data: st.DataObject, case: tuple[Routing, int, bool]) -> None:
    routing, count, _ = case
    values = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
    logits = data.draw(st.lists(values, min_size=count, max_size=count))
    same_choice(make_mixture(routing, routed=count).op, torch.tensor([logits], device=DEVICE))


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_exist_whatever_the_logits_are(routing: Routing) -> None:
    op, nan, inf = make_mixture(routing).op, float("nan"), float("inf")
    logits = torch.randn(4, 6, device=DEVICE)
    logits[0], logits[1, 2], logits[2], logits[3] = nan, nan, inf, -inf
    experts = choose_experts(op, logits, None).experts
    assert ((experts >= 0) & (experts < 6)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "hidden", "routed"), [(1, 37, 5), (4, 1100, 3), (19, 150, 18)])
def test_logits_are_float32(tokens: int, hidden: int, routed: int, dtype: torch.dtype) -> None:
    x, router = torch.randn(tokens, hidden).to(dtype), torch.randn(routed, hidden).to(dtype)
    bias = torch.randn(routed).to(dtype)
    for b in (None, bias.to(DEVICE)):
        found = router_logits(x.to(DEVICE), router.to(DEVICE), b)
        expected = x.double() @ router.double().T + (0 if b is None else bias.double())
        assert error(found.cpu(), expected) < 1e-6


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    experts=st.lists(st.integers(0, 7), min_size=1, max_size=300),
    rows=st.sampled_from([2, 4, 16]),
    scan=st.sampled_from([128, 1024]),
)
def test_pairs_are_sorted_by_expert(experts: list[int], rows: int, scan: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepgraph.runtime.kernels.triton.expert_blocks._SCAN", scan)
        found = sort_pairs(torch.tensor([experts], dtype=torch.int32, device=DEVICE), 7, rows)
    blocks = [
        (expert, pairs[pairs < len(experts)].tolist())
        for expert, pairs in zip(found.experts.tolist(), found.pairs.view(-1, rows), strict=True)
        if expert < 7
    ]
    expected = []
    for expert in range(7):
        mine = [pair for pair, chosen in enumerate(experts) if chosen == expert]
        expected += [(expert, mine[i : i + rows]) for i in range(0, len(mine), rows)]
    assert blocks == expected


@settings(max_examples=200)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_there_are_blocks_for_any_choice(counts: list[int]) -> None:
    pairs = max(1, sum(counts))
    rows = block_rows(pairs, len(counts))
    assert sum(-(-count // rows) for count in counts) <= num_blocks(pairs, len(counts), rows)


def run(mixture: Mixture, x: Tensor, live: Tensor | None, way: str, **ends: Any) -> Tensor:
    """The result of one way of computing the products, in poisoned memory."""
    op, tensors = mixture.op, mixture.tensors
    routed = reference_routing(op, x, tensors, live)
    out = poisoned(*x.shape, dtype=x.dtype)
    sizes = ExpertSizes.of(op, len(x), x.dtype, tensors.gate_up)
    configs = [default_tiles(kernel, sizes, way) for kernel in EXPERT_PRODUCTS]
    ends = {"residual": None, "scale": 1.0} | ends
    experts(op, x, tensors, routed, ends["residual"], out, (*configs,), scale=ends["scale"])
    return out


WAYS = {"pairs": 2, "blocks": 11}
"""Kinds of products, and tokens for each."""
TRAITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared": 2, "correction": True},
    "biases": {"biases": True, "limit": 0.5},
    "inputs": {"scaled_inputs": True, "shared": 1},
    "odd": {"hidden": 37, "features": 21, "biases": True},
    "steps": {"hidden": 270, "features": 260, "routed": 3},
    "int8": {"storage": "int8", "hidden": 30, "features": 130, "biases": True},
    "fp8": {"storage": "fp8", "hidden": 144, "features": 40, "biases": True},
    "fp8 odd": {"storage": "fp8", "hidden": 30, "features": 130, "biases": True},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS)
@pytest.mark.parametrize("way", WAYS)
def test_products_against_float64(way: str, traits: dict[str, Any], dtype: torch.dtype) -> None:
    tokens = WAYS[way]
    mixture = make_mixture(TOP_2, dtype=dtype, **traits).to(DEVICE)
    x = torch.randn(tokens, mixture.op.router.shape[1], device=DEVICE).to(dtype)
    out = run(mixture, x, None, way)
    expected = simple_experts(mixture, x.cpu())
    assert error(out.cpu(), expected) < 3 * tolerance(dtype)
    if tokens < 9:  # the whole operation, with its own logits
        found = triton_experts(mixture.op, x, mixture.tensors).cpu()
        assert error(found, expected) < 3 * tolerance(dtype)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_padding_uses_no_expert(way: str, residual: bool) -> None:
    """Whatever its hidden states are: its sum is zero."""
    tokens = WAYS[way]
    mixture = make_mixture(TOP_2, shared=1, biases=True).to(DEVICE)
    x = torch.randn(tokens, 12, device=DEVICE)
    live = torch.arange(tokens, device=DEVICE) % 3 != 1
    ends = {"residual": torch.randn(tokens, 12, device=DEVICE) if residual else None, "scale": 0.3}
    out = run(mixture, x, live, way, **ends)
    added = ends["residual"] if residual else torch.zeros_like(x)
    assert torch.equal(out[~live], added[~live])
    expected = 0.3 * simple_experts(mixture, x.cpu()).to(DEVICE) + added
    torch.testing.assert_close(out[live], expected[live].float(), rtol=1e-4, atol=1e-4)
    x[~live] = float("nan")
    assert torch.equal(run(mixture, x, live, way, **ends), out)
    padding = run(mixture, x, torch.zeros_like(live), way, **ends)
    assert torch.equal(padding, added)


@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_choose_one_expert(way: str) -> None:
    tokens = WAYS[way]
    tokens *= 4 if way == "blocks" else 1  # more than a block has
    mixture = make_mixture(Routing(top_k=1, scores="sigmoid"), routed=3, biases=True).to(DEVICE)
    mixture.tensors.router_bias[:] = torch.tensor([-50.0, 50.0, -50.0])
    mixture.exact.router_bias[:] = mixture.tensors.router_bias.double()
    x = torch.randn(tokens, 12, device=DEVICE)
    expected = simple_experts(mixture, x.cpu())
    assert error(run(mixture, x, None, way).cpu(), expected) < 1e-5


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_by_expert(dtype: torch.dtype, transposed: bool) -> None:
    experts_N = torch.tensor([2, 0, 2, 4, 2, 0, 5], dtype=torch.int32, device=DEVICE)
    x = torch.randn(7, 37, device=DEVICE).to(dtype)
    weight = torch.randn(5, 21, 37, device=DEVICE).to(dtype)
    stored = weight.transpose(1, 2).contiguous() if transposed else weight
    found = product_of_rows_by_expert(x, stored, experts_N, transposed=transposed)[:6]
    expected = torch.einsum("nk,nrk->nr", x[:6].double(), weight[experts_N[:6].long()].double())
    assert error(found.cpu(), expected.cpu()) < tolerance(dtype)
