"""Pictures of timelines: what is drawn, as matplotlib has it, and the files."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from stepgraph.profiling import plot
from stepgraph.profiling.plot import PlotError, draw_steps, plot_steps
from stepgraph.profiling.plot.roofline_panel import roofline_lines
from stepgraph.profiling.plot.series import series_of
from stepgraph.profiling.timeline import StepRecord

from .plot_rig import any_records, run_of

MIXED = run_of(
    [10, 12, 50, 11, 10, 30, 10, 11, 12, 10, 10, 11],
    rows=[0, 1, 1, 2, 2, 2, 4, 4, 3, 3, 3, 3],
    bucket=[64, 1, 1, 2, 2, 2, 4, 4, 4, 4, 4, 4],
    prefill_tokens=[64, 0, 48, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    joined=[1, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0],
    collected_ns=[0, 0, 0, 0, 0, 20_000_000, 0, 0, 500, 0, 0, 0],
)
"""A chunk beside a row, three joins, two changes of the bucket, and a collection that counts."""


def case(batch_size: int, fraction: float | None, **fields: Any) -> dict[str, Any]:
    told = {"fraction": fraction, "bandwidth_gb_s": 40.0}
    base = {"model": "demo", "mode": "eager", "input_len": 128, "batch_size": batch_size}
    return base | {"roofline": told} | fields


def axes_of(figure: Figure) -> dict[str, Axes]:
    """The axes by what they count."""
    return {axes.get_ylabel() or axes.get_xlabel(): axes for axes in figure.axes}


def drawn(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each labelled line."""
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }


def words(figure: Figure) -> str:
    texts = (artist for artist in figure.findobj(Text) if artist.get_visible())
    return "\n".join(text.get_text() for text in texts)


def test_gaps_are_drawn_as_they_are() -> None:
    figure = draw_steps(MIXED, title="demo", max_itl_ms=40.0)
    axes = axes_of(figure)["gap between tokens (ms)"]
    lines = drawn(axes)
    series = series_of(MIXED)
    assert len(series.gaps) == len(MIXED) - 1
    assert [y for _, y in lines["prefill chunk"]] == [50]
    assert [y for _, y in lines["collection"]] == [30]
    points = lines["decode step"] + lines["prefill chunk"] + lines["collection"]
    assert sorted(points) == sorted((gap.seconds, gap.ms) for gap in series.gaps)
    # Levels stand for themselves, with their names at their ends.
    levels = {name: points[0][1] for name, points in lines.items() if len(points) == 2}
    assert levels["p50 11 ms"] == 11
    assert levels["budget 40 ms"] == 40
    assert "longest: 50 ms, chunk of 48 tokens" in words(figure)
    assert not any(name.startswith("p99") for name in lines), "11 gaps have no 99th percentile"


def test_every_event_has_a_lane() -> None:
    figure = draw_steps(MIXED, title="demo")
    lanes = drawn(axes_of(figure)["seconds since the first step"])
    assert {name: len(points) for name, points in lanes.items()} == {
        "prefill chunk": 2,
        "join": 3,
        "bucket change": 2,
        "collection": 2,
    }
    assert len({points[0][1] for points in lanes.values()}) == 4, "a height for each"
    text = words(figure)
    for name in ("prefill chunk: 2", "join: 3", "bucket change: 2", "collection: 2"):
        assert name in text
    marks = series_of(MIXED).marks
    assert [x for x, _ in lanes["join"]] == [mark.seconds for mark in marks["join"]]


def test_percentiles_need_their_samples() -> None:
    for n, named in ((5, {"p50"}), (12, {"p50", "p90"}), (150, {"p50", "p90", "p99"})):
        figure = draw_steps(run_of([10 + index % 7 for index in range(n + 1)]), title="demo")
        axes = next(axes for axes in figure.axes if axes.get_ylabel() == "gaps")
        assert {name.split()[0] for name in drawn(axes)} == named
        assert f"n = {n}" in words(figure)


def test_the_histogram_counts_every_gap() -> None:
    figure = draw_steps(MIXED, title="demo")
    axes = next(axes for axes in figure.axes if axes.get_ylabel() == "gaps")
    heights = {bars.get_label(): sum(bar.get_height() for bar in bars) for bars in axes.containers}
    assert heights == {"decode step": 9, "prefill chunk": 1, "collection": 1}


@pytest.mark.parametrize("longest", [[24, 33], [29, 30], [15, 15]])
def test_the_name_of_a_percentile_lies_on_no_line_of_another(longest: list[float]) -> None:
    figure = draw_steps(run_of(30 * [1, 2, 3] + 8 * longest), title="demo")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = next(axes for axes in figure.axes if axes.get_ylabel() == "gaps")
    lines = [line for line in axes.lines if str(line.get_label()).startswith("p")]
    assert len(lines) == 3
    for text in (text for text in axes.texts if text.get_text().startswith("p")):
        box = Text.get_window_extent(text, canvas.get_renderer())
        own = next(line for line in lines if line.get_label() == text.get_text())
        for line in lines:
            x, top = line.get_transform().transform(np.asarray(line.get_xydata()))[-1]
            assert line is own or not (box.x0 < x < box.x1 and top > box.y0), text.get_text()
        assert box.x1 < 0.51 * plot.WIDTH, "the panel beside it begins there"


@pytest.mark.parametrize("lengths", [[10, 10.0001, 10.0002], [10, 10, 10], [3, 10, 10.001, 10]])
def test_ticks_of_a_narrow_histogram_are_told_apart(lengths: list[float]) -> None:
    figure = draw_steps(run_of(lengths), title="demo")
    FigureCanvasAgg(figure).draw()
    axes = next(axes for axes in figure.axes if axes.get_ylabel() == "gaps")
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert len(set(ticks)) == len(ticks) > 2


def test_long_runs_keep_their_peaks() -> None:
    lengths = [1.0 + index % 5 / 100 for index in range(20_000)]
    chunks = [512 if index % 100 == 50 else 0 for index in range(20_000)]
    lengths[12_345], lengths[777] = 321.0, 0.9
    lengths[5_050] = 77.0
    figure = draw_steps(run_of(lengths, prefill_tokens=chunks), title="demo")
    axes = axes_of(figure)["gap between tokens (ms)"]
    ranges = {
        str(each.get_label()): np.concatenate(each.get_segments())[:, 1]
        for each in axes.collections
        if isinstance(each, LineCollection)
    }
    assert ranges["decode step, range"].max() == 321.0
    assert ranges["decode step, range"].min() == 0.9
    assert ranges["prefill chunk, range"].max() == 77.0
    assert max(len(line.get_xydata()) for line in axes.lines) <= 600, "no more than are seen"
    assert "longest: 321 ms" in words(figure)
    lanes = drawn(axes_of(figure)["seconds since the first step"])
    assert len(lanes["prefill chunk"]) == 200
    assert "prefill chunk: 200" in words(figure)


def test_pauses_are_told() -> None:
    after = run_of([10] * 9, first=3, at_ms=4_000, rows=[0] + [1] * 8)
    figure = draw_steps(run_of([10] * 3) + after, title="demo")
    assert "without 1 pause (3.97 s in all, dotted)" in words(figure)


def test_phases_take_the_place_of_a_roofline() -> None:
    records = run_of([10, 12, 50], prefill_tokens=[0, 0, 64])
    figure = draw_steps(records, title="demo")
    bars = [
        {str(bar.get_label()): bar.patches[0].get_width() for bar in axes.containers}
        for axes in figure.axes
        if axes.get_xlabel() == "ms"
    ]
    assert [each["device"] for each in bars] == [pytest.approx(10.7), pytest.approx(49.7)]
    assert [each["plan"] for each in bars] == [pytest.approx(0.1)] * 2
    text = words(figure)
    assert "Where the time of a step goes (medians)" in text
    assert "decode step: 11 ms, n = 2" in text
    assert "with a chunk: 50 ms, n = 1" in text
    assert "Roofline" not in text


def test_a_roofline_has_a_line_for_each_mode_and_context() -> None:
    cases = [
        case(rows, fraction * rows, mode=mode, input_len=context)
        for rows in (8, 1)
        for mode, fraction in (("eager", 0.02), ("compile", 0.3))
        for context in (128, 1024)
    ]
    figure = draw_steps(MIXED, title="demo", cases=cases)
    axes = axes_of(figure)["fraction of the roofline (%)"]
    lines = drawn(axes)
    assert lines["eager 128 tokens"] == [(1, 2), (8, 16)]
    assert lines["compile 1024 tokens"] == [(1, 30), (8, 240)]
    assert len(lines) == 4 + 1
    assert {y for _, y in lines["100 %"]} == {100}
    low, high = axes.get_ylim()
    assert low == 0
    assert high > 240
    text = words(figure)
    for name in ("eager 128 tokens: 16 %", "compile 128 tokens: 240 %", "100 %: 40 GB/s"):
        assert name in text
    assert "above 100 %" in text


def test_labels_of_a_roofline_say_what_sets_lines_apart() -> None:
    one, common = roofline_lines([case(1, 0.5), case(2, 0.6)])
    assert one == {"eager": [(1, 50.0), (2, 60.0)]}
    assert common == "demo, eager, 128 tokens"
    two, common = roofline_lines([case(1, 0.5), case(1, 0.6, kv_dtype="int8", model="other")])
    assert set(two) == {"demo", "other KV int8"}
    assert common == "eager, 128 tokens"


def test_cases_without_a_fraction_are_left_out() -> None:
    lines, _ = roofline_lines([case(1, None), case(2, 0.5), case(4, 0.5, roofline=None)])
    assert lines == {"eager": [(2, 50.0)]}
    figure = draw_steps(MIXED, title="demo", cases=[case(1, None)])
    assert "no case has a roofline" in words(figure)


@pytest.mark.parametrize("wrong", [{"roofline": {}}, {"batch_size": 3}, {}])
def test_a_case_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="case 1 has no batch_size or no roofline"):
        roofline_lines([case(1, 0.5), wrong])


@pytest.mark.parametrize("count", [0, 1])
def test_without_gaps_that_is_said(count: int) -> None:
    text = words(draw_steps(run_of([10] * count), title="demo"))
    assert text.count("no gap between tokens was recorded") == 2
    assert "n = 0" in text


def test_the_same_gap_over_and_over_is_drawn() -> None:
    figure = draw_steps(run_of([10] * 200), title="demo")
    assert "p99 10 ms" in words(figure)


@settings(max_examples=15, deadline=None)
@given(records=any_records())
def test_any_records_can_be_drawn(records: list[StepRecord]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw_steps(records, title="any", max_itl_ms=5.0)
        FigureCanvasAgg(figure).draw()
    gaps = series_of(records).gaps
    if gaps:
        lines = drawn(axes_of(figure)["gap between tokens (ms)"])
        kinds = ("decode step", "prefill chunk", "collection")
        points = [y for name in kinds for _, y in lines.get(name, [])]
        assert len(points) == len(gaps)
        longest = max(gap.ms for gap in gaps)
        assert max(points) == longest
        assert axes_of(figure)["gap between tokens (ms)"].get_ylim()[1] > longest


def test_a_png_is_as_large_as_it_says(tmp_path: Path) -> None:
    plot_steps(MIXED, tmp_path / "a.png", title="demo")
    contents = (tmp_path / "a.png").read_bytes()
    assert contents.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", contents[16:24]) == (plot.WIDTH, plot.HEIGHT)
    assert os.listdir(tmp_path) == ["a.png"]


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    plot_steps(MIXED, tmp_path / "a.svg", title="demo")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.tag.endswith("svg")
    assert root.attrib["viewBox"] == "0 0 1152 720"  # points: 72 for 100 pixels
    plot_steps(MIXED, str(tmp_path / "A.PDF"), title="demo")
    assert (tmp_path / "A.PDF").read_bytes().startswith(b"%PDF-")


def test_titles_may_hold_anything(tmp_path: Path) -> None:
    title = "a $model$ at /tmp/\udcff\n\x00second _{line}_ " + 200 * "long "
    figure = draw_steps(MIXED, title=title, command="python bench.py $HOME '$x$' " + 900 * "y ")
    FigureCanvasAgg(figure).draw()
    assert "$model$" in words(figure)
    assert "second _{line}_ long" in words(figure)
    assert "$HOME '$x$'" in words(figure)


def test_long_titles_and_commands_stay_in_the_picture() -> None:
    engine = "some-company/Model-3.1-405B-Instruct-of-a-long-name, bfloat16, weights int8, KV fp8"
    title = f"{engine}, graph, NVIDIA H200 141GB HBM3e SXM\nchurn: 256 rows"
    figure = draw_steps(MIXED, title=title, command="python bench.py --model " + 40 * "abcdefg ")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert title in words(figure), "it is whole"
    for text in figure.texts:
        assert text.get_window_extent(canvas.get_renderer()).x1 < plot.WIDTH, text.get_text()


def test_settings_of_the_process_do_not_show_through(tmp_path: Path) -> None:
    plot_steps(MIXED, tmp_path / "plain.png", title="demo")
    foreign = {
        "savefig.bbox": "tight",
        "savefig.dpi": 30,
        "font.size": 30,
        "axes.facecolor": "black",
        "figure.facecolor": "black",
        "text.color": "white",
        "axes.labelcolor": "white",
        "xtick.color": "white",
        "axes.grid": True,
    }
    with matplotlib.rc_context(foreign):
        plot_steps(MIXED, tmp_path / "foreign.png", title="demo")
    assert (tmp_path / "foreign.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("steps.jpg", r"steps\.jpg: its suffix must be one of \.png, \.svg, \.pdf"),
        ("steps", r"its suffix must be one of"),
        ("missing/steps.png", r"missing is not a directory"),
        ("folder.png", r"folder\.png: it is a directory"),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(PlotError, match=message):
        plot_steps(MIXED, tmp_path / name, title="demo")
    assert os.listdir(tmp_path) == ["folder.png"]


def test_a_folder_that_takes_no_files_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PlotError, match=r"cannot write .*a\.png: Permission denied"):
        plot_steps(MIXED, tmp_path / "a.png", title="demo")


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "matplotlib" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(PlotError, match=r'pip install "stepgraph\[plot\]"'):
        plot_steps(MIXED, tmp_path / "a.png", title="demo")


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    path.write_text("before")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PlotError, match=r"cannot write .*a\.png: No space left on device"):
        plot_steps(MIXED, path, title="demo")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.png"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.png").write_text("before")
    (tmp_path / "link.png").symlink_to("real.png")
    plot_steps(MIXED, tmp_path / "link.png", title="demo")
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "real.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_leaves_the_process_alone(tmp_path: Path) -> None:
    program = f"""
import sys
import stepgraph.profiling, stepgraph.profiling.timeline
from stepgraph.profiling import plot
assert "matplotlib" not in sys.modules
assert "torch" not in sys.modules
import matplotlib
def settings():  # but for the backend: to ask for it is to choose one
    return {{name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}}
before = settings()
plot.plot_steps([], {str(tmp_path / "a.png")!r}, title="nothing")
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
