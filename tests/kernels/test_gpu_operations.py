"""Steps made of plain operations: the tokens of transformers, and nothing a capture cannot hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.engine import startup
from stepgraph.runtime.kernels import Kernels, reference_paged_attention

pytest.importorskip("triton")

from stepgraph.runtime.execution.step_key import StepKey
from stepgraph.runtime.kernels.triton import kernel_calls
from stepgraph.runtime.kernels.triton.backend import gpu_kernels
from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED, record_kernel_calls
from stepgraph.runtime.kernels.triton.operations import Operations
from stepgraph.runtime.kernels.triton.paged_attention import triton_paged_attention

from ..rigs.operation_tape import Tape

if TYPE_CHECKING:
    from conftest import TinyModel

pytestmark = [
    pytest.mark.usefixtures("steps_are_not_measured"),
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()),
        reason="needs a CUDA device or the interpreter",
    ),
]
NAMES = [field.name for field in dataclasses.fields(Operations)]


@pytest.fixture
def open_with(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """Open an eager engine of tiny steps over operations of the test's choice."""

    def make(operations: Operations, variant: str, **settings: Any) -> Engine:
        def select(
            _device: Any, _mode: Any, _dtype: Any, weights: Any, _kernels: Any, **_: Any
        ) -> Kernels:
            chosen = gpu_kernels(weights, operations)
            return dataclasses.replace(
                chosen, attention=operations.paged_attention, sampler="torch"
            )

        monkeypatch.setattr(startup, "select_kernels", select)
        monkeypatch.setattr(startup, "check_kernels", lambda kernels, *_, **__: kernels)
        sizes = {"max_num_seqs": 3, "block_size": 4, "max_model_len": 64, "prefill_chunk": 8}
        config = EngineConfig(mode="eager", **(sizes | settings))
        return Engine.from_pretrained(tiny(variant).directory, config)

    return make


@pytest.mark.parametrize("variant", ["odd", "qwen3", "gemma2", "gemma3", "biases", "deepseek_v2"])
def test_plain_operations_give_the_tokens_of_transformers_without_a_kernel(
    open_with: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    prompts = tiny(variant).prompts(13, 1, 6, 3)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with record_kernel_calls() as calls, open_with(Operations.reference(), variant) as engine:
        outputs = engine.generate(prompts, params)
    assert not calls
    assert [o.token_ids for o in outputs] == tiny(variant).greedy(prompts, 3)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("variant", ["micro", "gemma2"])
@pytest.mark.parametrize("name", ["decode_attention", "combine_output", "prefill_tiles", "head"])
def test_a_plain_operation_fits_between_kernels(
    open_with: Callable[..., Engine],
    tiny: Callable[[str], TinyModel],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    variant: str,
) -> None:
    monkeypatch.setattr(kernel_calls, "MULTIPROCESSORS", 8)  # so that positions are split
    prompts = tiny(variant).prompts(13, 6)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    operations = Operations.native().with_reference([name])
    with open_with(operations, variant) as engine:
        outputs = engine.generate(prompts, params)
    assert [o.token_ids for o in outputs] == tiny(variant).greedy(prompts, 3)


@pytest.mark.parametrize(
    "settings", [{}, {"weight_dtype": "int8", "kv_dtype": "fp8"}, {"weight_dtype": "fp8"}]
)
def test_plain_steps_can_be_captured(
    open_with: Callable[..., Engine], settings: dict[str, str]
) -> None:
    with open_with(Operations.reference(), "gemma2", **settings) as engine:
        runner = engine._parts.runner
        width = runner.sizes.read_blocks.largest
        for key in (StepKey("decode", 2, width, False), StepKey("prefill", 8, width, False)):
            with Tape() as tape:  # which refuses what waits for the device
                runner.steps.functions.bind(key)()
            assert tape.operations


def test_an_unknown_operation_has_no_plain_version() -> None:
    assert Operations.native().with_reference(NAMES) == Operations.reference()
    with pytest.raises(AttributeError, match="attend_twice"):
        Operations.native().with_reference(["attend_twice"])


def test_triton_attention_is_an_operation() -> None:
    assert Operations.native().paged_attention is triton_paged_attention
    assert Operations.reference().paged_attention is reference_paged_attention
