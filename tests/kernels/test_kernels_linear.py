"""Packed linear layers: packing, agreement with float64, batch invariance, compilation."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from stepgraph.runtime import kernels
from torch import Tensor

from ..rigs.thread_rig import kernel_threads

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

DTYPES = [torch.bfloat16, torch.float32]
# N, K: whole blocks, less than one, odd K, K of one, a last block of one column
SHAPES = [(960, 576), (1, 1), (7, 3), (33, 65), (64, 128), (45, 1), (257, 31), (100, 1025)]


@pytest.fixture(scope="module", autouse=True)
def _cpu_ops() -> None:
    kernels.load_cpu_ops()


@dataclass
class Layer:
    """A packed layer over x, and what it gives in float64."""

    x: Tensor
    packed: Tensor
    bias: Tensor
    scales: Tensor | None
    exact: Tensor

    def run(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernels.packed_linear(x, self.packed, bias, len(self.exact), self.scales)


def make(t: int, n: int, k: int, dtype: torch.dtype, storage: str = "model") -> Layer:
    rng = torch.Generator().manual_seed(t)
    x, weight, bias = (torch.randn(*shape, generator=rng) for shape in ((t, k), (n, k), (n,)))
    if storage == "int8":
        data, scales = kernels.quantise_weight(weight)
        exact = data.double() * scales.double()[:, None]
    else:
        data, scales = weight.to(dtype), None
        exact = data.double()
    return Layer(x.to(dtype), kernels.pack_linear(data), bias.to(dtype), scales, exact)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_of_a_packed_weight_are_the_weight(n: int, k: int, dtype: torch.dtype) -> None:
    weight = torch.randint(-127, 128, (n, k)).to(dtype)
    packed = kernels.pack_linear(weight)
    assert packed.is_contiguous()
    assert packed.nbytes == kernels.packed_bytes(n, k, dtype)
    rows = kernels.reference_packed_embedding(torch.arange(n), packed, k)
    assert torch.equal(rows, weight)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("t", [1, 3, 700])
def test_rows_of_a_packed_weight(t: int, n: int, k: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(n)
    weight = torch.randint(-127, 128, (n, k), generator=rng).to(dtype)
    width = 1 if dtype == torch.float32 else 2
    padded = F.pad(weight, (0, -k % width, 0, -n % 32))
    packed = padded.view(-1, 32, padded.shape[1] // width, width).transpose(1, 2).contiguous()
    tokens = torch.randint(n, (t,), generator=rng)
    rows = kernels.packed_embedding(tokens, packed, k)
    assert rows.is_contiguous()
    assert torch.equal(rows, weight[tokens])
    assert torch.equal(kernels.reference_packed_embedding(tokens, packed, k), rows)


@pytest.mark.sampled(31)
@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [*range(1, 31), 97, 200])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_float64(t: int, n: int, k: int, dtype: torch.dtype, storage: str) -> None:
    layer = make(t, n, k, dtype, storage)
    for added in (None, layer.bias):
        out = layer.run(layer.x, added)
        expected = layer.x.double() @ layer.exact.T + (0 if added is None else added.double())
        # A chain of k rounded additions that grows like a random walk, and the result.
        tolerance = 1e-6 + 2e-7 * k + (2**-8 if dtype == torch.bfloat16 else 0)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(960, 576), (33, 65)])
def test_a_row_does_not_see_its_batch(n: int, k: int, dtype: torch.dtype, storage: str) -> None:
    layer = make(150, n, k, dtype, storage)
    x, bias = layer.x, layer.bias
    out = layer.run(x, bias)
    poisoned = x.clone()
    poisoned[1:] = torch.nan
    after = layer.run(poisoned, bias)
    assert torch.equal(after[0], out[0])
    assert after[1:].isnan().all()
    for count in (1, 2, 3):
        with kernel_threads(count):
            for t in (1, 2, 5, 12, 13, 31, 96, 97):
                assert torch.equal(layer.run(x[150 - t :], bias), out[150 - t :])


@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_input(dtype: torch.dtype, storage: str) -> None:
    for k in (64, 63):
        layer = make(6, 40, k, dtype, storage)
        expected = layer.run(layer.x)
        for columns in (k + 1, k + 2, k + 6):
            wide = torch.full((6, columns), torch.nan, dtype=dtype)
            wide[:, :k] = layer.x
            assert torch.equal(layer.run(wide[:, :k]), expected)
        assert torch.equal(layer.run(layer.x.T.contiguous().T), expected)


def test_nan_and_infinity_come_through() -> None:
    for dtype in DTYPES:
        x, weight = torch.randn(3, 10).to(dtype), torch.randn(40, 10).to(dtype)
        x[1, 3] = torch.nan
        weight[7, 2] = torch.inf
        out = kernels.packed_linear(x, kernels.pack_linear(weight), None, 40)
        assert torch.isnan(out[1]).all()
        assert torch.isinf(out[0, 7])
        assert torch.isfinite(out[0, 8:]).all()


@pytest.mark.parametrize(
    ("x", "out_features"),
    [
        (torch.zeros(2, 8), 40),
        (torch.zeros(2, 8, dtype=torch.bfloat16), 32),
        (torch.zeros(2, 8, dtype=torch.bfloat16), 65),
        (torch.zeros(2, 11, dtype=torch.bfloat16), 40),
        (torch.zeros(8, dtype=torch.bfloat16), 40),
        (torch.zeros(2, 8, dtype=torch.float16), 40),
    ],
)
def test_arguments_that_do_not_fit_are_refused(x: Tensor, out_features: int) -> None:
    packed = kernels.pack_linear(torch.zeros(40, 8, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="packed_linear"):
        kernels.packed_linear(x, packed, None, out_features)


@pytest.mark.parametrize(
    ("packed", "scales"),
    [
        (torch.zeros(2, 4, 32, 2, dtype=torch.int8), None),
        (torch.zeros(2, 4, 32, 2, dtype=torch.bfloat16), torch.ones(40)),
        (torch.zeros(2, 4, 32, 2, dtype=torch.int8), torch.ones(39)),
        (torch.zeros(2, 4, 32, 2, dtype=torch.int8), torch.ones(40, dtype=torch.bfloat16)),
        (torch.zeros(2, 4, 32, 2, dtype=torch.int8), torch.ones(80)[::2]),
        (torch.zeros(2, 8, 32, 1, dtype=torch.int8), torch.ones(40)),
    ],
)
def test_scales_that_do_not_fit_are_refused(packed: Tensor, scales: Tensor | None) -> None:
    for dtype in DTYPES:
        with pytest.raises(RuntimeError, match="packed_linear"):
            kernels.packed_linear(torch.zeros(3, 8, dtype=dtype), packed, None, 40, scales)


def test_every_number_counts_in_every_place() -> None:
    """One k at a time and every int8 at every column: nothing of the expansion is left out."""
    data = (torch.arange(255)[:, None] + torch.arange(0, 250, 50) - 127) % 255 - 127
    packed = kernels.pack_linear(data.to(torch.int8))
    for dtype in DTYPES:
        out = kernels.packed_linear(torch.eye(5, dtype=dtype), packed, None, 255, torch.ones(255))
        assert torch.equal(out.int(), data.T.int())
