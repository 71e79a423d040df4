"""Which steps `compile_ahead` compiles the kernels of."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from stepgraph.runtime import EngineConfig
from stepgraph.runtime.tools.compile_ahead import RecordedStep, record_steps

EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 2}


def recorded(**config: Any) -> dict[str, RecordedStep]:
    """The steps of two rows, and of a chunk of 32 tokens, of the demo model."""
    steps = record_steps("demo", EngineConfig(**config), rows=[2], tokens=[32])
    by_name = {step.name: step for step in steps}
    assert len(by_name) == len(steps)
    return by_name


def kernels(step: RecordedStep) -> set[str]:
    return {call.name for call in step.kernel_calls}


def loaded(step: RecordedStep, parameter: str) -> list[bool]:
    """Whether the kernels of a step with such a parameter get a tensor."""
    return [
        call.args[call.kernel.arg_names.index(parameter)] is not None
        for call in step.kernel_calls
        if parameter in call.kernel.arg_names
    ]


def test_steps_that_verify_drafts_are_recorded() -> None:
    plain, steps = recorded(), recorded(speculation="suffix")
    assert set(plain) == {"decode 2 greedy", "decode 2 sampled", "prefill 32 greedy"}
    verified = [f"verify 2x{n} {how}" for n in (2, 3, 4, 5, 8) for how in ("greedy", "sampled")]
    assert set(steps) == {*plain, *verified}
    for name in verified:
        assert "_attention_kernel" in kernels(steps[name])
        assert any(loaded(steps[name], "inputs_ptr")) == ("sampled" in name)
    assert not any(loaded(steps["decode 2 sampled"], "inputs_ptr"))


def test_steps_with_masks_and_of_drafters_are_recorded() -> None:
    steps = recorded(speculation=EAGLE3, structured_output=True)
    for name in ("decode 2", "verify 2x2", "verify 2x3"):
        drafting = steps[f"{name} greedy drafting 2"]
        # Attention of the head's layer: after the step, and for the second draft.
        assert "_decode_ready_attention" in kernels(drafting)
        assert len(drafting.kernel_calls) > len(steps[f"{name} forward"].kernel_calls)
        for how in ("greedy", "sampled"):
            sampled = steps[f"sample {name.split()[1]} {how}"]
            assert all(loaded(sampled, "words_ptr"))
            assert not any(loaded(steps[f"{name} {how} drafting 2"], "words_ptr"))
    prefill = steps["prefill 32 greedy"]
    assert "_store_kernel" in kernels(prefill), "the head follows"
    proposing = steps["prefill 32 greedy drafting 2"]
    assert len(proposing.kernel_calls) > len(prefill.kernel_calls)
    assert not any("drafting" in name for name in steps if "masked" in name)
