"""The time of collective operations, against hand-computed and published values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.models.sharding import shard_plan
from stepgraph.runtime.tools.link_costs import NVLINK_4, Link, all_reduce, step_collectives

SLOW = Link(1e6, 1e-3)
ranks = st.integers(2, 64)
sizes = st.integers(0, 1 << 30)
links = st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 1e-2))


@pytest.mark.parametrize(
    ("size", "count", "algorithm", "received", "seconds"),
    [
        (1000, 2, "one-shot", 1000, 1e-3 + 1e-3),
        (100_000, 2, "one-shot", 100_000, 1e-3 + 0.1),
        (500, 4, "one-shot", 1500, 1e-3 + 1.5e-3),
        (100_000, 4, "two-shot", 150_000, 2e-3 + 0.15),
        (8000, 8, "two-shot", 14_000, 2e-3 + 14e-3),
    ],
)
def test_known_transfers(
    size: int, count: int, algorithm: str, received: int, seconds: float
) -> None:
    transfer = all_reduce(size, count, SLOW)
    assert transfer.algorithm == algorithm
    assert transfer.received_bytes == received
    assert transfer.seconds == pytest.approx(seconds)


# vLLM's pull request 24111: µs of the faster of its two kernels on six H100, by MiB.
SIX_H100 = {0.5: 13, 1: 17, 1.5: 20, 2: 26, 3: 29, 4: 37}


@pytest.mark.parametrize(("mebibytes", "microseconds"), SIX_H100.items())
def test_published_times(mebibytes: float, microseconds: int) -> None:
    seconds = all_reduce(mebibytes * (1 << 20), 6, NVLINK_4).seconds
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.2)


@given(sizes, sizes, ranks, links)
def test_times_grow_with_bytes_and_ranks(one: int, other: int, count: int, link: Link) -> None:
    small, large = sorted((one, other))
    seconds = all_reduce(small, count, link).seconds
    assert link.latency_s <= seconds <= all_reduce(large, count, link).seconds
    assert seconds <= all_reduce(small, count + 1, link).seconds * (1 + 1e-12)
    assert (
        all_reduce(small, count, link._replace(bytes_per_s=2 * link.bytes_per_s)).seconds <= seconds
    )


@given(ranks.filter(lambda count: count > 2), links.filter(lambda link: link.latency_s > 1e-9))
def test_two_shot_begins_where_its_bytes_outweigh_a_latency(count: int, link: Link) -> None:
    size = link.latency_s * link.bytes_per_s / ((count - 1) * (1 - 2 / count))
    assert all_reduce(0.99 * size, count, link).algorithm == "one-shot"
    assert all_reduce(1.01 * size, count, link).algorithm == "two-shot"


@pytest.mark.parametrize(
    ("size", "count", "link", "message"),
    [
        (1, 1, SLOW, "ranks is 1"),
        (-1, 2, SLOW, "size_bytes is -1"),
        (float("nan"), 2, SLOW, "size_bytes is nan"),
        (1, 2, Link(0.0, 1.0), "positive bandwidth"),
        (1, 2, Link(1.0, -1.0), "no negative latency"),
    ],
)
def test_wrong_values(size: float, count: int, link: Link, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduce(size, count, link)


def test_the_collectives_of_a_step() -> None:
    """Two in each layer and one for the embeddings, of the hidden states; then greedy tokens."""
    model = ModelConfig(
        hidden_size=8, intermediate_size=12, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4,
        vocab_size=20, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=1e4,
        max_position_embeddings=64,
    )  # fmt: skip
    plan = model_plan(model)
    assert step_collectives(plan, tokens=5, rows=2, element_bytes=2) == ()
    found = step_collectives(shard_plan(plan, 1, 2), tokens=5, rows=2, element_bytes=2)
    assert [(each.name, each.count, each.ranks, each.size_bytes) for each in found] == [
        ("all_reduce", 2 * 3 + 1, 2, 5 * 8 * 2),
        ("largest", 1, 2, 2 * (4 + 8)),
    ]
    assert found[0].seconds(SLOW) == pytest.approx(7 * (1e-3 + 80e-6))


def test_norms_over_the_heads_of_all_ranks() -> None:
    plan = shard_plan(model_plan(preset("olmo2-1b")), 0, 4)
    found = step_collectives(plan, tokens=3, rows=3, element_bytes=2)
    assert [(each.name, each.count, each.size_bytes) for each in found] == [
        ("all_reduce", 2 * 16 + 1, 3 * 2048 * 2),
        ("all_reduce", 16, 3 * 2 * 4),
        ("largest", 1, 3 * (4 + 8)),
    ]
