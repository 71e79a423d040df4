"""The self-test of Triton kernels: what is wrong is found, and the next pattern takes its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepgraph.graphs.steps import Capture
from stepgraph.runtime import EngineConfig, KernelSelfTestError
from stepgraph.runtime.engine.self_test import check_kernels, dependent_launch_failure
from stepgraph.runtime.kernels import Kernels, reference_paged_attention, select_kernels
from stepgraph.runtime.kernels.support import int4_kernels
from stepgraph.runtime.kernels.weights import INT4
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.resolved_config import ResolvedConfig

pytest.importorskip("triton")

from stepgraph.runtime.execution.sample_steps import SampleCase, SampleSteps, sample_config
from stepgraph.runtime.execution.step_key import StepKey
from stepgraph.runtime.kernels.triton.backend import gpu_kernels
from stepgraph.runtime.kernels.triton.causal_conv import triton_causal_conv
from stepgraph.runtime.kernels.triton.dependent import is_dependent_launch_enabled
from stepgraph.runtime.kernels.triton.recurrence import triton_delta_rule, triton_recurrence
from stepgraph.runtime.kernels.triton.stack import Operations

from ..rigs.fake_graphs import FakeCapturer, FakeGraphs
from ..rigs.sharding_rig import tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = Operations()
SETTINGS: dict[str, Any] = {
    "device": DEVICE, "mode": "eager", "max_num_seqs": 1, "block_size": 4, "max_model_len": 40,
    "prefill_chunk": 8,
}  # fmt: skip


def resolved(variant: str = "base", **settings: Any) -> tuple[ModelConfig, ResolvedConfig]:
    model = tiny_config(variant, 1)
    return model, ResolvedConfig.resolve(EngineConfig(**(SETTINGS | settings)), model)


def kernels_of(config: ResolvedConfig, **operations: Callable[..., Any]) -> Kernels:
    kernels = gpu_kernels(config.weights, Operations(**operations))
    if DEVICE == "cuda":
        return kernels
    return dataclasses.replace(
        kernels,
        attention=lambda *a: reference_paged_attention(*a),
        recurrence=triton_recurrence,
        delta_rule=triton_delta_rule,
        causal_conv=triton_causal_conv,
        sampler="torch",
    )


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("base", {}),
        ("base", {"kv_dtype": "int8", "weight_dtype": "int8"}),
        ("base", {"weight_dtype": "int4"}),
        ("olmo_hybrid", {}),
        pytest.param("gemma2", {"dtype": "bfloat16", "max_num_seqs": 3}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"dtype": "bfloat16", "max_num_seqs": 5}, marks=pytest.mark.slow),
        pytest.param("base", {"kv_dtype": "fp8", "weight_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
)
def test_right_kernels_pass(variant: str, settings: dict[str, Any]) -> None:
    model, config = resolved(variant, **settings)
    kernels = kernels_of(config)
    if config.weights == INT4:
        kernels = int4_kernels(kernels, model_plan(model), config.dtype)
    assert check_kernels(kernels, model, config, required=True) is kernels


def raises(*arguments: Any, **keywords: Any) -> None:
    raise ValueError("no such layout")


def writes_nothing(*arguments: Any, **keywords: Any) -> None:
    pass


def writes_another_block(*arguments: Any, **keywords: Any) -> None:
    NATIVE.decode_attention(*arguments, **keywords)
    arguments[1][:, :, -2].zero_()


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("gate_up", raises, "ValueError: no such layout"),
        ("residual_linear", writes_nothing, "NaN"),
        ("decode_attention", writes_another_block, "differ"),
    ],
)
def test_plain_layers_take_the_place_of_wrong_ones(
    name: str, wrong: Callable[..., Any], error: str
) -> None:
    model, config = resolved()
    kernels = kernels_of(config, **{name: wrong})
    with pytest.warns(RuntimeWarning):
        checked = check_kernels(kernels, model, config, required=False)
    (fallback,) = checked.fallbacks
    assert fallback.name == "Triton layers"
    assert error in fallback.error
    assert checked.make_stack is None
    assert checked.attention is kernels.attention


def test_a_recurrence_without_its_state_is_found() -> None:
    model, config = resolved("olmo_hybrid")

    def forgetful(*arguments: Any) -> torch.Tensor:
        *tensors, batch, place = arguments
        states = batch.states._replace(input_tables=torch.zeros_like(batch.states.input_tables))
        return triton_recurrence(*tensors, dataclasses.replace(batch, states=states), place)

    kernels = dataclasses.replace(kernels_of(config), recurrence=forgetful, delta_rule=None)
    with pytest.raises(KernelSelfTestError):
        check_kernels(kernels, model, config, required=True)


def test_device_that_is_lost_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any, **keywords: Any) -> None:
        def fail(*arguments: Any, **keywords: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch, "ones", fail)
        fail()

    model, config = resolved()
    with pytest.raises(KernelSelfTestError):
        check_kernels(kernels_of(config, gate_up=lost), model, config, required=False)


right = reference_paged_attention


def off_with_dependent_launch(*arguments: Any) -> torch.Tensor:
    return right(*arguments) * (1.001 if is_dependent_launch_enabled() else 1.0)


def races_in_padding(q: Any, k: Any, v: Any, arena: torch.Tensor, *rest: Any) -> torch.Tensor:
    out = right(q, k, v, arena, *rest)
    arena[:, :, 0].fill_(float(is_dependent_launch_enabled()))
    return out


class Refusing(FakeCapturer):
    def capture(self, fn: Callable[[], Any], identity: Any = None) -> Capture[Any]:
        if is_dependent_launch_enabled():
            raise RuntimeError("operation not permitted")
        return super().capture(fn)


@pytest.mark.parametrize(
    ("capturer", "attention", "error"),
    [
        (FakeCapturer, right, None),
        (FakeCapturer, off_with_dependent_launch, "a captured step has different results with it"),
        (FakeCapturer, races_in_padding, None),
        (Refusing, right, "RuntimeError: operation not permitted"),
    ],
)
def test_captures_with_and_without_dependent_launch_are_compared(
    capturer: type[FakeCapturer], attention: Callable[..., torch.Tensor], error: str | None
) -> None:
    """Of a decode step, and of a prefill step with padding."""
    model, config = resolved("gemma2", max_num_seqs=3)
    cases = [
        SampleCase(StepKey("decode", 3, 10, False), ((17, 1), (0, 1), (5, 1))),
        SampleCase(StepKey("prefill", 8, 10, False), ((3, 5),)),
    ]
    cut = sample_config(model, layers=2, vocabulary=model.vocab_size)
    plain = select_kernels(config.device, "eager", config.dtype)
    kernels = dataclasses.replace(plain, attention=attention)
    steps = SampleSteps(cut, config, kernels, cases, 0)
    found = dependent_launch_failure(steps, cases, capturer(FakeGraphs(), DEVICE))
    assert (found and found.error) == error
    assert is_dependent_launch_enabled()
