"""What the documentation says of the code is so."""

import re
from pathlib import Path

from stepgraph.profiling.ranges import RANGES
from stepgraph.runtime.benchmark_report import (
    BASELINE_COLUMNS,
    CHURN_COLUMNS,
    COLUMNS,
    INTERFERENCE_COLUMNS,
)

ROOT = Path(__file__).resolve().parent.parent


def test_the_dictionary_of_ranges_is_the_code_s_own():
    page = (ROOT / "docs" / "profiling.md").read_text()
    for info in RANGES.values():
        parent = f"`{info.parent}`" if info.parent else "-"
        assert f"| `{info.name}` | {parent} | {info.payload} | {info.description} |" in page
    assert len(re.findall(r"^\| `", page, flags=re.MULTILINE)) == len(RANGES)


def test_every_column_of_the_benchmark_is_explained():
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    for column in (*COLUMNS[7:], *BASELINE_COLUMNS, *INTERFERENCE_COLUMNS[7:], *CHURN_COLUMNS[8:]):
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
