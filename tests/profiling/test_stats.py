import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from stepgraph.profiling.bandwidth import measure_read_bandwidth
from stepgraph.profiling.stats import RequestTiming, Summary, covered

finite = st.floats(-1e9, 1e9, allow_nan=False, width=64)


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12)


@given(spans)
def test_covered_time_is_that_of_the_union(lengths: list[tuple[int, int]]) -> None:
    union = {at + i for at, length in lengths for i in range(length)}
    assert covered(sorted((at, at + length) for at, length in lengths)) == len(union)


@given(st.integers(1, 250).flatmap(lambda n: st.lists(finite, min_size=n, max_size=n)))
@example(list(range(9)))
@example(list(range(10)))
@example(list(range(99)))
@example(list(range(100)))
def test_summary_agrees_with_numpy(samples: list[float]) -> None:
    summary = Summary.of(samples)
    close = {"rel": 1e-9, "abs": 1e-6}
    assert summary.n == len(samples)
    assert summary.mean == pytest.approx(np.mean(samples), **close)
    assert (summary.min, summary.max) == (min(samples), max(samples))
    for percent, reported in ((50, summary.p50), (90, summary.p90), (99, summary.p99)):
        if len(samples) < {50: 1, 90: 10, 99: 100}[percent]:
            assert reported is None
        else:
            assert reported == pytest.approx(np.percentile(samples, percent), **close)
            assert summary.min <= reported <= summary.max
    if len(samples) == 1:
        assert summary.std is None
    else:
        assert summary.std == pytest.approx(np.std(samples, ddof=1), **close)


@pytest.mark.parametrize(
    ("samples", "message"),
    [([], "empty"), *(([1.0, 2.0, x], "sample 2 is .*finite") for x in (math.nan, -math.inf))],
)
def test_summary_rejects_what_has_no_distribution(samples: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Summary.of(samples)


def test_request_timing_of_a_worked_example() -> None:
    timing = RequestTiming(1_000_000, [21_000_000, 26_000_000, 46_000_000])
    assert timing.ttft_ms == 20.0
    assert timing.itl_ms == [5.0, 20.0]


def test_measured_bandwidth_of_this_cpu_is_plausible() -> None:
    measured = measure_read_bandwidth("cpu", repeats=2, buffer_bytes=64 * 2**20)
    # One channel of the oldest memory torch runs on, and far more than any socket has.
    assert 0.5e9 < measured < 20e12


@pytest.mark.gpu
def test_measured_bandwidth_of_this_gpu_is_plausible() -> None:
    before = torch.cuda.memory_allocated()
    assert 50e9 < measure_read_bandwidth("cuda") < 50e12
    assert torch.cuda.memory_allocated() == before
