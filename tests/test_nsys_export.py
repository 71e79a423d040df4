"""The reader of exports and its command against what is no export, damaged, or half of one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stepgraph.profiling.report import __main__ as cli
from stepgraph.profiling.report.document import read_report
from stepgraph.profiling.report.export import Export, ExportError, read_export
from stepgraph.profiling.report.payload import PayloadReader

from .nsys_rig import FIELDS, INT64, NEW, Kernel, Launch, Profile

ENTRIES = [(3, 900, i, INT64, name, 8 * i or None) for i, name in enumerate(FIELDS)]


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


def foreign(path: Path, *statements: str) -> Path:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path


def test_files_that_are_no_export(tmp_path: Path, capsys) -> None:
    missing = tmp_path / "missing.sqlite"
    assert "No such file" in error_of(missing, capsys=capsys)
    assert "directory" in error_of(tmp_path, capsys=capsys)
    (tmp_path / "empty.sqlite").write_bytes(b"")
    assert "is empty" in error_of(tmp_path / "empty.sqlite", capsys=capsys)
    (tmp_path / "text.sqlite").write_text("step,rows\n1,2\n" * 50)
    assert "is no SQLite file" in error_of(tmp_path / "text.sqlite", capsys=capsys)
    (tmp_path / "head.sqlite").write_bytes(b"SQLite format 3\0")
    assert "is damaged" in error_of(tmp_path / "head.sqlite", capsys=capsys)
    other = foreign(tmp_path / "other.sqlite", "CREATE TABLE cookies (name TEXT)")
    assert "no export of nsys" in error_of(other, capsys=capsys)


@pytest.mark.parametrize("suffix", [".nsys-rep", ".qdrep"])
def test_a_report_of_nsys_is_to_be_exported_first(tmp_path: Path, capsys, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"anything")
    message = error_of(path, capsys=capsys)
    assert "nsys export --type=sqlite --include-blobs=true" in message
    assert f"-o {tmp_path / 'x.sqlite'} {path}" in message


def test_exports_without_what_a_report_needs(tmp_path: Path, capsys) -> None:
    strings = "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)"
    assert "has no NVTX ranges" in error_of(foreign(tmp_path / "a.sqlite", strings), capsys=capsys)
    other = played(domain="NCCL").write(tmp_path / "b.sqlite")
    message = error_of(other, capsys=capsys)
    assert "no NVTX domain 'stepgraph'; its domains are: NCCL" in message
    unnamed = Profile(dataclasses.replace(NEW, domain_named=False))
    unnamed.range("step", 5, 9)  # of a program of its own: no `plan`, no `launch`
    message = error_of(unnamed.write(tmp_path / "c.sqlite"), capsys=capsys)
    assert message.endswith("has no NVTX domain 'stepgraph'\n")
    idle = Profile()
    idle.range("load", 5, 9, 1_000)
    assert "has no step in it: profile" in error_of(
        idle.write(tmp_path / "d.sqlite"), capsys=capsys
    )
    idle.range("step", 10, None, 0)
    message = error_of(idle.write(tmp_path / "e.sqlite"), capsys=capsys)
    assert "has no step in it (1 step left out: the profile ended before the step did)" in message


def test_ranges_of_others_are_not_looked_at(trace: Path) -> None:
    expected = read_export(trace)
    row = "(start, end, eventType, domainId, globalTid)"
    foreign(trace, f"INSERT INTO NVTX_EVENTS {row} VALUES ('?', 7, 59, 0, NULL)")
    assert read_export(trace) == expected


def test_a_view_without_an_end_is_left_alone(trace: Path, capsys) -> None:
    endless = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 9)"
    fills = "SELECT n AS start, n AS end, 0 AS deviceId, 101 AS correlationId FROM r"
    expected = read_export(trace)
    foreign(trace, f"CREATE VIEW CUPTI_ACTIVITY_KIND_MEMSET AS {endless} {fills}")
    assert read_export(trace) == expected, "one that ends is not read either"


def test_the_domain_of_ranges_without_one_is_nobody_s(tmp_path: Path) -> None:
    play = Profile(dataclasses.replace(NEW, domain_named=False))
    for name in ("step", "plan", "launch", "replay"):
        play.event(59, name, 5, 9, domain_id=0)
    with pytest.raises(ExportError, match="no NVTX domain"):
        read_export(play.write(tmp_path / "trace.sqlite"))


def test_other_domains_with_the_same_messages_are_left_alone(tmp_path: Path) -> None:
    play = played()
    play.event(75, "somebody else", 0, None, domain_id=9)
    for name in ("step", "launch", "replay"):
        play.event(59, name, play.now, play.now + 9, 1, domain_id=9)
    assert len(read_report(play.write(tmp_path / "trace.sqlite")).steps) == 3


def test_a_truncated_export_is_an_error_wherever_it_was_cut(trace: Path, capsys) -> None:
    whole = trace.read_bytes()
    for length in [*range(1, 200, 37), *range(200, len(whole), len(whole) // 23), len(whole) - 1]:
        trace.write_bytes(whole[:length])
        message = error_of(trace, capsys=capsys)
        assert "is truncated" in message or "is damaged" in message or "no SQLite" in message


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1),
    st.booleans(),
)
def test_a_damaged_export_is_read_or_an_error(changes: list[tuple[float, int]], tail) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.sqlite"
        path.write_bytes(bytes(_WHOLE))
        data = bytearray(_WHOLE)
        for where, value in changes:
            data[100 + int(where * (len(data) - 100))] = value
        path.write_bytes(data)
        if tail:
            with path.open("ab") as stream:
                stream.write(b"\0" * 7)
        with contextlib.suppress(ExportError):
            read_report(path)


def _whole() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return played().write(Path(folder) / "trace.sqlite").read_bytes()


_WHOLE = _whole()

hostile = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=5), st.binary(max_size=50),
    st.floats(),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_columns_may_hold_anything(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.sqlite"
        path.write_bytes(_WHOLE)
        with sqlite3.connect(path) as connection:
            tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
            for _ in range(data.draw(st.integers(1, 3))):
                table = data.draw(st.sampled_from(sorted(tables)))
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                column = data.draw(st.sampled_from(columns))
                value = data.draw(hostile)
                where = data.draw(st.sampled_from(["", " WHERE rowid % 3 = 0"]))
                try:
                    connection.execute(f'UPDATE {table} SET "{column}" = ?{where}', [value])
                except sqlite3.Error:
                    continue  # a key
        connection.close()
        with contextlib.suppress(ExportError):
            assert cli.report_text(read_report(path))


@pytest.mark.parametrize(
    "table",
    [
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "META_DATA_CAPTURE",
        "ENUM_NSYS_EVENT_TYPE",
        "NVTX_PAYLOAD_SCHEMA_ENTRIES",
    ],
)
def test_every_other_table_may_be_missing(trace: Path, table: str) -> None:
    foreign(trace, f"DROP TABLE IF EXISTS {table}")
    assert len(read_report(trace).steps) == 3


def test_only_threads_may_tell_of_the_machine_they_ran_on(trace: Path) -> None:
    machine = 7 << 48
    for table in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"):
        where = "WHERE eventType = 59" if table == "NVTX_EVENTS" else ""
        foreign(trace, f"UPDATE {table} SET globalTid = globalTid + {machine} {where}")
    assert [row.launches for row in read_report(trace).steps] == [1, 1, 1]
    assert all(row.device_us is not None for row in read_report(trace).steps)


def test_an_export_that_does_not_tell_processes_is_read_by_the_ids_of_calls(trace: Path) -> None:
    before = read_report(trace).steps
    for table in ("MEMCPY", "GRAPH_TRACE"):
        foreign(trace, f"UPDATE CUPTI_ACTIVITY_KIND_{table} SET globalPid = NULL")
    assert read_report(trace).steps == before


def test_the_export_is_not_changed_and_may_be_read_only(trace: Path) -> None:
    before = trace.read_bytes()
    trace.chmod(0o444)
    trace.parent.chmod(0o555)
    try:
        read_export(trace)
        assert trace.read_bytes() == before
        assert os.listdir(trace.parent) == [trace.name]
    finally:
        trace.parent.chmod(0o755)


def test_a_path_may_have_any_characters(tmp_path: Path) -> None:
    path = played().write(tmp_path / "100% ?a#b 日本.sqlite")
    assert len(read_report(path).steps) == 3


def test_the_order_of_rows_is_no_matter(tmp_path: Path) -> None:
    def read(seed: int) -> Export:
        export = read_export(played().write(tmp_path / f"{seed}.sqlite", seed))
        return dataclasses.replace(export, path=tmp_path)

    assert read(1) == read(2) == read(3)


@given(numbers=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 6))
def test_a_payload_of_bytes_is_read(numbers: tuple[int, ...]) -> None:
    body = struct.pack("<6q", *numbers)
    for last in (32, 32 + len(body)):  # versions differ
        blob = struct.pack("<4Q", 3, 900, len(body), last) + body
        assert PayloadReader(ENTRIES).numbers(None, blob) == dict(zip(FIELDS, numbers, strict=True))


@given(st.binary(max_size=100))
@example(struct.pack("<4Q", 3, 900, 2**63, 32) + bytes(5))
@example(struct.pack("<4Q", 3, 900, 48, 32) + bytes(47))
def test_any_bytes_are_a_payload_or_none(blob: bytes) -> None:
    assert set(PayloadReader(ENTRIES).numbers(None, blob)) <= set(FIELDS)


@given(st.text())
@example("[" * 100_000)
@example('{"a": true, "b": 1.5}')
@example('{"a": ' + "9" * 4_000 + "}")
def test_any_text_is_a_payload_or_none(text: str) -> None:
    for number in PayloadReader(()).numbers(text, None).values():
        assert type(number) is int
        assert number.bit_length() <= 64


def test_fields_of_other_types_and_places() -> None:
    entries = [
        (1, 5, 0, 15, "narrow", 0), (1, 5, 1, 99, "unknown", 4), (1, 5, 2, 18, "wide", 8),
        (1, 5, 3, 17, "beyond", 4_000), (1, 5, 4, "no type", "odd", None),
    ]  # fmt: skip
    body = struct.pack("<iiQ", -3, 7, 2**64 - 1)
    blob = struct.pack("<4Q", 1, 5, len(body), 0) + body
    assert PayloadReader(entries).numbers(None, blob) == {"narrow": -3, "wide": 2**64 - 1}


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_outputs_that_cannot_be_written(trace: Path, capsys, option: str) -> None:
    nowhere = trace.parent / "nowhere" / "out"
    message = error_of(trace, option, nowhere, capsys=capsys)
    assert f"cannot write {nowhere}: {nowhere.parent} is not a directory" in message
    message = error_of(trace, option, trace.parent, capsys=capsys)
    assert f"cannot write {trace.parent}: it is a directory" in message
    assert "it is what is read" in error_of(trace, option, trace, capsys=capsys)
    assert error_of(trace, option, os.devnull, capsys=capsys).endswith("no regular file\n")
    assert os.listdir(trace.parent) == [trace.name]


def test_an_output_that_fails_leaves_the_other_as_it_was(trace: Path, capsys) -> None:
    kept = trace.parent / "kept.json"
    kept.write_text("before")
    error_of(trace, "--json", kept, "--csv", trace.parent / "no" / "out.csv", capsys=capsys)
    assert kept.read_text() == "before"
    assert sorted(os.listdir(trace.parent)) == ["kept.json", trace.name]
    message = error_of(trace, "--json", kept, "--csv", kept, capsys=capsys)
    assert "both --json and --csv" in message


def test_an_output_has_the_permissions_of_any_new_file(trace: Path, capsys) -> None:
    out = trace.parent / "out.json"
    assert cli.main([str(trace), "--json", str(out)]) == 0
    (trace.parent / "plain").touch()
    assert out.stat().st_mode == (trace.parent / "plain").stat().st_mode


def test_names_that_are_none(trace: Path, capsys) -> None:
    assert "missing.json" in error_of(trace, "--names", "missing.json", capsys=capsys)
    beside = trace.with_name("trace.kernels.json")
    beside.write_text('{"schema_version": 7}')
    assert "schema_version" in error_of(trace, capsys=capsys)
    beside.write_text('{"cases": []}')
    assert str(beside) in error_of(trace, capsys=capsys)
    beside.write_text('{"schema_version": 1, "ste')
    assert str(beside) in error_of(trace, capsys=capsys)


def test_a_diff_against_something_else(trace: Path, capsys) -> None:
    out = trace.parent / "out.json"
    message = error_of(trace, "--diff", "old.sqlite", "--json", out, capsys=capsys)
    assert "cannot read old.sqlite" in message
    assert not out.exists()


def test_a_terminal_without_greek_letters_gets_a_report_too(trace: Path) -> None:
    command = [sys.executable, "-m", "stepgraph.profiling.report", trace.name]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        command, cwd=trace.parent, env=environment, capture_output=True, check=True, timeout=60
    )
    assert result.stdout.startswith(b"# trace.sqlite\n")
    assert b"host \\xb5s" in result.stdout
    assert result.stderr == b""


def test_unknown_flags(trace: Path, capsys) -> None:
    with pytest.raises(SystemExit) as exit_status:
        cli.main([str(trace), "--jso", "x"])
    assert exit_status.value.code == 2
    assert "unrecognized arguments: --jso" in capsys.readouterr().err
