"""Short convolutions, whose inputs lie in the paged cache. Models with them are among those of
`test_invariants.py` and `test_speculation.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.kernels.ops.short_conv import reference_short_conv

from ..rigs.engine_rig import Open


@given(data=st.data())
@settings(max_examples=60)
def test_the_operator_is_a_convolution(data: st.DataObject) -> None:
    """Against float64, of a row that is computed in chunks beside padding, in a poisoned cache."""
    taps, features = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    heads, dim, sides, size = 2, 4, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5))
    layers = range(-(-features // (heads * dim * sides)))
    length, columns = data.draw(st.integers(1, 9)), 9
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tables = torch.zeros(2, 2, columns, dtype=torch.int32)
    tables[:, 0] = torch.randperm(2 * columns, generator=rng).view(2, columns) + 1
    arena = torch.full((len(layers), sides, 2 * columns + 1, heads, size, dim), torch.nan)
    arena[:, :, 0] = 0.0
    weight = torch.randn(features, 1, taps, generator=rng)
    bias = torch.randn(features, generator=rng) if data.draw(st.booleans()) else None
    x = torch.randn(length, features, generator=rng)
    outputs, done = list[torch.Tensor](), 0
    while done < length:
        count = data.draw(st.integers(1, length - done))
        positions = torch.tensor([*range(done, done + count), 0])
        rows = torch.tensor([0] * count + [1])
        slots = tables[:, rows, positions // size].long() * size + positions % size
        out = reference_short_conv(
            *(torch.cat((x[done : done + count], torch.ones(1, features))), weight, bias, arena),
            *(positions, slots, rows, tables, [layer % 2 for layer in layers], layers),
        )
        outputs.append(out[:count])
        done += count
    padded = F.pad(x.T[None].double(), (taps - 1, 0))
    added = None if bias is None else bias.double()
    exact = F.conv1d(padded, weight.double(), added, groups=features)
    torch.testing.assert_close(torch.cat(outputs).double(), exact[0].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("refused", [{"kv_dtype": "int8"}, {"tensor_parallel": 2}])
def test_what_convolutions_do_not_support(open_engine: Open, refused: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, check=lambda error: error.field in refused):
        open_engine("lfm2", **refused)
