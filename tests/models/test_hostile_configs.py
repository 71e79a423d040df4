"""Values that no config should hold: each is a typed error of bounded length, or it works."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgraph.runtime import EngineConfig, SamplingParams
from stepgraph.runtime.errors import CheckpointError, ConfigError, MemoryBudgetError
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.models.resolved_config import ResolvedConfig

from ..rigs.engine_rig import opened
from ..rigs.tiny_models import changed_checkpoint
from .test_model_config import words_of

TYPED = (CheckpointError, ConfigError, MemoryBudgetError)
LONGEST_MESSAGE = 3000
"""Of characters: a list of ten tensors that do not fit, or a memory plan."""

INTEGERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**62, 2**64, 10**400])
FLOATS = st.sampled_from(
    [-1.0, 0.0, 1e-320, 1e-12, 0.5, 1.0, 1 + 2**-52, 1e9, 1e308, math.inf, -math.inf, math.nan]
)
TEXTS = st.sampled_from(["", "llama", "yarn", "8", "\ud800", "\0", "x" * 100_000])
SCALARS = st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ROPE_KEYS = """
    rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast
    beta_slow truncate attention_factor mscale mscale_all_dim partial_rotary_factor
"""
ROPE = st.builds(
    lambda kind, rest: {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, **rest},
    st.sampled_from(["default", "linear", "llama3", "yarn"]) | SCALARS,
    st.dictionaries(st.sampled_from(ROPE_KEYS.split()), SCALARS, max_size=4),
)
KEYS = """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_theta tie_word_embeddings
    max_position_embeddings attention_bias mlp_bias hidden_act hidden_activation layer_types
    sliding_window use_sliding_window max_window_layers sliding_window_pattern
    query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping bos_token_id
    eos_token_id dtype torch_dtype quantization_config use_bidirectional_attention
    partial_rotary_factor original_max_position_embeddings rope_local_base_freq
    first_k_dense_replace n_routed_experts q_lora_rank kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim v_head_dim rope_interleave
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size n_shared_experts
    n_group topk_group topk_method norm_topk_prob routed_scaling_factor moe_layer_freq
    decoder_sparse_step mlp_only_layers moe_layers interleave_moe_layer_step intermediate_size_mlp
    no_rope_layers no_rope_layer_interval attention_chunk_size use_qk_norm floor_scale attn_scale
    attn_temperature_tuning swiglu_limit swiglu_alpha
"""
CHANGES = st.builds(
    lambda plain, ropes: plain | ropes,
    st.dictionaries(st.sampled_from(KEYS.split()), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(["rope_scaling", "rope_parameters"]), ROPE | VALUES),
)
MODELS = (
    *("micro", "mistral", "qwen3", "gemma2", "gemma3", "deepseek_v2", "deepseek_v3"),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2_moe", "deepseek_v3_moe", "llama4"),
)


def start_and_decode(directory: Path) -> None:
    with opened(directory, max_num_seqs=2, memory_bytes=200 << 20) as engine:
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert output.finished


def refusal(work: Callable[[], object]) -> str | None:
    """The message of a typed error, None where there is none; within seconds of processor time."""
    began = time.process_time()
    message = None
    try:
        work()
    except TYPED as error:
        message = str(error)
        assert len(message) < LONGEST_MESSAGE
    assert time.process_time() - began < 5.0  # a garbage collection takes a second
    return message


def resident(name: str) -> int:
    """Bytes of the process; 0 where the system does not say."""
    with suppress(OSError):
        found = re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())
        return int(found[1]) << 10 if found else 0
    return 0


def check_refused_or_works(directory: Path) -> None:
    message = None

    def start() -> None:
        nonlocal message
        message = refusal(lambda: start_and_decode(directory))

    with suppress(OSError):  # no Linux, or a sandbox
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident set
    before = resident("VmHWM")
    start()
    assert resident("VmHWM") - before < 200 << 20
    assert message is None or str(directory) in message or "memory" in message


def fuzz(max_examples: int) -> Callable[..., Any]:
    """A test of so many random changes of the configs of random models."""

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @given(model=st.sampled_from(MODELS), changes=CHANGES)
    @settings(
        max_examples=max_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    def check(tiny: Any, tmp_path: Path, model: str, changes: dict[str, Any]) -> None:
        directory = tiny(model).directory
        check_refused_or_works(changed_checkpoint(directory, tmp_path / "changed", **changes))

    return check


test_any_value_is_refused_or_works = fuzz(30)
test_many_values_are_refused_or_work = pytest.mark.slow(fuzz(2000))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2**62},
        {"num_hidden_layers": 4000},
        {"hidden_size": 10**400},
        {"rope_theta": 10**400},
        {"sliding_window": "x" * 10**6},
        {"eos_token_id": [10**400] * 1000},
        {"architectures": ["x" * 10**6], "model_type": "gpt"},
        {"model_type": ["llama"]},
        {"rope_scaling": {"rope_type": "linear", "factor": 1e300}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 1e-320}},
    ],
    ids=lambda changes: str(list(changes)),
)
def test_the_key_and_the_file_are_named(tiny: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = {"rope_parameters": None, **changes}
    directory = changed_checkpoint(tiny("micro").directory, tmp_path / "changed", **whole)
    message = refusal(lambda: start_and_decode(directory))
    assert message is not None
    assert str(directory) in message
    words = (*words_of(changes), "architecture")
    assert any(word in message for word in words), message


@pytest.mark.parametrize(
    "content",
    [
        '{"vocab_size": ' * 100_000 + "1" + "}" * 100_000,
        '{"model_type": "llama", "model_type": "mistral"}',
        '{"vocab_size": ' + "9" * 100_000 + "}",
        " " * (5 << 20) + "{}",
        "[1]",
    ],
    ids=["deep", "key twice", "digits", "long", "list"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_python_does_not_take(tiny: Any, tmp_path: Path, name: str, content: str) -> None:
    directory = changed_checkpoint(tiny("micro").directory, tmp_path / "changed")
    (directory / name).write_text(content)
    message = refusal(lambda: read_config(directory))
    assert message is not None
    assert message.startswith(str(directory / name))


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no")

    __hash__ = object.__hash__


MODEL = preset("smollm2-135m")
FIELDS = [field.name for field in dataclasses.fields(EngineConfig)]
ODD = [
    *(10**400, 10**5000, -(10**400), -1, 2**63, 0.5, -0.0, math.nan, math.inf, True, False),
    *("", "8", "cpu\0", "cuda:256", "cpu:128", "x" * 10**6, b"cpu", None, (), [1], [[]], {}, set()),
    *(1j, Unprintable(), torch.ones(2), (10**400,), ("1",), (True,), object),
]


@pytest.mark.parametrize("field", FIELDS)
def test_any_engine_configuration_is_refused_or_resolves(field: str) -> None:
    for value in ODD:
        choices = {"device": "cpu", "mode": "eager", field: value}
        message = refusal(lambda c=choices: ResolvedConfig.resolve(EngineConfig(**c), MODEL))
        assert message is None or len(message) < 500
        if isinstance(value, int) and value.bit_length() > 70:
            assert message is not None
            assert field in message
