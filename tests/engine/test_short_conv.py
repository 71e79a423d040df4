"""Short convolutions, whose inputs lie in the paged cache: tokens are the same however they are
computed."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.kernels.ops.short_conv import reference_short_conv

from ..rigs.engine_rig import greedy, opened, run
from ..rigs.speculation_rig import guess
from ..rigs.tiny_models import Tiny, TinyModel

SIZES = {"block_size": 4, "prefill_chunk": 16}
NEW_TOKENS = 40


class Case(NamedTuple):
    model: TinyModel
    prompts: list[list[int]]
    """Of which some begin alike, up to the middle of a block or its end."""
    expected: list[list[int]]


@pytest.fixture(scope="module")
def case(tiny: Tiny) -> Case:
    first, second, *rest = tiny("lfm2").prompts(30, 21, 1, 2, 9)
    prompts = [first, first[:17] + second, first[:16] + second, *rest, second * 2]
    expected = [tiny("lfm2").greedy([prompt], NEW_TOKENS)[0] for prompt in prompts]
    return Case(tiny("lfm2"), prompts, expected)


@pytest.mark.parametrize(
    ("options", "reached"),
    [
        ({"max_num_seqs": 1, "prefix_cache": False}, ()),
        ({}, ("hit_tokens",)),
        ({"prefill_chunk": 3, "block_size": 8}, ("hit_tokens",)),
        ({"speculation": "suffix"}, ("hit_tokens", "accepted", "rejected")),
        ({"num_blocks": 60}, ("preemptions",)),
        (
            {"num_blocks": 60, "host_cache_bytes": 1 << 20, "speculation": "suffix"},
            ("preemptions", "swapped_in", "accepted"),
        ),
        pytest.param({"mode": "compile"}, ("hit_tokens",), marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_transformers(
    case: Case, options: dict[str, Any], reached: tuple[str, ...]
) -> None:
    with opened(case.model.directory, **(SIZES | options)) as engine:
        named = {str(i): tokens for i, tokens in enumerate(case.expected)}
        guesses = None
        if "speculation" in options:
            guesses = guess(engine, {f"{name}/0": tokens for name, tokens in named.items()})
        for _ in range(2):
            for i, prompt in enumerate(case.prompts):
                engine.add_request(prompt, greedy(NEW_TOKENS), request_id=str(i))
            assert {name: output.token_ids for name, output in run(engine).items()} == named
        engine.check_integrity()
        stats = engine.stats()
        seen = stats | stats["cache"]
        if guesses is not None:
            seen |= guesses.stats()
        assert all(seen[name] for name in reached)


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
def test_what_convolutions_do_not_support(case: Case, refused: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught, opened(case.model.directory, **(SIZES | refused)):
        pytest.fail("it is refused")
    assert caught.value.field in refused
