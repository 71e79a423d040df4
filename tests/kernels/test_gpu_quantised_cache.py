"""Vectors that kernels write to the cache, and read of it, are those of the torch reference."""

from __future__ import annotations

import math

import pytest
import torch

tl = pytest.importorskip("triton.language")
triton = pytest.importorskip("triton")

from stepgraph.runtime.kernels.ops.kv_storage import (  # noqa: E402
    quantise,
    read_blocks,
    write_blocks,
)
from stepgraph.runtime.kernels.triton import quantised as qc  # noqa: E402
from stepgraph.runtime.kernels.triton.kernel_calls import call_kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STORAGES = ["model", "int8", "fp8"]
NATIVE = qc.fp8_is_native(torch.device(DEVICE))


@triton.jit
def _write(
    numbers_ptr, scales_ptr, x_ptr, slots_ptr, T, G: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STORAGE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All tokens of one head."""
    head = tl.program_id(0)
    t, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    x_at = (t[:, None] * G + head) * D + d[None, :]
    x = tl.load(x_ptr + x_at, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    slots = tl.load(slots_ptr + t, mask=t < T, other=0)
    qc.store_vectors(numbers_ptr, scales_ptr, x, slots, head, t < T, G, D, BLOCK_SIZE, STORAGE)


@triton.jit
def _read(
    numbers_ptr, scales_ptr, out_ptr, slots_ptr, T, G: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What stands at the slots, for one head."""
    head = tl.program_id(0)
    t, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    slots = tl.load(slots_ptr + t, mask=t < T, other=0)
    block, place = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    at = qc.vector_offset(block, head, place, G, D, BLOCK_SIZE, STORAGE)[:, None] + d[None, :]
    mask = (t < T)[:, None] & (d < D)[None, :]
    x = qc.load_numbers(numbers_ptr, at, mask, out_ptr.dtype.element_ty, STORAGE, NATIVE_FP8)
    x = x.to(tl.float32)
    if STORAGE != "model":
        scale_at = qc.scale_offset(block, head, place, G, D, BLOCK_SIZE)
        x *= qc.load_scales(scales_ptr, scale_at, t < T)[:, None]
    tl.store(out_ptr + (t[:, None] * G + head) * D + d[None, :], x, mask=mask)


@triton.jit
def _decode(byte_ptr, out_ptr, NATIVE_FP8: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out_ptr + i, qc.decode_fp8(tl.load(byte_ptr + i), NATIVE_FP8))


@triton.jit
def _encode(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, qc.encode_fp8(tl.load(x_ptr + i)))


def _side(storage: str, blocks: int, heads: int, block_size: int, width: int) -> torch.Tensor:
    """One side of a layer in poisoned memory: NaN, or bytes that are NaN as fp8 and as bfloat16."""
    if storage == "model":
        shape: tuple[int, ...] = (1, blocks, heads, block_size, width)
        return torch.full(shape, math.nan, device=DEVICE)
    shape = (1, blocks, heads, block_size * (width + 2))
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)


def _write_both(storage: str, x: torch.Tensor, slots: torch.Tensor, block_size: int) -> tuple:
    """The side as the kernel leaves it and as the reference does."""
    tokens, heads, width = x.shape
    kv = _side(storage, 7, heads, block_size, width)
    expected = kv.clone()
    write_blocks(expected[0], slots, x, block_size, storage)
    views = qc.cache_views(kv, width, block_size, storage)
    call_kernel(
        _write, (heads,), views.keys, views.key_scales, x, slots, tokens, G=heads, D=width,
        BLOCK_SIZE=block_size, STORAGE=storage, BLOCK_T=triton.next_power_of_2(tokens),
        BLOCK_D=triton.next_power_of_2(width),
    )  # fmt: skip
    return kv, expected, views


@pytest.mark.sampled(5)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("heads", "width", "block_size"), [(1, 64, 16), (3, 10, 1), (2, 80, 5), (1, 36, 64)]
)
def test_writes_and_reads_are_those_of_the_reference(
    storage: str, heads: int, width: int, block_size: int
) -> None:
    torch.manual_seed(0)
    tokens = 6
    magnitude = torch.logspace(-6, 3, tokens * heads).view(tokens, heads, 1)
    x = (torch.randn(tokens, heads, width) * magnitude).to(DEVICE)
    x[2, 0] = 0.0
    slots = torch.randperm(7 * block_size)[:tokens].to(DEVICE)
    kv, expected, views = _write_both(storage, x, slots, block_size)
    assert torch.equal(kv.view(torch.uint8), expected.view(torch.uint8))

    out = torch.full_like(x, math.nan)
    call_kernel(
        _read, (heads,), views.keys, views.key_scales, out, slots, tokens, G=heads, D=width,
        BLOCK_SIZE=block_size, STORAGE=storage, NATIVE_FP8=NATIVE, BLOCK_T=8,
        BLOCK_D=triton.next_power_of_2(width),
    )  # fmt: skip
    read = read_blocks(kv[0], torch.arange(7, device=DEVICE)[None], block_size, storage)[0]
    assert torch.equal(out, read[:, slots].transpose(0, 1))


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(storage: str, poison: float) -> None:
    x = torch.randn(2, 1, 8).to(DEVICE)
    x[1, 0, 3] = poison
    kv, expected, _ = _write_both(storage, x, torch.tensor([4, 9], device=DEVICE), 4)
    scales = kv[0].view(torch.bfloat16)[:, 0, 16:]
    assert scales[1, 0].isfinite()
    assert not scales[2, 1].isfinite()
    assert scales[2, 1] != 0
    assert torch.equal(kv[0, 1], expected[0, 1])  # the healthy neighbour
    if storage == "int8":
        assert torch.equal(kv[0, 2, 0, 8:16], expected[0, 2, 0, 8:16])


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_scales_of_the_smallest_and_largest_vectors(storage: str) -> None:
    """Subnormal numbers and those whose quotient lies on a bfloat16 are rounded as there."""
    tops = [1e-45, 1e-40, 1.2e-38, 127.0, 448.0, 448.0 * 1.0078125, 3.3e38, 0.5]
    x = torch.tensor(tops)[:, None, None] * torch.linspace(-1, 1, 32)
    slots = torch.arange(4, 12, device=DEVICE)
    kv, expected, _ = _write_both(storage, x.to(DEVICE), slots, 4)
    assert torch.equal(kv, expected)


def test_halves_are_rounded_to_even() -> None:
    x = torch.cat((torch.tensor([127.0, -127.0]), torch.arange(-30, 32) / 2.0))[None, None]
    numbers, _ = quantise(x, "int8")
    kv, _, _ = _write_both("int8", x.to(DEVICE), torch.tensor([5], device=DEVICE), 4)
    assert torch.equal(kv[0, 1, 0, 64:128].cpu(), numbers[0, 0])


@pytest.mark.parametrize("native", [False, True] if NATIVE else [False])
def test_every_byte_of_fp8_is_decoded(native: bool) -> None:
    byte = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.full((256,), 7.0, device=DEVICE)
    call_kernel(_decode, (1,), byte, out, NATIVE_FP8=native)
    expected = byte.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_fp8_is_encoded_to_the_nearest_even_number() -> None:
    """All numbers of fp8, all middles between two of them, and the floats beside those."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    up, down = torch.tensor(1e9), torch.tensor(-1.0)
    x = torch.cat((numbers, middles, middles.nextafter(up), middles.nextafter(down)))
    x = torch.cat((x, -x, torch.tensor([1e-30, -1e-45])))
    x = torch.nn.functional.pad(x, (0, 1024 - len(x))).to(DEVICE)
    out = torch.full((1024,), 0x7F, dtype=torch.uint8, device=DEVICE)
    call_kernel(_encode, (1,), x, out, N=1024)
    assert torch.equal(out, x.to(torch.float8_e4m3fn).view(torch.uint8))
