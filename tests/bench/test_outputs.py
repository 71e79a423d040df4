"""Files that the benchmark writes: refused before anything is measured, and never half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from stepgraph.profiling import atomic_write
from stepgraph.profiling.atomic_write import check_writable, write_file
from stepgraph.runtime.bench.options import parse_arguments
from stepgraph.runtime.bench.scenarios import steady

from ..rigs.bench_rig import run_bench

SMALL = "--mode eager --batch-size 1 2 --input-len 24 --output-len 6 --num-warmup 0 --num-iters 1"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_whole_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a.json"
    check_writable(path)
    assert files(tmp_path) == []
    write_file(path, "one µ\n")
    assert path.read_text(encoding="utf-8") == "one µ\n"
    path.chmod(0o640)
    check_writable(path)
    assert path.read_text(encoding="utf-8") == "one µ\n"
    write_file(path, "two\n")
    assert path.read_text() == "two\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert files(tmp_path) == ["a.json"]


def test_an_interrupt_leaves_nothing_half_written(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_write.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "a.json", "after")
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", ["folder", "file/b.json", "no/b.json", "link.json", "pipe"])
def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link.json").symlink_to("no/b.json")
    os.mkfifo(tmp_path / "pipe")
    before = files(tmp_path)
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--output-json", str(tmp_path / name)])
    assert caught.value.code == 2
    assert str(tmp_path / name) in capsys.readouterr().err.splitlines()[-1]
    assert files(tmp_path) == before


def test_what_was_measured_before_an_interrupt_is_kept(monkeypatch, tmp_path, capsys):
    def repeat(run: steady.CaseRun) -> None:
        if run.case.batch_size == 2:
            raise KeyboardInterrupt
        real(run)

    real = steady.CaseRun.repeat
    monkeypatch.setattr(steady.CaseRun, "repeat", repeat)
    arguments = f"{SMALL} --output-json {tmp_path}/a.json"
    assert run_bench(monkeypatch, arguments) == 130
    (case,) = json.loads((tmp_path / "a.json").read_text())["cases"]
    assert case["batch_size"] == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("stepgraph bench: interrupted")
    assert "Traceback" not in captured.err
    assert "- batch 1, input 24: " in captured.out
    assert files(tmp_path) == ["a.json"]
