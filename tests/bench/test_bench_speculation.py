"""`bench.py --speculate`: which command lines it takes, and what a run prints."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.bench import cli, speculation
from stepgraph.runtime.bench.results.speculation_lines import (
    Case,
    Measured,
    Run,
    comparison_line,
)
from stepgraph.runtime.speculation.config import Speculation
from stepgraph.runtime.tools.arguments import speculation_spec

from ..rigs.tiny_models import TinyModel


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


@pytest.mark.parametrize("more", [("--num-starts", "2"), ("--same-engine", "--num-starts", "2")])
def test_a_run(
    more: tuple[str, ...],
    base: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With two proposers of one name, as two heads have."""
    monkeypatch.setattr("stepgraph.runtime.bench.speculation.PROMPT_TOKENS", 20)
    flags = ["--speculate", "suffix:1", "suffix:1", "ngram:2", "--model", str(base.directory)]
    assert cli.main([*flags, *SMALL, *more, "--device", "cpu", "--dtype", "float32"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert "accepted" in header
    assert [line.split()[3] for line in lines] == ["suffix:1", "suffix:1", "ngram:2"]
    assert all(re.search(r"\| 2[0-4] same tokens$", line) for line in lines)  # 3 of each of 8 rows


def test_speculation_is_off_in_plain_runs_of_an_engine(
    open_engine: Callable[..., Engine],
) -> None:
    eager = {"method": "suffix", "adaptive": False}
    engine = open_engine("base", max_model_len=64, speculation=eager)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3] * 6]
    plain = speculation._run_plainly(engine, prompts, params)
    assert engine.stats()["speculation"]["verify_steps"] == 0
    assert speculation._run(engine, prompts, params).tokens == plain.tokens
    assert engine.stats()["speculation"]["verify_steps"] > 0


def test_the_interval_of_a_ratio_of_tails() -> None:
    """Times of which one side takes longer in two of four repetitions."""
    rng = random.Random(2)
    runs = [Run(1.0, [rng.uniform(1, 2) for _ in range(500)], [[1]]) for _ in range(4)]
    slow = [Run(1.0, [t * (1 + i % 2) for t in run.itl_us], [[1]]) for i, run in enumerate(runs)]
    case, one = Case(1, 0.0, "edit"), Measured(runs)
    found = []
    for other in (one, Measured(slow)):
        line = comparison_line(one, "suffix:3", other, case, "-")
        match = re.search(r" ([0-9.]+) \(([0-9.]+)-([0-9.]+)\) \|[^|]*\| 2000 same tokens$", line)
        assert match is not None, line
        found.append([float(value) for value in match.groups()])
    assert found[0] == [1.0, 1.0, 1.0]
    ratio, low, high = found[1]
    assert low < ratio <= high <= 2.01
    assert ratio == pytest.approx(2, abs=0.05)


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
