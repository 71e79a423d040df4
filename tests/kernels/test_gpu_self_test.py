"""The self-test of a GPU's operations: one that is made wrong is found and replaced, by itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepgraph.graphs.steps import Capture
from stepgraph.runtime import Engine, EngineConfig, KernelSelfTestError, SamplingParams
from stepgraph.runtime.engine import startup
from stepgraph.runtime.engine.gpu_self_test import dependent_launch_failure
from stepgraph.runtime.engine.self_test import check_kernels
from stepgraph.runtime.kernels import ExpertTensors, Kernels, Routing
from stepgraph.runtime.kernels.result_check import Fallback
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.resolved_config import ResolvedConfig

pytest.importorskip("triton")

from stepgraph.runtime.execution.sample_steps import SampleCase, SampleSteps, sample_config
from stepgraph.runtime.execution.step_key import StepKey
from stepgraph.runtime.kernels.triton import operation_check as checks
from stepgraph.runtime.kernels.triton.backend import gpu_kernels
from stepgraph.runtime.kernels.triton.dependent import is_dependent_launch_enabled
from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.kernels.triton.operations import Operations

from ..engine.test_self_test import GEMMA2, TINY
from ..rigs.expert_cases import make_mixture
from ..rigs.fake_graphs import FakeCapturer, FakeGraphs

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device or the interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = Operations.reference()
SETTINGS: dict[str, Any] = {
    "device": DEVICE, "mode": "eager", "max_num_seqs": 6, "block_size": 4, "max_model_len": 40,
    "prefill_chunk": 16,
}  # fmt: skip


def resolved(
    changes: dict[str, Any] | None = None, **settings: Any
) -> tuple[ModelConfig, ResolvedConfig]:
    model = ModelConfig(**(TINY | (changes or {})))
    return model, ResolvedConfig.resolve(EngineConfig(**(SETTINGS | settings)), model)


def use(monkeypatch: pytest.MonkeyPatch, **operations: Callable[..., Any]) -> None:
    """Let native operations be plain ones, which take no interpreter, but for those given."""
    mixed = dataclasses.replace(PLAIN, **operations)
    monkeypatch.setattr(Operations, "native", classmethod(lambda cls: mixed))


def check(
    model: ModelConfig, config: ResolvedConfig, *, required: bool = False, attention: Any = None
) -> Kernels:
    kernels = gpu_kernels(config.weights)
    return check_kernels(
        dataclasses.replace(kernels, attention=attention or kernels.attention),
        model,
        config,
        required=required,
    )


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        pytest.param(GEMMA2, {"dtype": "bfloat16", "max_num_seqs": 3}, marks=pytest.mark.slow),
        pytest.param({}, {"kv_dtype": "int8", "weight_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({}, {"kv_dtype": "fp8", "weight_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
)
def test_kernels_pass(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    model, config = resolved(changes, **({"max_num_seqs": 1} | settings))
    assert not check(model, config, required=True).fallbacks


def scaled(name: str) -> Callable[..., Any]:
    """The operation with one number of its result off."""
    right, writes = getattr(PLAIN, name), checks.WRITES[name]

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        result = right(*arguments, **keywords)
        if result is None:
            given = inspect.signature(right).bind(*arguments, **keywords)
            target = given.arguments.get(writes.outputs[-1])
            target = given.arguments[writes.outputs[0]] if target is None else target
            target = target[0] if isinstance(target, tuple) else target
        else:
            target = next(checks._tensors(result))
        target.view(-1)[0] += 1
        return result

    return wrong


UNUSED = {"combine_output", "paged_attention", "route", "experts"}
"""Operations that no step of the tiny model runs untuned."""
OF_RANKS = {"sum_rows", "pick_of_ranks"}
"""Operations of tensor-parallel groups, see `test_gpu_ranks.py`."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(set(checks.WRITES) - UNUSED - OF_RANKS))
def test_a_wrong_number_costs_the_operation_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    use(monkeypatch, **{name: scaled(name)})
    model, config = resolved({"tie_word_embeddings": False}, weight_dtype="int8", max_num_seqs=40)
    with pytest.warns(RuntimeWarning, match=name):
        fallbacks = check(model, config).fallbacks
    assert [fallback.name for fallback in fallbacks] == [name]


@pytest.mark.parametrize("wrong", [None, "route", "experts"])
@pytest.mark.parametrize("tokens", [3, 9])
def test_experts_are_checked(
    monkeypatch: pytest.MonkeyPatch, tokens: int, wrong: str | None
) -> None:
    if wrong is not None:
        use(monkeypatch, **{wrong: scaled(wrong)})
    mixture = make_mixture(Routing(top_k=2, normalised=True), shared=1, biases=True)
    tensors = ExpertTensors(*(None if t is None else t.to(DEVICE) for t in mixture.tensors))
    found = checks.OperationChecks(torch.float32, "model", 4, torch.device(DEVICE))
    x, live = torch.randn(tokens, 12, device=DEVICE), torch.arange(tokens, device=DEVICE) != 1
    out = found.operations.mixture(mixture.op, x, tensors, live)
    assert list(found.failures) == ([] if wrong is None else [wrong])
    assert torch.equal(out, PLAIN.mixture(mixture.op, x, tensors, live))


def raises(*arguments: Any, **keywords: Any) -> None:
    raise ValueError("no such layout")


def writes_nothing(*arguments: Any, **keywords: Any) -> None:
    pass


def writes_beyond(x_TD: Any, norm: Any, linear: Any, out_TN: torch.Tensor, *rest: Any) -> None:
    PLAIN.norm_linear(x_TD, norm, linear, out_TN, *rest)
    out_TN.as_strided((1,), (1,), out_TN.storage_offset() + out_TN.numel()).zero_()


def writes_another_block(*arguments: Any, **keywords: Any) -> None:
    PLAIN.decode_attention(*arguments, **keywords)
    arguments[1][:, :, -1].zero_()


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("gate_up", raises, "ValueError: no such layout"),
        ("residual_linear", writes_nothing, "NaN"),
        ("norm_linear", writes_beyond, "outside"),
        ("decode_attention", writes_another_block, "arena"),
    ],
)
def test_an_engine_replaces_what_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    open_engine: Callable[..., Engine],
    name: str,
    wrong: Callable[..., Any],
    error: str,
) -> None:
    prompts, params = [[5, 7, 11]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    expected = open_engine("micro", mode="eager").generate(prompts, params)
    use(monkeypatch, **{name: wrong})

    def select(
        _device: Any, _mode: Any, _dtype: Any, weights: Any, _kernels: Any, **_: Any
    ) -> Kernels:
        return dataclasses.replace(gpu_kernels(weights), attention=PLAIN.paged_attention)

    def check_all(kernels: Kernels, *arguments: Any, **keywords: Any) -> Kernels:
        # As on CUDA, where attention of this package is an operation of its own.
        own = dataclasses.replace(kernels, attention=lambda *a: PLAIN.paged_attention(*a))
        return check_kernels(own, *arguments, **keywords)

    monkeypatch.setattr(startup, "select_kernels", select)
    monkeypatch.setattr(startup, "check_kernels", check_all)
    with pytest.warns(RuntimeWarning, match=f"native {name}"):
        engine = open_engine("micro", **(SETTINGS | {"max_num_seqs": 2}))
    assert [o.token_ids for o in engine.generate(prompts, params)] == [
        o.token_ids for o in expected
    ]
    (fallback,) = engine.stats()["kernel_fallbacks"]
    assert fallback["name"] == name
    assert "float32" in fallback["shape"]
    assert error in fallback["error"]


def test_a_required_kernel_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, gate_up=raises)
    with pytest.raises(KernelSelfTestError, match=r"gate_up .*no such layout.*kernels='torch'"):
        check(*resolved(), required=True)


def test_plain_attention_reads_narrow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, decode_attention=raises)
    with pytest.warns(RuntimeWarning):
        kernels = check(*resolved())
    assert not kernels.bounded_by_length
    assert kernels.masks == 1


def test_a_device_that_is_lost_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any, **keywords: Any) -> None:
        def fail(*arguments: Any, **keywords: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch, "ones", fail)
        fail()

    use(monkeypatch, gate_up=lost)
    with pytest.raises(KernelSelfTestError, match=r"gate_up .*illegal memory.*kernels='torch'"):
        check(*resolved())


def compared(capturer: FakeCapturer, *, padding: int = 0) -> Fallback | None:
    """What a decode step and a prefill step with so many tokens of padding show."""
    model, config = resolved(GEMMA2)
    cases = [
        SampleCase(StepKey("decode", 3, 10, False), ((17, 1), (0, 1), (5, 1))),
        SampleCase(StepKey("prefill", 8, 10, False), ((3, 8 - padding),)),
    ]
    cut = sample_config(model, layers=2, vocabulary=model.vocab_size)
    steps = SampleSteps(cut, config, gpu_kernels("model"), cases, 0)
    return dependent_launch_failure(steps, cases, capturer)


@pytest.mark.parametrize("wrong", [False, True])
def test_captures_with_and_without_dependent_launch_are_compared(
    monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    def early(a_TK: Any, linear: Any, residual_TN: Any, out_TN: torch.Tensor, **_: Any) -> None:
        PLAIN.residual_linear(a_TK, linear, residual_TN, out_TN)
        if wrong and is_dependent_launch_enabled():
            out_TN.mul_(1.001)

    use(monkeypatch, residual_linear=early)
    assert (compared(FakeCapturer(FakeGraphs(), DEVICE)) is not None) == wrong
    assert is_dependent_launch_enabled()


def test_what_padding_writes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def raced(qkv_TN: torch.Tensor, arena: torch.Tensor, *rest: Any) -> torch.Tensor:
        q_THE = PLAIN.rotate_and_store(qkv_TN, arena, *rest)
        arena[:, :, 0].fill_(float(is_dependent_launch_enabled()))
        return q_THE

    use(monkeypatch, rotate_and_store=raced)
    assert compared(FakeCapturer(FakeGraphs(), DEVICE), padding=3) is None


def test_a_capture_that_fails_has_no_dependent_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeCapturer):
        def capture(self, fn: Callable[[], Any]) -> Capture[Any]:
            if is_dependent_launch_enabled():
                raise RuntimeError("operation not permitted")
            return super().capture(fn)

    use(monkeypatch)
    found = compared(Refusing(FakeGraphs(), DEVICE))
    assert found is not None
    assert found.error == "RuntimeError: operation not permitted"


def test_plain_attention_is_captured_over_the_columns_in_use() -> None:
    case = SampleCase(StepKey("decode", 2, 8192, False), ((17, 1), (63, 1)))
    assert case.narrowed(16).key == StepKey("decode", 2, 4, False)
