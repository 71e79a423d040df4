"""`bench.py --explain-step`: the kernels of any model's decode step, on any card."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from stepgraph.profiling.roofline import floor_seconds
from stepgraph.runtime import ConfigError, Engine, EngineConfig
from stepgraph.runtime.kernels.triton.linear import FEW_ROWS, ROW_CLASSES
from stepgraph.runtime.kernels.triton.linear_configs import default_config
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.resolved_config import ResolvedConfig
from stepgraph.runtime.tools import step_costs
from stepgraph.runtime.tools.step_costs import (
    LIBRARY_CHUNK,
    ROWS_CHUNK,
    VOCABULARY_CHUNK,
    floor_bytes,
    kernel_costs,
    predicted_seconds,
)
from stepgraph.runtime.tools.step_report import MULTIPROCESSORS, explain_step, stored_sizes

from .bench_rig import run_bench

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


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    points = "--batch-size 1 8 --input-len 128 1024 --bandwidth-gb-s 4300"
    assert run_bench(monkeypatch, f"--explain-step --model demo preset:mla-small {points}") == 2
    out, err = capsys.readouterr()
    titles = re.findall(r"^demo in bfloat16, (.*) at 4,300 GB/s$", out, re.MULTILINE)
    assert titles == [
        f"{rows} of {context} tokens"
        for context in ("128", "1,024")
        for rows in ("1 row", "8 rows")
    ]
    (line, *others) = err.splitlines()
    assert line.startswith("bench.py: error: preset:mla-small: the layers of a model with latent")
    assert others == [line] * 3


def test_command_line_without_a_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(monkeypatch, "--explain-step --device cpu") == 1
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line == (
        "bench.py: error: decode steps are predicted for a GPU, and the device is 'cpu':"
        " give the GPU's --bandwidth-gb-s"
    )
