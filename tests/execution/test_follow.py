"""What rank 0 sends, and a runner that follows it as another rank does.

The follower has the whole model: without collectives it must compute what rank 0 does.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

import pytest
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.engine import startup
from stepgraph.runtime.errors import RankError
from stepgraph.runtime.execution.runner import Runner, follow

from ..rigs.engine_rig import MIXED_PARAMS, Open, loop_of
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.structured_rig import GRAMMARS
from ..rigs.tiny_models import TinyModel
from ..speculation.test_speculation import run_mixed


class FakeGroup:
    """One of two ranks: what rank 0 sends waits until the other one reads it."""

    timeout = 5.0
    checksum = 0
    failed = False

    def __init__(self, rank: int, messages: deque[bytes]) -> None:
        self.rank, self.messages = rank, messages
        self.tokens: list[bytes] = []

    @property
    def steps(self) -> int:
        return len(self.tokens)

    def send(self, *message: object) -> None:
        self.messages.append(pickle.dumps((self.steps, 0, message)))

    def receive(self) -> Any:
        return pickle.loads(self.messages.popleft())

    def serve(self, seconds: float) -> None:
        """Nothing waits."""

    def check(self) -> None:
        """Nothing fails."""

    def check_in(self, tokens: bytes) -> None:
        self.tokens.append(tokens)

    def close(self) -> None:
        """There is no process."""


@pytest.fixture(params=["eager", "graph"])
def mode(request: Any, fake_graphs: FakeGraphs) -> str:
    """On a CPU steps run synchronously, on a device they run after the host has launched others."""
    fake_graphs.stream.behind = request.param == "graph"
    return str(request.param)


def open_ranks(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, mode: str, variant: str, **config: Any
) -> tuple[Engine, Engine, deque[bytes]]:
    """Open the engines of two ranks; return the messages of rank 0 as well."""
    messages: deque[bytes] = deque()
    engines: list[Engine] = []
    config |= {"mode": mode, "compile": False, "dtype": "float32", "max_model_len": 44}
    config |= {"kernels": "torch" if mode == "eager" else "auto"}
    for rank in (0, 1):

        def make(*arguments: Any, group: FakeGroup = FakeGroup(rank, messages)) -> Runner:  # noqa: B008
            *others, _, drafter, states = arguments
            return Runner(*others, group, drafter, states)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(startup, "Runner", make)
            engines.append(open_engine(variant, **config))
    return engines[0], engines[1], messages


def names(messages: deque[bytes]) -> set[str]:
    return {pickle.loads(message)[2][0] for message in messages}


def follow_rank_0(engine: Engine, follower: Engine) -> None:
    """Run the messages; the tokens are those of rank 0."""
    runners = [loop_of(e).runner for e in (engine, follower)]
    runners[0].send("close")
    follow(runners[1], lambda _: None)
    groups: list[Any] = [runner.group for runner in runners]
    assert groups[0].tokens == groups[1].tokens
    assert len(groups[0].tokens) > 10


def test_follower_runs_masked_steps(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """On a CPU masks arrive within a step, on a device that runs asynchronously between parts."""
    engine, follower, messages = open_ranks(
        *(open_engine, monkeypatch, mode, "text"),
        structured_output=True,
        max_num_seqs=2,
        buckets=(2,),
        prefill_chunk=16,
        speculation={"num_speculative_tokens": 2, "adaptive": False},
    )
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
    assert "write_masks" in names(messages)
    follow_rank_0(engine, follower)
    ours, theirs = (loop_of(e).runner.state.masks for e in (engine, follower))
    assert ours is not None
    assert theirs is not None
    assert ours.bits.equal(theirs.bits)


def test_follower_has_the_drafts_of_rank_0(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, base: TinyModel, mode: str
) -> None:
    """Rows come, go and are swapped. Where steps run asynchronously, rows keep their drafts."""
    drafter = {"method": "draft_model", "model": str(base.directory), "adaptive": False}
    engine, follower, messages = open_ranks(
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
    assert "clear_drafter" in names(messages)
    follow_rank_0(engine, follower)
    ours, theirs = (loop_of(e).runner for e in (engine, follower))
    assert ours.drafter is not None
    assert theirs.drafter is not None
    # The null block holds what padding writes.
    assert ours.drafter.arena.tensor[:, :, 1:].equal(theirs.drafter.arena.tensor[:, :, 1:])
    assert (ours.state.drafts is not None) == (mode == "graph")
    if ours.state.drafts is not None and theirs.state.drafts is not None:
        assert ours.state.drafts.equal(theirs.state.drafts)


@pytest.mark.parametrize("mode", ["eager"], indirect=True)
def test_step_that_gets_no_masks_is_an_error(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    engine, follower, messages = open_ranks(
        *(open_engine, monkeypatch, mode, "text"), structured_output=True, max_num_seqs=1
    )
    engine.generate([[7]], SamplingParams(max_tokens=3, structured=GRAMMARS[0]))
    kept = [message for message in messages if b"write_masks" not in message]
    messages.clear()
    messages.extend(kept)
    with pytest.raises(RankError):
        follow_rank_0(engine, follower)


def test_step_with_other_tokens_is_an_error(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    engine, follower, messages = open_ranks(*(open_engine, monkeypatch, mode, "base"))
    engine.generate([[7]], SamplingParams(max_tokens=3))
    steps, _, message = pickle.loads(messages.pop())
    messages.append(pickle.dumps((steps, 1, message)))
    with pytest.raises(RankError):
        follow_rank_0(engine, follower)
