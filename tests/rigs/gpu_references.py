"""For tests of Triton kernels: random linear layers, plain torch of other kernels, and errors."""

from __future__ import annotations

import torch
from stepgraph.runtime.kernels.ops.kv_storage import write_blocks
from stepgraph.runtime.kernels.ops.linear import LinearTensors
from stepgraph.runtime.kernels.triton.linear import GpuNorm
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
) -> LinearTensors:
    """`[n, k]` with entries of about 1 / sqrt(k); `storage` as in `STORAGES`, or the model's."""
    bias_N = rows(1, n, dtype)[0] if bias else None
    if storage == "model":
        return LinearTensors((rows(n, k, torch.float32) / k**0.5).to(dtype), None, bias_N)
    if storage.startswith("int8"):
        weight = torch.randint(-127, 128, (n, k), device=DEVICE, dtype=torch.int8)
    else:
        weight = (rows(n, k, torch.float32) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (n, -(-k // 128)) if storage.endswith("blocks") else (n,)
    scales = (torch.rand(shape, device=DEVICE) + 0.5) / (64.0 * k**0.5)
    return LinearTensors(weight, scales, bias_N)


def error(out: Tensor, reference: Tensor) -> float:
    """Relative, of all elements together; NaN if there is one."""
    difference = (out.double() - reference.double()).norm() / reference.double().norm()
    return float(difference)


def tolerance(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]


def reference_store(
    k_TGE: Tensor,
    v_TGE: Tensor | None,
    arena: Tensor,
    layer: int,
    slots_T: Tensor,
    block_size: int,
    storage: str,
) -> None:
    """Plain torch; arguments as in `store_keys_and_values`."""
    for side, x in zip(arena[layer], (k_TGE, v_TGE), strict=False):
        assert x is not None, "an arena of two sides takes keys and values"
        write_blocks(side, slots_T, x, block_size, storage)
