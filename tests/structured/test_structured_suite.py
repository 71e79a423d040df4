"""The tool that checks outputs of schemas from files and from the official test suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stepgraph.runtime.tools import structured_output_check

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_counts_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "draft7"
    folder.mkdir()
    (folder / "real.json").write_text(json.dumps(OBJECT))
    cases = [
        {"description": "short", "schema": {"enum": [1, "b"]}, "tests": []},
        {"description": "long", "schema": {"type": "string", "minLength": 500}, "tests": []},
        {"description": "none", "schema": {"type": "string", "not": {}}, "tests": []},
        {"description": "any", "schema": True, "tests": []},
    ]
    (folder / "suite.json").write_text(json.dumps(cases))
    structured_output_check.main([str(tmp_path), "--output-len", "24", "--show"])
    shown = capsys.readouterr().out
    counts = dict(line.split() for line in shown.splitlines() if len(line.split()) == 2)
    numbers = {name: int(count) for name, count in counts.items()}
    assert numbers["schemas"] == 5
    assert numbers["refused"] == 1
    assert numbers["valid"] >= 1
    assert numbers["cut"] >= 1
    assert (numbers["wrong"], numbers["failed"]) == (0, 0)
    assert "refused: draft7/suite.json: none" in shown
