"""Whole engines on the kernels for GPUs: the tokens and logits of transformers.

On the CPU they run in Triton's interpreter, so models and prompts are as small as they can be.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.engine import startup
from stepgraph.runtime.kernels import Kernels

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton import kernel_calls
from stepgraph.runtime.kernels.triton.backend import gpu_kernels
from stepgraph.runtime.kernels.triton.causal_conv import triton_causal_conv
from stepgraph.runtime.kernels.triton.decode_attention import triton_paged_attention
from stepgraph.runtime.kernels.triton.experts import triton_experts
from stepgraph.runtime.kernels.triton.recurrence import triton_delta_rule, triton_recurrence
from stepgraph.runtime.tools.compile_ahead import record_steps

from ..loading.test_weight_formats import SIZES, save_as
from ..rigs.engine_rig import Open
from ..rigs.expert_models import EXPERT_VARIANTS
from ..rigs.head_references import write_eagle3
from ..rigs.speculation_rig import guess
from ..rigs.tiny_models import Tiny
from ..speculation.test_speculation import run_mixed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOW_VARIANTS = (  # each takes seconds of interpretation
    *("odd", "base", "gemma2", "gemma3", "mistral", "mixtral_one", "qwen3", "qwen3_yarn"),
    *("deepseek_v3", "phi3_longrope", "qwen3_next", "qwen3_5_moe"),
)
FAST = ["deepseek_v2", "gpt_oss_odd", "olmo_hybrid", "kimi_linear"]
SLOW = [v for v in (*SLOW_VARIANTS, *EXPERT_VARIANTS) if v not in FAST]
VARIANTS = [*FAST, *(pytest.param(v, marks=pytest.mark.slow) for v in SLOW)]


@pytest.fixture
def gpu_engine(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Open an engine whose steps are eager calls of the kernels."""

    def select(
        _device: Any, _mode: Any, _dtype: Any, weights: Any, _kernels: Any, **_: Any
    ) -> Kernels:
        kernels = gpu_kernels(weights)
        # The operators around them are for CUDA's tensors.
        return dataclasses.replace(
            kernels,
            attention=triton_paged_attention,
            experts=triton_experts,
            recurrence=triton_recurrence,
            delta_rule=triton_delta_rule,
            causal_conv=triton_causal_conv,
        )

    monkeypatch.setattr(startup, "select_kernels", select)
    # Tested elsewhere; interpreted, it takes longer than the engine.
    monkeypatch.setattr(startup, "check_kernels", lambda kernels, *_, **__: kernels)

    def make(variant: str | Path, **config: Any) -> Engine:
        settings = {
            "device": DEVICE,
            "mode": "eager",
            "max_num_seqs": 3,
            "block_size": 4,
            "max_model_len": 64,
            "num_blocks": 512,
            "prefill_chunk": 8,
        } | config
        found = tiny(variant).directory if isinstance(variant, str) else variant
        return Engine.from_pretrained(found, EngineConfig(**settings))

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_those_of_transformers(
    gpu_engine: Open, tiny: Tiny, variant: str
) -> None:
    model = tiny(variant)
    prompts = model.prompts(6, 1, 2)  # chunks in the middle of a prompt, rows handed on
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    with gpu_engine(variant, max_num_seqs=2, prefill_chunk=4) as engine:
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == model.greedy(prompts, 2)
        if variant in ("gemma2", "odd"):
            (token_ids,) = model.prompts(14, seed=5)  # beyond the windows
            logits = engine.score(token_ids, 13).cpu()  # chunks of prefill, then a decode step
            expected = model.logits(token_ids)[12:]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        assert engine.stats()["fallbacks"] == 0
        engine.check_integrity()


@pytest.mark.slow
def test_drafts_and_masks_change_no_token(gpu_engine: Open, open_engine: Open) -> None:
    """Rows with and without a grammar, greedy and drawn; right and wrong drafts."""
    params = [
        SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.0, structured={"regex": "[ab]xyz[0-9]{5}"}),
        SamplingParams(max_tokens=6, temperature=0.8, seed=3, presence_penalty=0.5),
        SamplingParams(max_tokens=6, seed=4, structured={"regex": "[a-c]{2,9}"}, logprobs=1),
    ]
    prompts = [[5, 9, 31], [7, 7, 8], [40, 2], [11, 12, 13]]
    config = {"structured_output": True, "dtype": "float32"}
    expected = run_mixed(open_engine("text", kernels="torch", **config), prompts, params)
    with gpu_engine("text", **config, speculation={"num_speculative_tokens": 2}) as engine:
        guesses = guess(engine, {name: own[0] for name, own in expected.items()}, 0.7)
        assert run_mixed(engine, prompts, params) == expected
        assert guesses.accepted > 2
        assert engine.stats()["fallbacks"] == 0


@pytest.mark.slow
def test_rejected_drafts_leave_recurrent_state_as_it_was(
    gpu_engine: Open, open_engine: Open, tiny: Tiny
) -> None:
    params = [SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)] * 2
    prompts = tiny("olmo_hybrid").prompts(5, 2)
    expected = run_mixed(open_engine("olmo_hybrid", kernels="torch"), prompts, params)
    with gpu_engine("olmo_hybrid", speculation={"num_speculative_tokens": 3}) as engine:
        guesses = guess(engine, {name: own[0] for name, own in expected.items()}, 0.7)
        found = run_mixed(engine, prompts, params)
        assert guesses.accepted > 2
    assert [own[0] for own in found.values()] == [own[0] for own in expected.values()]


@pytest.mark.slow
def test_a_head_drafts_on_the_kernels(
    gpu_engine: Open, open_engine: Open, tiny: Tiny, tmp_path: Path
) -> None:
    directory, *_ = write_eagle3(tmp_path / "drafter")
    speculation = {
        "method": "eagle3",
        "model": str(directory),
        "num_speculative_tokens": 2,
        "adaptive": False,
    }
    prompts = tiny("base").prompts(11, 3)
    params = [SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)] * 2
    expected = run_mixed(open_engine("base", kernels="torch", dtype="float32"), prompts, params)
    with gpu_engine("base", dtype="float32", speculation=speculation) as engine:
        assert run_mixed(engine, prompts, params) == expected
        stats = engine.stats()
        assert stats["fallbacks"] == 0
        assert stats["speculation"]["drafted"] > 4


def test_a_quantised_engine_follows_the_plain_one(
    gpu_engine: Open, open_engine: Open, tiny: Tiny
) -> None:
    settings = {"weight_dtype": "int8", "kv_dtype": "int8"}
    (token_ids,) = tiny("micro").prompts(11, seed=7)
    expected = open_engine("micro", **settings).score(token_ids, 9)
    with gpu_engine("micro", **settings) as engine:
        logits = engine.score(token_ids, 9).cpu()
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3)


def test_a_chunk_of_as_many_tokens_as_rows_is_prefilled() -> None:
    """Its tokens see each other: the kernel of decode steps would read keys as they are written."""
    config = EngineConfig(max_num_seqs=4, prefill_chunk=4)
    steps = record_steps("demo", config, rows=[1], tokens=[4])
    step = next(step for step in steps if step.name.startswith("prefill"))
    names = {call.name for call in step.kernel_calls}
    assert "_attention_kernel" in names
    assert "_decode_attention" not in names


def test_few_rows_take_few_kernels_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch edges are most of a small step: sixteen layers, and few kernels around them."""
    monkeypatch.setattr(kernel_calls, "MULTIPROCESSORS", 132)
    config = EngineConfig(max_num_seqs=4)
    steps = record_steps("preset:llama-3.2-1b", config, rows=[1, 4], tokens=[])
    greedy = [step for step in steps if "greedy" in step.name]
    assert len(greedy) >= 2
    for step in greedy:
        assert len(step.kernel_calls) <= 5 * 16 + 5, step.name


LAYOUTS = ["awq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8_blocks", "nvfp4"))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_of_a_checkpoint_are_kept(
    gpu_engine: Open,
    tiny: Tiny,
    tmp_path: Path,
    layout: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Chunks of a prompt and decode steps have the logits of the dequantised model."""
    model = tiny("wide_groups")
    reference = save_as(layout, model, tmp_path, SIZES.get(layout, 32))
    (token_ids,) = model.prompts(7, seed=3)
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0, 5:]
    with gpu_engine(tmp_path, dtype="float32") as engine:
        logits = engine.score(token_ids, 6).cpu()
        assert engine.stats()["fallbacks"] == 0
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-4 * float(expected.std()))
    assert "decoded while they are loaded" not in caplog.text


def test_int4_follows_the_kernels_of_the_cpu(gpu_engine: Open, open_engine: Open) -> None:
    settings = {"weight_dtype": "int4", "dtype": "float32"}
    token_ids = [7, 3, 11, 5, 2]
    expected = open_engine("wide_groups", kernels="native", **settings).score(token_ids, 4)
    with gpu_engine("wide_groups", **settings) as engine:
        logits = engine.score(token_ids, 4).cpu()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
