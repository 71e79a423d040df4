"""Quality of quantised keys, values and weights, on a model that has been trained."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from ..rigs.engine_rig import opened

HELD_OUT = Path(sysconfig.get_paths()["stdlib"]) / "logging" / "handlers.py"
"""A file of the standard library that the demo model was not trained on."""


def demo_perplexity(kernels: str, num_tokens: int, window: int, **storage: str) -> float:
    """Return the perplexity of the first tokens of `HELD_OUT`, each decoded in a step."""
    sizes = {"max_num_seqs": 1, "max_model_len": window}
    losses = []
    with opened("demo", kernels=kernels, **sizes, **storage) as engine:
        assert engine.tokenizer is not None
        tokens = engine.tokenizer.encode(HELD_OUT.read_text())[:num_tokens]
        assert len(tokens) == num_tokens
        for start in range(0, num_tokens, window):
            piece = tokens[start : start + window]
            logits = engine.score(piece[:-1])
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(piece[1:])))
    return float(torch.stack(losses).mean().exp())


KV = [{"kv_dtype": "int8"}, {"kv_dtype": "fp8"}]
WEIGHTS = [{"weight_dtype": "int8"}, {"weight_dtype": "fp8"}]


@pytest.mark.parametrize(
    ("kernels", "num_tokens", "window", "storages"),
    [
        ("native", 500, 250, [*KV, *WEIGHTS[:1]]),
        pytest.param("torch", 500, 250, [*KV, *WEIGHTS], marks=pytest.mark.slow),
        pytest.param("native", 8192, 1024, [*KV, *WEIGHTS[:1]], marks=pytest.mark.slow),
    ],
)
def test_perplexity_stays_within_one_percent(
    kernels: str, num_tokens: int, window: int, storages: list[dict[str, str]]
) -> None:
    exact = demo_perplexity(kernels, num_tokens, window)
    assert 5 < exact < 60, "this is no text that the model knows to predict"
    for storage in storages:
        quantised = demo_perplexity(kernels, num_tokens, window, **storage)
        assert quantised != exact, "nothing was quantised"
        assert quantised == pytest.approx(exact, rel=0.01)
