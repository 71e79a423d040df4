"""Types of GGUF tensors: the numbers of the package gguf, for any bits."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.kernels.ops.parameter import ExpertRows, HeadRows, Narrowed, Slice
from stepgraph.runtime.kernels.weights.gguf import GGUF_TYPES, GGUFType

from ..rigs.gguf_files import random_blocks

TYPES = list(GGUF_TYPES.values())


@pytest.mark.parametrize("stored_as", TYPES, ids=lambda found: found.name)
def test_type_has_the_numbers_of_gguf(stored_as: GGUFType) -> None:
    theirs = GGMLQuantizationType(stored_as.number)
    assert theirs.name == stored_as.name
    assert GGML_QUANT_SIZES[theirs] == (stored_as.elements, stored_as.nbytes)
    blocks = random_blocks(stored_as, (2, 5), 3)
    expected = gguf.dequantize(blocks.reshape(2, 5, -1), theirs)
    decoded = stored_as.weight(torch.from_numpy(blocks)).decode()
    assert np.array_equal(decoded.numpy(), expected)
    doubled = stored_as.weight(torch.from_numpy(blocks), scale=2.0).decode()
    assert np.array_equal(doubled.numpy(), 2 * expected)


@given(data=st.data())
def test_part_is_the_part_of_the_whole(data: st.DataObject) -> None:
    stored_as = data.draw(st.sampled_from(TYPES))
    blocks = torch.from_numpy(random_blocks(stored_as, (2, 8), 3))
    columns = 3 * stored_as.elements
    start = data.draw(st.integers(0, columns - 1))
    part = Slice(1, start, data.draw(st.integers(1, columns - start)))
    rows = data.draw(st.sampled_from([Slice(0, 1, 6), HeadRows(0, 2, 4, 4, interleaved=True)]))
    whole = stored_as.weight(blocks).decode()
    for stored, numbers, selection in (
        *((blocks[1], whole[1], s) for s in (None, rows, part, Narrowed(rows, part))),
        (blocks, whole, Narrowed(ExpertRows(1, 2, 3), part)),
    ):
        expected = numbers if selection is None else selection.read(numbers)
        found = stored_as.read(stored, selection, 1.0).decode()
        assert torch.equal(found, expected)
