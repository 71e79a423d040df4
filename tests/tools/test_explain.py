"""`stepgraph explain`: memory and decode steps of any model, on any card, with nothing loaded."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from stepgraph.runtime import ConfigError, Engine, EngineConfig
from stepgraph.runtime.bench.explain import main
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.tools.arguments import parse_bytes
from stepgraph.runtime.tools.memory_report import explain_memory
from stepgraph.runtime.tools.step_costs import explain_step, floor_bytes, step_bytes


@pytest.mark.parametrize("text", ["", "GB", "80XB", "-3GB", "0", "0.2B", "1e9", "inf", "80 G B"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount of memory"):
        parse_bytes(text)


def explain(model: str, memory: str | None, **config: object) -> str:
    size = None if memory is None else parse_bytes(memory)
    return explain_memory(model, EngineConfig(**config), size)


def answer(text: str, question: str) -> int:
    found = re.search(rf"^{question}: ([\d,]+)", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1].replace(",", ""))


def test_a_card_that_is_not_there() -> None:
    text = explain("preset:llama-3.1-8b", "80GB", max_num_seqs=8)
    assert text.startswith("preset:llama-3.1-8b in bfloat16, cache in bfloat16, on cuda with 74.51")
    assert re.search(r"^weights +14\.96 GiB$", text, re.MULTILINE)
    assert "cache of a token: 128.00 KiB" in text
    assert answer(text, "longest context of 1 row") == 131072
    assert 0 < answer(text, "longest context of 8 rows") < 131072
    rows = [answer(text, f"most rows of {n} tokens") for n in ("1,024", "8,192", "131,072")]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] >= 1


def test_answers_agree_with_each_other() -> None:
    text = explain("preset:llama-3.2-1b", "16GB", max_num_seqs=6)
    longest = answer(text, "longest context of 6 rows")
    # A model whose own context is the answer has room for so many rows of it, and one more token
    # a row would be too much.
    fits = explain("preset:llama-3.2-1b", "16GB", max_num_seqs=6, max_model_len=longest)
    assert answer(fits, f"most rows of {longest:,} tokens") >= 6
    more = explain("preset:llama-3.2-1b", "16GB", max_num_seqs=6, max_model_len=longest + 1)
    assert answer(more, f"most rows of {longest + 1:,} tokens") == 5


def test_a_quantised_cache_holds_more() -> None:
    tokens = [
        answer(explain("preset:llama-3.2-1b", "16GB", kv_dtype=kv), "longest context of 16 rows")
        for kv in ("auto", "int8")
    ]
    assert tokens[1] > 1.4 * tokens[0]


ROWS = 4
USED_BY_ROWS = ROWS * 2048 // 16 + 1
"""Blocks that four rows of the demo model's 2,048 positions use, and the null block."""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("budget", [{}, {"memory_fraction": 0.7}], ids=str)
def test_a_share_of_the_memory_is_no_more_than_the_rows_can_use(
    device: str, budget: dict[str, float]
) -> None:
    text = explain("demo", "80GB", device=device, mode="eager", max_num_seqs=ROWS, **budget)
    assert f"\n{USED_BY_ROWS} blocks of 16 slots, limited by max_num_seqs" in text
    assert ": 8,192 tokens of context, " in text


def test_command_line_of_several_of_which_one_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = ["preset:llama-3.2-1b", "preset:llama-3.1-8b", "preset:qwen3-0.6b"]
    flags = ["--device-memory", "8GB", "--mode", "eager", "graph"]
    assert main(["memory", "--model", *models, *flags]) == 1
    out, err = capsys.readouterr()
    plans = re.findall(r"^(preset:\S+) in .*, (eager|graph), 8 rows$", out, re.MULTILINE)
    assert plans == [(name, mode) for name in models[::2] for mode in ("eager", "graph")]
    assert out.count("\n\npreset:") == 3
    lines = err.splitlines()
    assert len(lines) == 2
    assert all(": error: preset:llama-3.1-8b: " in line for line in lines)


def test_the_plan_of_a_rank() -> None:
    """A quarter of the weights, and of the cache of a token."""
    whole, rank = (
        explain("preset:llama-3.1-8b", "80GB", max_num_seqs=8, tensor_parallel=ranks)
        for ranks in (1, 4)
    )
    assert re.search(r"^weights +3\.74 GiB$", rank, re.MULTILINE)
    assert "cache of a token: 32.00 KiB" in rank
    assert "rank 0 of 4: 8 of 32 query heads, 32,064 of 128,256 tokens" in rank
    assert "of its own, 520.00 KiB replicated on every rank, of 14.96 GiB" in rank
    assert "rank" not in whole
    question = "longest context of 8 rows"
    assert answer(rank, question) > 2 * answer(whole, question)


@pytest.mark.parametrize(
    ("model", "ranks", "held"),
    [
        ("gpt-oss-20b", 16, "1 of 8 key/value heads, replicated on 2 ranks"),
        ("deepseek-v2-lite", 8, "a latent of all heads, replicated on 8 ranks"),
    ],
)
def test_cache_of_a_rank_may_be_replicated(model: str, ranks: int, held: str) -> None:
    assert held in explain(f"preset:{model}", "80GB", tensor_parallel=ranks)


def test_ranks_on_a_cpu_share_its_memory() -> None:
    on_cpu = {"device": "cpu", "mode": "eager"}
    plans = [explain("demo", "80GB", **on_cpu, tensor_parallel=ranks) for ranks in (1, 2)]
    found = [re.search(r"^available +([\d.]+) GiB$", plan, re.MULTILINE) for plan in plans]
    whole, half = (float(line[1]) for line in found if line is not None)
    assert half == pytest.approx(whole / 2, abs=0.01)


# The floor of a decode step -----------------------------------------------------------------------


BANDWIDTH = 4.3e12
# Microseconds of a bf16 step at 4.3 TB/s: model, rows, context, floor.
FLOORS = [
    ("llama-3.2-1b", 1, 1024, 583),
    ("qwen3-0.6b", 1, 1024, 305),
    ("llama-3.1-8b", 1, 1024, 3522),
    ("llama-3.2-1b", 32, 8192, 2572),
    ("llama-3.1-8b", 32, 8192, 11481),
]


def explain_floor(model: str, rows: int = 1, context: int = 1024, **config: str) -> str:
    return explain_step(
        model, EngineConfig(**config), rows=rows, context=context, bandwidth=BANDWIDTH
    )


def floor_of(text: str) -> int:
    found = re.search(r"^floor ([\d,]+) µs", text, re.MULTILINE)
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(("model", "rows", "context", "microseconds"), FLOORS)
def test_floors_of_known_models(model: str, rows: int, context: int, microseconds: int) -> None:
    assert floor_of(explain_floor(f"preset:{model}", rows, context)) == microseconds


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
    text = explain_floor("preset:llama-3.2-1b")
    operations = [line.split("|")[1].strip() for line in text.splitlines() if line[:1] == "|"][2:]
    layer = ["norm_linear", "decode_attention", "output", "gate_up", "down"]
    assert operations == [*layer, "final_norm", "head"]
    shares = [float(cell) for cell in re.findall(r"([\d.]+)% \|$", text, re.MULTILINE)]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    windows = explain_floor("preset:gemma-3-1b", 2)
    assert re.search(r"^\| decode_attention, window 512 +\| +22 \|", windows, re.MULTILINE)
    assert re.search(r"^\| decode_attention +\| +4 \|", windows, re.MULTILINE)


def test_models_without_these_operations_are_refused() -> None:
    with pytest.raises(ConfigError):
        explain_floor("preset:mla-small")
    with pytest.raises(ConfigError):
        explain_floor("preset:llama-3.2-1b", context=131073)


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
