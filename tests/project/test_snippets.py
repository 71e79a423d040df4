"""The Python snippets of README.md and docs/ run: on a CPU, page by page in one namespace.

A fence "```python no-run" marks a snippet that needs more than this repository and its extras.
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
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda p: p.stem)
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
