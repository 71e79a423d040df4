"""Weights in 8 bits: what quantising promises, and linear layers over them in plain torch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.kernels.weights import FP8, INT8, WeightStorage, dequantise, stored
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float32]


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Rows of very different sizes, some of zeros and some with zeros."""
    n, k = draw(st.integers(1, 40)), draw(st.integers(1, 40) | st.sampled_from([127, 128, 300]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    weight = torch.randn(n, k, generator=rng)
    weight *= 10.0 ** torch.randint(-30, 30, (n, 1), generator=rng)
    weight[torch.rand(n, k, generator=rng) < 0.1] = 0.0
    weight[torch.rand(n, generator=rng) < 0.2] = 0.0
    return weight.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@pytest.mark.parametrize(
    ("storage", "dtype", "largest", "block"),
    [(INT8, torch.int8, 127, 1000), (FP8, torch.float8_e4m3fn, 448, 128)],
)
@settings(max_examples=50)
@given(weights())
def test_a_number_is_off_by_half_its_last_bit(
    storage: WeightStorage, dtype: torch.dtype, largest: int, block: int, weight: Tensor
) -> None:
    data, scales = storage.quantise(weight)
    assert (data.dtype, scales.dtype) == (dtype, torch.float32)
    n, k = weight.shape
    assert scales.shape == ((n,) if storage == INT8 else (n, -(-k // block)))
    back = dequantise(data, scales)
    assert (back[weight == 0] == 0).all()
    for scale, exact, numbers, read in zip(
        scales.view(n, -1).T,
        *(x.split(block, 1) for x in (weight.double(), data.float(), back.double())),
        strict=True,
    ):
        amax = exact.float().abs().amax(1)
        assert torch.equal(scale, amax / largest)
        # The largest number of a block is the same whatever the block.
        assert torch.equal(numbers.abs().amax(1), torch.where(amax == 0, 0.0, largest))
        bound = scale.double()[:, None] / (2 if storage == INT8 else 1024)
        if storage == FP8:
            bound = torch.maximum(exact.abs() / 16, bound)
        assert ((read - exact).abs() <= bound * (1 + 2e-5)).all()
    again, same = storage.quantise(back)
    assert torch.equal(again.float(), data.float())
    torch.testing.assert_close(same, scales, rtol=1e-6, atol=0)


@pytest.mark.parametrize("storage", [INT8, FP8])
@settings(max_examples=30)
@given(weights(), st.integers(-8, 8), st.integers(1, 100))
def test_rows_are_quantised_one_by_one(
    storage: WeightStorage, weight: Tensor, power: int, at_a_time: int
) -> None:
    before = weight.clone()
    data, scales = storage.quantise(weight)
    assert torch.equal(weight, before)
    other, larger = storage.quantise(-weight.float() * 2.0**power)
    assert torch.equal(other.float(), -data.float())
    assert torch.equal(larger, scales * 2.0**power)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "_NUMBERS_AT_A_TIME", at_a_time)
        parts = storage.quantise(weight)
    assert torch.equal(parts[0].float(), data.float())
    assert torch.equal(parts[1], scales)
    row = torch.tensor([len(weight) - 1])
    assert torch.equal(
        dequantise(data[row], scales[row]),
        dequantise(data, scales)[row],
    )


@pytest.mark.parametrize(
    ("storage", "weight", "expected"),
    [
        (INT8, [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.4], [127, 0, 2, 2, 0, -2, 3]),
        (FP8, [448.0, 17.0, 19.0, 2**-10, 3 * 2**-10, -432.0], [448, 16, 20, 0, 2**-8, -448]),
        (INT8, [1e-45, -1e-45], [0, 0]),  # smaller than a scale can be
        (INT8, [1e-37, -1e-37], [127, -127]),
        (FP8, [1e-45, -1e-45], [0, 0]),
        (FP8, [9e-43, -9e-43], [448, -448]),
    ],
)
def test_halves_are_rounded_to_even(
    storage: WeightStorage, weight: list[float], expected: list[float]
) -> None:
    data, _ = storage.quantise(torch.tensor([weight]))
    assert data.tolist() == [expected]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", [INT8, FP8])
def test_what_is_no_number_is_refused(
    value: float, dtype: torch.dtype, storage: WeightStorage
) -> None:
    weight = torch.randn(9, 150).to(dtype)
    weight[6, 140] = weight[8, 0] = value
    with pytest.raises(ValueError, match=r"^row 6 holds NaN or infinity$"):
        storage.quantise(weight)
