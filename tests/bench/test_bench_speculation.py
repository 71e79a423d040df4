"""`bench.py --speculate`: what a run prints."""

from __future__ import annotations

import pytest
from stepgraph.runtime.bench import cli

from ..rigs.tiny_models import TinyModel


def test_run_compares_proposers(
    base: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two proposers of one name, as two heads have."""
    monkeypatch.setattr("stepgraph.runtime.bench.speculation.PROMPT_TOKENS", 20)
    flags = ["--speculate", "suffix:1", "suffix:1", "ngram:2", "--model", str(base.directory)]
    small = "--batch-size 2 --kind random --num-iters 2 --output-len 4 --num-starts 2"
    small += " --device cpu --dtype float32"
    assert cli.main([*flags, *small.split()]) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[3] for row in cells] == ["suffix:1", "suffix:1", "ngram:2"]
    assert all(row[-1] == "same" and 20 <= int(row[-2]) <= 24 for row in cells)  # 3 of 8 rows


def test_model_without_a_tokenizer_is_refused(base: TinyModel) -> None:
    flags = ["--speculate", "suffix", "--model", str(base.directory), "--kind", "edit"]
    assert cli.main([*flags, "--batch-size", "1", "--output-len", "4"]) == 2
