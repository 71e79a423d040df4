"""Products, norms and activations of steps of few and of many rows, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.ops.activation import Activate
from stepgraph.runtime.kernels.ops.linear import LinearTensors
from stepgraph.runtime.kernels.triton.linear import (
    LinearConfig,
    Pending,
    reference_linear,
)
from stepgraph.runtime.kernels.triton.linear_kernels import (
    gate_up,
    norm_linear,
    reference_product,
    residual_linear,
    unfused_linear,
)
from stepgraph.runtime.kernels.triton.rowwise import (
    activate_rows,
    norm_rows,
    reference_activate_rows,
    reference_norm_rows,
)
from torch import Tensor

from ..rigs.gpu_references import (
    DEVICE,
    DTYPES,
    STORAGES,
    error,
    poisoned,
    random_linear,
    random_norm,
    rows,
    tolerance,
)

N = 37
SILU = Activate(name="activate", function="silu", features=N)
GELU = replace(SILU, function="gelu_tanh")
HALF = torch.bfloat16
# The function, its input features, and a configuration for few rows; more rows take none.
OPERATIONS = {
    "norm_linear": (norm_linear, 21, LinearConfig(8, 64)),
    "gate_up": (gate_up, 21, LinearConfig(8, 64)),
    "residual_linear": (residual_linear, 53, LinearConfig(8, 16)),
}


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
        **traits: Any,
    ) -> None:
        self.run_kernel, least, self.config = OPERATIONS[operation]
        k = k or least
        self.x_TK = rows(count, k, dtype)
        self.traits, gated = traits, operation == "gate_up"
        if gated:
            self.traits.setdefault("activate", SILU)
        self.linear = random_linear(2 * N if gated else N, k, dtype, storage, bias=bias)
        if operation != "residual_linear":
            self.traits["norm"] = random_norm(k, dtype, offset=offset) if normed else None
        elif residual:
            self.traits["residual_TN"] = rows(count, N, dtype)
        if pending:
            post = random_norm(k, dtype, offset=offset)
            sum_TK = poisoned(count, k, dtype=dtype)
            self.traits["pending"] = Pending(rows(count, k, dtype), post, sum_TK)

    def run(self, config: LinearConfig | None = None, out_TN: Tensor | None = None) -> Tensor:
        """The result, in poisoned memory unless some is given."""
        if out_TN is None:
            out_TN = poisoned(len(self.x_TK), N, dtype=self.x_TK.dtype)
        config = config or (self.config if len(self.x_TK) <= 4 else None)
        self.run_kernel(self.x_TK, self.linear, out_TN, config=config, **self.traits)
        return out_TN

    def reference(self, **changes: Any) -> Tensor:
        return reference_product(self.x_TK, self.linear, **self.traits | changes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "traits", [{"activate": GELU}, {"scale": 0.22}, {}], ids=["gelu", "scale", ""]
)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("count", "dtype"),
    [*((n, dtype) for n in (3, 5) for dtype in DTYPES), *((n, HALF) for n in (1, 2, 4, 32))],
)
def test_odd_shapes(operation: str, count: int, dtype: torch.dtype, traits: dict[str, Any]) -> None:
    if ("activate" in traits) != (operation == "gate_up"):
        traits = {}
    product = Product(operation, count, dtype, bias=True, residual=count != 3, **traits)
    assert error(product.run(), product.reference()) < tolerance(dtype)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("k", [37, 256, 300])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("count", "config"),
    [(1, LinearConfig(32, 64)), (2, LinearConfig(8, 128)), (5, None), (17, None)],
)
def test_weights_of_8_bits(
    count: int, config: LinearConfig | None, operation: str, k: int, storage: str
) -> None:
    dtype = torch.float16 if operation == "residual_linear" else HALF
    product = Product(operation, count, dtype, k, storage, bias=True)
    assert error(product.run(config), product.reference()) < tolerance(dtype)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("operation", ["norm_linear", "gate_up"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_is_pending_is_added_and_kept(
    count: int, operation: str, normed: bool, offset: bool
) -> None:
    product = Product(operation, count, k=150, pending=True, normed=normed, offset=offset)
    out_TN, pending = product.run(), product.traits["pending"]
    expected = pending._replace(out=torch.empty_like(pending.out))
    assert error(out_TN, product.reference(pending=expected)) < tolerance(HALF)
    torch.testing.assert_close(pending.out, expected.out)


@pytest.mark.parametrize("count", [1, 5])
def test_the_residual_may_be_what_is_written(count: int) -> None:
    product = Product("residual_linear", count)
    expected = product.reference()
    out_TN = product.run(out_TN=product.traits["residual_TN"])
    assert error(out_TN, expected) < tolerance(HALF)


@pytest.mark.parametrize("operation", OPERATIONS)
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
@pytest.mark.parametrize("activate", [SILU, GELU], ids=["silu", "gelu"])
def test_the_activation_by_itself(activate: Activate, dtype: torch.dtype) -> None:
    x_TF = rows(3, 2 * 1029, dtype) * 10
    out_TF = poisoned(3, 1029, dtype=dtype)
    for one in (activate, replace(activate, limit=7.0, alpha=1.702, up_offset=1.0)):
        activate_rows(x_TF, out_TF, one)
        expected = reference_activate_rows(x_TF, one)
        assert error(out_TF, expected) < tolerance(dtype)
    x_TF[1, 5] = float("nan")
    activate_rows(x_TF, out_TF, one)
    assert out_TF.isnan().sum() == 1


@pytest.mark.parametrize(
    ("weight", "raised"),
    [(torch.zeros(N + 1, 21), ValueError), (torch.zeros(N, 21).int(), TypeError)],
)
def test_what_does_not_fit_is_an_error(weight: Tensor, raised: type[Exception]) -> None:
    product = Product("norm_linear", 1)
    product.linear = LinearTensors(weight.to(DEVICE))
    with pytest.raises(raised):
        product.run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("features", [21, 64, 5000])
def test_norm_rows(features: int, offset: bool, dtype: torch.dtype) -> None:
    """Also of what is pending, which is added and kept."""
    x_TD, norm = rows(3, features, dtype), random_norm(features, dtype, offset=offset)
    out_TD, sum_TD = (poisoned(3, features, dtype=dtype) for _ in range(2))
    norm_rows(x_TD, norm, out_TD)
    assert error(out_TD, reference_norm_rows(x_TD, norm)) < tolerance(dtype)
    post = random_norm(features, dtype, offset=not offset)
    pending = Pending(rows(3, features, dtype), post, sum_TD)
    norm_rows(x_TD, norm, out_TD, pending)
    expected = pending._replace(out=torch.empty_like(sum_TD))
    assert error(out_TD, reference_norm_rows(x_TD, norm, expected)) < tolerance(dtype)
    assert error(sum_TD, expected.out) < tolerance(dtype)


@pytest.mark.parametrize("storage", ["model", *STORAGES])
@pytest.mark.parametrize(
    ("count", "n", "k", "dtype"),
    [(20, 37, 100, torch.float32), (33, 130, 256, torch.float16), (130, 150, 70, HALF)],
)
def test_many_rows_of_every_storage(
    count: int, n: int, k: int, dtype: torch.dtype, storage: str
) -> None:
    x_TK, linear = rows(count, k, dtype), random_linear(n, k, dtype, storage, bias=True)
    x_TK[3] = float("nan")
    out_TN = poisoned(count, n, dtype=dtype)
    unfused_linear(x_TK, linear, out_TN)
    assert out_TN[3].isnan().all()
    whole = torch.arange(count, device=x_TK.device) != 3
    assert error(out_TN[whole], reference_linear(x_TK, linear)[whole]) < tolerance(dtype)
