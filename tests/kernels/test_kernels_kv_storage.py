"""Quantised keys and values: the format, its accuracy, byte-equal writes of both kernels."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels import AttentionForm, LayerPlace, RaggedBatch
from stepgraph.runtime.kernels.ops import kv_storage
from torch import Tensor

STORAGES = ["int8", "fp8"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
needs_compiler = pytest.mark.usefixtures("cpu_ops")


def all_numbers(storage: str) -> Tensor:
    """Every number that a byte can be, NaN and -128 left out, as float64."""
    data = torch.arange(256, dtype=torch.uint8).view(kv_storage.DATA_DTYPES[storage]).double()
    return data[data.abs() <= kv_storage.LARGEST[storage]]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_nearest_number_is_taken_under_the_smallest_scale(
    storage: str, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(0)
    spread = torch.logspace(-3, 2, 40)[:, None]
    x = (torch.randn(40, 30, generator=rng) * spread).to(dtype)
    data, scale = kv_storage.quantise(x, storage)
    assert (data.dtype, data.shape, scale.dtype) == (torch.uint8, x.shape, torch.bfloat16)
    amax, largest = x.double().abs().amax(-1), kv_storage.LARGEST[storage]
    exact = (amax.float() / largest).double()
    below = (scale.view(torch.int16) - 1).view(torch.bfloat16).double()
    assert (scale.double() >= exact).all()
    assert (below < exact).all()
    numbers = data.view(kv_storage.DATA_DTYPES[storage]).double()
    quotient = x.double() / scale.double()[:, None]
    nearest = (quotient[..., None] - all_numbers(storage)).abs().amin(-1)
    torch.testing.assert_close((quotient - numbers).abs(), nearest, atol=1e-4, rtol=1e-5)
    back = kv_storage.dequantise(data, scale, storage)
    assert back.dtype == torch.float32
    assert torch.equal(back.double(), numbers * scale.double()[:, None])


@pytest.mark.parametrize("storage", STORAGES)
def test_zeros_and_what_is_not_finite(storage: str) -> None:
    x = torch.ones(3, 6)
    x[0] = 0
    x[1, 4] = torch.nan
    x[2, 1] = -torch.inf
    data, scale = kv_storage.quantise(x, storage)
    assert scale[0] == 0
    assert not data[0].any()
    assert not torch.isfinite(scale[1:]).any()
    back = kv_storage.dequantise(data, scale, storage)
    assert torch.equal(back[0], x[0])
    assert torch.isnan(back[1:]).all()


def written_by(attention: Callable[..., Tensor], x: Tensor, storage: str, latent: bool) -> Tensor:
    """The arena after one call that stores `[T, G, D]` as keys (and, turned around, as values)."""
    t, g, d = x.shape
    sides, block_size = (1 if latent else 2), 8
    num_blocks = -(-t // block_size) + 1
    arena = torch.zeros(1, sides, num_blocks, g, block_size * (d + 2), dtype=torch.uint8)
    tables = torch.tensor([[*range(1, num_blocks)]], dtype=torch.int32)
    positions = torch.arange(t)
    form = AttentionForm(0.1, storage=storage, value_dim=d)
    rows = torch.zeros(t, dtype=torch.int64)
    v = None if latent else x.flip(0)
    slots = positions[None] + block_size
    batch = RaggedBatch(
        positions, slots, rows, rows[:1], tables[None], num_blocks - 1, block_size, t
    )
    attention(x, x, v, arena, LayerPlace(0, 0), batch, form)
    return arena


@needs_compiler
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    storage=st.sampled_from(STORAGES),
    dtype=st.sampled_from(DTYPES),
    width=st.integers(1, 45),
    exponent=st.integers(-30, 30),
    latent=st.booleans(),
)
def test_both_implementations_write_the_same_bytes(
    seed: int, storage: str, dtype: torch.dtype, width: int, exponent: int, latent: bool
) -> None:
    rng = torch.Generator().manual_seed(seed)
    largest = kv_storage.LARGEST[storage]
    exponent = max(-12, min(4, exponent)) if dtype == torch.float16 else exponent
    x = torch.randn(11, 2, 2 * width, generator=rng)
    # Halves of steps under a scale of a power of two: what ties do shows.
    x[1] = torch.randint(-253, 253, x[1].shape, generator=rng) / 2
    x[1, :, 0] = largest
    x[2] = 0
    x[3] = -0.0
    x[4, 1, 1:] *= 2.0**-9
    x = (x * 2.0**exponent).to(dtype)
    arenas = [
        written_by(attention, x, storage, latent)
        for attention in (kernels.paged_attention, kernels.reference_paged_attention)
    ]
    assert torch.equal(*arenas)


@needs_compiler
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_is_read_as_its_number(storage: str, dtype: torch.dtype) -> None:
    """Keys n and 0 with values n and 0, read with query e_i: n_i goes through score and value."""
    numbers = all_numbers(storage).to(dtype)
    if len(numbers) % 2:
        numbers = torch.cat([numbers, numbers[:1]])
    d = len(numbers)
    kv = torch.stack([numbers, torch.zeros_like(numbers)])[:, None]
    form = AttentionForm(1 / 64, storage=storage, value_dim=d)
    arena = torch.full((1, 2, 2, 1, 2 * (d + 2)), 0xFF, dtype=torch.uint8)
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    # The last two tokens are the ones that are stored; all others go to the null block.
    q = torch.cat([torch.eye(d, dtype=dtype), torch.zeros(2, d, dtype=dtype)])[:, None]
    k = torch.cat([torch.zeros(d, 1, d, dtype=dtype), kv])
    slots = torch.cat([torch.zeros(d, dtype=torch.int64), torch.tensor([2, 3])])
    positions = torch.cat([torch.ones(d, dtype=torch.int64), torch.tensor([0, 1])])
    rows = torch.zeros(d + 2, dtype=torch.int64)
    batch = RaggedBatch(positions, slots[None], rows, rows[:1], table[None], 1, 2, d + 2)
    out = kernels.paged_attention(q, k, k, arena, LayerPlace(0, 0), batch, form)
    assert torch.equal(out[d, 0], numbers)  # sees itself only: no arithmetic but the decoding
    weights = torch.sigmoid(numbers.double() / 64)
    expected = weights[:, None] * numbers.double()
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out[:d, 0].double(), expected, atol=1e-6, rtol=tolerance)
