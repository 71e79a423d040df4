"""The time between two decode steps that no kernel covers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, StepgraphError
from stepgraph.runtime.bench.idle import (
    SETTLING_STEPS,
    longest_sequence,
    main,
    measure_idle,
    uncovered_us,
)


def event(name: str, began: float, lasted: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": began, "dur": lasted}


def test_gaps_lie_before_the_first_kernel_of_a_step() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        event("_begin_decode", 10.0, 2.0),
        event("_norm_linear", 15.0, 10.0),  # a gap inside a step is no gap between two
        event("_pick_greedy", 20.0, 1.0),
        event("Memcpy DtoH", 25.0, 3.0, "gpu_memcpy"),
        event("_begin_decode", 29.5, 1.0),
        event("_begin_decode", 30.0, 1.0),
    ]
    assert uncovered_us(list(reversed(events))) == [4.5, 0.0]
    assert uncovered_us([]) == []


def test_one_row_decodes_while_it_is_traced() -> None:
    config = EngineConfig(
        device="cpu",
        mode="eager",
        max_num_seqs=1,
        max_model_len=longest_sequence(8, 3),
        prefix_cache=False,
    )
    seen: list[int] = []

    def trace(run: Callable[[], None]) -> list[dict[str, Any]]:
        engine.timeline().clear()
        run()
        records = engine.timeline().records()
        assert all((record.rows, record.prefill_tokens) == (1, 0) for record in records)
        seen.append(len(records))
        return [event("_begin_decode", 10.0 * n, 9.0 - n / 10) for n in range(len(records))]

    with Engine.from_pretrained("demo", config, progress=False) as engine:
        gaps = measure_idle(engine, input_len=8, num_steps=3, seed=0, trace=trace)
        assert seen == [SETTLING_STEPS + 3 + 2]
        assert gaps == pytest.approx([1.5, 1.6, 1.7])
        assert not engine.has_unfinished()
        with pytest.raises(StepgraphError, match=r"saw 0 gaps .* not 3"):
            measure_idle(engine, input_len=8, num_steps=3, seed=0, trace=lambda run: [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "demo", "--input-len", "24", "--num-steps", "10"]) == 0
    assert '"n": 10' in capsys.readouterr().out
