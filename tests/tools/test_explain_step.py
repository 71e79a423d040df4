"""`stepgraph explain step`: the kernels of any model's decode step, on any card and on several."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from stepgraph.profiling.roofline import floor_seconds
from stepgraph.runtime import ConfigError, Engine, EngineConfig
from stepgraph.runtime.bench.explain import main
from stepgraph.runtime.kernels.triton.linear import FEW_ROWS, ROW_CLASSES
from stepgraph.runtime.kernels.triton.linear_configs import default_config
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.models.sharding import shard_plan
from stepgraph.runtime.resolved_config import ResolvedConfig
from stepgraph.runtime.tools import step_costs
from stepgraph.runtime.tools.step_costs import (
    LIBRARY_CHUNK,
    MULTIPROCESSORS,
    NVLINK_4,
    ROWS_CHUNK,
    VOCABULARY_CHUNK,
    Link,
    collective_seconds,
    explain_step,
    floor_bytes,
    kernel_costs,
    predicted_seconds,
    stored_sizes,
)

BANDWIDTH = 4.3e12
# Microseconds of a bf16 step at 4.3 TB/s: model, rows, context, floor.
FLOORS = [
    ("llama-3.2-1b", 1, 1024, 583),
    ("qwen3-0.6b", 1, 1024, 305),
    ("llama-3.1-8b", 1, 1024, 3522),
    ("llama-3.2-1b", 32, 8192, 2573),
    ("llama-3.1-8b", 32, 8192, 11481),
]


@pytest.mark.parametrize(("model", "rows", "context", "microseconds"), FLOORS)
def test_floors_of_known_models(model: str, rows: int, context: int, microseconds: int) -> None:
    config = ResolvedConfig.resolve(EngineConfig(device="cpu", mode="eager"), preset(model))
    sizes = stored_sizes(config, preset(model).head_dim)
    plan = model_plan(preset(model))
    costs = kernel_costs(plan, sizes, rows=rows, context=context, splits=8)
    floor = floor_seconds(floor_bytes(costs), BANDWIDTH) * 1e6
    assert floor == pytest.approx(microseconds, abs=1)
    predicted = predicted_seconds(costs, BANDWIDTH) * 1e6
    assert 1.01 * floor < predicted < 1.25 * floor


@pytest.mark.parametrize("weight_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(
    ("variant", "kv_dtype"),
    [("odd", "auto"), ("wide", "int8"), ("qwen3", "fp8"), ("gemma2", "auto"), ("gemma3", "int8")],
)
def test_the_kernels_read_what_an_engine_reads(
    open_engine: Callable[..., Engine], variant: str, kv_dtype: str, weight_dtype: str
) -> None:
    engine = open_engine(variant, weight_dtype=weight_dtype, kv_dtype=kv_dtype, dtype="bfloat16")
    assert engine.config.dtype == torch.bfloat16
    plan = model_plan(engine.model_config)
    sizes = stored_sizes(engine.config, engine.model_config.head_dim)
    for rows, context in ((1, 1), (3, 200)):
        costs = kernel_costs(plan, sizes, rows=rows, context=context, splits=4)
        expected = engine.weight_bytes_per_step + rows * engine.kv_bytes_read(context)
        assert floor_bytes(costs) == expected


@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_the_kernels_read_the_experts_that_rows_use(
    open_engine: Callable[..., Engine], variant: str, weight_dtype: str
) -> None:
    engine = open_engine(variant, weight_dtype=weight_dtype)
    plan = model_plan(engine.model_config)
    sizes = stored_sizes(engine.config, engine.model_config.head_dim)
    for rows in (1, 3, 9):
        costs = kernel_costs(plan, sizes, rows=rows, context=1, splits=1)
        expected = engine.weight_bytes_read(rows) + rows * engine.kv_bytes_read(1)
        assert abs(floor_bytes(costs) - expected) <= len(plan.layers)  # rounded by layer


def explain(model: str, rows: int = 1, context: int = 1024, **config: str) -> str:
    return explain_step(
        model, EngineConfig(**config), rows=rows, context=context, bandwidth=BANDWIDTH
    )


def test_the_report_of_a_model() -> None:
    text = explain("preset:llama-3.2-1b")
    lines = text.splitlines()
    assert lines[0] == "preset:llama-3.2-1b in bfloat16, 1 row of 1,024 tokens at 4,300 GB/s"
    kernels = [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:]
    layer = ["norm_linear", "decode_attention", "combine_output", "gate_up", "down"]
    assert kernels == ["begin", *layer, "head", "greedy"]
    assert "floor 583 µs: 2,505.2 MB" in lines
    found = re.findall(r"predicted (\d+) µs (\w+) dependent launch .* of 83 edges", text)
    assert [how for _, how in found] == ["with", "without"]
    assert 583 < int(found[0][0]) < int(found[1][0]) < 720
    shares = [float(line.split("|")[-2].strip(" %")) for line in lines if line.endswith("% |")]
    assert sum(shares) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b", "gemma-3-1b"])
def test_chunks_of_the_vocabulary_are_those_of_the_head(name: str) -> None:
    pytest.importorskip("triton")
    from stepgraph.runtime.kernels.triton.head import CHUNK

    assert (step_costs.FEW_ROWS, LIBRARY_CHUNK) == (FEW_ROWS, CHUNK)
    model = preset(name)
    for rows in ROW_CLASSES:
        sizes = (model.vocab_size, model.hidden_size, 2, MULTIPROCESSORS)
        expected = VOCABULARY_CHUNK if rows <= FEW_ROWS else ROWS_CHUNK
        assert default_config("head", rows, *sizes, library=False).block_n == expected


def test_what_carries_out_products_untuned() -> None:
    """Weights of 8 bits have no library: their products are in parts where they are small."""
    plain = explain("preset:llama-3.2-1b", 8)
    assert re.search(r"of (\d+) edges", plain).group(1) == str(2 + 16 * 10 + 3)
    small = explain("preset:llama-3.2-1b", 8, weight_dtype="int8")
    assert re.search(r"of (\d+) edges", small).group(1) == str(2 + 16 * 10 + 2)


def test_a_step_that_is_stored_in_fewer_bytes() -> None:
    def floor(text: str) -> int:
        found = re.search(r"^floor ([\d,]+) µs", text, re.MULTILINE)
        assert found is not None
        return int(found[1].replace(",", ""))

    plain = explain("preset:llama-3.1-8b", 32, 8192)
    small = explain("preset:llama-3.1-8b", 32, 8192, weight_dtype="fp8", kv_dtype="int8")
    named = "bfloat16, weights in fp8, cache in int8, 32 rows of 8,192 tokens at 4,300 GB/s"
    assert small.startswith(f"preset:llama-3.1-8b in {named}\n")
    assert 0.5 * floor(plain) < floor(small) < 0.53 * floor(plain)


def test_windows_are_told_apart() -> None:
    text = explain("preset:gemma-3-1b", 2)
    assert re.search(r"^\| decode_attention, window 512 +\| +22 \|", text, re.MULTILINE)
    assert re.search(r"^\| decode_attention +\| +4 \|", text, re.MULTILINE)


def test_what_cannot_be_told() -> None:
    with pytest.raises(ConfigError, match="latent attention"):
        explain("preset:mla-small")
    with pytest.raises(ConfigError, match="a context of 131073 exceeds the 131072 positions"):
        explain("preset:llama-3.2-1b", context=131073)


def test_links_reach_published_times() -> None:
    """vLLM's pull request 24111: µs of the faster of its two kernels on six H100, by MiB."""
    for mebibytes, microseconds in {0.5: 13, 1: 17, 1.5: 20, 2: 26, 3: 29, 4: 37}.items():
        seconds = NVLINK_4.all_reduce_seconds(int(mebibytes * (1 << 20)), 6)
        assert seconds * 1e6 == pytest.approx(microseconds, rel=0.2)


def test_collectives_of_a_step_by_hand() -> None:
    """Two in each layer and one for the embeddings, of the hidden states; then greedy tokens."""
    model = ModelConfig(
        hidden_size=8, intermediate_size=12, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4,
        vocab_size=20, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=1e4,
        max_position_embeddings=64,
    )  # fmt: skip
    plan, link = model_plan(model), Link(1e6, 1e-3)
    assert collective_seconds(plan, link, rows=5, element_bytes=2) == 0
    found = collective_seconds(shard_plan(plan, 1, 2), link, rows=5, element_bytes=2)
    assert found == pytest.approx(7 * (1e-3 + 5 * 8 * 2 / 1e6) + 1e-3 + 5 * (4 + 8) / 1e6)


def test_norms_over_the_heads_of_all_ranks_are_summed() -> None:
    plan, link = shard_plan(model_plan(preset("olmo2-1b")), 0, 4), Link(1e6, 1e-3)
    found = collective_seconds(plan, link, rows=3, element_bytes=2)
    sums = 33 * (2e-3 + 1.5 * 3 * 2048 * 2 / 1e6)  # of hidden states, in two phases
    small = 16 * (1e-3 + 3 * 3 * 2 * 4 / 1e6) + 1e-3 + 3 * 3 * (4 + 8) / 1e6
    assert found == pytest.approx(sums + small)


def group(source: str, ranks: list[int], rows: int = 1, **config: str) -> list[list[float]]:
    """The numbers of the table of groups."""
    text = explain_step(
        source, EngineConfig(**config), ranks=ranks, rows=rows, context=1024, bandwidth=BANDWIDTH
    )
    return [
        [float(cell.strip(" %").replace(",", "")) for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| +\d", line)
    ]


@pytest.mark.parametrize("source", ["preset:llama-3.1-8b", "preset:qwen3-30b-a3b", "demo"])
@pytest.mark.parametrize("rows", [1, 32])
def test_one_rank_is_one_device(source: str, rows: int) -> None:
    ((ranks, _, _, floor, kernels, exchange, predicted, *speed_up, slower),) = group(
        source, [1], rows
    )
    text = explain(source, rows)
    found = re.findall(r"(?:floor|predicted) ([\d,]+) µs", text)
    assert [int(number.replace(",", "")) for number in found] == [floor, predicted, slower]
    assert (ranks, exchange, kernels) == (1, 0, predicted)
    assert speed_up == [1, 100]


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_more_ranks_read_less_and_exchange_more(name: str) -> None:
    table = group(f"preset:{name}", [8, 2, 4, 2], 32, weight_dtype="fp8")
    assert [row[0] for row in table] == [1, 2, 4, 8]
    floors, exchanged, speed_ups = ([row[column] for row in table] for column in (3, 5, 7))
    assert floors == sorted(floors, reverse=True)
    assert exchanged == sorted(exchanged)
    assert speed_ups == sorted(speed_ups)
    for ranks, weights, _, _, kernels, exchange, predicted, speed_up, *_ in table:
        assert weights == pytest.approx(table[0][1] / ranks, rel=0.02)
        assert abs(kernels + exchange - predicted) <= 1
        assert speed_up <= ranks


def test_a_model_that_ranks_cannot_share() -> None:
    with pytest.raises(ConfigError, match="2 does not divide 9 query heads"):
        group("preset:smollm2-135m", [2])


def test_command_line_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--bandwidth-gb-s 4300 --tensor-parallel 2 4 --link-gb-s 25 --link-latency-us 12.5"
    models = "preset:llama-3.1-8b preset:smollm2-135m"
    assert main(["step", "--model", *models.split(), *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith(
        "1 row of 1,024 tokens at 4,300 GB/s a device, links of 25 GB/s and 12.5 µs"
    )
    assert err.startswith("stepgraph explain step: error: preset:smollm2-135m: ")


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    points = "--batch-size 1 8 --input-len 128 1024 --bandwidth-gb-s 4300"
    assert main(["step", "--model", "demo", "preset:mla-small", *points.split()]) == 2
    out, err = capsys.readouterr()
    titles = re.findall(r"^demo in bfloat16, (.*) at 4,300 GB/s$", out, re.MULTILINE)
    assert titles == [
        f"{rows} of {context} tokens"
        for context in ("128", "1,024")
        for rows in ("1 row", "8 rows")
    ]
    (line, *others) = err.splitlines()
    assert line.startswith("stepgraph explain step: error: preset:mla-small: ")
    assert others == [line] * 3


def test_command_line_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.endswith("give the GPU's --bandwidth-gb-s")
