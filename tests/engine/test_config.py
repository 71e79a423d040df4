"""What a user may choose, what each wrong choice is answered with, and how open ones are made."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from stepgraph.cache.memory.handler import MemoryBudget
from stepgraph.runtime import resolved_config
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.resolved_config import ResolvedConfig

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


def test_defaults_serve(no_cuda: None) -> None:
    resolved = resolve()
    assert resolved.user == EngineConfig()
    assert resolved.device == torch.device("cpu")
    assert resolved.dtype == torch.bfloat16
    assert resolved.mode == "compile"
    assert resolved.max_model_len == 8192


@pytest.mark.parametrize(
    "field", ["dtype", "weight_dtype", "kv_dtype", "kernels", "mode", "preemption"]
)
@pytest.mark.parametrize("value", ["float64", "GRAPH", "", None, 3])
def test_a_choice_that_does_not_exist(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be one of auto, .*not {value!r}$"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"memory_fraction": 0.5, "memory_bytes": 100},
            "memory_tokens, not memory_fraction and memory_bytes",
        ),
        (
            {"memory_fraction": 0.5, "memory_bytes": 100, "memory_tokens": 9},
            "not memory_fraction and memory_bytes and memory_tokens",
        ),
        ({"memory_tokens": 100, "num_blocks": 10}, "memory_tokens and num_blocks both fix"),
        (
            {"max_batch_tokens": 16, "max_num_seqs": 16},
            "max_batch_tokens=16 must be greater than max_num_seqs=16",
        ),
        (
            {"preemption": "swap"},
            "preemption='swap' needs a host cache: set host_cache_bytes",
        ),
        ({"prefix_cache": 1}, "prefix_cache must be True or False, not 1"),
        ({"prompt_embeds": None}, "prompt_embeds must be True or False, not None"),
        ({"compile": "yes"}, "compile must be True or False, not 'yes'"),
        ({"freeze_gc": 1}, "freeze_gc must be True or False, not 1"),
        ({"max_itl_ms": 0}, "max_itl_ms must be a positive number of milliseconds, not 0"),
        ({"max_itl_ms": math.nan}, "max_itl_ms must be a positive number of milliseconds, not nan"),
        ({"max_itl_ms": math.inf}, "max_itl_ms must be a positive number of milliseconds, not inf"),
        ({"max_itl_ms": "20"}, "leave it out for chunks of prefill_chunk tokens"),
        ({"memory_fraction": math.nan}, "memory_fraction"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"buckets": ()}, "buckets must be a non-empty tuple"),
        ({"buckets": (2, 17)}, "each of buckets must be an integer from 1 to 16, not 17"),
        ({"buckets": (2.0,)}, "each of buckets must be an integer from 1 to 16, not 2.0"),
    ],
)
def test_choices_that_contradict_each_other(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(**choices)


@pytest.mark.parametrize(
    ("choices", "budget", "fixed_blocks"),
    [
        ({}, MemoryBudget(fraction=0.5), None),
        ({"memory_fraction": 0.25}, MemoryBudget(fraction=0.25), None),
        ({"memory_bytes": 10**9}, MemoryBudget(bytes=10**9), None),
        ({"memory_tokens": 4096}, MemoryBudget(context_tokens=4096), None),
        ({"num_blocks": 12}, MemoryBudget(num_blocks=12), None),
        ({"num_blocks": 12, "memory_bytes": 10**9}, MemoryBudget(bytes=10**9), 12),
        ({"num_blocks": 12, "memory_fraction": 0.25}, MemoryBudget(fraction=0.25), 12),
    ],
)
def test_memory_budget(
    choices: dict[str, Any], budget: MemoryBudget, fixed_blocks: int | None
) -> None:
    config = EngineConfig(**choices)
    assert config.memory_budget(torch.device("cpu")) == budget
    assert config.fixed_blocks == fixed_blocks


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("toaster", "device 'toaster' is not a device: use 'auto', 'cpu' or 'cuda'"),
        ("", "device '' is not a device"),
        ("meta", "device 'meta' is not supported: use 'cpu' or 'cuda'"),
        ("cuda", "device 'cuda' does not exist: torch sees 0 CUDA devices"),
        ("cuda:1", "device 'cuda:1' does not exist: torch sees 0 CUDA devices"),
    ],
)
def test_a_device_that_cannot_be_used(device: str, message: str, no_cuda: None) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(device=device)


@pytest.mark.parametrize(
    ("device", "resolved"), [("auto", "cuda"), ("cuda", "cuda"), ("cuda:1", "cuda:1")]
)
def test_cuda_devices(device: str, resolved: str, two_cuda_devices: None) -> None:
    assert resolve(device=device).device == torch.device(resolved)
    assert resolve(device=device).mode == "graph"
    assert resolve(device=device, mode="compile").mode == "compile"
    with pytest.raises(ConfigError, match="torch sees 2 CUDA devices"):
        resolve(device="cuda:2")


def test_without_a_compiler_it_decodes_eagerly_and_warns(no_cuda: None, no_compiler: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(mode="eager").mode == "eager"
    with pytest.warns(RuntimeWarning, match=r"many times slower.*C\+\+ compiler"):
        assert resolve().mode == "eager"
    with pytest.raises(ConfigError, match=r"mode='compile' needs a C\+\+ compiler.*mode='eager'"):
        resolve(mode="compile")


def test_a_library_that_was_found_serves_without_a_compiler(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolved_config, "have_compiler", lambda: False)
    resolved = resolve()
    assert (resolved.mode, resolved.kernels) == ("compile", "native")
    for needs_torch_compile in ({"kernels": "torch"}, {"dtype": "float16"}):
        with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
            resolve(mode="compile", **needs_torch_compile)


def test_a_gpu_needs_no_compiler(two_cuda_devices: None, no_compiler: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve().mode == "graph"


@pytest.mark.parametrize(
    ("kernels", "mode", "resolved"),
    [
        ("auto", "eager", "torch"),
        ("auto", "compile", "native"),
        ("native", "eager", "native"),
        ("torch", "compile", "torch"),
    ],
)
def test_kernels(kernels: str, mode: str, resolved: str, no_cuda: None) -> None:
    assert resolve(kernels=kernels, mode=mode).kernels == resolved


def test_native_kernels_without_what_they_need(
    two_cuda_devices: None, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolved_config, "have_triton", lambda: False)
    for device, needed in (("cpu", "C++ compiler"), ("cuda", "package triton")):
        message = f"kernels='native' needs .*{re.escape(needed)}.*kernels='torch'"
        with pytest.raises(ConfigError, match=message):
            resolve(device=device, mode="eager", kernels="native")
    with pytest.warns(RuntimeWarning, match="triton"):
        assert resolve(device="cuda", mode="graph").kernels == "torch"


@pytest.mark.parametrize(
    "choices", [{"dtype": "float16"}, {"weight_dtype": "fp8"}], ids=["float16", "fp8"]
)
def test_native_kernels_for_a_model_without_them(choices: dict[str, str], no_cuda: None) -> None:
    with pytest.raises(ConfigError, match=r"does not support this model: .*kernels='auto'"):
        resolve(kernels="native", **choices)
    auto = resolve(**choices)
    assert (auto.kernels, auto.native_obstacle is None) == ("native", False)
