"""Vectors of the cache and weights in kernels: how they are read and written.

Device functions for the three storages of `kernels/ops/kv_storage.py`, whose `write_blocks` and
`read_blocks` are the reference; what they write is bit for bit the same (but for the payload of a
NaN). Shapes: G kv heads, D elements of a vector, N vectors.

A kernel does not cast pointers: it takes the views that `cache_views` makes of one layer, numbers
(the model's dtype, int8, or uint8 for the bits of fp8) and scales (bfloat16). A vector is
`numbers * scale`; a reader may leave the scale to what it multiplies the vector by, as numbers of 8
bits are exact in bfloat16.

fp8 is e4m3: s eeee mmm, value (-1)^s 2^(e - 7) 1.m, without infinity, NaN being s 1111 111. From
compute capability 8.9 on processors convert it (`NATIVE_FP8`); elsewhere integer operations do.
Of weights: N output features, K input features, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.linear import LinearTensors
from ..weights.stored import FP8_BLOCK, group_size, in_features
from .kernel_calls import INTERPRETED, compute_capability
from .linear import STORAGES
from .rowwise import load_tile

_NUMBERS = {"int8": torch.int8, "fp8": torch.uint8}


class CacheForm(NamedTuple):
    """How vectors are stored in blocks: a constant of kernels."""

    heads: int
    """G."""
    width: int
    """D, elements of a vector."""
    block_size: int
    storage: str
    native_fp8: bool

    @property
    def stride(self) -> int:
        """Numbers from one head of a block to the next; bytes where scales follow the vectors."""
        return self.block_size * (self.width if self.storage == "model" else self.width + 2)


class CacheViews(NamedTuple):
    """One layer's part of the arena as kernels take it; None: it does not exist."""

    keys: Tensor
    key_scales: Tensor | None
    values: Tensor | None
    value_scales: Tensor | None


def cache_views(
    kv: Tensor, head_dim: int, block_size: int, storage: str
) -> tuple[CacheViews, CacheForm]:
    """Views of `arena[layer]`, `[sides, num_blocks, G, block_size, D]` or bytes, and their form.

    Raises ValueError for quantised blocks whose scales stand at odd addresses.
    """
    form = CacheForm(kv.shape[2], head_dim, block_size, storage, fp8_is_native())
    if storage == "model":
        return CacheViews(kv[0], None, kv[1] if kv.shape[0] > 1 else None, None), form
    if head_dim * block_size % 2:
        raise ValueError(
            f"{storage} keys of {head_dim} elements in blocks of {block_size} have scales at odd "
            "addresses; kernels take an even head_dim or block size"
        )
    sides = [(side.view(_NUMBERS[storage]), side.view(torch.bfloat16)) for side in kv]
    return CacheViews(*sides[0], *(sides[1] if len(sides) > 1 else (None, None))), form


def fp8_is_native() -> bool:
    """Whether kernels may use conversions of fp8; so does the interpreter."""
    return compute_capability() >= 89


@triton.jit
def vector_offset(block, head, place, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """First element of the vector at a place of a block, int64, in the view of numbers."""
    return (block.to(tl.int64) * CACHE.heads + head) * CACHE.stride + place * CACHE.width


@triton.jit
def scale_offset(block, head, place, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of its scale, in the view of scales."""
    index = block.to(tl.int64) * CACHE.heads + head
    return index * (CACHE.stride // 2) + CACHE.block_size * CACHE.width // 2 + place


@triton.jit
def load_vectors(  # type: ignore[no-untyped-def]
    numbers_ptr, at, i, stored, WIDTH: tl.constexpr, dtype: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Elements `i`, below WIDTH, of the vectors [N] at `at`, as `dtype` (the model's); 0 where they
    are not `stored`, whatever the memory holds."""
    pointers = numbers_ptr + (at[:, None] + i[None, :])
    mask = stored[:, None] if i.shape[0] == WIDTH else stored[:, None] & (i < WIDTH)[None, :]
    # Everything in branches: what follows a branch that returns is compiled all the same.
    if CACHE.storage == "model":
        numbers = tl.load(pointers, mask=mask, other=0.0)
    elif CACHE.storage == "int8":
        numbers = tl.load(pointers, mask=mask, other=0).to(tl.float32)
    else:
        numbers = decode_fp8(tl.load(pointers, mask=mask, other=0), CACHE.native_fp8)
    return numbers.to(dtype)


@triton.jit
def load_scales(scales_ptr, offsets, mask):  # type: ignore[no-untyped-def]
    """Scales in float32; 0 where masked."""
    return tl.load(scales_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def decode_fp8(byte, NATIVE_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of bits (uint8) in float32."""
    if NATIVE_FP8:
        number = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = byte.to(tl.int32)
        # e4m3's bits as the upper ones of a float32: its bias is 127 instead of 7, so 2**120 is
        # missing, also from numbers without a leading one.
        number = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        number = tl.where((bits & 0x7F) == 0x7F, float("nan"), number * 1.329227995784916e36)
    return number


@triton.jit
def encode_fp8(x):  # type: ignore[no-untyped-def]
    """The bits (uint8) of the numbers nearest to float32 `x`, ties to even, at most 448."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Keep three bits of the mantissa; a carry runs into the exponent as it should.
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # Below 2**-6 numbers are multiples of 2**-9, which is what 2**14 leaves of a float32.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_int8(x):  # type: ignore[no-untyped-def]
    """The integers nearest to float32 `x`, ties to even, at most 127 and 0 for NaN."""
    # 1.5 * 2**23 leaves whole numbers of a float32.
    rounded = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    rounded = tl.minimum(tl.maximum(rounded, -127), 127)
    return tl.where(x == x, rounded, 0).to(tl.int8)


@triton.jit
def quantised(x, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers (int8, or uint8 for fp8) and scales `[N]` (bfloat16) of vectors `[N, D]`, as
    `kv_storage.quantise`; padding of D is zero."""
    x = x.to(tl.float32)
    # As integers NaN is above infinity and that above all numbers.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    exact = tl.div_rn(largest, 127.0 if CACHE.storage == "int8" else 448.0)
    bits = exact.to(tl.int32, bitcast=True)
    upper = tl.where(bits > 0x7F800000, 0x7FC0, (bits + 0xFFFF) >> 16)
    scale = (upper << 16).to(tl.float32, bitcast=True)
    scaled = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale)[:, None] + tl.zeros_like(x))
    numbers = encode_int8(scaled) if CACHE.storage == "int8" else encode_fp8(scaled)
    return numbers, upper.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def store_vectors(  # type: ignore[no-untyped-def]
    numbers_ptr, scales_ptr, x, slots, head, mask, CACHE: tl.constexpr
):  # fmt: skip
    """Write vectors `[N, D padded]` (zeros in the padding) to the slots `[N]` of a head, where
    `mask` `[N]` says so. Return them in float32 as they will be read."""
    block, place = slots // CACHE.block_size, slots % CACHE.block_size
    d = tl.arange(0, x.shape[1])
    offset = vector_offset(block, head, place, CACHE)
    pointers = numbers_ptr + offset[:, None] + d[None, :]
    inside = mask[:, None] & (d < CACHE.width)[None, :]
    if CACHE.storage == "model":
        stored = x.to(numbers_ptr.dtype.element_ty)
        tl.store(pointers, stored, mask=inside)
        stored = stored.to(tl.float32)
    else:
        numbers, scale = quantised(x, CACHE)
        tl.store(pointers, numbers, mask=inside)
        tl.store(scales_ptr + scale_offset(block, head, place, CACHE), scale, mask=mask)
        stored = numbers.to(tl.float32) if CACHE.storage == "int8" else decode_fp8(numbers, False)
        stored *= scale.to(tl.float32)[:, None]
    return stored


class WeightForm(NamedTuple):
    """How a weight is stored: a constant of kernels."""

    storage: str
    """One of `linear.STORAGES`."""
    native_fp8: bool
    groups: int
    """Of a row; 0: a row has one scale or none."""
    group: int
    """Inputs of a group."""
    minimums: bool

    @property
    def is_grouped(self) -> bool:
        """Whether tiles are multiplied with their scales before a product, because they have
        several groups, or minimums."""
        return self.storage == "codes" or self.group < FP8_BLOCK or self.minimums


def kernel_weight(linear: LinearTensors) -> tuple[Tensor, WeightForm]:
    """A weight as kernels take it (fp8 as its bits, codes in words of 8), and its form."""
    weight, scales = linear.weight, linear.scales
    storage = STORAGES[weight.dtype]
    groups, group = 0, FP8_BLOCK
    if scales is not None and scales.dim() > 1:
        groups = scales.shape[-1]
        group = group_size(in_features(weight), groups)
    minimums = scales is not None and scales.dim() > 2
    views = {"fp8": torch.uint8, "codes": torch.int32}
    stored = weight.view(views[storage]) if storage in views else weight
    return stored, WeightForm(storage, fp8_is_native(), groups, group, minimums)


_EMULATED = tl.constexpr(INTERPRETED)


@triton.jit
def permuted_bytes(low, high, selector):  # type: ignore[no-untyped-def]
    """Bytes of words: byte i is byte s of the 8 bytes of `low` and then `high`, where s are the
    lowest 3 of the bits from 4 i on of `selector`, of which the fourth one is 0."""
    if _EMULATED:
        words = low & 0
        for i in tl.static_range(4):
            s = (selector >> (4 * i)) & 7
            byte = tl.where(s < 4, low, high) >> (8 * (s & 3)) & 255
            words = words | (byte << (8 * i))
    else:
        words = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], tl.int32, True, 1
        )
    return words


@triton.jit
def load_levels(w_ptr, K: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 16 bytes that 4-bit codes stand for, in words; they end the first row of the weight."""
    levels = (0, 0, 0, 0)
    if FORM.storage == "codes":
        at = w_ptr + K // 8
        levels = (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    return levels


@triton.jit
def load_groups(  # type: ignore[no-untyped-def]
    scale_ptr, rows, k, mask, EVEN: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Scales and minimums of features `k` of rows, in float32; 0 where masked."""
    at = scale_ptr + rows * (FORM.groups * (2 if FORM.minimums else 1)) + k // FORM.group
    scales = load_tile(at, mask, EVEN).to(tl.float32)
    minimums = 0.0
    if FORM.minimums:
        minimums = load_tile(at + FORM.groups, mask, EVEN).to(tl.float32)
    return scales, minimums


@triton.jit
def decoded_tile(  # type: ignore[no-untyped-def]
    w_ptr, scale_ptr, levels, rows, start, K: tl.constexpr, BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Weights of rows `[R]` in float32, `[R, BLOCK_K]` from feature `start` on, with their scales
    and minimums; 0 past the last feature."""
    UNIT: tl.constexpr = FORM.group if FORM.group < BLOCK_K else BLOCK_K
    WORD: tl.constexpr = 8 if FORM.storage == "codes" else 1
    first = start + tl.arange(0, BLOCK_K // UNIT)[None, :] * UNIT
    k = first[:, :, None] + tl.arange(0, UNIT // WORD)[None, None, :] * WORD
    STRIDE: tl.constexpr = K // 8 + 4 if FORM.storage == "codes" else K
    at = w_ptr + rows[:, None, None] * STRIDE + k // WORD
    numbers = as_numbers(tl.load(at, mask=k < K, other=0), FORM, levels)
    scales, minimums = load_groups(scale_ptr, rows[:, None], first, first < K, False, FORM)
    numbers *= scales[:, :, None]
    if FORM.minimums:
        numbers -= minimums[:, :, None]
    return tl.reshape(numbers, [rows.shape[0], BLOCK_K])


@triton.jit
def as_numbers(tile, FORM: tl.constexpr, levels=None):  # type: ignore[no-untyped-def]
    """Stored weights in float32, without their scales: of words, all that they hold.

    Words are int32 and hold the elements that stand in them in memory, the lowest bits first; a
    tile `[..., W]` makes `[..., W * elements of a word]`. As a loop carries a tile from one pass to
    the next, each element of a tile of smaller elements would take a register of its own, and
    putting them there would wait for them. `levels` are of `load_levels`.
    """
    if tile.dtype == tl.int32:
        if FORM.storage == "float32":
            numbers = tile.to(tl.float32, bitcast=True)
        elif FORM.storage == "bfloat16":
            low = (tile << 16).to(tl.float32, bitcast=True)
            numbers = _interleaved(low, (tile & -65536).to(tl.float32, bitcast=True))
        elif FORM.storage == "float16":
            low = tile.to(tl.int16).to(tl.float16, bitcast=True)
            high = (tile >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            numbers = _interleaved(low, high).to(tl.float32)
        elif FORM.storage == "codes":
            numbers = _level_numbers(tile, levels)
        else:
            even = _interleaved(tile, tile >> 16)
            numbers = _byte_numbers(_interleaved(even, even >> 8).to(tl.uint8), FORM)
    elif FORM.storage == "fp8" or FORM.storage == "int8":
        numbers = _byte_numbers(tile.to(tl.uint8, bitcast=True), FORM)
    else:
        numbers = tile.to(tl.float32)
    return numbers


@triton.jit
def as_operand(tile, FORM: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stored weights in the model's dtype, in which numbers of 8 bits are exact."""
    if FORM.storage == "int8" or FORM.storage == "fp8":
        operand = as_numbers(tile, FORM).to(dtype)
    else:
        operand = tile
    return operand


@triton.jit
def _interleaved(first, second):  # type: ignore[no-untyped-def]
    """`[A, B, C]` twice as `[A, B, 2 * C]`, an element of each in turn."""
    pairs = tl.join(first, second)
    return tl.reshape(pairs, [first.shape[0], first.shape[1], first.shape[2] * 2])


@triton.jit
def _level_numbers(word, levels):  # type: ignore[no-untyped-def]
    """The levels of the 8 codes of words, in float32.

    Four codes at a time choose a byte of the first and of the last 8 levels, and their highest bit
    one of both. Bytes are levels plus 128, and the lowest ones of 2**23 + 128 + level.
    """
    low, upper = word & 0x77777777, (word >> 1) & 0x44444444 | 0x32103210
    first = permuted_bytes(
        permuted_bytes(levels[0], levels[1], low), permuted_bytes(levels[2], levels[3], low), upper
    )
    low, upper = low >> 16, upper >> 16
    second = permuted_bytes(
        permuted_bytes(levels[0], levels[1], low), permuted_bytes(levels[2], levels[3], low), upper
    )
    four = _interleaved(first, second)
    even = _interleaved(_biased(four, 0x7440), _biased(four, 0x7442))
    odd = _interleaved(_biased(four, 0x7441), _biased(four, 0x7443))
    return _interleaved(even, odd).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _biased(four, SELECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """2**23 plus a byte, in the bits of float32."""
    return permuted_bytes(four, tl.full(four.shape, 0x4B000000, tl.int32), SELECTOR)


@triton.jit
def _byte_numbers(byte, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of bits (uint8) in float32."""
    if FORM.storage == "fp8":
        numbers = decode_fp8(byte, FORM.native_fp8)
    else:
        # Processors convert few integers a cycle. 2**23 + 128 + i has i + 128 as its lowest bits.
        bits = (byte ^ 0x80).to(tl.int32) | 0x4B000000
        numbers = bits.to(tl.float32, bitcast=True) - 8388736.0
    return numbers
