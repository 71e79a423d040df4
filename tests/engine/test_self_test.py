"""The self-test of C++ operators: right ones pass, one that is made wrong costs its use alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepgraph.runtime import EngineConfig, KernelSelfTestError, SamplingParams
from stepgraph.runtime.engine.self_test import check_kernels
from stepgraph.runtime.execution.sample_steps import sample_codes, sample_config
from stepgraph.runtime.kernels import DecoderStack, Experts, Kernels, have_compiler, select_kernels
from stepgraph.runtime.kernels.choice import Parts
from stepgraph.runtime.kernels.ops.packed_parts import pack_parts
from stepgraph.runtime.kernels.result_check import disagreement
from stepgraph.runtime.kernels.support import int4_kernels
from stepgraph.runtime.kernels.weights.grouped import GroupedFormat, ScaleFormat, integers
from stepgraph.runtime.models import resolved_config
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.sampling.samplers import SAMPLERS

from ..rigs.engine_rig import Open
from ..rigs.sharding_rig import tiny_config

pytestmark = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")

HALF = ScaleFormat(torch.float16)
RUNS = ScaleFormat(torch.float16, torch.uint8, 8)
ZEROS = ScaleFormat(torch.float16, torch.uint8)


def chosen(variant: str = "base", **settings: Any) -> tuple[Kernels, ModelConfig, ResolvedConfig]:
    model = tiny_config(variant, 1)
    if variant == "odd":  # more tokens than a sample has
        model = dataclasses.replace(model, vocab_size=2050)
    config = ResolvedConfig.resolve(EngineConfig(device="cpu", mode="compile", **settings), model)
    kernels = select_kernels(config.device, config.mode, config.dtype, config.weights)
    return kernels, model, config


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "weight_dtype": "int8", "kv_dtype": "int8"},
        {"weight_dtype": "fp8", "kv_dtype": "fp8"},
        {"dtype": "float16", "max_model_len": 1, "max_num_seqs": 1, "block_size": 3},
    ],
)
@pytest.mark.parametrize("variant", ["base", "gemma2", "odd", "qwen3_moe"])
def test_right_operators_pass(variant: str, settings: dict[str, Any]) -> None:
    kernels, model, config = chosen(variant, **settings)
    for _ in range(2):  # inputs are others each time
        assert check_kernels(kernels, model, config, required=True) is kernels


@pytest.mark.parametrize("variant", ["base", "qwen3_moe"])
def test_products_over_codes_are_tested(variant: str) -> None:
    kernels, model, config = chosen(variant, weight_dtype="int4", dtype="bfloat16")
    kernels = int4_kernels(kernels, model_plan(model), config.dtype)
    in_6_bits = GroupedFormat(integers(6, 32), 16, ScaleFormat(torch.float16, torch.int8, 16))
    kernels = dataclasses.replace(kernels, formats=(*kernels.formats, in_6_bits))
    assert check_kernels(kernels, model, config, required=True) is kernels

    def wrong(parts: Parts, dtype: torch.dtype, packed: torch.Tensor) -> None:
        pack_parts(parts, dtype, packed)
        packed[len(packed) // 2 :] = 0

    kernels = dataclasses.replace(kernels, pack_parts=wrong)
    with pytest.raises(KernelSelfTestError):
        check_kernels(kernels, model, config, required=True)


@pytest.mark.parametrize("minimums", [None, HALF, ZEROS])
@pytest.mark.parametrize("scales", [HALF, RUNS, ScaleFormat(torch.bfloat16)])
def test_bfloat16_has_all_numbers_of_sampled_codes(
    scales: ScaleFormat, minimums: ScaleFormat | None
) -> None:
    """Else the reference, whose weights are decoded, would have rounding errors of its own."""
    kernels, model, config = chosen("base", weight_dtype="int4")
    kernels = int4_kernels(kernels, model_plan(model), config.dtype)
    if minimums is not None and scales.run > 1:
        minimums = scales  # as in all formats
    form = GroupedFormat(integers(5), 16, scales, minimums)
    kernels = dataclasses.replace(kernels, formats=(form,))
    sampled = sample_codes(model, kernels, torch.Generator().manual_seed(1))
    assert len(sampled) > 4
    for part in (part for parts in sampled.values() for part in parts):
        decoded = part.rows(0, part.shape[0]).decode()
        assert decoded.unique().numel() > 32
        assert torch.equal(decoded, decoded.bfloat16().float())


def test_samples_have_layers_with_and_without_experts() -> None:
    _, model, _ = chosen("qwen3_moe")
    assert model.experts is not None
    plan = model_plan(sample_config(model, layers=1, vocabulary=50))
    mixed, dense = (
        [op for op in layer.operations if isinstance(op, Experts)] for layer in plan.layers
    )
    assert not dense
    assert mixed[0].routed == mixed[0].routing.top_k < model.experts.num_experts


def spoilt(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], object]) -> None:
    run = DecoderStack.run

    def wrong(self: DecoderStack, *arguments: Any) -> Any:
        out = run(self, *arguments)
        change(out[0])
        return out

    monkeypatch.setattr(DecoderStack, "run", wrong)


def refuse(out: torch.Tensor) -> None:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda out: out[-1].mul_(1.5), "differ"),
        (lambda out: out.fill_(float("nan")), "NaN"),
        (refuse, "no such instruction"),
    ],
)
def test_a_wrong_stack_leaves_its_place_to_plain_layers(
    monkeypatch: pytest.MonkeyPatch,
    open_engine: Open,
    change: Callable[[torch.Tensor], object],
    error: str,
) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    prompt = [[5, 7, 11, 13, 17]]
    expected = open_engine("micro", mode="eager").generate(prompt, params)
    spoilt(monkeypatch, change)
    # Eager steps, as torch.compile would take most of the time.
    monkeypatch.setattr(resolved_config, "resolve_kernels", lambda *_: "native")
    with pytest.warns(RuntimeWarning):
        engine = open_engine("micro", mode="eager")
    outputs = engine.generate(prompt, params)
    (fallback,) = engine.stats()["kernel_fallbacks"]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert fallback["name"] == "C++ decoder stack"
    assert error in fallback["error"]


def test_attention_that_is_wrong_too_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, model, config = chosen()

    right = kernels.attention

    def wrong(*arguments: Any) -> torch.Tensor:
        return right(*arguments) + 1.0

    spoilt(monkeypatch, torch.Tensor.zero_)
    kernels = dataclasses.replace(kernels, attention=wrong)
    with pytest.raises(KernelSelfTestError):
        check_kernels(kernels, model, config, required=True)
    with pytest.warns(RuntimeWarning):
        checked = check_kernels(kernels, model, config, required=False)
    assert [f.name for f in checked.fallbacks] == ["C++ decoder stack", "C++ attention"]
    assert checked.make_stack is None
    assert checked.attention is not wrong


def test_a_sample_that_fails_by_chance_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, model, config = chosen()
    changes = iter([torch.Tensor.zero_])
    spoilt(monkeypatch, lambda out: next(changes, torch.Tensor.size)(out))
    assert check_kernels(kernels, model, config, required=True) is kernels


def test_a_wrong_sampler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SAMPLERS["cpu"]
    shifted = dataclasses.replace(right, greedy=lambda *lanes: right.greedy(*lanes) + 1)
    monkeypatch.setitem(SAMPLERS, "cpu", shifted)
    with pytest.warns(RuntimeWarning):
        checked = check_kernels(*chosen(), required=False)
    assert checked.sampler == "torch"


def test_a_difference_in_one_element_of_many_is_seen() -> None:
    expected = torch.randn(64, 1000).bfloat16()
    assert disagreement(expected.clone(), expected, 0.03) is None
    found = expected.clone()
    found[63, 999] += 1.0
    assert disagreement(found, expected, 0.03) is not None
    found[63, 999] = float("nan")
    assert "NaN" in str(disagreement(found, expected, 0.03))
    expected[63, 999] = float("nan")  # nothing is written there
    assert disagreement(found, expected, 0.03) is None
    assert disagreement(expected.nan_to_num(), expected, 0.03) is not None
