"""The operators that drafters run on a CPU, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from stepgraph.cache.arena import Storage
from stepgraph.runtime import kernels
from stepgraph.runtime.execution.step_functions import reference_newest_tokens
from stepgraph.runtime.kernels import LayerPlace, packed_linear, quantise_weight
from stepgraph.runtime.kernels.cpu.drafted import (
    PackedWeight,
    drafter_context,
    linear_most_likely,
    newest_tokens,
)
from stepgraph.runtime.kernels.cpu.sampling import fused_most_likely, reference_rotations
from stepgraph.runtime.kernels.ops.kv_storage import write_blocks
from stepgraph.runtime.kernels.ops.linear import pack_linear
from stepgraph.runtime.models.modules import mean_square
from stepgraph.runtime.models.rope import rotate
from torch import Tensor

from ..rigs.thread_rig import kernel_threads

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def _cpu_ops() -> None:
    kernels.load_cpu_ops()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 1000, 4097])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_most_likely_after_a_linear_layer(rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 40).to(dtype)
    packed = pack_linear(torch.randn(vocab_size, 40).to(dtype))
    bias = torch.randn(vocab_size).to(dtype)
    if rows > 1:
        x[1] = torch.nan
        bias[0] = -torch.inf if vocab_size > 1 else 0.0
    logits = packed_linear(x, packed, bias, vocab_size)
    expected, probabilities = fused_most_likely(logits)
    for threads in (1, 2):
        with kernel_threads(threads):
            ids, found = linear_most_likely(x, packed, bias, vocab_size)
        assert torch.equal(ids, expected)
        torch.testing.assert_close(found, probabilities, rtol=1e-5, atol=0)


def test_newest_tokens() -> None:
    rows, first = torch.tensor([3, 0, 5]), torch.tensor([0, 4, 5])
    positions = torch.tensor([8, 0, 0, 7, 0, 0])
    token_positions = torch.tensor([4, 5, 6, 7, 7, 0])
    token_ids, next_ids = torch.arange(10, 16), torch.tensor([11, 12, 30, -1, -1, 31])
    arguments = rows, positions, first, token_positions, token_ids, next_ids
    for ours, expected in zip(
        newest_tokens(*arguments), reference_newest_tokens(*arguments), strict=True
    ):
        assert torch.equal(ours, expected)
    assert newest_tokens(*arguments)[1].tolist() == [30, 0, 31]
    positions[0] = 10
    with pytest.raises(IndexError):
        newest_tokens(*arguments)


HIDDEN, FEATURES, HEADS, SIZE, LAYERS, BLOCK, BLOCKS = 48, 96, 2, 16, 3, 4, 40
EPS = 1e-5


def reference_context(
    features: Tensor,
    fuse: Tensor,
    hidden_norm: Tensor,
    context: Tensor,
    key_norms: Tensor,
    rotations: tuple[Tensor, Tensor],
    slots: Tensor,
    arena: Tensor,
    places: list[LayerPlace],
    storage: Storage,
) -> None:
    """Float32 between roundings to the dtype of the features."""
    dtype = features.dtype

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(mean_square(x)[..., None] + EPS)
        return weight * scaled.to(dtype)

    hidden = norm((features.float() @ fuse.float().T).to(dtype), hidden_norm)
    made = (hidden.float() @ context.float().T).to(dtype)
    kv = made.view(len(features), LAYERS, 2, HEADS, SIZE)
    for layer, place in enumerate(places):
        keys = rotate(norm(kv[:, layer, 0], key_norms[layer]), *rotations)
        for side, x in enumerate((keys, kv[:, layer, 1])):
            write_blocks(arena[place.position, side], slots, x, BLOCK, storage)


@pytest.mark.parametrize(
    ("dtype", "storage", "weights"),
    [
        (torch.float32, "model", "model"),
        (torch.bfloat16, "model", "model"),
        (torch.bfloat16, "fp8", "model"),
        (torch.bfloat16, "int8", "int8"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 8, 21, 130])
def test_context_of_a_drafter(
    tokens: int, dtype: torch.dtype, storage: Storage, weights: str
) -> None:
    features = torch.randn(tokens, FEATURES).to(dtype)
    matrices = [
        torch.randn(HIDDEN, FEATURES) * FEATURES**-0.5,
        torch.randn(LAYERS * 2 * HEADS * SIZE, HIDDEN) * HIDDEN**-0.5,
    ]
    packed = []
    for i, matrix in enumerate(matrices):
        stored, scales = matrix.to(dtype), None
        if weights == "int8":
            stored, scales = quantise_weight(matrix, "int8")
        packed.append(PackedWeight(pack_linear(stored), scales))
        matrices[i] = stored.float() if scales is None else stored.float() * scales[:, None]
    hidden_norm, key_norms = (
        (1 + 0.2 * torch.randn(size)).to(dtype) for size in ((HIDDEN,), (LAYERS, SIZE))
    )
    positions = torch.randint(0, 1000, (tokens,))
    cos, sin = reference_rotations(positions, torch.rand(1, SIZE // 2))
    slots = torch.randperm(BLOCK * BLOCKS)[:tokens]
    places = [LayerPlace(0, position) for position in (2, 0, 1)]
    shape: tuple[int, ...] = (LAYERS, 2, BLOCKS, HEADS, BLOCK, SIZE)
    if storage == "model":
        arena = torch.full(shape, torch.nan, dtype=dtype)
    else:
        arena = torch.randint(0, 120, (*shape[:4], BLOCK * (SIZE + 2)), dtype=torch.uint8)
    expected = arena.clone()
    reference_context(
        *(features, matrices[0], hidden_norm, matrices[1], key_norms),
        *((cos[0], sin[0]), slots, expected, places, storage),
    )
    for threads in (1, 2):
        ours = arena.clone()
        with kernel_threads(threads):
            drafter_context(
                *(features, packed[0], hidden_norm, packed[1], key_norms, EPS),
                *(cos[0], sin[0], slots, ours, places, BLOCK, storage),
            )
        if storage == "model":
            tolerance = 1e-5 if dtype == torch.float32 else 0.04
            torch.testing.assert_close(
                ours, expected, rtol=tolerance, atol=tolerance, equal_nan=True
            )
        else:
            # Sums in another order may round to the next number, of data and of scales.
            assert (ours != expected).float().mean() < 0.05
