"""Several decode steps in one launch: when there are any, and that no token is another for it."""

from __future__ import annotations

from typing import Any

import pytest
from stepgraph.runtime.kernels import have_compiler

from ..rigs.engine_rig import Open, shown
from ..rigs.fake_device import oracle
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.scheduler_rig import Rig
from ..rigs.tiny_models import TinyModel
from ..speculation.test_speculation import MIXED

pytestmark = pytest.mark.native_kernels


def steps_of(rig: Rig) -> list[int]:
    """Decode steps of each launch so far; 0: it prefilled only."""
    return [plan.steps if plan.decode else 0 for plan in rig.runner.plans]


# When ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(17, [0, 8, 8]), (20, [0, 8, 8, 1, 1, 1]), (8, [0, *[1] * 7]), (9, [0, 8]), (1, [0])],
)
def test_the_last_tokens_are_decoded_singly(
    max_tokens: int, expected: list[int], in_flight: int
) -> None:
    """The prefill samples the first one."""
    rig = Rig(steps_per_launch=8, in_flight=in_flight)
    request = rig.add(3, max_tokens=max_tokens)
    rig.drain()
    assert steps_of(rig) == expected
    assert request.output_ids == oracle(request)[0]


def test_where_blocks_are_short_there_are_single_steps() -> None:
    """A window of three tokens fits, eight more beside it do not; nobody loses blocks for them."""
    rigs = [
        Rig(windows=(3,), block_size=1, usable_blocks=blocks, prefill_chunk=1, steps_per_launch=8)
        for blocks in (9, 30)
    ]
    for rig in rigs:
        requests = [rig.add(2, max_tokens=25) for _ in range(2)]
        rig.drain()
        assert rig.loop.counts["preemptions"] == 0
        for request in requests:
            assert request.output_ids == oracle(request, (3,))[0]
    tight, roomy = rigs
    assert max(steps_of(tight)) == 1
    assert max(steps_of(roomy)) == 8
    assert tight.loop.counts["multi_step_launches"] == 0
    assert roomy.loop.counts["multi_step_launches"] == steps_of(roomy).count(8) >= 2


# Engines ------------------------------------------------------------------------------------------


MODES = [
    {"mode": "eager"},
    pytest.param(
        {"mode": "compile"},
        marks=pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler"),
    ),
    {"mode": "graph", "compile": False, "buckets": (1, 4)},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", MODES, ids=["eager", "compile", "graph"])
@pytest.mark.parametrize("steps", [2, 5])
def test_tokens_are_those_of_single_steps(
    open_engine: Open, fake_graphs: FakeGraphs, base: TinyModel, config: dict[str, Any], steps: int
) -> None:
    """Penalties, forks and log-probabilities; one request reaches `max_model_len`."""
    if config["mode"] == "compile":
        fake_graphs.kernels = "compile"
    sizes = {"block_size": 4, "prefill_chunk": 16, "max_model_len": 64}
    prompts = base.prompts(30, 4, 12, 7, 9)
    single = open_engine("base", **config, **sizes)
    several = open_engine("base", **config, **sizes, steps_per_launch=steps)
    fake_graphs.stream.behind = config["mode"] == "graph"
    expected = single.generate(prompts, MIXED[:5])
    assert shown(several.generate(prompts, MIXED[:5])) == shown(expected)
    assert [len(o.token_ids) for o in expected][4] == 64 - 9
    stats = several.stats()
    assert stats["multi_step_launches"] > 3
    assert stats["steps"] < single.stats()["steps"]
    assert stats["fallbacks"] == 0
    assert single.stats()["multi_step_launches"] == 0
    several.check_integrity()
