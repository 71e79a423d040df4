"""Commands of rank 0, and a runner that follows them as another rank does.

The follower has the whole model: without collectives it must compute what rank 0 does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.engine import startup
from stepgraph.runtime.errors import RankError
from stepgraph.runtime.execution.follower import Follower
from stepgraph.runtime.execution.rank_commands import (
    Command,
    CommandSender,
    decode_run,
    encode_run,
)
from stepgraph.runtime.execution.runner import Runner
from stepgraph.runtime.execution.step_key import StepKey
from stepgraph.runtime.execution.token_masks import FollowedMasks

from ..rigs.engine_rig import loop_of
from ..rigs.fake_graphs import FakeEvent, FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.structured_rig import GRAMMARS
from ..rigs.tiny_models import TinyModel
from ..speculation.test_speculation import run_mixed

PROMPTS = [[7, 30, 41], [5, 5, 90, 12], [60], [44, 45, 9]]


class FakeGroup:
    """The group of both ranks: what rank 0 sends waits until the other one reads it."""

    timeout = 5.0

    def __init__(self, rank: int, messages: deque[tuple[int, bytes]]) -> None:
        self.rank, self.messages = rank, messages
        self.writer = self.reader = self
        self.tokens: list[bytes] = []
        self.on_idle: Any = None

    def send(self, kind: int, payload: bytes = b"", *, wake: bool = True) -> None:
        self.messages.append((kind, payload))

    def receive(self) -> tuple[int, bytes]:
        return self.messages.popleft()

    def check(self) -> None:
        """Nothing fails."""

    def check_in(self, tokens: bytes) -> None:
        self.tokens.append(tokens)


def shared_groups() -> list[FakeGroup]:
    messages: deque[tuple[int, bytes]] = deque()
    return [FakeGroup(rank, messages) for rank in range(2)]


def rank_0(group: FakeGroup) -> Callable[..., Runner]:
    """What makes the runner of rank 0."""

    def make(*arguments: Any) -> Runner:
        *others, _, drafter = arguments
        return Runner(*others, CommandSender(group), drafter)  # type: ignore[arg-type]

    return make


def query(event: FakeEvent) -> bool:
    """Whether an event has been reached: after the wait for it."""
    event.synchronize()
    return True


@pytest.mark.parametrize("part", ["whole", "forward", "sample"])
@pytest.mark.parametrize("masked", [False, True])
def test_keys_arrive_as_they_are(part: Any, masked: bool) -> None:
    for key in (
        StepKey("decode", 4096, 1 << 20, True, 64, masked=masked, part=part),
        StepKey("prefill", 1 << 20, 3, False, masked=masked, part=part),
        StepKey("decode", 8, 3, True, 1, 16, 15, masked=masked, part=part),
    ):
        for lanes, awaits_masks in ((0, False), (4096, masked)):
            sent = encode_run(key, lanes, awaits_masks=awaits_masks)
            assert decode_run(sent) == (key, lanes, awaits_masks)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_follower_runs_masked_steps(
    open_engine: Callable[..., Engine],
    fake_graphs: FakeGraphs,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """On a CPU masks arrive within a step, on a device that runs asynchronously between parts."""
    groups = shared_groups()
    monkeypatch.setattr(FakeEvent, "query", query, raising=False)
    fake_graphs.stream.behind = mode == "graph"
    config: dict[str, Any] = {
        "mode": mode,
        "compile": False,
        "structured_output": True,
        "dtype": "float32",
        "kernels": "torch" if mode == "eager" else "auto",
        "max_num_seqs": 2,
        "buckets": (2,),
        "max_model_len": 64,
        "prefill_chunk": 16,
        "speculation": {"num_speculative_tokens": 2, "adaptive": False},
    }
    with monkeypatch.context() as patched:
        patched.setattr(startup, "Runner", rank_0(groups[0]))
        engine = open_engine("text", **config)
    follower = open_engine("text", **config)
    runner = loop_of(follower).runner
    assert runner._host_masks is not None
    runner.followed_masks = FollowedMasks(runner._host_masks)
    for functions in (runner.functions, runner._eager):
        functions._masks_thread = None if mode == "graph" else runner.followed_masks

    params = [
        SamplingParams(max_tokens=14, temperature=0.0, structured=GRAMMARS[0]),
        SamplingParams(
            max_tokens=14, seed=3, logprobs=1, structured={"regex": "abcde[f-h]xyzabc+"}
        ),
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=14, seed=1, structured=GRAMMARS[1]),
    ]
    found = run_mixed(engine, PROMPTS, params)
    assert {end for _, end, _, _ in found.values()} <= {"stop", "length"}
    assert engine.stats()["speculation"]["accepted"] > 2
    kinds = [kind for kind, _ in groups[0].messages]
    assert Command.MASKS in kinds

    groups[1].send(Command.CLOSE)
    follow(follower, groups[1])
    assert groups[1].tokens == groups[0].tokens
    assert len(groups[1].tokens) > 10
    ours, theirs = (loop_of(e).runner.state.masks for e in (engine, follower))
    assert ours is not None
    assert theirs is not None
    assert ours.bits.equal(theirs.bits)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_follower_has_the_drafts_of_rank_0(
    open_engine: Callable[..., Engine],
    base: TinyModel,
    fake_graphs: FakeGraphs,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """Rows come, go and are swapped. Where steps run asynchronously, rows keep their drafts."""
    groups = shared_groups()
    fake_graphs.stream.behind = mode == "graph"
    monkeypatch.setattr(FakeEvent, "query", query, raising=False)
    config: dict[str, Any] = {
        "mode": mode,
        "compile": False,
        "dtype": "float32",
        "kernels": "torch" if mode == "eager" else "auto",
        "max_num_seqs": 4,
        "buckets": (4,),
        "block_size": 4,
        "max_model_len": 64,
        "prefill_chunk": 32,
        "num_blocks": 19,
        "host_cache_bytes": 1 << 20,
        "speculation": {
            "method": "draft_model",
            "model": str(base.directory),
            "num_speculative_tokens": 1 if mode == "graph" else 3,
            "adaptive": False,
        },
    }
    with monkeypatch.context() as patched:
        patched.setattr(startup, "Runner", rank_0(groups[0]))
        engine = open_engine("base", **config)
    follower = open_engine("base", **config)
    params = [
        SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0.9, seed=5, ignore_eos=True, n=2),
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=33, temperature=0.0, ignore_eos=True),
    ]
    run_mixed(engine, base.prompts(30, 4, 12, 7), params)
    stats = engine.stats()
    assert stats["cache"]["swapped_in"]
    assert stats["speculation"]["accepted"] > 20
    assert Command.CLEAR_DRAFTER in [kind for kind, _ in groups[0].messages]

    groups[1].send(Command.CLOSE)
    follow(follower, groups[1])
    assert groups[1].tokens == groups[0].tokens
    ours, theirs = (loop_of(e).runner for e in (engine, follower))
    assert ours.drafter is not None
    assert theirs.drafter is not None
    # The null block holds what padding writes.
    assert ours.drafter.arena.tensor[:, :, 1:].equal(theirs.drafter.arena.tensor[:, :, 1:])
    assert (ours.state.drafts is not None) == (mode == "graph")
    if ours.state.drafts is not None and theirs.state.drafts is not None:
        assert ours.state.drafts.equal(theirs.state.drafts)


def follow(engine: Engine, group: FakeGroup) -> None:
    follower = Follower(loop_of(engine).runner, group, lambda _: None, lambda _: None)  # type: ignore[arg-type]
    follower.follow()
    while follower._check_in_arrived():
        pass


def test_a_step_that_gets_no_masks(open_engine: Callable[..., Engine]) -> None:
    config = {"structured_output": True, "max_num_seqs": 1, "mode": "eager", "kernels": "torch"}
    engine = open_engine("text", **config)
    runner = loop_of(engine).runner
    assert runner._host_masks is not None
    masks = runner.followed_masks = FollowedMasks(runner._host_masks)
    for functions in (runner.functions, runner._eager):
        functions._masks_thread = masks
    group = FakeGroup(1, deque())
    (key, *_) = filter(lambda key: key.masked, runner.sizes.keys())
    group.send(Command.RUN, encode_run(key, 1, awaits_masks=True))
    group.send(Command.CLOSE)
    with pytest.raises(RankError, match=r"rank 1 awaits token masks.*CLOSE"):
        follow(engine, group)
