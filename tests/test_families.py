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

if TYPE_CHECKING:
    from conftest import TinyModel

FAMILIES = [
    "base",
    "qwen3",
    "qwen3_yarn",
    "mistral",
    "mistral_full",
    "gemma2",
    "gemma3",
    "deepseek_v2",
    "deepseek_v3",
]
REPEATED = ("qwen3_yarn", "mistral_full")  # of parts that others have: yarn, and no window
EAGER = [  # `base` is in test_engine_parity
    pytest.param(variant, marks=pytest.mark.slow) if variant in REPEATED else variant
    for variant in FAMILIES[1:]
]
GROUPS = {  # (window, layers) of each layer group
    "base": [(None, 3)],
    "qwen3": [(None, 2)] * 2 + [(11, 2)],
    "mistral": [(13, 3)],
    "gemma2": [(9, 2), (None, 2)],
    "gemma3": [(10, 1)] * 6 + [(None, 1)],
    "deepseek_v3": [(None, 3)],
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("variant", GROUPS)
def test_layer_groups(tiny: Callable[[str], TinyModel], variant: str) -> None:
    groups = group_layers(attention_specs(read_config(tiny(variant).directory), 4))
    found = [(group.spec.window_tokens, len(group.layers)) for group in groups]
    assert sorted(found, key=str) == sorted(GROUPS[variant], key=str)


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


COMPILED = [  # each costs seconds of compilation
    variant if variant == "gemma2" else pytest.param(variant, marks=pytest.mark.slow)
    for variant in FAMILIES[1:]
]
# More prompts than rows, so that rows are handed on; several windows long, and many chunks.
BATCHES = [((3, 17, 1, 50, 9, 130), 24), ((2,), 32), ((33, 32, 31), 12)]


def assert_parity(engine: Engine, model: TinyModel) -> None:
    for seed, (lengths, new_tokens) in enumerate(BATCHES):
        prompts = model.prompts(*lengths, seed=seed)
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == model.greedy(prompts, new_tokens)
        if len(prompts) > 1:
            distinct = {token for o in outputs for token in o.token_ids}
            assert len(distinct) > 15, "a model that repeats itself shows nothing"
    (token_ids,) = model.prompts(90, seed=5)
    expected = model.logits(token_ids)
    for prompt_len in (1, 50, 90):  # all decoded, chunks of prefill and decoded, all prefilled
        logits = engine.score(token_ids, prompt_len)
        torch.testing.assert_close(logits, expected[prompt_len - 1 :], rtol=0, atol=2e-4)
    assert engine.stats()["fallbacks"] == 0
    engine.check_integrity()


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("variant", EAGER)
def test_eager_engine_equals_transformers(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    assert_parity(open_engine(variant, prefill_chunk=32, block_size=4), tiny(variant))


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize(("storage", "within"), [("int8", 0.3), ("fp8", 1.0)])
@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "deepseek_v3"])
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


@pytest.mark.parametrize("variant", COMPILED)
def test_compiled_engine_equals_transformers(
    compiled: Callable[[str], Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    assert_parity(compiled(variant), tiny(variant))


@pytest.mark.parametrize("variant", EAGER)
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
