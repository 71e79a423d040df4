"""What the report says of a profile is what was played into it."""

from __future__ import annotations

import csv
import dataclasses
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stepgraph.profiling.kernel_names import KernelNames, Node, OperationCost, StepNodes
from stepgraph.profiling.nsys import cli
from stepgraph.profiling.nsys.report import Report, compare, read_report
from stepgraph.profiling.nsys.steps import STEP_COLUMNS, TracedStep
from stepgraph.profiling.stats import Summary

from ..rigs.nsys_rig import NEW, OLD, Kernel, Launch, Profile, Variant

VARIANTS = {
    "old": OLD,
    "graphs whole": NEW,
    "nodes": dataclasses.replace(NEW, graph_trace="node", payload="json"),
    "nodes, no metadata": dataclasses.replace(NEW, graph_trace="node", metadata=False),
    "no graphs": dataclasses.replace(NEW, graph_trace=None),
    "domain not named": dataclasses.replace(NEW, domain_named=False),
}

KERNELS = (Kernel("norm", 700, 11), Kernel("matmul", 9_000, 12), Kernel("norm", 650, 13),
           Kernel("matmul", 11_000, 14), Kernel("argmax", 400, 15))  # fmt: skip
NODES = (
    Node(0, "norm", "kernel", "norm", 11),
    Node(0, "down", "kernel", "_Z6matmulPf", 12),
    Node(1, "norm", "kernel", "norm", 13),
    Node(1, "down", "kernel", None, 14),
    Node(None, "greedy", "kernel", "argmax", 15),
)


def decode(rows: int = 3, bucket: int = 4, kernels=KERNELS, idle_ns: int = 300) -> Launch:
    return Launch("decode", rows, bucket, rows, kernels, idle_ns)


def prefill(tokens: int = 60, bucket: int = 64) -> Launch:
    return Launch("prefill", 0, bucket, tokens, (Kernel("big", 90_000, 21),))


def played(variant: Variant = NEW, steps: int = 6, **profile) -> Profile:
    """A step in flight: each turn commits the step before."""
    play = Profile(variant, **profile)
    for number in range(10, 10 + steps):
        play.step(number, [decode()], wait_ns=9_000, commits=number - 1 if number > 10 else None)
    return play


def report_of(play: Profile, folder: Path, **more) -> Report:
    return read_report(play.write(folder / "trace.sqlite", **more))


def names_file(path: Path, **changes) -> KernelNames:
    step = StepNodes("decode", 4, False, 1, NODES)
    names = KernelNames(
        model="demo",
        device="NVIDIA H200",
        bandwidth_gb_s=4_000.0,
        steps=[step],
        costs=[OperationCost("down", 2, 20_000_000), OperationCost("greedy", 1, 400_000)],
    )
    for name, value in changes.items():
        setattr(names, name, value)
    names.save(path)
    return names


def assert_rows_are(rows: list[TracedStep], truth: list[SimpleNamespace], variant: Variant) -> None:
    assert len(rows) == len(truth)
    numbers = variant.payload is not None
    for row, true in zip(rows, truth, strict=True):
        assert (row.step, row.phase, row.launches) == (true.step, true.phase, true.launches)
        told = (row.rows, row.bucket, row.tokens, row.padding, row.blocks_in_use)
        expected = (true.rows, true.bucket, true.tokens, true.padding, 40 + true.step)
        assert told == (expected if numbers else (None,) * 5)
        for name in ("host", "wait", "plan", "launch", "commit", "device", "busy", "gap", "step"):
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
def test_any_steps_in_any_order_of_rows(variant: Variant, steps, seed: int) -> None:
    play = Profile(variant)
    for number, (what, durations, idle_ns, pause_ns, wait_ns) in enumerate(steps):
        kernels = [Kernel(f"k{i}", ns, i + 1) for i, ns in enumerate(durations)]
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


def test_operations_and_layers_are_those_of_the_captured_nodes(tmp_path) -> None:
    variant = VARIANTS["nodes"]
    play = played(variant, steps=6)
    trace = play.write(tmp_path / "trace.sqlite")
    names_file(tmp_path / "trace.kernels.json")
    report = read_report(trace)
    launch_ns = sum(kernel.ns for kernel in KERNELS) + 4 * 300
    operations = {part.label: part for part in report.operations if part.phase == "decode"}
    assert list(operations) == ["down", "norm", "greedy"], "the most expensive first"
    for name, ns, count in (("down", 20_000, 2), ("norm", 1_350, 2), ("greedy", 400, 1)):
        part = operations[name]
        assert part.us == Summary.of([ns / 1e3] * 6)
        assert part.activities == count
        assert part.share == pytest.approx(ns / launch_ns, abs=1e-12)
    # 2 launches of 20 MB at 4 TB/s are 10 µs; it took 20.
    assert operations["down"].fraction == pytest.approx(0.5)
    assert operations["greedy"].fraction == pytest.approx(0.1 / 0.4)
    assert operations["norm"].fraction is None, "nothing says what it reads"
    assert report.idle == {"decode": pytest.approx(4 * 300 / launch_ns)}
    layers = {part.layer: part for part in report.layers}
    assert [layers[i].us.p50 for i in (0, 1)] == [9.7, 11.65]
    assert layers[0].fraction == pytest.approx(5 / 9.7), "one of the two launches of `down`"
    around = {p.label: p for p in report.operations if p.phase == "around"}
    assert around["[copy host to device]"].us.p50 == 1.5
    assert around["[copy device to host]"].us.p50 == 1.0
    assert report.notes == []
    # A launch of four decode steps is compared with as many floors.
    names_file(tmp_path / "trace.kernels.json", steps=[StepNodes("decode", 4, False, 4, NODES)])
    assert read_report(trace).operations[0].fraction == pytest.approx(2.0)


def test_without_names_or_nodes_a_note_says_how_to_get_them(tmp_path) -> None:
    report = report_of(played(VARIANTS["nodes"]), tmp_path)
    labels = [p.label for p in report.operations if p.phase == "decode"]
    assert labels == ["[matmul]", "[norm]", "[argmax]"]
    assert report.layers == []
    assert any("kernels.json" in note for note in report.notes)
    (tmp_path / "trace.sqlite").unlink()
    report = report_of(played(NEW), tmp_path)
    assert {part.phase for part in report.operations} == {"around"}
    assert any("--graph-trace node" in note for note in report.notes)


def test_what_the_profile_cuts_is_left_out_and_counted(tmp_path) -> None:
    play = Profile()
    # The profile began within a turn: its range is not there, what was in it is.
    play.range("replay", play.now, play.now + 5_000, numbers=(3, 1, 1, 1, 1, 0))
    play.now += 10_000
    play.step(4, [decode()])
    play.step(5, [decode()], commits=4)
    play.range("step", play.now + 10, play.now + 90, 6)  # it launches nothing
    play.range("commit", play.now + 20, play.now + 80, 5)
    play.range("step", play.now + 100, None, 6)
    play.range("plan", play.now + 200, play.now + 300, 6)
    report = report_of(play, tmp_path)
    assert_rows_are(report.steps, play.truth, NEW)
    assert "1 step left out: the profile ended before the step did" in report.notes
    assert "1 launch left out: outside of a complete step" in report.notes
    assert "1 turn that launched nothing left out" in report.notes


def test_no_gap_is_told_across_a_step_that_is_missing(tmp_path) -> None:
    play = Profile()
    for number in (1, 2, 5, 6, 0):  # 3 and 4 are missing, then another engine begins
        play.step(number, [decode()])
    report = report_of(play, tmp_path)
    assert [row.gap_us is None for row in report.steps] == [True, False, True, False, True]
    assert [row.step_us is None for row in report.steps] == [True, False, True, False, True]


def test_processes_with_the_same_ids_are_kept_apart(tmp_path) -> None:
    one, two = played(pid=100, tid=100), Profile(pid=200, tid=201, device=1, now=1_004_321)
    two.strings, two.correlation = one.strings, 100  # the ids of calls of both are the same
    for number in range(4):
        two.step(number, [prefill()])
    report = report_of(one, tmp_path, others=[two])
    assert_rows_are([r for r in report.steps if r.thread == 0], one.truth, NEW)
    assert_rows_are([r for r in report.steps if r.thread == 1], two.truth, NEW)
    notes = "\n".join(report.notes)
    assert "steps of 2 threads in 2 processes" in notes
    assert "activities on devices 0, 1" in notes


def test_calls_of_other_threads_are_no_part_of_a_step(tmp_path) -> None:
    play = Profile(tid=50)
    helper = Profile(pid=play.pid, tid=51, correlation=5_000, strings=play.strings)
    helper.now = play.now + 5_000
    call = helper.call("cudaLaunchKernel_v7000", 500)
    helper.activity("KERNEL", helper.now, helper.now + 10**9, call, shortName=1, demangledName=1)
    play.step(1, [decode()])
    report = report_of(play, tmp_path, others=[helper])
    assert_rows_are(report.steps, play.truth, NEW)


def test_the_device_s_work_of_a_commit_is_no_part_of_the_step_around_it(tmp_path) -> None:
    play = Profile()
    true = play.step(1, [decode()], commits=0, commit_ns=90_000)
    now, play.now = play.now, play.now - 50_000
    call = play.call("cudaMemcpyAsync_v3020", 1_000)
    play.activity("MEMCPY", now + 10**6, now + 2 * 10**6, call, copyKind=2, bytes=1)
    report = report_of(play, tmp_path)
    assert report.steps[0].device_us == true.device_ns / 1e3


def test_activities_without_times_and_graphs_without_activities_are_told(tmp_path) -> None:
    play = Profile()
    play.step(1, [decode()])
    for row in play.rows["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"]:
        row["start"] = row["end"] = 0
    play.last_end = None
    play.step(2, [decode()])
    del play.rows["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"][1]
    report = report_of(play, tmp_path)
    notes = "\n".join(report.notes)
    assert "1 activity without a time" in notes
    assert "1 graph launch of these steps left no activity" in notes
    assert [row.busy_us for row in report.steps] == [2.5, 2.5], "the copies"


def test_on_a_cpu_the_device_works_in_the_engine_s_thread(tmp_path) -> None:
    play = played(steps=4)
    play.rows = {"NVTX_EVENTS": play.rows["NVTX_EVENTS"]}
    report = report_of(play, tmp_path)
    work_ns, behind_ns = 5_000, 2_000  # the range `replay`, and the copy behind it
    for row, true in zip(report.steps, play.truth, strict=True):
        assert row.device_us == row.busy_us == work_ns / 1e3
        assert row.launch_us == (true.launch_ns - work_ns) / 1e3
        assert row.host_us == (true.host_ns + true.wait_ns - work_ns) / 1e3
    for row, before in zip(report.steps[1:], play.truth, strict=False):
        # Behind the work of a step: its commit, a pause, and plan and copy of the next one.
        assert row.gap_us == (behind_ns + before.commit_ns + 1_000 + 4_000 + 2_000) / 1e3
        assert row.step_us == row.gap_us + row.device_us
    assert any("no CUDA in this profile" in note for note in report.notes)


def test_two_profiles_compared(tmp_path) -> None:
    def report(folder: str, ns: int, name: str) -> Report:
        (tmp_path / folder).mkdir()
        kernels = (Kernel("matmul", ns, 12), Kernel(name, 500, 15))
        play = Profile(VARIANTS["nodes"])
        for number in range(5):
            play.step(number, [decode(kernels=kernels, idle_ns=0)])
        trace = play.write(tmp_path / folder / "trace.sqlite")
        nodes = (Node(0, "down", "kernel", "matmul", 12), Node(None, name, "kernel", name, 15))
        steps = [StepNodes("decode", 4, False, 1, nodes)]
        names_file(tmp_path / folder / "trace.kernels.json", steps=steps, costs=[])
        return read_report(trace)

    old, new = report("old", 10_000, "sort"), report("new", 8_000, "argmax")
    changes = {(c.what, c.label): c for c in compare(new, old) if c.phase == "decode"}
    assert changes["operation", "down"].ratio == pytest.approx(0.8)
    assert changes["layer", "layer 0"].ratio == pytest.approx(0.8)
    step = changes["step", "device, bucket 4"]
    assert step.new_us == new.cases[0].device_us.p50
    assert step.ratio == pytest.approx(new.cases[0].device_us.p50 / old.cases[0].device_us.p50)
    assert changes["operation", "sort"].new_us is None
    assert changes["operation", "argmax"].old_us is None
    assert changes["operation", "argmax"].ratio is None


def test_the_command_prints_tables_and_writes_files(tmp_path, capsys) -> None:
    trace = played(VARIANTS["nodes"], steps=5).write(tmp_path / "trace.sqlite")
    names_file(tmp_path / "trace.kernels.json")
    outputs = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "s.csv")]
    assert cli.main([str(trace), *outputs]) == 0
    printed = capsys.readouterr().out
    assert "|   10 | decode |    3 |      4 |" in printed
    report = read_report(trace)
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["schema_version"] == 1
    assert document["steps"] == [
        {name: getattr(row, name) for name in STEP_COLUMNS} for row in report.steps
    ]
    assert document["cases"][0]["device_us"] == report.cases[0].device_us.to_json()
    with (tmp_path / "s.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["step"] for row in rows] == ["10", "11", "12", "13", "14"]
    assert rows[0]["gap_us"] == "", "what is not known is empty"
    assert float(rows[1]["gap_us"]) == report.steps[1].gap_us


def test_a_comparison_says_what_its_numbers_come_from(tmp_path, capsys) -> None:
    (tmp_path / "old").mkdir()
    new = played(VARIANTS["nodes"]).write(tmp_path / "trace.sqlite")
    old = played(VARIANTS["nodes"]).write(tmp_path / "old" / "trace.sqlite")
    names_file(tmp_path / "trace.kernels.json")
    names_file(tmp_path / "old" / "trace.kernels.json", model="another", device="NVIDIA H100")
    assert cli.main([str(new), "--diff", str(old)]) == 0
    printed = capsys.readouterr().out
    assert "node by node (node): that perturbs" in printed
    assert "of another model: another, now demo" in printed
    assert "of another device: NVIDIA H100, now NVIDIA H200" in printed
    old = played(dataclasses.replace(OLD, payload=None)).write(tmp_path / "bare.sqlite")
    assert cli.main([str(new), "--diff", str(old), "--json", str(tmp_path / "r.json")]) == 0
    printed = capsys.readouterr().out
    assert "note on the old one: no structured payloads" in printed
    assert f"Only in {new}:" in printed
    changes = json.loads((tmp_path / "r.json").read_text())["diff"]["changes"]
    assert {change["what"] for change in changes} == {"step", "operation", "layer"}
