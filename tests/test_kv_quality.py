"""What quantised keys and values cost in quality, on a model that has been trained."""

from __future__ import annotations

import pytest
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.demo.perplexity import held_out_tokens, perplexity


def demo_perplexity(kv_dtype: str, mode: str, num_tokens: int, window: int) -> float:
    config = EngineConfig(
        device="cpu", mode=mode, kv_dtype=kv_dtype, max_rows=1, max_model_len=window
    )
    with Engine.from_pretrained("demo", config) as engine:
        return perplexity(engine, held_out_tokens()[:num_tokens], window)


@pytest.mark.parametrize(
    ("mode", "num_tokens", "window"),
    [("eager", 500, 250), pytest.param("compile", 1 << 16, 1024, marks=pytest.mark.slow)],
)
def test_perplexity_stays_within_one_percent(mode: str, num_tokens: int, window: int) -> None:
    exact = demo_perplexity("auto", mode, num_tokens, window)
    assert 5 < exact < 60, "this is no text that the model knows to predict"
    for kv_dtype in ("int8", "fp8"):
        quantised = demo_perplexity(kv_dtype, mode, num_tokens, window)
        assert quantised != exact, "nothing was quantised"
        assert quantised == pytest.approx(exact, rel=0.01)


def test_bytes_are_halved() -> None:
    """But for the scale: 2 bytes for the 32 elements of a head."""
    sizes = {}
    for kv_dtype in ("auto", "int8", "fp8"):
        config = EngineConfig(
            device="cpu", mode="eager", kv_dtype=kv_dtype, max_rows=1, num_blocks=9
        )
        with Engine.from_pretrained("demo", config) as engine:
            sizes[kv_dtype] = engine.stats()["memory"]["cache"]["measured"]
    assert sizes["int8"] == sizes["fp8"] == sizes["auto"] * (32 + 2) / 64


def test_bad_windows() -> None:
    config = EngineConfig(device="cpu", mode="eager", max_rows=1, max_model_len=64)
    with Engine.from_pretrained("demo", config) as engine:
        for window in (1, 11):
            with pytest.raises(ValueError, match=f"from 2 to the 10 tokens given, not {window}"):
                perplexity(engine, list(range(10)), window)
