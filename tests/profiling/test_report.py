"""What `stepgraph report` says of a profile is what was played into it; other files are errors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stepgraph.profiling.attribution import KernelNames, Node, StepNodes
from stepgraph.profiling.report import Report, Step, main, read_report, report_text
from stepgraph.profiling.stats import Summary
from stepgraph.profiling.trace import TraceError

from ..rigs.nsys_rig import NEW, OLD, PUSH_POP, Launch, Profile, Variant

VARIANTS = {
    "old": OLD,
    "graphs whole": NEW,
    "nodes": dataclasses.replace(NEW, graph_trace="node"),
    "no graphs": dataclasses.replace(NEW, graph_trace=None),
}

KERNELS = (("norm", 700), ("matmul", 9_000), ("norm", 650),
           ("matmul", 11_000), ("argmax", 400))  # fmt: skip
NODES = (
    Node(0, "norm", "kernel", "norm"),
    Node(0, "down", "kernel", "_Z6matmulPf"),
    Node(1, "norm", "kernel", "norm"),
    Node(1, "down", "kernel", None),
    Node(None, "greedy", "kernel", "argmax"),
)
DECODE = Launch("decode", 3, 4, 3, KERNELS, idle_ns=300)


def played(variant: Variant = NEW, steps: int = 6, **profile) -> Profile:
    """A step in flight: each turn commits the step before."""
    play = Profile(variant, **profile)
    for number in range(10, 10 + steps):
        play.step(number, [DECODE], wait_ns=9_000, commits=number - 1 if number > 10 else None)
    return play


def report_of(play: Profile, folder: Path, **more) -> Report:
    return read_report(play.write(folder / "trace.sqlite", **more))


NAMES = KernelNames(
    bandwidth_gb_s=4_000.0,
    steps=[StepNodes("decode", 4, False, NODES)],
    bytes_read={"down": 40_000_000, "greedy": 400_000},
)


def assert_rows_are(rows: list[Step], truth: list[SimpleNamespace], variant: Variant) -> None:
    assert len(rows) == len(truth)
    numbers = variant.payload
    for row, true in zip(rows, truth, strict=True):
        assert (row.step, row.phase, row.launches) == (true.step, true.phase, true.launches)
        told = (row.rows, row.bucket, row.tokens, row.padding)
        expected = (true.rows, true.bucket, true.tokens, true.padding)
        assert told == (expected if numbers else (None,) * 4)
        for name in ("host", "wait", "device", "gap", "step"):
            ns = getattr(true, f"{name}_ns")
            assert getattr(row, f"{name}_us") == (None if ns is None else ns / 1e3), name


steps_played = st.lists(
    st.tuples(
        st.sampled_from(["decode", "prefill", "both"]),
        st.lists(st.integers(1, 50_000), min_size=1, max_size=5),  # kernels
        st.integers(0, 3_000),  # idle between them
        st.integers(0, 200_000),  # the host does something else
        st.integers(0, 50_000),  # waits
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@settings(max_examples=5, deadline=None)
@given(steps=steps_played, seed=st.integers(0, 2**32))
@example([("prefill", [5], 0, 9, 0), ("both", [7], 9, 0, 20_000), ("decode", [3], 0, 5, 0)], 0)
def test_steps_in_any_order_of_rows(variant: Variant, steps, seed: int) -> None:
    play = Profile(variant)
    for number, (what, durations, idle_ns, pause_ns, wait_ns) in enumerate(steps):
        kernels = [(f"k{i}", ns) for i, ns in enumerate(durations)]
        launches = [Launch("decode", 1, 2, 1, kernels, idle_ns)] if what != "prefill" else []
        if what != "decode":
            launches.append(Launch("prefill", 0, 64, 20, kernels, idle_ns))
        commits = number - 1 if number else None
        play.step(number, launches, pause_ns=pause_ns, wait_ns=wait_ns, commits=commits)
    with tempfile.TemporaryDirectory() as folder:
        report = report_of(play, Path(folder), seed=seed)
    assert_rows_are(report.steps, play.truth, variant)
    assert report.graph_trace == variant.graph_trace
    buckets = {(true.phase, true.bucket if variant.payload else None) for true in play.truth}
    assert {(case.phase, case.bucket) for case in report.cases} == buckets
    gaps = [true.gap_ns for true in play.truth if true.gap_ns is not None]
    for case in report.cases:
        rows = [row for row in report.steps if (row.phase, row.bucket) == (case.phase, case.bucket)]
        assert case.n == len(rows)
        assert case.device_us == Summary.of(row.device_us for row in rows)
    assert sum(case.gap_us.n for case in report.cases if case.gap_us) == len(gaps)


def test_operations_belong_to_the_captured_nodes(tmp_path) -> None:
    trace = played(VARIANTS["nodes"], steps=6).write(tmp_path / "trace.sqlite")
    NAMES.save(tmp_path / "trace.kernels.json")
    report = read_report(trace)
    launch_ns = sum(ns for _, ns in KERNELS) + 4 * 300
    operations = {row.name: row for row in report.operations if row.phase == "decode"}
    assert list(operations) == ["down", "norm", "greedy"], "the most expensive first"
    for name, ns, count in (("down", 20_000, 2), ("norm", 1_350, 2), ("greedy", 400, 1)):
        row = operations[name]
        assert row.us == Summary.of([ns / 1e3] * 6)
        assert row.activities == count
        assert row.share == pytest.approx(ns / launch_ns, abs=1e-12)
    # 2 launches of 20 MB at 4 TB/s are 10 µs; it took 20.
    assert operations["down"].fraction == pytest.approx(0.5)
    assert operations["greedy"].fraction == pytest.approx(0.1 / 0.4)
    assert operations["norm"].fraction is None, "nothing says what it reads"
    assert report.idle == {"decode": pytest.approx(4 * 300 / launch_ns)}
    around = {row.name: row for row in report.operations if row.phase == "around"}
    assert around["[copy host to device]"].us.p50 == 1.5
    assert around["[copy device to host]"].us.p50 == 1.0
    assert report.notes == []


def test_operations_without_names_or_nodes(tmp_path) -> None:
    report = report_of(played(VARIANTS["nodes"]), tmp_path)
    names = [row.name for row in report.operations if row.phase == "decode"]
    assert names == ["[matmul]", "[norm]", "[argmax]"]
    (note,) = report.notes
    assert "kernels.json" in note
    (tmp_path / "trace.sqlite").unlink()
    report = report_of(played(NEW), tmp_path)
    assert {row.phase for row in report.operations} == {"around"}
    (note,) = report.notes
    assert "--graph-trace node" in note


def test_steps_that_the_profile_cuts_are_left_out(tmp_path) -> None:
    play = Profile()
    # The profile began within a turn: its range is not there, what was in it is.
    play.range("replay", play.now, play.now + 5_000, numbers=(3, 1, 1, 1, 1, 0))
    play.now += 10_000
    play.step(4, [DECODE])
    play.step(5, [DECODE], commits=4)
    play.range("step", play.now + 10, play.now + 90, 6)  # it launches nothing
    play.range("commit", play.now + 20, play.now + 80, 5)
    play.range("step", play.now + 100, None, 6)
    play.range("plan", play.now + 200, play.now + 300, 6)
    report = report_of(play, tmp_path)
    assert_rows_are(report.steps, play.truth, NEW)
    assert [note[:17] for note in report.notes[:2]] == ["1 steps left out:", "1 launches left o"]


def test_gaps_do_not_cross_missing_steps(tmp_path) -> None:
    play = Profile()
    for number in (1, 2, 5, 6, 0):  # 3 and 4 are missing, then another engine begins
        play.step(number, [DECODE])
    report = report_of(play, tmp_path)
    assert [row.gap_us is None for row in report.steps] == [True, False, True, False, True]
    assert [row.step_us is None for row in report.steps] == [True, False, True, False, True]


def test_processes_with_the_same_ids_are_kept_apart(tmp_path) -> None:
    one, two = played(pid=100, tid=100), Profile(pid=200, tid=201, now=1_004_321)
    two.strings, two.correlation = one.strings, 100  # the ids of calls of both are the same
    for number in range(4):
        two.step(number, [Launch("prefill", 0, 64, 60, (("big", 90_000),))])
    report = report_of(one, tmp_path, others=[two])
    assert_rows_are([r for r in report.steps if r.thread == 0], one.truth, NEW)
    assert_rows_are([r for r in report.steps if r.thread == 1], two.truth, NEW)


def test_calls_of_other_threads_are_left_out(tmp_path) -> None:
    play = Profile(tid=50)
    helper = Profile(pid=play.pid, tid=51, correlation=5_000, strings=play.strings)
    helper.now = play.now + 5_000
    call = helper.call("cudaLaunchKernel_v7000", 500)
    helper.activity("KERNEL", helper.now, helper.now + 10**9, call, shortName=1, demangledName=1)
    play.step(1, [DECODE])
    report = report_of(play, tmp_path, others=[helper])
    assert_rows_are(report.steps, play.truth, NEW)


def test_commits_belong_to_the_step_before(tmp_path) -> None:
    play = Profile()
    true = play.step(1, [DECODE], commits=0, commit_ns=90_000)
    now, play.now = play.now, play.now - 50_000
    call = play.call("cudaMemcpyAsync_v3020", 1_000)
    play.activity("MEMCPY", now + 10**6, now + 2 * 10**6, call, copyKind=2)
    report = report_of(play, tmp_path)
    assert report.steps[0].device_us == true.device_ns / 1e3


def test_steps_on_a_cpu_run_in_the_engine_thread(tmp_path) -> None:
    play = played(steps=4)
    play.rows = {"NVTX_EVENTS": play.rows["NVTX_EVENTS"]}
    report = report_of(play, tmp_path)
    work_ns, behind_ns = 5_000, 2_000  # the range `replay`, and the copy behind it
    for row, true in zip(report.steps, play.truth, strict=True):
        assert row.device_us == work_ns / 1e3
        assert row.host_us == (true.host_ns + true.wait_ns - work_ns) / 1e3
    for row, before in zip(report.steps[1:], play.truth, strict=False):
        # Behind the work of a step: its commit, a pause, and plan and copy of the next one.
        assert row.gap_us == (behind_ns + before.commit_ns + 1_000 + 4_000 + 2_000) / 1e3
        assert row.step_us == row.gap_us + row.device_us
    assert any("no CUDA in this profile" in note for note in report.notes)
    names = {row.name for row in report.operations}
    assert names == {"(step)", "(commit)", "(replay)", "(launch)", "(plan)"}
    assert sum(row.us.mean * row.us.n for row in report.operations) == pytest.approx(
        sum(row.host_us + row.device_us for row in report.steps)
    )


def test_the_command_prints_tables_and_writes_json(tmp_path, capsys) -> None:
    trace = played(VARIANTS["nodes"], steps=5).write(tmp_path / "trace.sqlite")
    NAMES.save(tmp_path / "trace.kernels.json")
    assert main([str(trace), "--json", str(tmp_path / "r.json")]) == 0
    printed = capsys.readouterr().out
    assert "|   10 | decode |    3 |      4 |" in printed
    report = read_report(trace)
    document = json.loads((tmp_path / "r.json").read_text())
    assert [step["gap_us"] for step in document["steps"]] == [s.gap_us for s in report.steps]
    assert document["steps"][0]["gap_us"] is None
    assert document["cases"][0]["device_us"] == report.cases[0].device_us.to_json()
    assert document["operations"][0]["name"] == "down"
    assert main([str(trace), "--json", str(trace)]) == 1
    assert len(read_report(trace).steps) == 5


# Exports that are damaged or incomplete ----------------------------------------------------------


def error_of(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error, without the name of the program."""
    assert main([str(argument) for argument in arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("stepgraph report: error: ")


def execute(path: Path, *statements: str) -> Path:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


def test_files_that_are_not_an_export(tmp_path: Path, capsys) -> None:
    assert "No such file" in error_of(tmp_path / "missing.sqlite", capsys=capsys)
    assert "directory" in error_of(tmp_path, capsys=capsys)
    for content in (b"", b"step,rows\n1,2\n" * 50):
        (tmp_path / "x.sqlite").write_bytes(content)
        assert "x.sqlite" in error_of(tmp_path / "x.sqlite", capsys=capsys)
    other = execute(tmp_path / "other.sqlite", "CREATE TABLE cookies (name TEXT)")
    assert "not an export of nsys" in error_of(other, capsys=capsys)
    report = tmp_path / "x.nsys-rep"
    report.write_bytes(b"anything")
    assert "nsys export --type=sqlite --include-blobs=true" in error_of(report, capsys=capsys)


def test_exports_without_steps(tmp_path: Path, capsys) -> None:
    other = Profile()
    other.range("step", 5, 9)  # of a program of its own: no `plan`, no `launch`
    for name in ("step", "plan", "launch"):  # of ranges without a domain
        other.event(PUSH_POP, name, 5, 9, domain_id=0)
    trace = other.write(tmp_path / "c.sqlite")
    assert "not an export of nsys with the NVTX ranges" in error_of(trace, capsys=capsys)
    idle = Profile()
    for name in ("step", "plan", "launch"):
        idle.range(name, 5, 9)
    assert "no complete step" in error_of(idle.write(tmp_path / "d.sqlite"), capsys=capsys)


def test_other_domains_are_left_alone(tmp_path: Path) -> None:
    play = played(steps=3)
    for name in ("step", "launch", "replay"):
        play.event(PUSH_POP, name, play.now, play.now + 9, 1, domain_id=9)
    trace = play.write(tmp_path / "trace.sqlite")
    row = "(start, end, eventType, domainId, globalTid)"
    execute(trace, f"INSERT INTO NVTX_EVENTS {row} VALUES ('?', 7, 59, 0, NULL)")
    assert len(read_report(trace).steps) == 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1))
def test_exports_that_are_damaged(changes: list[tuple[float, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = played(steps=3).write(Path(folder) / "trace.sqlite")
        data = bytearray(path.read_bytes())
        for where, value in changes:
            data[100 + int(where * (len(data) - 100))] = value
        path.write_bytes(data)
        with contextlib.suppress(TraceError):
            assert report_text(read_report(path))
