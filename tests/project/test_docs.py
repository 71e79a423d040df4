"""The documentation agrees with the code."""

import re
from pathlib import Path

import pytest

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


def test_each_row_of_the_guarantees_names_a_test():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(test_\w+)\.(test_\w+)`", page)
    assert len(named) > 35
    for module, name in named:
        (file,) = ROOT.glob(f"tests/*/{module}.py")
        assert f"def {name}(" in file.read_text(), name
