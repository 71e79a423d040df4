"""What a decode step must read, and shares of equal tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from stepgraph.runtime import Engine
from stepgraph.runtime.bench.workload import decode_roofline, equal_share


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weight_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("variant", ["odd", "qwen3", "deepseek_v2"])
def test_bytes_are_those_that_are_stored(
    open_engine: Callable[..., Engine], variant: str, kv_dtype: str, weight_dtype: str
) -> None:
    """Scales of cache and weights included; `odd` has an embedding that is only gathered from."""
    engine = open_engine(variant, kv_dtype=kv_dtype, weight_dtype=weight_dtype)
    parts = engine._open_parts()
    arena = parts.arena.tensor
    of_slot = arena.nbytes / (arena.shape[2] * engine.config.block_size)  # in one group
    assert engine.kv_bytes_read(1) == of_slot * len(parts.groups)
    weights = {p.data_ptr(): p.untyped_storage().nbytes() for p in parts.model.parameters()}
    gathered = 0
    if not engine.model_config.tie_word_embeddings:
        embedding = parts.model.embed_tokens.parameters()
        gathered = sum(p.untyped_storage().nbytes() for p in embedding)
    assert engine.weight_bytes_read(1) == sum(weights.values()) - gathered
    if weight_dtype != "auto":
        stored = {p.dtype for p in parts.model.parameters()}
        assert stored & {torch.int8, torch.float8_e4m3fn, torch.uint8}
    limit = decode_roofline(engine, [1, 1, 1], 1e9, 0.1)
    read = engine.weight_bytes_read(1) + 3 * engine.kv_bytes_read(1)
    assert (limit["bytes_per_step"], limit["floor_ms"]) == (read, pytest.approx(read / 1e6))
    assert limit["fraction"] == pytest.approx(read / 1e8)


def test_a_window_is_read_and_no_more(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine("mistral")  # all layers slide over 13 tokens
    assert engine.kv_bytes_read(13) == engine.kv_bytes_read(200) == 13 * engine.kv_bytes_read(1)


def test_the_share_of_equal_tokens() -> None:
    assert equal_share([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.75
    assert equal_share([[1, 2]], [[1]]) == 0.5
    with pytest.raises(ValueError, match="shorter"):
        equal_share([[1, 2]], [])
    with pytest.raises(ValueError, match="no token"):
        equal_share([], [])
