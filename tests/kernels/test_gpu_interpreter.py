"""The interpreter, as tests use it, rounds and multiplies as a GPU does."""

from __future__ import annotations

import pytest
import torch

tl = pytest.importorskip("triton.language")
triton = pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED, call_kernel  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a device")


@triton.jit
def _round(x_ptr, bf16_ptr, fp8_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(bf16_ptr + i, x.to(tl.bfloat16))
    tl.store(fp8_ptr + i, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True))


@triton.jit
def _multiply(a_ptr, b_ptr, out_ptr, K, N: tl.constexpr, BLOCK_K: tl.constexpr):
    i = tl.arange(0, N)
    acc = tl.zeros([N, N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + i[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        b = tl.load(b_ptr + i[None, :] * K + k[:, None], mask=k[:, None] < K, other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + i[:, None] * N + i[None, :], acc)


def test_rounding_is_to_the_nearest_even_number() -> None:
    x = torch.randn(4096) * torch.logspace(-6, 2, 4096)
    bf16, fp8 = torch.empty(4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.uint8)
    call_kernel(_round, (1,), x, bf16, fp8, N=4096)
    assert torch.equal(bf16, x.bfloat16())
    assert torch.equal(fp8, x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_those_of_the_numbers(dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 50, dtype=dtype), torch.randn(16, 50, dtype=dtype)
    out = torch.full((16, 16), float("nan"))
    call_kernel(_multiply, (1,), a, b, out, 50, N=16, BLOCK_K=32)
    torch.testing.assert_close(out, a.float() @ b.float().T)
