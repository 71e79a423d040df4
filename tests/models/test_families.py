"""Engines of every family compute what transformers computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from stepgraph.cache.spec import group_layers
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.kernels import pack_linear, select_kernels
from stepgraph.runtime.loading.checkpoint import CheckpointReader, read_config
from stepgraph.runtime.loading.loader import iter_weights, random_weights
from stepgraph.runtime.memory.footprint import weight_bytes
from stepgraph.runtime.models.decoder import Decoder, attention_specs

from ..rigs.family_variants import FAMILY_VARIANTS

if TYPE_CHECKING:
    from conftest import TinyModel

FAMILIES = [
    "base",
    *FAMILY_VARIANTS,
    "qwen3",
    "qwen3_yarn",
    "mistral",
    "mistral_full",
    "gemma2",
    "gemma3",
    "deepseek_v2",
    "deepseek_v3",
]
REPEATED = (  # of parts that others have: yarn, no window, and second shapes of a family
    *("qwen3_yarn", "mistral_full", "smollm3_listed", "phi3_quarter", "granite4_nope", "glm"),
)
ROUNDED_ALIKE = (  # as others: llama, olmo2, glm4, gemma3 and deepseek_v3
    *("qwen2", "smollm3", "mistral", "olmo3", "granite4", "glm4_odd", "deepseek_v2"),
    *("qwen3", "gemma2", "granite"),
)
EAGER = [  # `base` is in test_engine_parity
    pytest.param(variant, marks=pytest.mark.slow) if variant in REPEATED else variant
    for variant in FAMILIES[1:]
]
CPU = torch.device("cpu")


@pytest.mark.parametrize("pack", [None, pack_linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3"])
def test_weights_take_the_bytes_that_were_planned(
    tiny: Callable[[str], TinyModel],
    variant: str,
    dtype: torch.dtype,
    pack: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    config = read_config(tiny(variant).directory)
    kernels = dataclasses.replace(select_kernels(CPU, "eager", dtype), pack=pack)
    groups = group_layers(attention_specs(config, 4))
    decoder = Decoder(config, kernels, dtype, CPU, groups)
    decoder.store(random_weights(config, dtype))
    assert decoder.weight_bytes == weight_bytes(decoder.plan, kernels, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["base", "gemma2", "gemma3"])
def test_embeddings_are_those_of_transformers(
    tiny: Callable[[str], TinyModel], variant: str, dtype: torch.dtype
) -> None:
    """To the last bit: the root that Gemma multiplies by is rounded to the dtype first."""
    model = tiny(variant)
    config = read_config(model.directory)
    kernels = select_kernels(CPU, "eager", dtype)
    decoder = Decoder(config, kernels, dtype, CPU, group_layers(attention_specs(config, 4)))
    with CheckpointReader(model.directory) as reader:
        decoder.store(iter_weights(reader, config, dtype))
    ids = torch.arange(model.vocab_size)
    with torch.no_grad():
        expected = model.reload(dtype).get_input_embeddings()(ids)
        torch.testing.assert_close(decoder.embed(ids), expected, rtol=0, atol=0)


COMPILED = [  # a family without native layers costs a minute of compilation
    variant
    if variant in ("gemma2", "smollm3", "phi3", "olmo3", "granite", "glm4_odd")
    else pytest.param(variant, marks=pytest.mark.slow)
    for variant in FAMILIES[1:]
]
# More prompts than rows, so that rows are handed on; several windows long, and many chunks.
BATCHES = {0: ((3, 17, 1, 50, 9, 130), 16), 2: ((33, 32, 31), 12)}
"""By the seed of the prompts: their lengths, and new tokens."""


def assert_parity(engine: Engine, model: TinyModel) -> None:
    for seed, (lengths, new_tokens) in BATCHES.items():
        prompts = model.prompts(*lengths, seed=seed)
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params)
        # Llama 4 in transformers counts left padding in the temperature of positions.
        alone = model.reference.config.model_type == "llama4_text"
        batches = [[prompt] for prompt in prompts] if alone else [prompts]
        expected = [row for batch in batches for row in model.greedy(batch, new_tokens)]
        assert [o.token_ids for o in outputs] == expected
        distinct = {token for o in outputs for token in o.token_ids}
        assert len(distinct) > 15, "a model that repeats itself shows nothing"
    (token_ids,) = model.prompts(70, seed=5)
    expected_logits = model.logits(token_ids)
    for prompt_len in (50, 70):  # chunks of prefill, and decoded; all prefilled
        logits = engine.score(token_ids, prompt_len)
        torch.testing.assert_close(logits, expected_logits[prompt_len - 1 :], rtol=0, atol=2e-4)
    assert engine.stats()["fallbacks"] == 0
    engine.check_integrity()


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("variant", EAGER)
def test_eager_engine_equals_transformers(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    assert_parity(open_engine(variant, prefill_chunk=32, block_size=4), tiny(variant))


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("storage", "within"), [("int8", 0.3), ("fp8", 1.0)])
@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "deepseek_v3", "phi3", "olmo3", "glm4"])
def test_quantised_keys_and_values(
    open_engine: Callable[..., Engine],
    tiny: Callable[[str], TinyModel],
    variant: str,
    storage: str,
    within: float,
) -> None:
    """Root mean square, of logits that spread by 3; NaN of memory that is not read never shows."""
    engine = open_engine(variant, kv_dtype=storage, prefill_chunk=17, block_size=4)
    (token_ids,) = tiny(variant).prompts(61, seed=4)
    errors = engine.score(token_ids, 30) - tiny(variant).logits(token_ids)[29:]
    assert errors.square().mean().sqrt() < within


@pytest.mark.parametrize("variant", ["qwen2", "phi3", "olmo2", "granite4", "glm4"])
def test_quantised_weights(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    """Root mean square, of logits that spread by 3."""
    engine = open_engine(variant, weight_dtype="int8", prefill_chunk=17, block_size=4)
    (token_ids,) = tiny(variant).prompts(61, seed=4)
    errors = engine.score(token_ids, 30) - tiny(variant).logits(token_ids)[29:]
    assert 0.0 < errors.square().mean().sqrt() < 0.4


@pytest.mark.parametrize("variant", COMPILED)
def test_compiled_engine_equals_transformers(
    compiled: Callable[[str], Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    assert_parity(compiled(variant), tiny(variant))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=pytest.mark.slow) if v in (*REPEATED, *ROUNDED_ALIKE) else v
        for v in FAMILIES[1:]
    ],
)
def test_bfloat16_is_as_exact_as_transformers(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    """Both round the same weights and then every intermediate result to bfloat16.

    Against the same rounded weights in float64 only the rounding of intermediate results is left:
    the root mean square of the engine's error may be at most 1.5 times that of transformers. A
    norm, rotation or embedding that is rounded at another place shows as more.
    """
    model = tiny(variant)
    engine = open_engine(variant, dtype="bfloat16", prefill_chunk=32, max_num_seqs=1)
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
