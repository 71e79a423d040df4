"""Engines with experts: tokens of transformers, quantised weights and caches, shared prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from stepgraph.cache.spec import group_layers
from stepgraph.runtime import Engine
from stepgraph.runtime.kernels import Experts, select_kernels
from stepgraph.runtime.loading.loader import random_weights
from stepgraph.runtime.memory.footprint import weight_bytes
from stepgraph.runtime.models.config import ExpertsConfig, ModelConfig
from stepgraph.runtime.models.decoder import Decoder, attention_specs
from stepgraph.runtime.models.plan import model_plan, weights_per_step

from ..rigs.expert_models import EXPERT_VARIANTS
from .test_families import assert_parity

if TYPE_CHECKING:
    from conftest import TinyModel

CPU = torch.device("cpu")


REPEATED = (  # of parts that others have
    *("mixtral_one", "mixtral_all", "qwen3_moe_sliding", "gpt_oss_odd", "deepseek_v2_greedy"),
    *("deepseek_v3_scaled", "llama4_maverick"),
)
CASES = [
    pytest.param(variant, marks=pytest.mark.slow) if variant in REPEATED else variant
    for variant in EXPERT_VARIANTS
]


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("variant", CASES)
def test_eager_engine_equals_transformers(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    assert_parity(open_engine(variant, prefill_chunk=32, block_size=4), tiny(variant))


@pytest.mark.parametrize(
    "variant",
    [v if v == "mixtral_all" else pytest.param(v, marks=pytest.mark.slow) for v in EXPERT_VARIANTS],
)
def test_compiled_engine_equals_transformers(
    compiled: Callable[[str], Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    assert_parity(compiled(variant), tiny(variant))


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "deepseek_v2_moe"])
def test_quantised_weights(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    """Routers are not quantised."""
    (token_ids,) = tiny(variant).prompts(40, seed=4)
    engine = open_engine(variant, weight_dtype="int8")
    error = (
        (engine.score(token_ids, 20) - tiny(variant).logits(token_ids)[19:]).square().mean().sqrt()
    )
    assert 0 < error < 0.6
    routers = [
        p for n, p in engine.decoder.named_parameters() if n.endswith("experts.router.weight")
    ]
    assert routers
    assert all(router.dtype == torch.float32 for router in routers)


SMALL = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=50,
    hidden_size=40,
    intermediate_size=33,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    experts=ExpertsConfig(
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=17, dense_layers=(1,)
    ),
)


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_take_the_bytes_that_were_planned(
    dtype: torch.dtype, storage: str, mode: str
) -> None:
    """Packed and not; each expert is padded to whole blocks."""
    kernels = select_kernels(CPU, mode, dtype, storage)
    decoder = Decoder(SMALL, kernels, dtype, CPU, group_layers(attention_specs(SMALL, 4)))
    decoder.store(random_weights(SMALL, dtype))
    assert decoder.weight_bytes == weight_bytes(decoder.plan, kernels, dtype)


def test_bytes_of_a_step() -> None:
    decoder = Decoder(
        SMALL,
        select_kernels(CPU, "eager", torch.float32),
        torch.float32,
        CPU,
        group_layers(attention_specs(SMALL, 4)),
    )
    decoder.store(random_weights(SMALL, torch.float32))
    expert = 4 * 3 * 40 * 17  # bytes
    others = decoder.weight_bytes - 2 * 5 * expert - 4 * 50 * 40
    assert decoder.weight_bytes_read(1) == others + 2 * 2 * expert
    assert decoder.weight_bytes_read(2) == round(others + 2 * 5 * (1 - 0.6**2) * expert)
    assert decoder.weight_bytes_read(1000) == others + 2 * 5 * expert
    assert weights_per_step(SMALL) == decoder.weight_bytes_read(1) // 4


def test_expected_experts_are_those_of_uniform_routing() -> None:
    plan = model_plan(SMALL)
    (op, *_) = (op for op in plan.operations if isinstance(op, Experts))
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 4, 9):
        chosen = torch.rand(4000, tokens, 5, generator=generator).argsort(-1)[..., :2].flatten(1)
        distinct = torch.nn.functional.one_hot(chosen, 5).amax(1).sum(1).double().mean()
        assert op.expected_experts(tokens) == pytest.approx(distinct.item(), rel=0.02)
