"""Memory of packed weights: places and alignment."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.kernels import PackedMemory

pytestmark = pytest.mark.usefixtures("cpu_ops")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300)))
def test_parts_lie_on_cache_lines_of_their_own(sizes: list[int]) -> None:
    memory = PackedMemory(sum(sizes), len(sizes))
    parts = [memory.take(size) for size in sizes]
    for number, part in enumerate(parts):
        part.fill_(number)
        assert part.data_ptr() % 64 == 0
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        assert part.tolist() == [number % 256] * size
    assert len({part.untyped_storage().data_ptr() for part in parts if part.nbytes}) <= 1
