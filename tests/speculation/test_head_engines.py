"""Engines with drafters that read hidden states: their drafts change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine
from stepgraph.runtime.kernels import have_compiler

from ..rigs.engine_rig import greedy, loop_of
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.tiny_models import TinyModel
from . import test_block_drafter, test_eagle3
from .test_speculation import SIZES, run_mixed

pytestmark = pytest.mark.native_kernels

MODES: dict[str, dict[str, Any]] = {
    "plain": {"mode": "eager", "kernels": "torch"},
    "native": {"mode": "eager", "kernels": "native"},
    "cache in 8 bits": {"mode": "eager", "kernels": "native", "kv_dtype": "int8"},
    "captured": {"mode": "graph", "compile": False, "buckets": (4,)},
    "preempted": {"mode": "eager", "kernels": "native", "num_blocks": 19},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_tokens_are_those_of_plain_decoding(
    open_engine: Callable[..., Engine],
    base: TinyModel,
    fake_graphs: FakeGraphs,
    kind: str,
    mode: str,
    tmp_path: Path,
) -> None:
    config = SIZES | MODES[mode]
    if config.get("kernels") == "native" and not have_compiler():
        pytest.skip("needs a C++ compiler")
    write = test_eagle3.write if kind == "eagle3" else test_block_drafter.write
    directory, *_ = write(tmp_path / "drafter")
    speculation = {
        "method": kind,
        "model": str(directory),
        "num_speculative_tokens": 1 if mode == "captured" else 3,
        "adaptive": False,
    }
    fake_graphs.stream.behind = mode == "captured"
    plain = open_engine("base", **config, dtype="float32")
    engine = open_engine("base", **config, dtype="float32", speculation=speculation)
    prompts = base.prompts(30, 4, 12, 7)
    params = [greedy(28), greedy(40), greedy(33), greedy(19, n=2)]
    expected = run_mixed(plain, prompts, params)
    for _ in range(2):  # the second time prompts are cached
        assert run_mixed(engine, prompts, params) == expected
    stats = engine.stats()
    assert stats["fallbacks"] == 0
    assert stats["speculation"]["drafted"] > 50


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_drafts_after_prompts_are_the_same_on_all_kernels(
    open_engine: Callable[..., Engine],
    base: TinyModel,
    fake_graphs: FakeGraphs,
    kind: str,
    tmp_path: Path,
) -> None:
    """Of several prompts in a step, in chunks that end before the prompt does, too."""
    if not have_compiler():
        pytest.skip("needs a C++ compiler")
    write = test_eagle3.write if kind == "eagle3" else test_block_drafter.write
    directory, *_ = write(tmp_path / "drafter")
    speculation = {
        "method": kind,
        "model": str(directory),
        "num_speculative_tokens": 3,
        "adaptive": False,
    }
    found: list[dict[int, tuple[list[int], list[float]]]] = []
    for mode in ("plain", "native", "captured"):
        config = SIZES | MODES[mode] | {"prefill_chunk": 16, "dtype": "float32"}
        engine = open_engine("base", **config, speculation=speculation)
        speculator: Any = loop_of(engine).speculator
        own: dict[int, tuple[list[int], list[float]]] = {}
        received = speculator.received

        def record(proposed: Any, own: Any = own, received: Any = received) -> None:
            proposed = list(proposed)
            for request, _, tokens, probabilities in proposed:
                own.setdefault(len(request.prompt_ids), (tokens, probabilities))
            received(proposed)

        speculator.received = record
        engine.generate(base.prompts(30, 4, 12, 7), greedy(9))
        found.append(own)
    for other in found[1:]:
        assert other.keys() == found[0].keys() == {30, 4, 12, 7}
        for length, (tokens, probabilities) in found[0].items():
            assert other[length][0] == tokens
            assert other[length][1] == pytest.approx(probabilities, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_compiled_steps_give_drafters_their_hidden_states(
    open_engine: Callable[..., Engine],
    base: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Traced as for inductor, but run as they are, which takes less time."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda code, *, options, **own: compile_(code, backend="eager", **own)
    )
    directory, *_ = test_eagle3.write(tmp_path / "drafter")
    speculation = {"method": "eagle3", "model": str(directory), "num_speculative_tokens": 2}
    config = SIZES | {"mode": "compile", "kernels": "torch", "dtype": "float32"}
    prompts, params = base.prompts(30, 4), [greedy(20), greedy(24)]
    expected = run_mixed(open_engine("base", **config), prompts, params)
    engine = open_engine("base", **config, speculation=speculation | {"adaptive": False})
    assert run_mixed(engine, prompts, params) == expected
    stats = engine.stats()
    assert stats["fallbacks"] == 0
    assert stats["speculation"]["drafted"] > 20
