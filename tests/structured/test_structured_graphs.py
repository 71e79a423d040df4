"""Grammars with captured steps on an asynchronous device: the fake of the graph API."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from stepgraph.runtime import Engine, SamplingParams

from ..execution.test_graph_mode import check_captured, open_both, open_captured  # noqa: F401
from ..rigs.engine_rig import shown
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.structured_rig import PROMPTS, mixed

pytestmark = pytest.mark.native_kernels


def test_captured_steps_with_masks(
    open_both: Callable[..., tuple[Engine, Engine]],  # noqa: F811
) -> None:
    config = {"block_size": 4, "num_blocks": 25, "prefill_chunk": 8, "host_cache_bytes": 1 << 18}
    captured, eager = open_both("text", structured_output=True, **config)
    prompts, params = mixed()
    assert shown(captured.generate(prompts, params)) == shown(eager.generate(prompts, params))
    check_captured(captured)
    captured.check_integrity()


def test_one_step_stays_in_flight(
    open_both: Callable[..., tuple[Engine, Engine]],  # noqa: F811
    fake_graphs: FakeGraphs,
) -> None:
    captured, _ = open_both("text", structured_output=True)
    captured.add_request(PROMPTS[0], SamplingParams(max_tokens=20, structured={"regex": "[a-z]*"}))
    threads = set(threading.enumerate())
    for _ in range(4):
        captured.step()
    started = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not any("masks" in name for name in started), "the host has nothing else to do"
    del fake_graphs.log[:]
    captured.step()
    kinds = [entry[0] for entry in fake_graphs.log]
    replays = [i for i, kind in enumerate(kinds) if kind == "replay"]
    assert len(replays) == 2, fake_graphs.log
    assert replays[0] < kinds.index("read") < replays[1], fake_graphs.log
