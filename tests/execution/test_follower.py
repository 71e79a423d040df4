"""Commands of rank 0, and a runner that follows them as another rank does.

The follower has the whole model: without collectives it must compute what rank 0 does.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.engine import startup
from stepgraph.runtime.errors import RankError
from stepgraph.runtime.execution.follower import Follower
from stepgraph.runtime.execution.rank_commands import Command, CommandSender
from stepgraph.runtime.execution.runner import Runner
from stepgraph.runtime.execution.token_masks import FollowedMasks

from ..rigs.engine_rig import MIXED_PARAMS, Open, loop_of
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.structured_rig import GRAMMARS
from ..rigs.tiny_models import TinyModel
from ..speculation.test_speculation import run_mixed


class FakeGroup:
    """The group of both ranks: what rank 0 sends waits until the other one reads it."""

    timeout = 5.0

    def __init__(self, rank: int, messages: deque[tuple[int, int, bytes]]) -> None:
        self.rank, self.messages = rank, messages
        self.tokens: list[bytes] = []
        self.checksum = 0

    @property
    def steps(self) -> int:
        return len(self.tokens)

    def send(self, kind: int, payload: bytes = b"") -> None:
        self.messages.append((self.steps, kind, payload))

    def receive(self) -> tuple[int, int, tuple[int, bytes]]:
        steps, *message = self.messages.popleft()
        return steps, 0, tuple(message)

    def check(self) -> None:
        """Nothing fails."""

    def check_in(self, tokens: bytes) -> None:
        self.tokens.append(tokens)


@pytest.fixture(params=["eager", "graph"])
def mode(request: Any, fake_graphs: FakeGraphs) -> str:
    """On a CPU steps run synchronously, on a device they run after the host has launched others."""
    fake_graphs.stream.behind = request.param == "graph"
    return str(request.param)


def open_ranks(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, mode: str, variant: str, **config: Any
) -> tuple[Engine, Engine, FakeGroup]:
    """Open rank 0, and the engine of the other rank; return the group of both."""
    group = FakeGroup(0, deque())

    def make(*arguments: Any) -> Runner:
        *others, _, drafter = arguments
        return Runner(*others, CommandSender(group), drafter)  # type: ignore[arg-type]

    config |= {"mode": mode, "compile": False, "dtype": "float32", "max_model_len": 44}
    config |= {"kernels": "torch" if mode == "eager" else "auto"}
    with monkeypatch.context() as patched:
        patched.setattr(startup, "Runner", make)
        engine = open_engine(variant, **config)
    return engine, open_engine(variant, **config), group


def receive_masks(engine: Engine, mode: str) -> None:
    """Let the steps of a follower wait for the masks of rank 0."""
    runner = loop_of(engine).runner
    assert runner._host_masks is not None
    masks = runner.followed_masks = FollowedMasks(runner._host_masks)
    for functions in (runner.functions, runner._eager):
        functions._masks_thread = None if mode == "graph" else masks


def follow(engine: Engine, sent: FakeGroup) -> None:
    """Run the commands; the tokens are those of rank 0."""
    group = FakeGroup(1, sent.messages)
    sent.send(Command.CLOSE)
    follower = Follower(loop_of(engine).runner, group, lambda _: None, lambda _: None)  # type: ignore[arg-type]
    follower.follow()
    assert group.tokens == sent.tokens
    assert len(group.tokens) > 10


def test_follower_runs_masked_steps(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """On a CPU masks arrive within a step, on a device that runs asynchronously between parts."""
    engine, follower, group = open_ranks(
        *(open_engine, monkeypatch, mode, "text"),
        structured_output=True,
        max_num_seqs=2,
        buckets=(2,),
        prefill_chunk=16,
        speculation={"num_speculative_tokens": 2, "adaptive": False},
    )
    receive_masks(follower, mode)
    forced = {"regex": "abcde[f-h]xyzabc+"}
    params = [
        SamplingParams(max_tokens=14, temperature=0.0, structured=GRAMMARS[0]),
        SamplingParams(max_tokens=14, seed=3, logprobs=1, structured=forced),
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=14, seed=1, structured=GRAMMARS[1], repetition_penalty=1.2),
    ]
    prompts = [[7, 30, 41], [5, 5, 90, 12], [60], [44, 45, 9]]
    found = run_mixed(engine, prompts, params)
    assert {end for _, end, _, _ in found.values()} <= {"stop", "length"}
    assert engine.stats()["speculation"]["accepted"] > 2
    assert Command.MASKS in [kind for _, kind, _ in group.messages]
    follow(follower, group)
    ours, theirs = (loop_of(e).runner.state.masks for e in (engine, follower))
    assert ours is not None
    assert theirs is not None
    assert ours.bits.equal(theirs.bits)


def test_follower_has_the_drafts_of_rank_0(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, base: TinyModel, mode: str
) -> None:
    """Rows come, go and are swapped. Where steps run asynchronously, rows keep their drafts."""
    drafter = {"method": "draft_model", "model": str(base.directory), "adaptive": False}
    engine, follower, group = open_ranks(
        *(open_engine, monkeypatch, mode, "base"),
        buckets=(4,),
        block_size=4,
        prefill_chunk=16,
        num_blocks=16,
        host_cache_bytes=1 << 20,
        speculation=drafter | {"num_speculative_tokens": 1 if mode == "graph" else 3},
    )
    run_mixed(engine, base.prompts(20, 4, 12, 7), MIXED_PARAMS)
    stats = engine.stats()
    assert stats["cache"]["swapped_in"]
    assert stats["speculation"]["accepted"] > 15
    assert Command.CLEAR_DRAFTER in [kind for _, kind, _ in group.messages]
    follow(follower, group)
    ours, theirs = (loop_of(e).runner for e in (engine, follower))
    assert ours.drafter is not None
    assert theirs.drafter is not None
    # The null block holds what padding writes.
    assert ours.drafter.arena.tensor[:, :, 1:].equal(theirs.drafter.arena.tensor[:, :, 1:])
    assert (ours.state.drafts is not None) == (mode == "graph")
    if ours.state.drafts is not None and theirs.state.drafts is not None:
        assert ours.state.drafts.equal(theirs.state.drafts)


def test_step_that_gets_no_masks_is_an_error(open_engine: Open) -> None:
    engine = open_engine("text", structured_output=True, max_num_seqs=1, kernels="torch")
    receive_masks(engine, "eager")
    group = FakeGroup(0, deque())
    (key, *_) = filter(lambda key: key.masked, loop_of(engine).runner.sizes.keys())
    CommandSender(group).run(key, 1, awaits_masks=True)  # type: ignore[arg-type]
    with pytest.raises(RankError):
        follow(engine, group)
