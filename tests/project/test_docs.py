"""The documentation agrees with the code, and its Python snippets run.

On a CPU, page by page in one namespace. A fence "```python no-run" marks a snippet that needs more
than this repository and its extras.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import stepgraph
from stepgraph import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```python\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)

SUBSTITUTIONS = {
    # Eager engines start without compiling.
    r'from_pretrained\("([\w/]+)"\)': r'from_pretrained("\1", EAGER)',
    r"\bEngineConfig\((?!mode=)": 'EngineConfig(mode="eager", ',
    r'"path/to/checkpoint"': "CHECKPOINT",
    r"hidden_size=768, num_hidden_layers=12": "hidden_size=96, num_hidden_layers=1",
}

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def snippets(page: Path) -> list[str]:
    found = [textwrap.dedent(code) for _, code in FENCE.findall(page.read_text())]
    for old, new in SUBSTITUTIONS.items():
        found = [re.sub(old, new, code) for code in found]
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a folder of a user, with a chat template."""
    folder = tmp_path_factory.mktemp("snippets") / "checkpoint"
    shutil.copytree(Path(stepgraph.runtime.__path__[0]) / "demo", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


RUN = [page for page in PAGES if snippets(page) and "results" not in page.parts]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_snippets_run(
    page: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "example", "CHECKPOINT": str(checkpoint)}
    scope["EAGER"] = EngineConfig(mode="eager")
    try:
        for code in snippets(page):
            exec(compile(code, page.name, "exec"), scope)
    finally:
        engine = scope.get("engine")
        if engine is not None and hasattr(engine, "close"):
            engine.close()


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
