"""Packed linear layers: packing, agreement with float64, batch invariance, compilation."""

import pytest
import torch
import torch.nn.functional as F
from stepgraph.runtime import kernels
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from .thread_rig import kernel_threads

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

DTYPES = [torch.bfloat16, torch.float32]
# N, K: whole blocks, less than one, odd K, a last block of one column
SHAPES = [(960, 576), (1, 1), (7, 3), (33, 65), (64, 128), (257, 31), (100, 1025)]


@pytest.fixture(scope="module", autouse=True)
def _cpu_ops() -> None:
    kernels.load_cpu_ops()


def make(
    t: int, n: int, k: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=rng) for shape in ((t, k), (n, k), (n,)))
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packing_is_undone_by_unpacking(n: int, k: int, dtype: torch.dtype) -> None:
    _, weight, _ = make(1, n, k, dtype)
    packed = kernels.pack_linear(weight)
    assert packed.is_contiguous()
    assert packed.nbytes == kernels.packed_bytes(n, k, dtype)
    assert torch.equal(kernels.unpack_linear(packed, n, k), weight)


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


@pytest.mark.parametrize("token", [-1, 64])
def test_a_row_outside_a_packed_weight_is_refused(token: int) -> None:
    packed = kernels.pack_linear(torch.ones(33, 8))
    with pytest.raises(IndexError, match=f"tokens.0. is {token}, outside 0"):
        kernels.packed_embedding(torch.tensor([token]), packed, 8)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [1, 2, 3, 8, 12, 13, 25, 97, 200])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_float64(t: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = make(t, n, k, dtype)
    packed = kernels.pack_linear(weight)
    for added in (None, bias):
        out = kernels.packed_linear(x, packed, added, n)
        expected = x.double() @ weight.double().T + (0 if added is None else added.double())
        # A chain of k rounded additions that grows like a random walk, and the result.
        tolerance = 1e-6 + 2e-7 * k + (2**-8 if dtype == torch.bfloat16 else 0)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(960, 576), (33, 65)])
def test_a_row_does_not_see_its_batch(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = make(150, n, k, dtype)
    packed = kernels.pack_linear(weight)
    out = kernels.packed_linear(x, packed, bias, n)
    poisoned = x.clone()
    poisoned[1:] = torch.nan
    assert torch.equal(kernels.packed_linear(poisoned, packed, bias, n)[0], out[0])
    for count in (1, 2, 3):
        with kernel_threads(count):
            for t in (1, 2, 5, 12, 13, 31, 96, 97):
                part = kernels.packed_linear(x[150 - t :], packed, bias, n)
                assert torch.equal(part, out[150 - t :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_input(dtype: torch.dtype) -> None:
    x, weight, _ = make(6, 40, 64, dtype)
    packed = kernels.pack_linear(weight)
    expected = kernels.packed_linear(x, packed, None, 40)
    for columns in (65, 66, 70):
        wide = torch.full((6, columns), torch.nan, dtype=dtype)
        wide[:, :64] = x
        assert torch.equal(kernels.packed_linear(wide[:, :64], packed, None, 40), expected)
    assert torch.equal(kernels.packed_linear(x.T.contiguous().T, packed, None, 40), expected)


def test_nan_and_infinity_come_through() -> None:
    for dtype in DTYPES:
        x, weight, _ = make(3, 40, 10, dtype)
        x[1, 3] = torch.nan
        weight[7, 2] = torch.inf
        out = kernels.packed_linear(x, kernels.pack_linear(weight), None, 40)
        assert torch.isnan(out[1]).all()
        assert torch.isinf(out[0, 7])
        assert torch.isfinite(out[0, 8:]).all()


def test_compiled_equals_eager_in_one_graph() -> None:
    x, weight, bias = make(3, 100, 576, torch.bfloat16)
    packed = torch.nn.Parameter(kernels.pack_linear(weight), requires_grad=False)

    def model(x: Tensor) -> Tensor:
        hidden = kernels.packed_linear(F.silu(x), packed, bias, 100)
        return kernels.packed_embedding(hidden.argmax(-1), packed, 576) + 1

    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    out, (code,) = run_and_get_code(compiled, x)
    assert torch.equal(out, model(x))
    assert "stepgraph.packed_linear" in code


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


def test_dtypes_without_packed_form_are_named() -> None:
    with pytest.raises(TypeError, match="float16"):
        kernels.pack_linear(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"\(4,\)"):
        kernels.pack_linear(torch.zeros(4))


def test_reference_is_the_plain_layer() -> None:
    x, weight, bias = make(3, 20, 12, torch.float32)
    assert torch.equal(kernels.reference_linear(x, weight, bias, 20), F.linear(x, weight, bias))
