"""Memory of packed weights: places, alignment, lifetime, and what a decoder puts there."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels import PackedMemory, select_kernels
from stepgraph.runtime.kernels.weights import INT8, MODEL, WeightStorage
from torch.multiprocessing.reductions import StorageWeakRef

from ..rigs.sharding_rig import random_decoder, tiny_config

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

DTYPES = [torch.bfloat16, torch.float32, torch.int8]


@pytest.fixture(scope="module", autouse=True)
def _cpu_ops() -> None:
    kernels.load_cpu_ops()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 70), st.sampled_from(DTYPES))))
def test_parts_are_copies_on_cache_lines_of_their_own(
    shapes: list[tuple[int, int, torch.dtype]],
) -> None:
    tensors = [torch.randint(-99, 99, (n, k)).to(dtype) for n, k, dtype in shapes]
    memory = PackedMemory(sum(tensor.nbytes for tensor in tensors), len(tensors))
    placed = [memory.place(tensor) for tensor in tensors]
    for tensor, part in zip(tensors, placed, strict=True):
        assert torch.equal(part, tensor)
        assert part.dtype == tensor.dtype
        assert part.is_contiguous()
        assert part.data_ptr() % 64 == 0
        if tensor.nbytes:
            assert part.data_ptr() != tensor.data_ptr()
    assert len({part.untyped_storage().data_ptr() for part in placed if part.nbytes}) <= 1


@pytest.mark.parametrize("weights", [MODEL, INT8])
@pytest.mark.parametrize("variant", ["base", "odd"])
def test_a_decoder_keeps_its_packed_weights_together(weights: WeightStorage, variant: str) -> None:
    config = tiny_config(variant, 1)
    chosen = select_kernels("cpu", "compile", torch.bfloat16, weights)
    decoder = random_decoder(config, chosen, torch.bfloat16)
    packed = [p for p in decoder.parameters() if p.dim() == 4]
    assert len(packed) == 4 * config.num_layers + (1 if config.tie_word_embeddings else 2)
    assert len({p.untyped_storage().data_ptr() for p in packed}) == 1
    alive = StorageWeakRef(packed[0].untyped_storage())
    del decoder, packed
    gc.collect()
    assert alive.expired()
