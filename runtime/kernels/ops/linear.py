"""Linear layers over weights that are packed once, for the few tokens of a decode step.

Shapes: T tokens, K input features, N output features.

A packed weight is a dense tensor `[ceil(N / 32), steps, 32, w]`: blocks of 32 output features,
which are read sequentially. A step contains w consecutive input features of each output feature of
the block: w = 2 in bfloat16 (steps = ceil(K / 2)), w = 1 in float32 (steps = K), w = 2 bytes for
int8 weights (`weights/stored.py`), in models of any dtype. Incomplete steps and blocks are padded
with zeros. The packed weight replaces the original: for a tied embedding `packed_embedding` reads
it.

The C++ version computes each output as one chain of multiply-adds in the order of K, for any T. So
row t of `packed_linear(x, ...)` is bitwise the same in any batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights import dequantise

BLOCK = 32
_PER_STEP = {torch.bfloat16: 2, torch.float32: 1, torch.int8: 2}
"""Input features per step, by the dtype of the weight."""

torch.library.define(
    "stepgraph::packed_linear",
    "(Tensor x, Tensor packed, Tensor? bias, int out_features, Tensor? scales=None) -> Tensor",
)
torch.library.define(
    "stepgraph::packed_embedding", "(Tensor tokens, Tensor packed, int k) -> Tensor"
)


@torch.library.register_fake("stepgraph::packed_linear")
def _fake_packed_linear(
    x_TK: Tensor,
    packed: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    scales_N: Tensor | None = None,
) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], out_features)


@torch.library.register_fake("stepgraph::packed_embedding")
def _fake_packed_embedding(tokens_T: Tensor, packed: Tensor, k: int) -> Tensor:
    return packed.new_empty(tokens_T.shape[0], k)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights of `dtype` have a packed form (bfloat16, float32 and int8 do)."""
    return dtype in _PER_STEP


def _per_step(dtype: torch.dtype) -> int:
    if dtype not in _PER_STEP:
        known = ", ".join(str(known) for known in _PER_STEP)
        raise TypeError(f"no packed form for weights of {dtype}; use one of {known}")
    return _PER_STEP[dtype]


def packed_bytes(n: int, k: int, dtype: torch.dtype) -> int:
    """Bytes of a packed `[n, k]` weight, padding included. TypeError as `pack_linear`."""
    width = _per_step(dtype)
    return -(-n // BLOCK) * BLOCK * -(-k // width) * width * dtype.itemsize


def pack_linear(weight_NK: Tensor) -> Tensor:
    """Pack a `[N, K]` weight to `[ceil(N / 32), steps, 32, w]`; see the top of this file.

    Raises TypeError for a dtype without packed form, and ValueError if it is not a matrix.
    """
    if weight_NK.dim() != 2:
        raise ValueError(f"a weight to pack must be [N, K], got shape {tuple(weight_NK.shape)}")
    n, k = weight_NK.shape
    width = _per_step(weight_NK.dtype)
    padded = F.pad(weight_NK, (0, -k % width, 0, -n % BLOCK))
    return padded.view(-1, BLOCK, padded.shape[1] // width, width).transpose(1, 2).contiguous()


def packed_embedding(tokens_T: Tensor, packed: Tensor, k: int) -> Tensor:
    """Rows `tokens_T` (int64) of the packed weight, `[T, k]`: `F.embedding` for a tied head.

    Runs on CPU after `load_cpu_ops`. Raises IndexError for a token outside the weight's blocks;
    padding rows of the last block are zeros.
    """
    rows: Tensor = torch.ops.stepgraph.packed_embedding.default(tokens_T, packed, k)
    return rows


def reference_packed_embedding(tokens_T: Tensor, packed: Tensor, k: int) -> Tensor:
    """`packed_embedding` in plain PyTorch."""
    return packed[tokens_T // BLOCK, :, tokens_T % BLOCK].flatten(1)[:, :k]


def packed_linear(
    x_TK: Tensor,
    packed: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    scales_N: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias` as `[T, out_features]`, accumulated in float32.

    `packed` is `pack_linear(weight)` in the dtype of `x_TK`; `bias_N` is `[out_features]` or None.
    With `scales_N`, float32 `[out_features]`, the weight is int8 and each sum is multiplied by the
    scale of its feature before the bias is added and the result rounded. Runs on CPU after
    `load_cpu_ops`. Raises RuntimeError for inconsistent arguments.
    """
    out: Tensor = torch.ops.stepgraph.packed_linear.default(
        x_TK, packed, bias_N, out_features, scales_N
    )
    return out


def reference_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    scales: Tensor | None = None,
) -> Tensor:
    """`F.linear` with the signature of `packed_linear`, for an unpacked weight.

    An 8-bit weight (`WeightStorage.quantise`) is converted to float32 as a whole, which is correct
    on every device but slow. Scales of whole rows, `[N]`, are applied to the sums.
    """
    assert weight_NK.shape[0] == out_features
    if scales is None:
        return F.linear(x_TK, weight_NK, bias_N)
    if scales.dim() == 1:
        out_TN = F.linear(x_TK.float(), weight_NK.float()) * scales
    else:
        out_TN = F.linear(x_TK.float(), dequantise(weight_NK, scales))
    if bias_N is not None:
        out_TN = out_TN + bias_N.float()
    return out_TN.to(x_TK.dtype)
