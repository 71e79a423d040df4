"""Random linear layers for tests of the kernels over them, and how results are compared."""

from __future__ import annotations

import torch
from stepgraph.runtime.kernels.triton.linear import GpuLinear, GpuNorm
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STORAGES = ("int8", "int8 blocks", "fp8", "fp8 blocks")


def rows(count: int, features: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, features, device=DEVICE).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def random_norm(features: int, dtype: torch.dtype, *, offset: bool = False) -> GpuNorm:
    return GpuNorm(rows(1, features, dtype)[0], 1e-5, offset)


def random_linear(
    n: int, k: int, dtype: torch.dtype, storage: str = "model", *, bias: bool = False
) -> GpuLinear:
    """`[n, k]` with entries of about 1 / sqrt(k); `storage` as in `STORAGES`, or the model's."""
    bias_N = rows(1, n, dtype)[0] if bias else None
    if storage == "model":
        return GpuLinear((rows(n, k, torch.float32) / k**0.5).to(dtype), None, bias_N)
    if storage.startswith("int8"):
        weight = torch.randint(-127, 128, (n, k), device=DEVICE, dtype=torch.int8)
        size = 64.0
    else:
        weight = (rows(n, k, torch.float32) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
        size = 64.0
    shape = (n, -(-k // 128)) if storage.endswith("blocks") else (n,)
    scales = (torch.rand(shape, device=DEVICE) + 0.5) / (size * k**0.5)
    return GpuLinear(weight, scales, bias_N)


def error(out: Tensor, reference: Tensor) -> float:
    """Relative, of all elements together; NaN if there is one."""
    difference = (out.double() - reference.double()).norm() / reference.double().norm()
    return float(difference)


def tolerance(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
