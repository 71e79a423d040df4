"""Rotary positions: frequencies equal the ones in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.decoder import FrequenciesByLength
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.rope import inverse_frequencies
from transformers import Glm4Config, LlamaConfig
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .test_model_config import old


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 4096}])
def test_first_context_outside_the_object_has_priority(kind: str, inside: dict[str, int]) -> None:
    rope = {"rope_type": kind, "factor": 8.0, **inside}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    changes = {"original_max_position_embeddings": 1024, "rope_scaling": rope}
    config = ModelConfig.from_hf(old(**changes))
    assert config.rope_scaling.original_max_position_embeddings == 1024
    expected = LlamaRotaryEmbedding(LlamaConfig(**old(**changes))).inv_freq
    actual = inverse_frequencies(config.rope(0), model_plan(config).rope_dim)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0.0)
    new = LlamaConfig(**old(**changes)).to_dict()
    assert ModelConfig.from_hf(new) == config


@given(st.data())
@settings(deadline=None)
def test_equal_to_transformers(data: st.DataObject) -> None:
    draw = data.draw
    head_dim, theta = 2 * draw(st.integers(1, 64)), draw(st.floats(1e3, 1e7))
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    low, span = draw(st.floats(0.5, 2.0)), draw(st.floats(0.5, 40.0))
    rope: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        rope["factor"] = draw(st.floats(1.0, 64.0))
    if kind == "llama3":
        rope |= {"low_freq_factor": low, "high_freq_factor": low + span}
    if kind == "yarn":
        rope |= {"beta_slow": low, "beta_fast": low + span, "truncate": draw(st.booleans())}
        rope["mscale"] = draw(st.sampled_from([None, 0.0, 0.707, 1.0]))
        rope["mscale_all_dim"] = draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
        rope["attention_factor"] = draw(st.sampled_from([None, 1.0, 1.5]))
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = draw(st.integers(64, 16384))
    hf = LlamaConfig(**old(head_dim=head_dim, rope_scaling=rope, rope_theta=theta))
    embedding = LlamaRotaryEmbedding(hf)
    config = ModelConfig.from_hf(hf.to_dict())
    actual = inverse_frequencies(config.rope(0), model_plan(config).rope_dim)
    assert actual.dtype == torch.float32
    assert actual.shape == (head_dim // 2,)
    torch.testing.assert_close(actual, embedding.inv_freq, rtol=1e-5, atol=1e-12)
    assert config.rope(0).scaling.amplitude == pytest.approx(embedding.attention_scaling)


@given(st.data())
@settings(deadline=None)
def test_frequencies_by_length_equal_those_of_transformers(data: st.DataObject) -> None:
    draw = data.draw
    head_dim, theta = 2 * draw(st.integers(2, 24)), draw(st.floats(1e3, 1e7))
    kind, factor = draw(st.sampled_from(["longrope", "dynamic"])), draw(st.floats(1.0, 64.0))
    original, partial = draw(st.integers(8, 400)), draw(st.sampled_from([0.25, 0.5, 0.75, 1.0]))
    lengths = draw(st.lists(st.integers(1, 800), min_size=1, max_size=4))
    dim = int(head_dim * partial)
    if dim <= 2:
        return
    rope: dict[str, Any] = {"rope_type": kind, "factor": factor, "rope_theta": theta}
    changes = {"model_type": "glm4", "architectures": None, "head_dim": head_dim}
    if kind == "longrope":
        rope["original_max_position_embeddings"] = original
        factors = st.lists(st.floats(0.5, 60.0), min_size=(dim + 1) // 2, max_size=(dim + 1) // 2)
        rope |= {"short_factor": draw(factors), "long_factor": draw(factors)}
    else:
        changes["max_position_embeddings"] = original
    hf = Glm4Config(
        **old(
            **changes, rope_scaling=None, rope_parameters=rope | {"partial_rotary_factor": partial}
        )
    )
    config = ModelConfig.from_hf(hf.to_dict())
    frequencies = FrequenciesByLength([config.rope(0)], head_dim, torch.device("cpu"))
    (actual,) = frequencies(torch.tensor(lengths))
    for length, found in zip(lengths, actual, strict=True):
        embedding = Glm4RotaryEmbedding(hf)
        embedding(torch.ones(1), torch.arange(length)[None])
        expected = torch.zeros(head_dim // 2)
        expected[: (dim + 1) // 2] = embedding.inv_freq
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-12)
    assert config.rope(0).scaling.amplitude == pytest.approx(embedding.attention_scaling)
