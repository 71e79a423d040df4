"""Memory of packed weights: places and alignment."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.kernels import PackedMemory

pytestmark = pytest.mark.usefixtures("cpu_ops")

DTYPES = [torch.bfloat16, torch.float32, torch.int8]


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
