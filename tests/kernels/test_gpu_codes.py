"""Weights of quantised checkpoints in the form of GPU kernels, against their numbers in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels import Routing
from stepgraph.runtime.kernels.ops.activation import Activate
from stepgraph.runtime.kernels.ops.linear import LinearTensors
from stepgraph.runtime.kernels.triton.begin import EmbeddingTable, begin_decode
from stepgraph.runtime.kernels.triton.experts import triton_experts
from stepgraph.runtime.kernels.triton.linear import LinearConfig
from stepgraph.runtime.kernels.triton.linear_kernels import (
    gate_up,
    norm_linear,
    reference_product,
    residual_linear,
    unfused_linear,
)
from stepgraph.runtime.kernels.triton.packed_codes import parts_bytes, store_parts
from stepgraph.runtime.kernels.weights import GroupedWeight, dequantise
from stepgraph.runtime.kernels.weights.grouped import (
    DOUBLED_E2M1,
    E4M3,
    INT8,
    NF4,
    Levels,
    Scales,
    integers,
)
from torch import Tensor

from ..rigs.expert_cases import make_mixture, simple_experts
from ..rigs.gpu_references import DEVICE, error, poisoned, random_norm, rows, tolerance

HALF = torch.bfloat16
IQ4_NL = Levels(
    "iq4nl",
    tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))),
)


def scales(n: int, groups: int, dtype: torch.dtype) -> Scales:
    """Powers of two times numbers of 8 bits: exact in each dtype."""
    numbers = torch.randint(128, 256, (n, groups)) * 2.0 ** torch.randint(-15, -12, (n, groups))
    return Scales(numbers.to(dtype))


def two_levels(n: int, groups: int, run: int) -> Scales:
    inner = torch.randint(1, 64, (n, groups), dtype=torch.uint8)
    return Scales(scales(n, -(-groups // run), torch.float16).outer / 32, inner, run)


def weight(
    levels: Levels,
    group: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.float16,
    minimums: str = "",
    run: int = 0,
) -> GroupedWeight:
    groups = -(-k // group)
    codes = torch.randint(len(levels.values), (n, k), dtype=torch.uint8)
    if levels is E4M3:
        codes &= 0xBF  # at most 1.875
    own = two_levels(n, groups, run) if run else scales(n, groups, dtype)
    points = torch.randint(16, (n, groups), dtype=torch.uint8)
    subtracted = {
        "": None,
        "zeros": Scales(own.outer, points),
        "minimums": two_levels(n, groups, run) if run else scales(n, groups, dtype),
    }
    return GroupedWeight(levels, codes, group, own, subtracted[minimums])


FORMATS: dict[str, Callable[[int, int], GroupedWeight]] = {
    "int4_32": lambda n, k: weight(integers(4, 8), 32, n, k),
    "int4_128_zeros": lambda n, k: weight(integers(4), 128, n, k, minimums="zeros"),
    "int4_64_biases": lambda n, k: weight(integers(4), 64, n, k, HALF, "minimums"),
    "q4_k": lambda n, k: weight(integers(4), 32, n, k, minimums="minimums", run=8),
    "int2_16": lambda n, k: weight(integers(2, 2), 16, n, k, torch.float32),
    "mxfp4": lambda n, k: weight(DOUBLED_E2M1, 32, n, k, HALF),
    "nvfp4": lambda n, k: weight(DOUBLED_E2M1, 16, n, k, run=1 << 20),
    "iq4_nl": lambda n, k: weight(IQ4_NL, 32, n, k),
    "int4_rows": lambda n, k: weight(integers(4, 8), k, n, k),
    "fp8_128": lambda n, k: weight(E4M3, 128, n, k, torch.float32),
    "fp8_rows": lambda n, k: weight(E4M3, k, n, k, torch.float32),
    "mxfp8": lambda n, k: weight(E4M3, 32, n, k, HALF),
    "int8_rows": lambda n, k: weight(INT8, k, n, k, torch.float32),
    "q8_0": lambda n, k: weight(INT8, 32, n, k),
    "q6_k": lambda n, k: weight(integers(6, 32), 16, n, k, run=16),
    "gptq_8": lambda n, k: weight(integers(8), 64, n, k, minimums="zeros"),
    "int8_256": lambda n, k: weight(integers(8, 128), 256, n, k),
}


def packed(parts: list[GroupedWeight]) -> LinearTensors:
    stored, own = store_parts(parts, HALF)
    on_meta = [part.over(lambda tensor: tensor.to("meta")) for part in parts]
    assert parts_bytes(on_meta, HALF) == stored.nbytes + own.nbytes
    return LinearTensors(stored.to(DEVICE), own.to(DEVICE))


def numbers(parts: list[GroupedWeight]) -> Tensor:
    return torch.cat([part.decode() for part in parts]).double().to(DEVICE)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [256, 320])
def test_packed_parts_have_the_numbers_of_their_codes(name: str, k: int) -> None:
    parts = [FORMATS[name](n, k) for n in (5, 8)]
    stored, own, _ = packed(parts)
    assert own is not None
    torch.testing.assert_close(dequantise(stored, own).double(), numbers(parts), rtol=3e-7, atol=0)


def test_codes_that_kernels_do_not_take_are_decoded() -> None:
    int4, fp8 = FORMATS["int4_32"](4, 64), FORMATS["mxfp8"](4, 64)
    for parts in (
        [weight(NF4, 32, 4, 64)],
        [weight(integers(4, 8), 8, 4, 64)],  # groups that are too small
        [weight(integers(4, 8), 32, 4, 72)],  # a last group that is shorter
        [int4, fp8],
        [int4, torch.zeros(4, 64)],
    ):
        assert parts_bytes(parts, HALF) is None


SILU = Activate(name="activate", function="silu", features=19)
PRODUCTS = {
    "norm_linear": (norm_linear, 37, {"norm": True}),
    "gate_up": (gate_up, 38, {"activate": SILU}),
    "residual_linear": (residual_linear, 37, {"residual": True}),
}


@pytest.mark.sampled(40)
@pytest.mark.parametrize("k", [96, 256, 320])
@pytest.mark.parametrize("operation", PRODUCTS)
@pytest.mark.parametrize("count", [1, 2, 4, 5, 33])
@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_products_with_codes(
    name: str, dtype: torch.dtype, count: int, operation: str, k: int
) -> None:
    run, n, traits = PRODUCTS[operation]
    part = FORMATS[name](n, k)
    if parts_bytes([part], dtype) is None:
        pytest.skip("a last group that is shorter")
    linear = packed([part])._replace(bias=rows(1, n, dtype)[0])
    exact = LinearTensors(numbers([part]).float(), None, linear.bias)
    x_TK = rows(count, k, dtype)
    outputs = n // 2 if operation == "gate_up" else n
    arguments: dict[str, object] = {
        "norm": random_norm(k, dtype) if "norm" in traits else None,
        "activate": traits.get("activate"),
        "residual_TN": rows(count, outputs, dtype) if "residual" in traits else None,
    }
    for config in (None, LinearConfig(8, 64)) if count <= 4 else (None,):
        out_TN = poisoned(count, outputs, dtype=dtype)
        run(x_TK, linear, out_TN, config=config, **arguments)
        reference = reference_product(x_TK, exact, **arguments)
        assert error(out_TN, reference) < tolerance(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_products_against_float64(name: str) -> None:
    """With float32 activations only the order of sums differs."""
    part = FORMATS[name](21, 256)
    linear = packed([part])
    any_rows = partial(unfused_linear, any_tokens=True)
    for count, product in ((3, norm_linear), (6, unfused_linear), (6, any_rows)):
        x_TK, out_TN = rows(count, 256, torch.float32), poisoned(count, 21, dtype=torch.float32)
        product(x_TK, linear, out_TN)
        assert error(out_TN, x_TK.double() @ numbers([part]).T) < 2e-6


@pytest.mark.parametrize("way", [2, 11], ids=["pairs", "blocks"])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_of_codes(name: str, way: int) -> None:
    """By pair and by block; the weights of 6 experts, gate and up, are one above the other."""
    mixture = make_mixture(Routing(top_k=2), hidden=64, features=96, biases=True).to(DEVICE)
    tensors, exact = mixture.tensors, mixture.exact
    for leaf, stacked in (("gate_up", 2 * 6 * 96), ("down", 6 * 64)):
        linear = getattr(tensors, leaf)
        part = FORMATS[name](stacked, linear.weight.shape[1])
        if parts_bytes([part], torch.float32) is None:
            pytest.skip("a last group that is shorter")
        coded = packed([part])._replace(bias=linear.bias)
        tensors = tensors._replace(**{leaf: coded})
        wide = getattr(exact, leaf)._replace(weight=numbers([part]).cpu())
        exact = exact._replace(**{leaf: wide})
    mixture = mixture._replace(tensors=tensors, exact=exact)
    x_TD = rows(way, 64, torch.float32)
    out_TD = triton_experts(mixture.op, x_TD, tensors)
    assert error(out_TD.cpu(), simple_experts(mixture, x_TD.cpu())) < 1e-5


@pytest.mark.parametrize("name", FORMATS)
def test_embeddings_of_codes(name: str) -> None:
    part = FORMATS[name](7, 256)
    stored, own, _ = packed([part])
    tokens = torch.tensor([6, 0, 3], device=DEVICE)
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    out = begin_decode(
        *(torch.arange(3, device=DEVICE), tokens, zeros, zeros.int().view(1, 3, 1), 1),
        EmbeddingTable(stored, own, torch.float32, held=range(1, 8)),
        (torch.ones(1, 1, device=DEVICE),) * 2,
    )
    expected = numbers([part])[tokens - 1]
    expected[1] = 0.0  # another rank's
    torch.testing.assert_close(out.x.double(), expected, rtol=1e-6, atol=1e-7)
