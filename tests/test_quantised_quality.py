"""Quality of quantised keys, values and weights, on a model that has been trained."""

from __future__ import annotations

import re

import pytest
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.demo.perplexity import held_out_tokens, main, perplexity


def demo_perplexity(mode: str, num_tokens: int, window: int, **storage: str) -> float:
    config = EngineConfig(device="cpu", mode=mode, max_num_seqs=1, max_model_len=window, **storage)
    with Engine.from_pretrained("demo", config) as engine:
        return perplexity(engine, held_out_tokens()[:num_tokens], window)


KV = [{"kv_dtype": "int8"}, {"kv_dtype": "fp8"}]
WEIGHTS = [{"weight_dtype": "int8"}, {"weight_dtype": "fp8"}]


@pytest.mark.parametrize(
    ("mode", "num_tokens", "window", "storages"),
    [
        ("compile", 500, 250, [*KV, *WEIGHTS[:1]]),
        pytest.param("eager", 500, 250, [*KV, *WEIGHTS], marks=pytest.mark.slow),
        pytest.param("compile", 1 << 16, 1024, [*KV, *WEIGHTS[:1]], marks=pytest.mark.slow),
    ],
)
def test_perplexity_stays_within_one_percent(
    mode: str, num_tokens: int, window: int, storages: list[dict[str, str]]
) -> None:
    exact = demo_perplexity(mode, num_tokens, window)
    assert 5 < exact < 60, "this is no text that the model knows to predict"
    for storage in storages:
        quantised = demo_perplexity(mode, num_tokens, window, **storage)
        assert quantised != exact, "nothing was quantised"
        assert quantised == pytest.approx(exact, rel=0.01)


def test_bytes_are_halved() -> None:
    """But for the scale: 2 bytes for the 32 elements of a head."""
    sizes = {}
    for kv_dtype in ("auto", "int8", "fp8"):
        config = EngineConfig(
            device="cpu", mode="eager", kv_dtype=kv_dtype, max_num_seqs=1, num_blocks=9
        )
        with Engine.from_pretrained("demo", config) as engine:
            sizes[kv_dtype] = engine.stats()["memory"]["cache"]["measured"]
    assert sizes["int8"] == sizes["fp8"] == sizes["auto"] * (32 + 2) / 64


def test_bad_windows() -> None:
    config = EngineConfig(device="cpu", mode="eager", max_num_seqs=1, max_model_len=64)
    with Engine.from_pretrained("demo", config) as engine:
        for window in (1, 11):
            with pytest.raises(ValueError, match=f"from 2 to the 10 tokens given, not {window}"):
                perplexity(engine, list(range(10)), window)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--window 1", "--window must be from 2 to 2048, the context of the model, not 1"),
        ("--window 2049", "--window must be from 2 to 2048, the context of the model, not 2049"),
        ("--tokens 63 --window 64", "from --window, 64, to the 3000 tokens .*, not 63"),
        ("--tokens 3001", "from --window, 1024, to the 3000 tokens .*, not 3001"),
    ],
)
def test_a_wrong_command_line_starts_no_engine(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    monkeypatch.setattr("stepgraph.runtime.demo.perplexity.text_tokens", lambda _: [1] * 3000)
    monkeypatch.delattr("stepgraph.runtime.demo.perplexity.Engine.from_pretrained")
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
