"""Packed linear layers: packing, agreement with float64, batch invariance, compilation."""

from dataclasses import dataclass

import pytest
import torch
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels.ops.linear import packed_bytes, packed_embedding
from stepgraph.runtime.kernels.weights import INT8
from torch import Tensor

from ..rigs.thread_rig import kernel_threads

pytestmark = pytest.mark.usefixtures("cpu_ops")

DTYPES = [torch.bfloat16, torch.float32]
# N, K: whole blocks, less than one, odd K, K of one, a last block of one column
SHAPES = [(960, 576), (1, 1), (7, 3), (33, 65), (64, 128), (45, 1), (257, 31), (100, 1025)]


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
        data, scales = INT8.quantise(weight)
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
    assert packed.nbytes == packed_bytes(n, k, dtype)
    for tokens in (torch.arange(n), torch.randint(n, (700,))):
        assert torch.equal(packed_embedding(tokens, packed, k), weight[tokens])


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


BF16 = torch.zeros(2, 8, dtype=torch.bfloat16)
PACKED = torch.zeros(2, 4, 32, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "out_features", "packed", "scales"),
    [
        *((x, 40, PACKED, None) for x in (BF16.float(), BF16.half(), BF16[0], BF16[:, :5])),
        *((BF16, out_features, PACKED, None) for out_features in (32, 65)),
        (BF16, 40, PACKED.char(), None),
        (BF16, 40, PACKED, torch.ones(40)),
        (BF16, 40, PACKED.char(), torch.ones(39)),
        (BF16.float(), 40, PACKED.char(), torch.ones(40, dtype=torch.bfloat16)),
        (BF16.float(), 40, PACKED.char(), torch.ones(80)[::2]),
        (BF16, 40, PACKED.char().view(2, 8, 32, 1), torch.ones(40)),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    x: Tensor, out_features: int, packed: Tensor, scales: Tensor | None
) -> None:
    with pytest.raises(RuntimeError):
        kernels.packed_linear(x, packed, None, out_features, scales)


def test_every_number_counts_in_every_place() -> None:
    """One k at a time and every int8 at every column: nothing of the expansion is left out."""
    data = (torch.arange(255)[:, None] + torch.arange(0, 250, 50) - 127) % 255 - 127
    packed = kernels.pack_linear(data.to(torch.int8))
    for dtype in DTYPES:
        out = kernels.packed_linear(torch.eye(5, dtype=dtype), packed, None, 255, torch.ones(255))
        assert torch.equal(out.int(), data.T.int())
