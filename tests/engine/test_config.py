"""What a user may choose, what each wrong choice is answered with, and how open ones are made.

And the parameters of requests.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.errors import ConfigError, RequestError
from stepgraph.runtime.models import resolved_config
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.sampling_params import SamplingParams

MODEL = preset("smollm2-135m")  # bfloat16, 8192 positions


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a compiler, whatever this machine has."""
    monkeypatch.setattr(resolved_config, "have_compiler", lambda: True)
    monkeypatch.setattr(resolved_config, "cpu_kernels_obstacle", lambda: None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_config, "have_compiler", lambda: False)
    monkeypatch.setattr(resolved_config, "cpu_kernels_obstacle", lambda: "a C++ compiler")


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def resolve(**choices: Any) -> ResolvedConfig:
    return ResolvedConfig.resolve(EngineConfig(**choices), MODEL)


@pytest.mark.parametrize(
    "choices",
    [
        {"memory_fraction": 0.5, "memory_bytes": 100},
        {"memory_tokens": 100, "num_blocks": 10},
        {"max_batch_tokens": 16, "max_num_seqs": 16},
        {"prefix_cache": 1},
        {"compile": "yes"},
        {"buckets": ()},
        {"buckets": (2, 17)},
        {"buckets": (2.0,)},
    ],
)
def test_choices_that_contradict_each_other(choices: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**choices)


@pytest.mark.parametrize(
    ("choices", "budget"),
    [
        ({}, 500),
        ({"memory_fraction": 0.2509}, 250),
        ({"memory_bytes": 10**9}, 10**9),
        ({"memory_tokens": 4096}, None),
        ({"num_blocks": 12}, None),
        ({"num_blocks": 12, "memory_bytes": 10**9}, 10**9),
        ({"num_blocks": 12, "memory_fraction": 0.25}, 250),
        ({"max_batch_tokens": 64}, 500),
    ],
)
def test_memory_budget(choices: dict[str, Any], budget: int | None) -> None:
    assert EngineConfig(**choices).budget_bytes(torch.device("cpu"), 1000) == budget


def refused(field: str) -> Any:
    """Expect an error that names a field."""
    return pytest.raises(ConfigError, check=lambda error: error.field == field)


@pytest.mark.parametrize("device", ["toaster", "", "meta", "cuda", "cuda:1"])
def test_a_device_that_cannot_be_used(device: str, no_cuda: None) -> None:
    with refused("device"):
        resolve(device=device)


@pytest.mark.parametrize(
    ("device", "resolved"), [("auto", "cuda"), ("cuda", "cuda"), ("cuda:1", "cuda:1")]
)
def test_cuda_devices(device: str, resolved: str, two_cuda_devices: None) -> None:
    assert resolve(device=device).device == torch.device(resolved)
    assert resolve(device=device).mode == "graph"
    assert resolve(device=device, mode="compile").mode == "compile"
    with refused("device"):
        resolve(device="cuda:2")


def test_without_a_compiler_it_decodes_eagerly_and_warns(no_cuda: None, no_compiler: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(mode="eager").mode == "eager"
    with pytest.warns(RuntimeWarning):
        assert resolve().mode == "eager"
    with refused("mode"):
        resolve(mode="compile")


def test_a_library_that_was_found_serves_without_a_compiler(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolved_config, "have_compiler", lambda: False)
    resolved = resolve()
    assert (resolved.mode, resolved.kernels) == ("compile", "native")
    for needs_torch_compile in ({"kernels": "torch"}, {"dtype": "float16"}):
        with refused("mode"):
            resolve(mode="compile", **needs_torch_compile)


def test_native_kernels_without_what_they_need(
    two_cuda_devices: None, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolved_config, "have_triton", lambda: False)
    for device in ("cpu", "cuda"):
        with refused("kernels"):
            resolve(device=device, mode="eager", kernels="native")
    with pytest.warns(RuntimeWarning):
        assert resolve(device="cuda", mode="graph").kernels == "torch"


def test_native_kernels_for_a_model_without_them(no_cuda: None) -> None:
    with refused("kernels"):
        resolve(kernels="native", dtype="float16")
    auto = resolve(dtype="float16")
    assert (auto.kernels, auto.native_obstacle is None) == ("native", False)


# Parameters of requests --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 3, "max_tokens": 2},
        {"ignore_eos": 1},
        {"logit_bias": [(1, 2.0)]},
        {"logit_bias": dict.fromkeys(range(301), 1.0)},
        *({"logit_bias": {token: 1.0}} for token in (-1, True, "1")),
        *({"logit_bias": {1: bias}} for bias in (100.5, math.nan)),
        *({"stop": stop} for stop in ("", ["a", ""], ["a"] * 17, "a" * 1025, [1], 1, {"a"})),
        *({"stop_token_ids": ids} for ids in ([0] * 17, [-1], [1 << 31], ["1"], "1", 7)),
    ],
)
def test_sampling_params_that_are_refused_name_their_first_field(fields: dict[str, Any]) -> None:
    with pytest.raises(
        RequestError, check=lambda error: error.field == next(iter(fields))
    ) as found:
        SamplingParams(**fields)
    assert len(str(found.value)) < 300


def test_logit_bias_is_an_immutable_copy() -> None:
    given_bias = {5: 1, 7: -2.5}
    params = SamplingParams(logit_bias=given_bias)
    given_bias[5] = 100
    assert params.logit_bias == {5: 1.0, 7: -2.5}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 3.0  # type: ignore[index]
