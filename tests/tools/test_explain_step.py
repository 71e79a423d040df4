"""`stepgraph explain step`: the floor of any model's decode step, on any card and on several."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from stepgraph.runtime import ConfigError, Engine, EngineConfig
from stepgraph.runtime.bench.explain import main
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.tools.step_costs import explain_step, floor_bytes, step_bytes

BANDWIDTH = 4.3e12
# Microseconds of a bf16 step at 4.3 TB/s: model, rows, context, floor.
FLOORS = [
    ("llama-3.2-1b", 1, 1024, 583),
    ("qwen3-0.6b", 1, 1024, 305),
    ("llama-3.1-8b", 1, 1024, 3522),
    ("llama-3.2-1b", 32, 8192, 2572),
    ("llama-3.1-8b", 32, 8192, 11481),
]


def explain(model: str, rows: int = 1, context: int = 1024, **config: str) -> str:
    return explain_step(
        model, EngineConfig(**config), rows=rows, context=context, bandwidth=BANDWIDTH
    )


def floor_of(text: str) -> int:
    found = re.search(r"^floor ([\d,]+) µs", text, re.MULTILINE)
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(("model", "rows", "context", "microseconds"), FLOORS)
def test_floors_of_known_models(model: str, rows: int, context: int, microseconds: int) -> None:
    assert floor_of(explain(f"preset:{model}", rows, context)) == microseconds


@pytest.mark.parametrize("weight_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(
    ("variant", "kv_dtype"),
    [
        *(("odd", "auto"), ("wide", "int8"), ("qwen3", "fp8"), ("gemma3", "int8")),
        *(("qwen3_moe", "auto"), ("gpt_oss", "auto"), ("mixtral", "auto")),
    ],
)
def test_operations_read_what_an_engine_reads(
    open_engine: Callable[..., Engine], variant: str, kv_dtype: str, weight_dtype: str
) -> None:
    engine = open_engine(variant, weight_dtype=weight_dtype, kv_dtype=kv_dtype, dtype="bfloat16")
    assert engine.config.dtype == torch.bfloat16
    plan = model_plan(engine.model_config)
    rounded = 0 if engine.model_config.experts is None else len(plan.layers)  # experts, by layer
    for rows, context in ((1, 1), (3, 200), (9, 1)):
        expected = engine.weight_bytes_read(rows) + rows * engine.kv_bytes_read(context)
        found = floor_bytes(step_bytes(plan, engine.config, rows=rows, context=context))
        assert abs(found - expected) <= rounded


def test_report_of_a_model() -> None:
    text = explain("preset:llama-3.2-1b")
    operations = [line.split("|")[1].strip() for line in text.splitlines() if line[:1] == "|"][2:]
    layer = ["norm_linear", "decode_attention", "output", "gate_up", "down"]
    assert operations == [*layer, "final_norm", "head"]
    shares = [float(cell) for cell in re.findall(r"([\d.]+)% \|$", text, re.MULTILINE)]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    windows = explain("preset:gemma-3-1b", 2)
    assert re.search(r"^\| decode_attention, window 512 +\| +22 \|", windows, re.MULTILINE)
    assert re.search(r"^\| decode_attention +\| +4 \|", windows, re.MULTILINE)


def test_models_without_these_operations_are_refused() -> None:
    with pytest.raises(ConfigError):
        explain("preset:mla-small")
    with pytest.raises(ConfigError):
        explain("preset:llama-3.2-1b", context=131073)


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_more_ranks_read_less(name: str) -> None:
    text = explain_step(
        f"preset:{name}",
        EngineConfig(weight_dtype="fp8"),
        **{"ranks": [8, 2, 4, 2], "rows": 32, "context": 1024, "bandwidth": BANDWIDTH},
    )
    lines = [line.replace(",", "") for line in text.splitlines() if re.match(r"\| +\d", line)]
    table = [[float(cell) for cell in line.strip("| ").split("|")] for line in lines]
    assert [row[0] for row in table] == [1, 2, 4, 8]
    assert [row[3] for row in table] == sorted((row[3] for row in table), reverse=True)
    for ranks, weights, *_ in table:
        assert weights == pytest.approx(table[0][1] / ranks, rel=0.02)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    points = "--batch-size 1 8 --input-len 128 1024 --bandwidth-gb-s 4300"
    assert main(["step", "--model", "demo", "preset:mla-small", *points.split()]) == 2
    out, err = capsys.readouterr()
    assert len(re.findall(r"^demo in bfloat16, .* at 4,300 GB/s$", out, re.MULTILINE)) == 4
    assert len(err.splitlines()) == 4
    groups = "--model preset:llama-3.1-8b preset:smollm2-135m --tensor-parallel 2 4"  # 9 heads
    assert main(["step", *groups.split(), "--bandwidth-gb-s", "4300"]) == 2
    assert main(["step", "--device", "cpu"]) == 1
