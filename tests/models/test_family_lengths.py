"""Models whose rotary parameters depend on the length: tokens and logits of `generate`."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from stepgraph.runtime import Engine
from stepgraph.runtime.kernels import kernels_for, native_gaps, select_kernels
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.models.rope import RopeScaling
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..rigs.engine_rig import Open, greedy
from ..rigs.family_variants import LENGTH_VARIANTS
from ..rigs.tiny_models import Tiny, TinyModel

LENGTHS = (5, 29, 30, 31, 39, 40, 41, 60)
"""Of prompts; the first contexts of the models are 40 or 30 tokens."""
NEW = 16
SMALL = {"block_size": 4, "prefill_chunk": 16, "max_num_seqs": 3}


@functools.cache
def loaded(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    )
    return model.eval()


@functools.cache
def generated(
    directory: Path, prompt: tuple[int, ...], new_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """What `generate` appends to one prompt, and the logits of these tokens `[new, V]`.

    The model is a new copy, because a `dynamic` rope keeps the length of the last sequence.
    """
    model = copy.deepcopy(loaded(directory))
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


def check_tokens(
    engine: Engine, model: TinyModel, prompts: Sequence[Sequence[int]], new_tokens: int = NEW
) -> None:
    outputs = engine.generate(prompts, greedy(new_tokens))
    expected = [generated(model.directory, tuple(p), new_tokens)[0] for p in prompts]
    assert [output.token_ids for output in outputs] == expected
    engine.check_integrity()


@pytest.mark.parametrize("variant", LENGTH_VARIANTS)
def test_tokens_and_logits_are_those_of_generate(
    open_engine: Open, tiny: Tiny, variant: str
) -> None:
    model = tiny(variant)
    engine = open_engine(variant, **SMALL)
    prompts = model.prompts(*LENGTHS)
    check_tokens(engine, model, prompts)
    for prompt in prompts[1::2]:
        tokens, logits = generated(model.directory, tuple(prompt), NEW)
        found = engine.score([*prompt, *tokens[:-1]], len(prompt))
        torch.testing.assert_close(found, logits, rtol=0, atol=2e-4)
    if not variant.startswith("phi3"):  # which recomputes the short prompt
        (token_ids,) = model.prompts(60, seed=9)
        difference = engine.score(token_ids, 60)[-1] - engine.score(token_ids, 20)[-1]
        assert difference.abs().max() > 0.01, "a model that shows no length shows nothing"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", LENGTH_VARIANTS)
def test_prompts_of_several_lengths_share_no_wrong_prefix(
    open_engine: Open, tiny: Tiny, variant: str
) -> None:
    """Each prompt is a prefix of the next, and each is computed twice."""
    model = tiny(variant)
    engine = open_engine(variant, **SMALL)
    (longest,) = model.prompts(max(LENGTHS), seed=2)
    prompts = [longest[:n] for n in LENGTHS]
    for _ in range(2):
        for prompt in reversed(prompts):
            check_tokens(engine, model, [prompt], 4)
    assert engine.stats()["cache"]["hit_tokens"] > 200


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", LENGTH_VARIANTS)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_keep_their_lengths(
    open_engine: Open, tiny: Tiny, variant: str, preemption: str
) -> None:
    model = tiny(variant)
    host = {"host_cache_bytes": 1 << 22} if preemption == "swap" else {}
    blocks = 55 if variant == "olmo3_lengths" else 40  # which has four layer groups
    tight = {"num_blocks": blocks, "max_model_len": 80, "max_num_seqs": 4}
    engine = open_engine(variant, **host, **SMALL | tight)
    check_tokens(engine, model, model.prompts(28, 36, 20, 41), 30)
    assert engine.stats()["preemptions"] >= 1


def test_completions_of_one_prompt(open_engine: Open, tiny: Tiny) -> None:
    """Later completions do not fork from earlier ones that outgrew the first context."""
    model = tiny("phi3_longrope")
    engine = open_engine("phi3_longrope", **SMALL | {"max_num_seqs": 2})
    (prompt,) = model.prompts(37)
    (output,) = engine.generate([prompt], greedy(NEW, n=5))
    expected, _ = generated(model.directory, tuple(prompt), NEW)
    assert [completion.token_ids for completion in output.completions] == [expected] * 5


def test_the_fused_decode_step_is_refused() -> None:
    """Its kernels derive rotations from positions only; the other native kernels run."""
    qwen = preset("qwen2.5-0.5b")
    ordinary = model_plan(qwen)
    scaling = RopeScaling(type="dynamic", factor=2.0, original_max_position_embeddings=32768)
    plan = model_plan(dataclasses.replace(qwen, rope_scaling=scaling))
    assert [gap.name for gap in native_gaps("cuda", torch.bfloat16, "model", plan)] == [
        "fused decode step"
    ]
    assert native_gaps("cpu", torch.bfloat16, "model", plan) == ()
    kernels = dataclasses.replace(
        select_kernels(torch.device("cpu"), "eager", torch.bfloat16),
        make_decode_step=lambda stack, model: pytest.fail("never made"),
    )
    assert kernels_for(kernels, plan).make_decode_step is None
    assert kernels_for(kernels, ordinary).make_decode_step is kernels.make_decode_step


def test_compiled_steps(open_engine: Open, tiny: Tiny) -> None:
    model = tiny("phi3_longrope")
    engine = open_engine("phi3_longrope", **SMALL, mode="compile")
    check_tokens(engine, model, model.prompts(*LENGTHS))
