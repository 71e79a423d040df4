"""What the documentation says of the code is so."""

import re
from pathlib import Path

import pytest
from stepgraph.profiling.dictionary import markdown
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.bench.results.columns import TABLES, baseline_columns
from stepgraph.runtime.tools.step_report import explain_step

ROOT = Path(__file__).resolve().parent.parent


def test_the_dictionary_is_the_code_s_own():
    page = (ROOT / "docs" / "profiling.md").read_text()
    assert markdown() in page, "paste what stepgraph.profiling.dictionary.markdown() returns"


def test_every_column_of_the_benchmark_is_explained():
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    columns = [column for tables in TABLES.values() for table in tables for column in table.columns]
    for method in ("continuous", "static"):
        columns += baseline_columns(method)
    for column in columns:
        assert re.split(r" ms| µs|/s", column)[0] in page, column


def test_links_of_the_readme_lead_somewhere():
    page = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (ROOT / target).exists(), target


def test_the_readme_s_example_runs():
    """The code block that embeds an engine, as it stands."""
    page = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(
    ("row", "name", "weight_dtype", "rows", "context"),
    [
        ("Llama-3.2-1B, batch 1, context 1k", "llama-3.2-1b", "auto", 1, 1024),
        ("Qwen3-0.6B, batch 1, context 1k", "qwen3-0.6b", "auto", 1, 1024),
        ("Llama-3.1-8B, batch 1, context 1k", "llama-3.1-8b", "auto", 1, 1024),
        ("Llama-3.2-1B, batch 32, context 8k", "llama-3.2-1b", "auto", 32, 8192),
        ("Llama-3.1-8B, batch 32, context 8k", "llama-3.1-8b", "auto", 32, 8192),
        ("Llama-3.1-8B, batch 1, int8 weights", "llama-3.1-8b", "int8", 1, 1024),
        ("Llama-3.1-8B, batch 1, fp8 weights", "llama-3.1-8b", "fp8", 1, 1024),
    ],
)
def test_predictions_are_those_of_the_command(row, name, weight_dtype, rows, context):
    page = (ROOT / "docs" / "kernels.md").read_text()
    config = EngineConfig(weight_dtype=weight_dtype)
    text = explain_step(f"preset:{name}", config, rows=rows, context=context, bandwidth=4.3e12)
    floor, predicted = (
        re.search(pattern, text)[1] for pattern in (r"floor ([\d,]+) µs", r"predicted ([\d,]+) µs")
    )
    assert f"| {row} | {floor} | {predicted} |" in page
