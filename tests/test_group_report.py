"""`--explain-step --tensor-parallel`: what the ranks of a group read, exchange and gain."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from stepgraph.runtime import ConfigError, EngineConfig
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.tools.group_costs import GroupStep, group_step, rank_plans
from stepgraph.runtime.tools.group_report import explain_groups
from stepgraph.runtime.tools.link_costs import NVLINK_4, Link
from stepgraph.runtime.tools.step_costs import StoredSizes, floor_bytes
from stepgraph.runtime.tools.step_report import explain_step

from .bench_rig import run_bench

BANDWIDTH = 4.3e12
SIZES = StoredSizes(lambda n, k: 2 * n * k, element_bytes=2, kv_vector_bytes=8)
TINY = ModelConfig(
    hidden_size=8, intermediate_size=12, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    vocab_size=21, tie_word_embeddings=False, rms_norm_eps=1e-5, rope_theta=1e4,
    max_position_embeddings=64,
)  # fmt: skip


def group(model: ModelConfig, ranks: int, rows: int = 1, context: int = 10) -> GroupStep:
    return group_step(
        rank_plans(model_plan(model), ranks),
        SIZES,
        lambda operation, n, k: 0,
        rows=rows,
        context=context,
    )


def test_two_ranks_of_a_tiny_model() -> None:
    """Each has two query heads, one of keys and values, six features, and 10 or 11 tokens."""
    step = group(TINY, 2, rows=3)
    layer = (2 + 1 + 1) * 4 * 8 + 8 * 2 * 4 + 2 * 6 * 8 + 8 * 6
    norms = 3 * 8
    cache = 3 * 10 * 2 * 8
    expected = [2 * (layer + norms + tokens * 8) + cache for tokens in (10, 11)]
    assert [floor_bytes(kernels) for kernels in step.ranks] == expected
    assert step.floor_bytes == max(expected)
    assert step.replicated_bytes(group(TINY, 1, rows=3)) == 2 * norms
    link = Link(1e6, 1e-3)
    exchanged = 3 * (1e-3 + 3 * 8 * 2 / 1e6) + 1e-3 + 3 * 12 / 1e6
    assert step.collective_seconds(link) == pytest.approx(exchanged)
    local = step.seconds(1e9, link, 0.0) - exchanged
    assert local == pytest.approx(sum(c.launches * c.bytes for c in step.slowest) / 1e9, abs=5e-5)


def test_heads_that_are_replicated() -> None:
    single, four = group(TINY, 1, context=50), group(TINY, 4, context=50)
    cached = [sum(c.launches * c.cache_bytes for c in kernels) for kernels in four.ranks]
    assert cached == [50 * 2 * 8] * 4
    keys_and_values = 2 * 4 * 8 * 2
    norms = 3 * 8 * 2
    assert four.replicated_bytes(single) == 3 * norms + 2 * keys_and_values + 2 * 50 * 2 * 8


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize(("rows", "context"), [(1, 1024), (32, 4096)])
def test_more_ranks_read_less_and_exchange_more(name: str, rows: int, context: int) -> None:
    steps = {count: group(preset(name), count, rows, context) for count in (1, 2, 4, 8)}
    floors = [step.floor_bytes for step in steps.values()]
    assert floors == sorted(floors, reverse=True)
    exchanged = [step.collective_seconds(NVLINK_4) for step in steps.values()]
    assert exchanged == sorted(exchanged)
    assert exchanged[0] == 0
    single = steps[1].seconds(BANDWIDTH, NVLINK_4)
    for count, step in steps.items():
        seconds = step.seconds(BANDWIDTH, NVLINK_4)
        assert seconds > step.floor_bytes / BANDWIDTH + step.collective_seconds(NVLINK_4)
        assert 0 < single / seconds / count <= 1
        replicated = step.replicated_bytes(steps[1])
        assert 0 <= replicated < 0.01 * count * floors[0]
        slower = step.seconds(BANDWIDTH, NVLINK_4._replace(latency_s=1e-5))
        assert (slower > seconds) == (count > 1)


def explain(source: str, ranks: Sequence[int], rows: int = 1, **config: str) -> list[list[str]]:
    """The cells of the report."""
    text = explain_groups(
        source, EngineConfig(**config), ranks=ranks, rows=rows, context=1024, bandwidth=BANDWIDTH
    )
    lines = [
        line for line in text.splitlines() if re.match(r"\| +\d|\| [a-z]+_?[a-z]+ +\| +\d", line)
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("source", ["preset:llama-3.1-8b", "preset:qwen3-30b-a3b", "demo"])
@pytest.mark.parametrize("rows", [1, 32])
def test_one_rank_is_the_report_of_one_device(source: str, rows: int) -> None:
    reads, times = explain(source, [1], rows)
    text = explain_step(source, EngineConfig(), rows=rows, context=1024, bandwidth=BANDWIDTH)
    assert re.findall(r"floor ([\d,]+) µs: ([\d,.]+) MB", text) == [(reads[5], reads[3])]
    with_launch, without = re.findall(r"predicted ([\d,]+) µs", text)
    assert (times[3], times[7]) == (with_launch, without)
    assert times[4:6] == ["1.00", "100%"]


def test_the_report_of_groups() -> None:
    cells = explain("preset:llama-3.1-70b", [8, 2, 4, 2], weight_dtype="fp8")
    assert [row[0] for row in cells[:4]] == ["1", "2", "4", "8"]
    exchanged = cells[4:10]
    assert [row[:4] for row in exchanged[::2]] == [
        ["all_reduce", ranks, "one-shot", str(2 * 80 + 1)] for ranks in ("2", "4", "8")
    ]
    assert exchanged[0][4:] == ["16.38", "16.38", "5.05", "813.2"]
    times = cells[10:]
    for row in times:
        kernels, collectives, predicted = (int(cell.replace(",", "")) for cell in row[1:4])
        assert abs(kernels + collectives - predicted) <= 1
    speedups = [float(row[4]) for row in times]
    assert speedups == sorted(speedups)


def test_refused_groups() -> None:
    with pytest.raises(ConfigError, match="2 does not divide 9 query heads"):
        explain("preset:smollm2-135m", [2])
    with pytest.raises(ConfigError, match="latent attention"):
        explain("preset:mla-small", [2])


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--explain-step --bandwidth-gb-s 4300 --batch-size 1 --input-len 1024"
    slow = "--tensor-parallel 2 4 --link-gb-s 25 --link-latency-us 12.5"
    assert (
        run_bench(monkeypatch, f"{flags} {slow} --model preset:llama-3.1-8b preset:smollm2-135m")
        == 2
    )
    out, err = capsys.readouterr()
    title, *_ = out.splitlines()
    assert title.endswith(
        "1 row of 1,024 tokens at 4,300 GB/s a device, links of 25 GB/s and 12.5 µs"
    )
    (line,) = err.splitlines()
    assert line.startswith("bench.py: error: preset:smollm2-135m: ")


def test_flags_without_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ("--explain-step --link-gb-s 25", "--link-latency-us 5"):
        with pytest.raises(SystemExit):
            run_bench(monkeypatch, flags)
        assert "has no effect without --tensor-parallel" in capsys.readouterr().err
