"""The reader of exports against files that are no export, damaged or incomplete."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.profiling.nsys import cli
from stepgraph.profiling.nsys.export import Export, ExportError, read_export
from stepgraph.profiling.nsys.report import read_report

from ..rigs.nsys_rig import NEW, Kernel, Launch, Profile


def played(**profile) -> Profile:
    play = Profile(**profile)
    for number in range(3):
        launch = Launch("decode", 1, 2, 1, (Kernel("gemv", 9_000, 1), Kernel("norm", 800, 2)))
        play.step(number, [launch], commits=number - 1)
    return play


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return played().write(tmp_path / "trace.sqlite")


def error_of(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error, without the name of the program."""
    assert cli.main([str(argument) for argument in arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("stepgraph report: error: ")


def execute(path: Path, *statements: str) -> Path:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


def test_files_that_are_no_export(tmp_path: Path, capsys) -> None:
    assert "No such file" in error_of(tmp_path / "missing.sqlite", capsys=capsys)
    assert "directory" in error_of(tmp_path, capsys=capsys)
    for content, message in ((b"", "is empty"), (b"step,rows\n1,2\n" * 50, "no SQLite file")):
        (tmp_path / "x.sqlite").write_bytes(content)
        assert message in error_of(tmp_path / "x.sqlite", capsys=capsys)
    other = execute(tmp_path / "other.sqlite", "CREATE TABLE cookies (name TEXT)")
    assert "no export of nsys" in error_of(other, capsys=capsys)
    report = tmp_path / "x.nsys-rep"
    report.write_bytes(b"anything")
    message = error_of(report, capsys=capsys)
    assert "nsys export --type=sqlite --include-blobs=true" in message
    assert f"-o {tmp_path / 'x.sqlite'} {report}" in message


def test_exports_without_what_a_report_needs(tmp_path: Path, capsys) -> None:
    strings = "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)"
    assert "has no NVTX ranges" in error_of(execute(tmp_path / "a.sqlite", strings), capsys=capsys)
    other = played(domain="NCCL").write(tmp_path / "b.sqlite")
    message = error_of(other, capsys=capsys)
    assert "no NVTX domain 'stepgraph'; its domains are: NCCL" in message
    unnamed = Profile(dataclasses.replace(NEW, domain_named=False))
    unnamed.range("step", 5, 9)  # of a program of its own: no `plan`, no `launch`
    for name in ("step", "plan", "launch"):  # of ranges without a domain
        unnamed.event(59, name, 5, 9, domain_id=0)
    message = error_of(unnamed.write(tmp_path / "c.sqlite"), capsys=capsys)
    assert message.endswith("has no NVTX domain 'stepgraph'\n")
    cut = Profile()
    cut.range("step", 10, None, 0)
    message = error_of(cut.write(tmp_path / "d.sqlite"), capsys=capsys)
    assert "has no step in it (1 step left out: the profile ended before the step did)" in message


def test_other_domains_are_left_alone(tmp_path: Path) -> None:
    play = played()
    play.event(75, "another program", 0, None, domain_id=9)
    for name in ("step", "launch", "replay"):
        play.event(59, name, play.now, play.now + 9, 1, domain_id=9)
    trace = play.write(tmp_path / "trace.sqlite")
    row = "(start, end, eventType, domainId, globalTid)"
    execute(trace, f"INSERT INTO NVTX_EVENTS {row} VALUES ('?', 7, 59, 0, NULL)")
    assert len(read_report(trace).steps) == 3


def test_a_truncated_export_is_an_error_wherever_it_was_cut(trace: Path, capsys) -> None:
    whole = trace.read_bytes()
    for length in (1, 50, 99, 100, *range(200, len(whole) - 4096, 3000), len(whole) - 4096):
        trace.write_bytes(whole[:length])
        error_of(trace, capsys=capsys)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1))
def test_a_damaged_export_is_read_or_an_error(changes: list[tuple[float, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = played().write(Path(folder) / "trace.sqlite")
        data = bytearray(path.read_bytes())
        for where, value in changes:
            data[100 + int(where * (len(data) - 100))] = value
        path.write_bytes(data)
        with contextlib.suppress(ExportError):
            assert cli.report_text(read_report(path))


@pytest.mark.parametrize(
    "table",
    [
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "META_DATA_CAPTURE",
    ],
)
def test_every_other_table_may_be_missing(trace: Path, table: str) -> None:
    execute(trace, f"DROP TABLE {table}")
    assert len(read_report(trace).steps) == 3


def test_processes_are_matched_by_their_own_bits_or_by_the_ids_of_calls(trace: Path) -> None:
    before = read_report(trace).steps
    assert all(step.device_us is not None for step in before)
    for table in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"):  # the hardware, in threads only
        execute(trace, f"UPDATE {table} SET globalTid = globalTid + {7 << 48}")
    assert read_report(trace).steps == before
    for table in ("MEMCPY", "GRAPH_TRACE"):
        execute(trace, f"UPDATE CUPTI_ACTIVITY_KIND_{table} SET globalPid = NULL")
    after = read_report(trace).steps
    assert [step.device_us for step in after] == [step.device_us for step in before]


def test_the_export_is_not_changed_and_may_be_read_only(tmp_path: Path) -> None:
    trace = played().write(tmp_path / "100% ?a#b 日本.sqlite")
    before = trace.read_bytes()
    trace.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert len(read_report(trace).steps) == 3
        assert trace.read_bytes() == before
        assert os.listdir(tmp_path) == [trace.name]
    finally:
        tmp_path.chmod(0o755)


def test_the_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    def read(seed: int) -> Export:
        export = read_export(played().write(tmp_path / f"{seed}.sqlite", seed))
        return dataclasses.replace(export, path=tmp_path)

    assert read(1) == read(2) == read(3)


def test_outputs_that_cannot_be_written_leave_the_others_as_they_were(trace: Path, capsys) -> None:
    kept = trace.parent / "kept.json"
    kept.write_text("before")
    nowhere = trace.parent / "nowhere" / "out.csv"
    message = error_of(trace, "--json", kept, "--csv", nowhere, capsys=capsys)
    assert f"cannot write {nowhere}: {nowhere.parent} is not a directory" in message
    assert "it is an input" in error_of(trace, "--json", trace, capsys=capsys)
    message = error_of(trace, "--json", kept, "--csv", kept, capsys=capsys)
    assert "both --json and --csv" in message
    message = error_of(trace, "--diff", "old.sqlite", "--json", kept, capsys=capsys)
    assert "cannot read old.sqlite" in message
    assert kept.read_text() == "before"
    assert sorted(os.listdir(trace.parent)) == ["kept.json", trace.name]


def test_names_that_cannot_be_read(trace: Path, capsys) -> None:
    assert "missing.json" in error_of(trace, "--names", "missing.json", capsys=capsys)
    beside = trace.with_name("trace.kernels.json")
    beside.write_text('{"schema_version": 7}')
    assert str(beside) in error_of(trace, capsys=capsys)


def test_the_command_in_a_terminal_without_greek_letters(trace: Path) -> None:
    command = [sys.executable, "-m", "stepgraph", "report", trace.name]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        command, cwd=trace.parent, env=environment, capture_output=True, check=True, timeout=60
    )
    assert result.stdout.startswith(b"# trace.sqlite\n")
    assert b"host \\xb5s" in result.stdout
    assert result.stderr == b""
