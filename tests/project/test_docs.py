"""The documentation agrees with the code."""

import re
from pathlib import Path

import pytest
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.tools.step_costs import explain_step

ROOT = Path(__file__).resolve().parents[2]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path):
    """Files exist, and `page.md#heading` names a heading of the page."""
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if ":" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, target


def test_paths_of_the_architecture_page_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", page):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        *(f"docs/{n}.md" for n in ("getting-started", "embedding", "serving", "metrics")),
    ],
)
def test_examples_run(name):
    """The Python blocks that import what they use, and need no server."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)
    complete = [block for block in blocks if "import" in block and "localhost" not in block]
    assert complete
    for block in complete:
        exec(compile(block, name, "exec"), {"__name__": "example"})


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
    page = (ROOT / "docs" / "gpu-predictions.md").read_text()
    config = EngineConfig(weight_dtype=weight_dtype)
    text = explain_step(f"preset:{name}", config, rows=rows, context=context, bandwidth=4.3e12)
    floor, predicted = (
        re.search(pattern, text)[1] for pattern in (r"floor ([\d,]+) µs", r"predicted ([\d,]+) µs")
    )
    assert f"| {row} | {floor} | {predicted} |" in page


@pytest.mark.parametrize(
    ("row", "name", "rows", "context"),
    [
        ("Llama-3.1-8B, batch 1, context 1k", "llama-3.1-8b", 1, 1024),
        ("Llama-3.1-8B, batch 32, context 8k", "llama-3.1-8b", 32, 8192),
        ("Llama-3.1-70B, batch 1, context 1k", "llama-3.1-70b", 1, 1024),
        ("Llama-3.1-70B, batch 32, context 8k", "llama-3.1-70b", 32, 8192),
    ],
)
def test_predictions_of_groups_are_those_of_the_command(row, name, rows, context):
    page = (ROOT / "docs" / "gpu-predictions.md").read_text()
    text = explain_step(
        *(f"preset:{name}", EngineConfig()),
        **{"ranks": [2, 4, 8], "rows": rows, "context": context, "bandwidth": 4.3e12},
    )
    lines = [line.strip("| ").split("|") for line in text.splitlines() if re.match(r"\| +\d", line)]
    one, *groups = ([cell.strip() for cell in line] for line in lines)
    times = [f"{line[6]} ({line[3]} + {line[5]})" for line in groups]
    expected = [row, one[6], *times, " / ".join(line[7] for line in groups)]
    assert f"| {' | '.join(expected)} |" in page


def test_each_row_of_the_guarantees_names_a_test():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(test_\w+)\.(test_\w+)`", page)
    assert len(named) > 35
    for module, name in named:
        (file,) = ROOT.glob(f"tests/*/{module}.py")
        assert f"def {name}(" in file.read_text(), name
