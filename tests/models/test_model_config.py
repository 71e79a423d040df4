"""Model descriptions: read from both layouts of config.json, refused when they cannot be served."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import fused_layout
from stepgraph.runtime.models.presets import preset
from transformers import LlamaConfig

# As transformers 4 wrote it, values of a published 1B model.
OLD_LAYOUT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA3 = OLD_LAYOUT["rope_scaling"]


def old(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy({**OLD_LAYOUT, **changes})  # transformers writes into nested objects


def test_both_layouts() -> None:
    expected = dataclasses.replace(preset("llama-3.2-1b"), eos_token_ids=(128001, 128008))
    new = LlamaConfig(**old()).to_dict()  # what transformers 5 makes of the same values
    assert "rope_parameters" in new
    assert "rope_theta" not in new
    assert ModelConfig.from_hf(OLD_LAYOUT) == ModelConfig.from_hf(new) == expected


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], {}, (2, 3)),
        (2, {"eos_token_id": [5, 2]}, (2, 5)),
        (None, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_eos_tokens_are_merged(own: Any, generation: Any, expected: Any) -> None:
    assert ModelConfig.from_hf(old(eos_token_id=own), generation).eos_token_ids == expected


def words_of(changes: Mapping[str, Any]) -> Iterator[str]:
    """The changed keys and their values, as far as these are texts."""
    for key, value in changes.items():
        yield key
        if isinstance(value, Mapping):
            yield from words_of(value)
        values = value if isinstance(value, list) else [value]
        yield from (text for text in values if isinstance(text, str))


def check_refused(changes: Mapping[str, Any], read: Callable[[], object]) -> None:
    """Assert that a config is refused in few words, one of which was changed."""
    with pytest.raises(CheckpointError) as raised:
        read()
    message = str(raised.value)
    assert any(key in message for key in words_of(changes)), message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None, "model_type": "mamba"},
        {"architectures": None, "model_type": None},
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "hqq"}},
        {"rope_scaling": {"rope_type": "su", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": None}},
        {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
        {"rope_scaling": [1]},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 2e4}},
        {"num_key_value_heads": 5},
        {"head_dim": None, "hidden_size": 2050},
        {"vocab_size": None},
        {"torch_dtype": "float8_e4m3fn"},
        {"eos_token_id": "</s>"},
        {"eos_token_id": [1, 128256]},
    ],
    ids=str,
)
def test_message_names_the_field(changes: dict[str, Any]) -> None:
    check_refused(changes, lambda: ModelConfig.from_hf(old(**changes)))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("mistral-7b", 7_241_732_096),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-3-1b", 999_885_952),
        ("qwen2.5-0.5b", 494_032_768),
    ],
)
def test_number_of_parameters_is_the_published_one(name: str, parameters: int) -> None:
    layout = fused_layout(preset(name))
    assert sum(math.prod(fused.shape) for fused in layout.values()) == parameters
