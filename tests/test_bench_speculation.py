"""`bench.py --speculate`: which command lines it takes, and what a run prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from stepgraph.runtime.bench import cli
from stepgraph.runtime.speculation.config import Speculation
from stepgraph.runtime.tools.arguments import speculation_spec

from .tiny_models import TinyModel


def test_a_method_and_its_drafts() -> None:
    assert speculation_spec("suffix") == Speculation()
    assert speculation_spec("ngram:4") == Speculation(method="ngram", num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--speculate", "expected at least one argument"),
        ("--speculate guess", "method must be one of"),
        ("--speculate suffix:x", "'x' is not a number of drafts; give METHOD or METHOD:K"),
        ("--speculate suffix:99", "an integer from 1 to 15, not 99"),
        ("--speculate suffix --output-len 1", "--output-len must be at least 2"),
        ("--speculate suffix --temperature x", "'x' is not a temperature"),
        ("--speculate suffix --batch-size 2 --llama python", "--llama decodes at --batch-size 1"),
        ("--speculate suffix --scenario churn", "unrecognized arguments: --scenario churn"),
    ],
)
def test_wrong_command_lines(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(flags.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(autouse=True)
def bandwidth_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stepgraph.runtime.bench.speculation.measure_read_bandwidth", lambda device: 3e10
    )


SMALL = ["--batch-size", "2", "--kind", "random", "--num-iters", "2", "--output-len", "4"]


def test_a_run(
    base: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stepgraph.runtime.bench.speculation.PROMPT_TOKENS", 20)
    flags = [
        "--speculate",
        "suffix:1",
        "ngram:2",
        "--model",
        str(base.directory),
        *SMALL,
        "--num-starts",
        "2",
    ]
    assert cli.main([*flags, "--device", "cpu", "--dtype", "float32"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert "accepted" in header
    assert [line.split()[3] for line in lines] == ["suffix:1", "ngram:2"]
    assert all(re.search(r"\| 2[0-4] same tokens$", line) for line in lines)  # 3 of each of 8 rows


def test_a_model_without_a_tokenizer(capsys: pytest.CaptureFixture[str], base: TinyModel) -> None:
    flags = ["--speculate", "suffix", "--model", str(base.directory), "--kind", "edit"]
    assert cli.main([*flags, "--batch-size", "1", "--output-len", "4"]) == 2
    assert "--kind edit needs a model with a tokenizer" in capsys.readouterr().err


def test_a_python_without_llama(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\nraise SystemExit('no llama_cpp here')\n")
    stand_in.chmod(0o755)
    flags = ["--speculate", "suffix", "--llama", str(stand_in), "--batch-size", "1"]
    assert cli.main(flags) == 1
    assert "no llama_cpp here" in capsys.readouterr().err
