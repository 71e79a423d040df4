"""Which steps only decode, what they had to read, and that it is what this engine has stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from stepgraph.profiling.timeline import StepRecord
from stepgraph.runtime import Engine
from stepgraph.runtime.bench.step_watch import (
    MeasuredStep,
    StepWatch,
    decode_roofline,
    decode_whole_batch,
    mean_roofline,
)
from stepgraph.runtime.bench.workload import abort_all, equal_share, greedy


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_reads_what_its_rows_have(open_engine: Callable[..., Engine], lag: int) -> None:
    """With a step under way when `step` returns, its rows are those of the step before."""
    engine = open_engine("micro", prefix_cache=False)
    engine._loop._in_flight = lag
    watch = StepWatch(engine, lag)
    for length in (5, 9):
        watch.add_request(list(range(length)), greedy(4))
    while engine.has_unfinished():
        watch.step()
    steps = watch.decode_steps()
    # The prefill makes the first token of both, three steps the others.
    assert [sorted(step.contexts) for step in steps] == [[6, 10], [7, 11], [8, 12]]
    assert all(step.record.rows == 2 and step.ms > 0 for step in steps)
    assert watch.decode_steps(rows=1) == []
    watch.clear()
    assert watch.decode_steps() == []


@pytest.mark.parametrize("lag", [0, 1])
def test_steps_with_prefill_and_tokens_of_nobody_do_not_count(
    open_engine: Callable[..., Engine], lag: int
) -> None:
    engine = open_engine("micro", prefix_cache=False)
    engine._loop._in_flight = lag
    watch = StepWatch(engine, lag)
    one, two = (watch.add_request(list(range(7)), greedy(20)) for _ in range(2))
    decode_whole_batch(watch, [one, two], 3)
    watch.clear()
    engine.abort(two)
    watch.step()
    watch.add_request(list(range(3)), greedy(9))
    for _ in range(4):
        watch.step()
    steps = watch.decode_steps()
    assert not any(step.record.prefill_tokens for step in steps)
    # The row that was aborted is in the one step that was under way, and got nothing.
    first, *others = ({8 + 3, 8 + 4, 8 + 5} & set(step.contexts) for step in steps)
    assert len(first) == 1
    assert all(len(step.contexts) == step.record.rows for step in steps[lag:])
    assert others
    abort_all(engine, [one])


def test_a_step_that_the_timeline_forgot_is_left_out(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine("micro", prefix_cache=False)
    engine._loop.timeline = type(engine.timeline())(2)
    watch = StepWatch(engine)
    watch.add_request([1, 2, 3], greedy(8))
    while engine.has_unfinished():
        watch.step()
    assert [step.contexts for step in watch.decode_steps()] == [(9,), (10,)]


def test_the_fraction_is_that_of_all_floors(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine("micro")

    def step(ms: float, *contexts: int) -> MeasuredStep:
        record = StepRecord(0, len(contexts), 4, 0, 0, 0, 0, 0, 0, None)
        return MeasuredStep(record, ms, contexts)

    steps = [step(1.0, 10), step(2.0, 11, 30), step(6.0, 12)]
    floors = [decode_roofline(engine, s.contexts, 1e9).floor_seconds for s in steps]
    told = mean_roofline(engine, steps, 1e9)
    assert told is not None
    assert told["fraction"] == pytest.approx(sum(floors) / 9e-3, rel=1e-3)
    assert told["floor_ms"] == pytest.approx(1e3 * sum(floors) / 3, rel=1e-3)
    assert told["bandwidth_gb_s"] == 1.0
    of_median = mean_roofline(engine, steps, 1e9, ms=2.0)
    assert of_median is not None
    assert of_median["fraction"] == pytest.approx(told["floor_ms"] / 2.0)
    assert mean_roofline(engine, [], 1e9) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weight_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("variant", ["odd", "qwen3", "deepseek_v2"])
def test_bytes_are_those_that_are_stored(
    open_engine: Callable[..., Engine], variant: str, kv_dtype: str, weight_dtype: str
) -> None:
    """Scales of cache and weights included; `odd` has an embedding that is only gathered from."""
    engine = open_engine(variant, kv_dtype=kv_dtype, weight_dtype=weight_dtype)
    parts = engine._open_parts()
    arena = parts.arena.tensor
    of_slot = arena.nbytes / (arena.shape[2] * engine.config.block_size)  # in one group
    assert engine.kv_bytes_read(1) == of_slot * len(parts.groups)
    weights = {p.data_ptr(): p.untyped_storage().nbytes() for p in parts.model.parameters()}
    gathered = 0
    if not engine.model_config.tie_word_embeddings:
        embedding = parts.model.embed_tokens.parameters()
        gathered = sum(p.untyped_storage().nbytes() for p in embedding)
    assert engine.weight_bytes_per_step == sum(weights.values()) - gathered
    if weight_dtype != "auto":
        stored = {p.dtype for p in parts.model.parameters()}
        assert stored & {torch.int8, torch.float8_e4m3fn, torch.uint8}
    limit = decode_roofline(engine, [1, 1, 1], 1e9)
    assert limit.bytes_per_step == engine.weight_bytes_per_step + 3 * engine.kv_bytes_read(1)


def test_a_window_is_read_and_no_more(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine("mistral")  # all layers slide over 13 tokens
    assert engine.kv_bytes_read(13) == engine.kv_bytes_read(200) == 13 * engine.kv_bytes_read(1)


def test_the_whole_batch(open_engine: Callable[..., Engine]) -> None:
    """Steps count from when all decode, whatever the first ones did before."""
    engine = open_engine("micro", prefix_cache=False, prefill_chunk=8)
    watch = StepWatch(engine)
    ids = [watch.add_request(list(range(20)), greedy(30)) for _ in range(3)]
    latest = decode_whole_batch(watch, ids, 5)
    tokens = [latest[request_id].completions[0].num_tokens for request_id in ids]
    assert tokens[-1] == 6
    assert tokens == sorted(tokens, reverse=True)
    assert len(watch.decode_steps(3)) == 5
    abort_all(engine, ids)


def test_the_share_of_equal_tokens() -> None:
    assert equal_share([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.75
    assert equal_share([[1, 2]], [[1]]) == 0.5
    with pytest.raises(ValueError, match="shorter"):
        equal_share([[1, 2]], [])
    with pytest.raises(ValueError, match="no token"):
        equal_share([], [])
