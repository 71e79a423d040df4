"""Engines whose model drafts with its own module for multi-token prediction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.kernels import have_compiler

from ..rigs.engine_rig import MIXED_PARAMS, greedy
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.mtp_models import KINDS, write_predictable
from .test_head_engines import MODES
from .test_speculation import SIZES, run_mixed

pytestmark = [
    pytest.mark.native_kernels,
    pytest.mark.filterwarnings("ignore:no native decoder layers"),
]

Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Open an engine on a directory, whose module drafts if `drafts` is not 0."""
    engines: list[Engine] = []

    def make(directory: Path, drafts: int, **config: Any) -> Engine:
        if drafts:
            config["speculation"] = {
                "method": "mtp",
                "num_speculative_tokens": drafts,
                "adaptive": False,
            }
        settings = {"device": "cpu", "mode": "eager", "max_num_seqs": 4, "dtype": "float32"}
        engines.append(Engine.from_pretrained(directory, EngineConfig(**settings | config)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in (30, 4, 12, 7)]


def compare(start: Start, directory: Path, drafts: int, config: dict[str, Any]) -> dict[str, Any]:
    """Compare with plain decoding, twice, as the second time prompts are cached; statistics."""
    vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
    expected = run_mixed(start(directory, 0, **config), prompts(vocab), MIXED_PARAMS)
    engine = start(directory, drafts, **config)
    for _ in range(2):
        assert run_mixed(engine, prompts(vocab), MIXED_PARAMS) == expected
    stats = engine.stats()
    assert stats["fallbacks"] == 0
    assert stats["preemptions"] >= ("num_blocks" in config)
    assert stats["cache"]["hit_tokens"] > 0
    speculation: dict[str, Any] = stats["speculation"]
    assert speculation["drafted"] > 50
    return speculation


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_decoding(
    start: Start, fake_graphs: FakeGraphs, kind: str, mode: str, tmp_path: Path
) -> None:
    """Some drafts are accepted, others not; greedy rows and rows with seeds."""
    config = SIZES | MODES[mode]
    if mode == "preempted" and kind == "mimo":
        config["num_blocks"] = 45  # of three layer groups
    if config.get("kernels") == "native":
        if not have_compiler():
            pytest.skip("needs a C++ compiler")
        if kind == "deepseek_v3":  # latent attention has no layers in C++
            config["kernels"] = "auto"
    if mode == "captured" and kind == "deepseek_v3":
        if not have_compiler():
            pytest.skip("experts in PyTorch cannot be captured")
        fake_graphs.kernels = "compile"
    fake_graphs.stream.behind = mode == "captured"
    write_predictable(tmp_path, kind, "embedding", layers=0.25)
    stats = compare(start, tmp_path, 1 if mode == "captured" else 3, config)
    assert 20 < stats["accepted"] < stats["drafted"] - 20


@pytest.mark.parametrize("reads", ["embedding", "hidden"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_knows_the_next_token_is_right(
    start: Start, kind: str, reads: str, tmp_path: Path
) -> None:
    """It is given the hidden states and the tokens that it was made for, in all of 4 drafts."""
    write_predictable(tmp_path, kind, reads)
    engine = start(tmp_path, 4, **SIZES)
    outputs = engine.generate(prompts(40), [greedy(31)] * 4)
    assert all(
        after == (7 * token + 3) % 40
        for output in outputs
        for token, after in zip(output.token_ids, output.token_ids[1:], strict=False)
    )
    stats = engine.stats()["speculation"]
    assert stats["drafted"] == stats["accepted"] > 80
