"""Whole engines whose steps are captured, over the recording fake of the graph API.

Order of captures, launches and copies; and tokens equal to those of eager engines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, SamplingParams

from ..rigs.engine_rig import Open, loop_of, run, shown
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.tiny_models import Tiny, TinyModel
from ..speculation.test_speculation import run_mixed

Both = Callable[..., tuple[Engine, Engine]]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
GRAPH = {
    "mode": "graph",
    "compile": False,
    "max_model_len": 96,
    "buckets": (1, 4),
    "prefill_chunk": 32,
}


@pytest.fixture
def open_captured(open_engine: Open, fake_graphs: FakeGraphs) -> Open:
    """Open an engine with captured steps, whose device works behind the host from then on."""

    def make(variant: str, **config: Any) -> Engine:
        engine = open_engine(variant, **GRAPH | config)
        fake_graphs.stream.behind = True
        return engine

    return make


@pytest.fixture
def open_both(open_engine: Open, open_captured: Open) -> Both:
    """Open the same engine with eager and with captured steps."""

    def make(variant: str, **config: Any) -> tuple[Engine, Engine]:
        eager = open_engine(variant, **config)
        return open_captured(variant, **config), eager

    return make


def check_captured(engine: Engine) -> None:
    stats = engine.stats()
    assert stats["mode"] == "graph"
    assert stats["fallbacks"] == 0
    engine.check_integrity()


def test_all_is_captured_before_the_first_request(
    open_captured: Open, fake_graphs: FakeGraphs, base: TinyModel
) -> None:
    engine = open_captured("base", prefill_chunk=64)
    runner = loop_of(engine).runner
    captures = fake_graphs.index_of(runner.library)
    assert set(captures) == set(runner.sizes.keys())
    assert [event for event, *_ in fake_graphs.log] == [
        "capturer",  # one pool and one stream for all
        *["warm up"] * len(captures),
        "begin captures",
        *["capture"] * len(captures),
        "end captures",
    ]
    engine.generate(base.prompts(70, 3, 20), GREEDY)
    assert len(fake_graphs.graphs) == len(captures)
    check_captured(engine)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_steady_launch_is_one_replay(
    open_captured: Open, fake_graphs: FakeGraphs, base: TinyModel, temperature: float
) -> None:
    """No copy to the device; the tokens of the step before are read while this one runs."""
    engine = open_captured("base", block_size=64)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in base.prompts(5, 9, 3)]
    for _ in range(5):
        engine.step()
    (number,) = [launch.number for launch in loop_of(engine)._launched]
    replayed = set()
    for step in range(20):
        mark = len(fake_graphs.log)
        engine.step()
        replay, *rest = fake_graphs.log[mark:]
        assert replay[0] == "replay"
        replayed.add(replay)
        assert rest == [("copy out", "decode"), ("read", number + step)]
        record = engine.timeline().records()[-1]
        assert (record.rows, record.bucket) == (3, 4)
    assert len(replayed) == 1
    key = {i: k for k, i in fake_graphs.index_of(loop_of(engine).runner.library).items()}[
        replayed.pop()[1]
    ]
    assert (key.phase, key.size) == ("decode", 4)
    assert key.full_sampler == (temperature > 0)
    final = run(engine)
    if temperature == 0:
        assert [final[i].token_ids for i in ids] == base.greedy(base.prompts(5, 9, 3), 60)
    check_captured(engine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["base", "qwen3", "gemma3", "deepseek_v2"])
def test_greedy_tokens(open_captured: Open, tiny: Tiny, variant: str) -> None:
    """Requests come while others decode; prompts are longer than a chunk, rows change hands."""
    prompts = tiny(variant).prompts(3, 50, 1, 17, 9, 33)
    engine = open_captured(variant, prefill_chunk=16, block_size=8)
    found = run_mixed(engine, prompts, [GREEDY] * 6)
    assert [found[f"r{5 - i}/0"][0] for i in range(6)] == tiny(variant).greedy(prompts, 20)
    check_captured(engine)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_model_len": 64, "num_blocks": 18},
        {"max_model_len": 64, "num_blocks": 18, "host_cache_bytes": 1 << 20},
    ],
    ids=str,
)
def test_sampled_tokens_and_their_log_probabilities(
    open_both: Both, base: TinyModel, config: dict[str, Any]
) -> None:
    """Penalties are state on the device; completions of one prompt fork, or are preempted."""
    prompts = base.prompts(30, 4, 12)
    params = [
        SamplingParams(
            max_tokens=18, temperature=0.9, top_k=20, top_p=0.95, min_p=0.02, seed=7, n=3,
            logprobs=4, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        ),
        SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, min_tokens=6),
        SamplingParams(max_tokens=25, temperature=1.3, seed=9, logit_bias={5: 4.0, 6: -9.0}, n=2),
    ]  # fmt: skip
    captured, eager = open_both("base", prefill_chunk=8, block_size=4, **config)
    both = [engine.generate(prompts, params) for engine in (captured, eager)]
    assert shown(both[0]) == shown(both[1])
    entries = [[p for o in outputs for c in o.completions for p in c.logprobs] for outputs in both]
    for a, b in zip(*entries, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert a.top == pytest.approx(b.top, abs=1e-4)
    stats = captured.stats()
    assert stats["cache"]["forks"] > 0
    assert (stats["preemptions"] > 0) == ("num_blocks" in config)
    assert (stats["cache"]["swapped_in"] > 0) == ("host_cache_bytes" in config)
    check_captured(captured)


def test_logits_of_forced_tokens(open_both: Both, fake_graphs: FakeGraphs, base: TinyModel) -> None:
    captured, eager = open_both("base", block_size=8, prefill_chunk=16)
    (token_ids,) = base.prompts(60)
    fake_graphs.stream.behind = False  # `score` takes the logits, which waits for the device
    for prompt_len in (1, 40, 60):
        expected = eager.score(token_ids, prompt_len)
        torch.testing.assert_close(
            captured.score(token_ids, prompt_len), expected, rtol=0, atol=1e-4
        )
    check_captured(captured)
