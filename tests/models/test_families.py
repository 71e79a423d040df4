"""Engines of every family compute what transformers computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine

from ..rigs.engine_rig import Open, greedy
from ..rigs.expert_models import EXPERT_VARIANTS
from ..rigs.family_variants import FAMILY_VARIANTS
from ..rigs.hybrid_models import HYBRID_VARIANTS
from ..rigs.tiny_models import Tiny, TinyModel

SHAPES = (  # of Llama
    *("base", "odd", "one_kv_head", "as_many_kv_heads", "biases", "sharded", "llama3_rope"),
    "linear_rope",
)
FAMILIES = (
    *FAMILY_VARIANTS,
    *("qwen3", "qwen3_yarn", "mistral", "mistral_full", "gemma2", "gemma3", "deepseek_v2"),
    "deepseek_v3",
)
ALL = (*SHAPES, *FAMILIES, *EXPERT_VARIANTS, *HYBRID_VARIANTS)
REPEATED = (  # of parts that others have: of `odd`, yarn, no window, and second shapes of a family
    *("one_kv_head", "biases", "sharded", "llama3_rope"),
    *("qwen3_yarn", "mistral_full", "smollm3_listed", "phi3_quarter", "granite4_nope", "glm"),
    *("mixtral_one", "mixtral_all", "qwen3_moe_sliding", "gpt_oss_odd", "deepseek_v2_greedy"),
    *("deepseek_v3_scaled", "llama4_maverick", "lfm2_moe_unbiased", "qwen3_next_odd"),
    *("granite4_hybrid_dense", "falcon_h1_normed"),
    *("kimi_linear_compressed", "olmo_hybrid_rotated"),
)
ROUNDED_ALIKE = (  # as others: llama, olmo2, glm4, gemma3 and deepseek_v3
    *("qwen2", "smollm3", "mistral", "olmo3", "granite4", "glm4_odd", "deepseek_v2"),
    *("qwen3", "gemma2", "granite"),
)
COMPILED = (  # a family without native layers costs a minute of compilation
    *("odd", "gemma2", "smollm3", "phi3", "olmo3", "granite", "glm4_odd", "mixtral_all"),
    "ernie4_5_moe",
)
ALONE = (
    *("llama4_text", "lfm2", "lfm2_moe", "granitemoehybrid", "bamba", "nemotron_h"),
    *("minimax", "jamba"),
)
CPU = torch.device("cpu")


def slow_but(quick: Iterable[str], variants: Iterable[str] = ALL) -> list[Any]:
    """Parameters of which only the quick ones run without being asked for."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in variants]


# More prompts than rows, so that rows are handed on; several windows long, and many chunks. 150 is
# far beyond the 32 positions that the Llama-3 frequencies were scaled from.
BATCHES = {0: ((3, 17, 1, 50, 9, 150), 16), 2: ((33, 32, 31), 12)}
"""By the seed of the prompts: their lengths, and new tokens."""


def assert_parity(engine: Engine, model: TinyModel) -> None:
    for seed, (lengths, new_tokens) in BATCHES.items():
        prompts = model.prompts(*lengths, seed=seed)
        outputs = engine.generate(prompts, greedy(new_tokens))
        # In transformers left padding counts in the temperature of positions of Llama 4, and
        # has the bias of the inputs of convolutions; masks of MiniMax are as long as the
        # keys of its first layer, which may have none.
        alone = model.reference.config.model_type in ALONE
        batches = [[prompt] for prompt in prompts] if alone else [prompts]
        expected = [row for batch in batches for row in model.greedy(batch, new_tokens)]
        assert [o.token_ids for o in outputs] == expected
        assert {o.finish_reason for o in outputs} == {"length"}
        distinct = {token for o in outputs for token in o.token_ids}
        assert len(distinct) > 15, "a model that repeats itself shows nothing"
    (token_ids,) = model.prompts(70, seed=5)
    expected_logits = model.logits(token_ids)
    is_llama = model.reference.config.model_type == "llama"
    within = 1e-4 if is_llama else 2e-4
    if "linear_attention" in (getattr(model.reference.config, "layer_types", None) or ()):
        within = 1e-3  # as transformers' own logits differ between prefill and decode
    for prompt_len in (1, 50, 70) if is_llama else (50, 70):  # decoded, and prefilled in chunks
        logits = engine.score(token_ids, prompt_len)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected_logits[prompt_len - 1 :], rtol=0, atol=within)
    assert engine.stats()["fallbacks"] == 0
    engine.check_integrity()


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("variant", slow_but(set(ALL) - set(REPEATED)))
def test_eager_engine_equals_transformers(open_engine: Open, tiny: Tiny, variant: str) -> None:
    assert_parity(open_engine(variant, prefill_chunk=32, block_size=4), tiny(variant))


@pytest.mark.parametrize("variant", slow_but(COMPILED))
def test_compiled_engine_equals_transformers(
    compiled: Callable[[str], Engine], tiny: Tiny, variant: str
) -> None:
    assert compiled(variant).stats()["mode"] == "compile"
    assert_parity(compiled(variant), tiny(variant))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
@pytest.mark.parametrize("variant", ["base", "odd"])
def test_gpu_equals_transformers(open_engine: Open, tiny: Tiny, variant: str, mode: str) -> None:
    engine = open_engine(variant, device="cuda", mode=mode, prefill_chunk=32, block_size=4)
    assert_parity(engine, tiny(variant))


KV_VARIANTS = ("gemma2", "gemma3", "deepseek_v3", "phi3", "olmo3", "glm4")


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize(
    ("variant", "storage", "within"),
    [
        *((variant, {"kv_dtype": "int8"}, 0.3) for variant in KV_VARIANTS),
        *((variant, {"kv_dtype": "fp8"}, 1.0) for variant in KV_VARIANTS),
        *(
            (v, {"weight_dtype": "int8"}, 0.4)
            for v in ("qwen2", "phi3", "olmo2", "granite4", "glm4")
        ),
        *((v, {"weight_dtype": "int8"}, 0.6) for v in ("qwen3_moe", "gpt_oss", "deepseek_v2_moe")),
    ],
)
def test_stored_in_8_bits(
    open_engine: Open, tiny: Tiny, variant: str, storage: dict[str, str], within: float
) -> None:
    """Root mean square, of logits that spread by 3; NaN of memory that is not read never shows.
    Routers are not quantised."""
    engine = open_engine(variant, **storage, prefill_chunk=17, block_size=4)
    (token_ids,) = tiny(variant).prompts(61, seed=4)
    errors = engine.score(token_ids, 30) - tiny(variant).logits(token_ids)[29:]
    assert 0.0 < errors.square().mean().sqrt() < within
    named = engine.decoder.named_parameters()
    routers = [p for name, p in named if name.endswith("experts.router.weight")]
    assert bool(routers) == (variant in EXPERT_VARIANTS)
    assert all(router.dtype == torch.float32 for router in routers)


BFLOAT16 = slow_but(
    {*FAMILIES, "qwen3_5", "olmo_hybrid"} - {*REPEATED, *ROUNDED_ALIKE},
    (*FAMILIES, "qwen3_5", "olmo_hybrid"),
)


@pytest.mark.parametrize(
    ("variant", "mode"),
    [
        *(("base", mode) for mode in ("eager", "compile")),
        pytest.param("base", "graph", marks=pytest.mark.gpu),
        *(
            (v, "eager") if isinstance(v, str) else pytest.param(*v.values, "eager", marks=v.marks)
            for v in BFLOAT16
        ),
    ],
)
def test_bfloat16_is_as_exact_as_transformers(
    open_engine: Open, tiny: Tiny, variant: str, mode: str
) -> None:
    """Both round the same weights and then every intermediate result to bfloat16.

    Against the same rounded weights in float64 only the rounding of intermediate results is left:
    the root mean square of the engine's error may be at most 1.5 times that of transformers. A
    norm, rotation or embedding that is rounded at another place shows as more.
    """
    model = tiny(variant)
    device = "cuda" if mode == "graph" else "cpu"
    engine = open_engine(
        variant, device=device, mode=mode, dtype="bfloat16", prefill_chunk=32, max_num_seqs=1
    )
    rounded, exact = model.reload(torch.bfloat16), model.reload(torch.float64)
    ours, theirs = [], []
    with torch.no_grad():
        for to, source in zip(exact.parameters(), rounded.parameters(), strict=True):
            to.copy_(source)
        for seed in (11, 12):
            (token_ids,) = model.prompts(60, seed=seed)
            ids = torch.tensor([token_ids])
            expected = exact(ids).logits[0]
            # Of the first half, which is prefilled, every third position; the second is decoded.
            ends = range(1, 30, 3)
            shown = [*(end - 1 for end in ends), *range(29, 60)]
            theirs.append((rounded(ids).logits[0].double() - expected)[shown])
            head = torch.cat([engine.score(token_ids[:n], n) for n in ends])
            tail = engine.score(token_ids, 30)
            ours.append(torch.cat((head, tail)).double() - expected[shown])
    our_error, their_error = (torch.cat(e).square().mean().sqrt().item() for e in (ours, theirs))
    assert their_error > 1e-3, "the reference is not rounded: this test would show nothing"
    assert our_error <= 1.5 * their_error
