"""Short convolutions, whose inputs lie in the paged cache: tokens are the same however they are
computed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.kernels.ops.short_conv import reference_short_conv

from ..rigs.engine_rig import greedy, opened, run
from ..rigs.speculation_rig import guess
from ..rigs.tiny_models import Tiny, TinyModel

SIZES = {"block_size": 4, "prefill_chunk": 16}
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> TinyModel:
    return tiny("lfm2")


@pytest.fixture(scope="module")
def prompts(model: TinyModel) -> list[list[int]]:
    """Prompts of which some begin alike, in the middle of a block and at its end."""
    first, second, *rest = model.prompts(30, 21, 1, 2, 9)
    return [first, first[:17] + second, first[:16] + second, *rest, second * 2]


@pytest.fixture(scope="module")
def expected(model: TinyModel, prompts: list[list[int]]) -> list[list[int]]:
    return [model.greedy([prompt], NEW_TOKENS)[0] for prompt in prompts]


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
        ({"steps_per_launch": 3}, ("multi_step_launches",)),
        pytest.param({"mode": "compile"}, ("hit_tokens",), marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_transformers(
    model: TinyModel,
    prompts: list[list[int]],
    expected: list[list[int]],
    options: dict[str, Any],
    reached: tuple[str, ...],
) -> None:
    with opened(model.directory, **(SIZES | options)) as engine:
        named = {str(i): tokens for i, tokens in enumerate(expected)}
        guesses = None
        if "speculation" in options:
            guesses = guess(engine, {f"{name}/0": tokens for name, tokens in named.items()})
        for _ in range(2):
            for i, prompt in enumerate(prompts):
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
    """Against float64, of rows that are computed in chunks, in a poisoned cache."""
    taps, features = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    heads, dim, sides, size = 2, 4, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5))
    parts = -(-features // (heads * dim * sides))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    seed = data.draw(st.integers(0, 99))
    rng, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    columns = -(-max(lengths) // size)
    order = torch.randperm(2 * len(lengths) * columns, generator=rng) + 1
    tables = torch.zeros(2, len(lengths) + 1, columns, dtype=torch.int32)
    tables[:, :-1] = order.view(2, len(lengths), columns)
    arena = torch.full((parts, sides, len(order) + 1, heads, size, dim), torch.nan)
    arena[:, :, 0] = 0.0
    groups = [part % 2 for part in range(parts)]
    weight = torch.randn(features, 1, taps, generator=rng)
    bias = torch.randn(features, generator=rng) if data.draw(st.booleans()) else None
    inputs = [torch.randn(length, features, generator=rng) for length in lengths]
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        tokens = [
            (row, position)
            for row, (start, length) in enumerate(zip(done, lengths, strict=True))
            for position in range(start, min(length, start + chance.randint(0, 3)))
        ]
        rows = torch.tensor([*(row for row, _ in tokens), len(lengths)])
        positions = torch.tensor([*(position for _, position in tokens), 0])
        x = torch.stack([*(inputs[row][at] for row, at in tokens), torch.zeros(features)])
        blocks = tables[:, rows, positions // size].long()
        out = reference_short_conv(
            *(x, weight, bias, arena, positions, blocks * size + positions % size),
            *(rows, tables, groups, range(parts)),
        )
        for (row, _), result in zip(tokens, out, strict=False):
            outputs[row].append(result)
            done[row] += 1
    for x, results in zip(inputs, outputs, strict=True):
        padded = torch.nn.functional.pad(x.T[None].double(), (taps - 1, 0))
        added = None if bias is None else bias.double()
        exact = torch.nn.functional.conv1d(padded, weight.double(), added, groups=features)[0].T
        torch.testing.assert_close(torch.stack(results).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("refused", [{"kv_dtype": "int8"}, {"tensor_parallel": 2}])
def test_what_convolutions_do_not_support(model: TinyModel, refused: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught, opened(model.directory, **(SIZES | refused)):
        pytest.fail("it is refused")
    assert caught.value.field in refused
