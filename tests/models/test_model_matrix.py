"""Every causal-LM class of transformers runs with the tokens and logits of transformers, or not.

docs/models.md lists which; this compares small random models in float32.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from stepgraph.runtime import Engine, StepgraphError
from stepgraph.runtime.errors import StepPreparationError
from stepgraph.runtime.kernels import have_compiler

from ..rigs.causal_models import (
    MODEL_TYPES,
    CausalModel,
    UnbuildableError,
    save_small_model,
)
from ..rigs.engine_rig import greedy
from ..rigs.model_matrix import IMPLEMENTATIONS, Row, replaced, row_of, start, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, without biases": ("gpt_neox", {"attention_bias": False}),
    "gpt2, scaled by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    ),
    "opt, norm after": ("opt", {"do_layer_norm_before": False}),
    "opt, projected": ("opt", {"word_embed_proj_dim": 24}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "gemma4_text, without embeddings of layers": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1},
    ),
}
"""Traits that the default of a type lacks, where `test_families.py` has none of its models."""
QUICK = ("bart", "phi", "gpt2", "gpt_neox", "cohere", "gemma2", "gpt_oss", "qwen2_moe", "opt")
"""One that is refused; partial rotation with biases; learned positions and Conv1D; parallel
residual, and scaled logits; soft caps and windows; attention sinks; shared experts; offset
positions."""
CASES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in (*MODEL_TYPES, *VARIANTS)
]
NEW_TOKENS = 12
GREEDY = greedy(NEW_TOKENS)
LOGIT_ERROR = 1e-3
"""Most difference of two logits, in standard deviations of all of them."""


@pytest.fixture(autouse=True)
def without_bars() -> None:
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes = VARIANTS.get(name, (name, {}))
    try:
        model = save_small_model(model_type, tmp_path, changes)
    except UnbuildableError:
        return  # the page says why
    for implementation in IMPLEMENTATIONS:
        try:
            engine = start(tmp_path, implementation)
        except StepgraphError:
            continue
        else:
            with engine:
                compare(model, engine)


def compare(model: CausalModel, engine: Engine) -> None:
    """Decode prompts longer than windows, with more of them than rows, in several chunks."""
    prompts = model.prompts(3, 9, 21, 30)
    expected = [model.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    scored = prompts[-1] + expected[-1]
    logits = model.logits(scored)
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
    for prompt_len in (len(scored), 1, 20):  # prefilled, decoded, both
        ours = engine.score(scored, prompt_len)
        theirs = logits[prompt_len - 1 :, : ours.shape[-1]]
        bound = LOGIT_ERROR * logits.std().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)
    weights = engine.stats()["memory"]["weights"]
    assert weights["planned"] == weights["measured"]
    engine.check_integrity()


@pytest.mark.slow
@pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_compiled_steps_have_the_tokens_of_eager_ones(model_type: str, tmp_path: Path) -> None:
    try:
        prompts = save_small_model(model_type, tmp_path).prompts(3, 21)
        eager = start(tmp_path, "transformers")
    except (UnbuildableError, StepgraphError):
        return  # the page says why
    with eager:
        expected = [output.token_ids for output in eager.generate(prompts, GREEDY)]
    try:
        compiled = start(tmp_path, "transformers", mode="compile")
    except StepPreparationError as error:
        if re.search(r"\.py:\d+", str(error)):
            return
        raise
    with compiled:
        assert [output.token_ids for output in compiled.generate(prompts, GREEDY)] == expected
        assert compiled.stats()["fallbacks"] == 0


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    transformers.utils.logging.disable_progress_bar()
    scratch = tmp_path_factory.mktemp("models")
    return [row_of(model_type, scratch / model_type) for model_type in MODEL_TYPES]


@pytest.mark.slow
def test_the_page_is_current(rows: list[Row]) -> None:
    page = PAGE.read_text()
    assert page == replaced(page, table(rows)), (
        "run python -m tests.rigs.model_matrix docs/models.md"
    )
