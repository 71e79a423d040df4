"""Products, norms and activations of steps of few and of many rows, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.triton.linear import (
    GpuLinear,
    LinearConfig,
    Pending,
    reference_linear,
)
from stepgraph.runtime.kernels.triton.linear_kernels import (
    gate_up,
    norm_linear,
    reference_gate_up,
    reference_norm_linear,
    reference_residual_linear,
    residual_linear,
)
from stepgraph.runtime.kernels.triton.matmul import library_linear
from stepgraph.runtime.kernels.triton.rowwise import (
    Clamp,
    activate_rows,
    norm_rows,
    reference_activate_rows,
    reference_norm_rows,
)
from torch import Tensor

from ..rigs.gpu_linear_rig import (
    DEVICE,
    DTYPES,
    STORAGES,
    cases,
    error,
    poisoned,
    random_linear,
    random_norm,
    rows,
    tolerance,
)

N = 37
HALF = torch.bfloat16


# Input features, and a configuration for few rows; more rows take none.
SIZES = {
    "norm_linear": (21, LinearConfig(8, 64)),
    "gate_up": (21, LinearConfig(8, 64)),
    "residual_linear": (53, LinearConfig(8, 16)),
}
EVERY = [(operation, *case) for operation in SIZES for case in cases()]


class Product:
    """Random tensors of an operation, which runs over them, and so does its reference."""

    def __init__(
        self,
        operation: str,
        count: int,
        dtype: torch.dtype = HALF,
        k: int = 0,
        storage: str = "model",
        *,
        bias: bool = False,
        offset: bool = False,
        normed: bool = True,
        pending: bool = False,
        residual: bool = True,
        gelu: bool = False,
    ) -> None:
        self.operation, self.gelu = operation, gelu
        k = k or SIZES[operation][0]
        self.x_TK = rows(count, k, dtype)
        self.norm = random_norm(k, dtype, offset=offset) if normed else None
        stored = 2 * N if operation == "gate_up" else N
        self.linear = random_linear(stored, k, dtype, storage, bias=bias)
        self.residual_TN = rows(count, N, dtype) if residual else None
        self.pending: Pending | None = None
        if pending:
            post = random_norm(k, dtype, offset=offset)
            self.pending = Pending(rows(count, k, dtype), post, poisoned(count, k, dtype=dtype))

    def run(self, config: LinearConfig | None = None, out_TN: Tensor | None = None) -> Tensor:
        """The result, in poisoned memory unless some is given."""
        if out_TN is None:
            out_TN = poisoned(len(self.x_TK), N, dtype=self.x_TK.dtype)
        config = config or (SIZES[self.operation][1] if len(self.x_TK) <= 4 else None)
        normed = (self.x_TK, self.norm, self.linear, out_TN)
        if self.operation == "norm_linear":
            norm_linear(*normed, self.pending, config)
        elif self.operation == "gate_up":
            gate_up(*normed, gelu=self.gelu, pending=self.pending, config=config)
        else:
            residual_linear(self.x_TK, self.linear, self.residual_TN, out_TN, config)
        return out_TN

    def reference(self, pending: Pending | None = None) -> Tensor:
        normed = (self.x_TK, self.norm, self.linear)
        if self.operation == "norm_linear":
            return reference_norm_linear(*normed, pending)
        if self.operation == "gate_up":
            return reference_gate_up(*normed, gelu=self.gelu, pending=pending)
        return reference_residual_linear(self.x_TK, self.linear, self.residual_TN)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("operation", "count", "dtype"), EVERY)
def test_odd_shapes(operation: str, count: int, dtype: torch.dtype, gelu: bool) -> None:
    product = Product(operation, count, dtype, bias=True, gelu=gelu, residual=not gelu)
    assert error(product.run(), product.reference()) < tolerance(dtype)


@pytest.mark.parametrize("count", [1, 4])
def test_a_bounded_prefetch_changes_no_result(count: int) -> None:
    """Of two rows of gate and two of up."""
    product = Product("gate_up", count, k=64)
    config = LinearConfig(8, 32)
    out_TN = product.run(replace(config, prefetch=5 * 64 * HALF.itemsize))
    assert torch.equal(out_TN, product.run(config))
    assert error(out_TN, product.reference()) < tolerance(HALF)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("k", [37, 256, 300])
@pytest.mark.parametrize("operation", SIZES)
@pytest.mark.parametrize(
    ("count", "config"),
    [(1, LinearConfig(32, 64)), (2, LinearConfig(8, 128)), (5, None), (17, None), (32, None)],
)
def test_weights_of_8_bits(
    count: int, config: LinearConfig | None, operation: str, k: int, storage: str
) -> None:
    dtype = torch.float16 if operation == "residual_linear" else HALF
    product = Product(operation, count, dtype, k, storage, bias=True)
    assert error(product.run(config), product.reference()) < tolerance(dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("operation", ["norm_linear", "gate_up"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_is_pending_is_added_and_kept(
    count: int, operation: str, normed: bool, offset: bool
) -> None:
    traits = {"normed": normed, "offset": offset, "gelu": True}
    product = Product(operation, count, k=150, pending=True, **traits)
    out_TN = product.run()
    assert product.pending is not None
    expected = product.pending._replace(out=torch.empty_like(product.pending.out))
    assert error(out_TN, product.reference(expected)) < tolerance(HALF)
    torch.testing.assert_close(product.pending.out, expected.out)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count", [1, 3, 5, 17])
@pytest.mark.parametrize("offset", [False, True])
def test_against_float64(count: int, offset: bool) -> None:
    product = Product("norm_linear", count, k=300, offset=offset)
    x, norm = product.x_TK.double(), product.norm
    assert norm is not None
    x = x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * (norm.weight.double() + offset)
    out_TN = product.run()
    assert error(out_TN, x @ product.linear.weight.double().T) < tolerance(HALF)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("count", [3, 8])
def test_results_that_are_scaled(count: int, residual: bool) -> None:
    product = Product("residual_linear", count, residual=residual)
    out_TN = poisoned(count, N, dtype=HALF)
    arguments = (product.x_TK, product.linear, product.residual_TN)
    residual_linear(*arguments, out_TN, scale=0.22)
    expected = reference_residual_linear(*arguments, scale=0.22)
    assert error(out_TN, expected) < tolerance(HALF)
    assert error(out_TN, product.reference()) > 0.1


@pytest.mark.parametrize("count", [1, 5])
def test_the_residual_may_be_what_is_written(count: int) -> None:
    product = Product("residual_linear", count)
    expected = product.reference()
    out_TN = product.run(out_TN=product.residual_TN)
    assert error(out_TN, expected) < tolerance(HALF)


@pytest.mark.parametrize("operation", SIZES)
@pytest.mark.parametrize("count", [3, 6])
def test_a_row_is_its_own(operation: str, count: int) -> None:
    """The result of a row depends on no other row: not on NaN, nor on memory past the last row."""
    product = Product(operation, count)
    memory = torch.cat([product.x_TK, poisoned(64, product.x_TK.shape[1], dtype=HALF)])
    product.x_TK = memory[:count]
    alone_TN = product.run()
    assert not alone_TN.isnan().any()
    memory[1] = float("nan")
    memory[0] = 1e30
    out_TN = product.run()
    assert out_TN[1].isnan().all()
    assert torch.equal(out_TN[2:], alone_TN[2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_the_activation_by_itself(gelu: bool, dtype: torch.dtype) -> None:
    x_TF = rows(3, 2 * 1029, dtype) * 10
    out_TF = poisoned(3, 1029, dtype=dtype)
    activate_rows(x_TF, out_TF, gelu=gelu)
    assert error(out_TF, reference_activate_rows(x_TF, gelu=gelu)) < tolerance(dtype)
    clamp = Clamp(limit=7.0, alpha=1.702, up_offset=1.0)
    activate_rows(x_TF, out_TF, gelu=gelu, clamp=clamp)
    expected = reference_activate_rows(x_TF, gelu=gelu, clamp=clamp)
    assert error(out_TF, expected) < tolerance(dtype)
    x_TF[1, 5] = float("nan")
    activate_rows(x_TF, out_TF, gelu=gelu, clamp=clamp)
    assert out_TF.isnan().sum() == 1


@pytest.mark.parametrize(
    ("weight", "raised"),
    [(torch.zeros(N + 1, 21), ValueError), (torch.zeros(N, 21).int(), TypeError)],
)
def test_what_does_not_fit_is_an_error(weight: Tensor, raised: type[Exception]) -> None:
    product = Product("norm_linear", 1)
    product.linear = GpuLinear(weight.to(DEVICE))
    with pytest.raises(raised):
        product.run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("features", [21, 64, 5000])
def test_norm_rows(features: int, offset: bool, dtype: torch.dtype) -> None:
    x_TD, norm = rows(3, features, dtype), random_norm(features, dtype, offset=offset)
    out_TD = poisoned(3, features, dtype=dtype)
    norm_rows(x_TD, norm, out_TD)
    assert error(out_TD, reference_norm_rows(x_TD, norm)) < tolerance(dtype)


@pytest.mark.parametrize("features", [21, 5000])
def test_norm_rows_adds_and_keeps_what_is_pending(features: int) -> None:
    dtype = torch.bfloat16
    x_TD, delta_TD = rows(3, features, dtype), rows(3, features, dtype)
    norm, post = random_norm(features, dtype), random_norm(features, dtype, offset=True)
    out_TD, sum_TD = (poisoned(3, features, dtype=dtype) for _ in range(2))
    norm_rows(x_TD, norm, out_TD, Pending(delta_TD, post, sum_TD))
    expected = torch.empty_like(sum_TD)
    pending = Pending(delta_TD, post, expected)
    assert error(out_TD, reference_norm_rows(x_TD, norm, pending)) < 1e-2
    torch.testing.assert_close(sum_TD, expected)


@pytest.mark.parametrize("storage", ["model", *STORAGES])
@pytest.mark.parametrize(("count", "n", "k"), [(1, 37, 21), (40, 130, 256), (1040, 150, 70)])
def test_many_rows_of_every_storage(count: int, n: int, k: int, storage: str) -> None:
    dtype = torch.bfloat16
    x_TK, linear = rows(count, k, dtype), random_linear(n, k, dtype, storage, bias=True)
    out_TN = poisoned(count, n, dtype=dtype)
    library_linear(x_TK, linear, out_TN)
    assert error(out_TN, reference_linear(x_TK, linear)) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_of_every_dtype(dtype: torch.dtype) -> None:
    x_TK, linear = rows(20, 100, dtype), random_linear(37, 100, dtype, "int8")
    x_TK[3] = float("nan")
    out_TN = poisoned(20, 37, dtype=dtype)
    library_linear(x_TK, linear, out_TN)
    assert out_TN[3].isnan().all()
    whole = torch.arange(20, device=x_TK.device) != 3
    assert error(out_TN[whole], reference_linear(x_TK, linear)[whole]) < tolerance(dtype)
