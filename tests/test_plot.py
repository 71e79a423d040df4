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
from matplotlib.figure import Figure
from matplotlib.text import Text
from stepgraph.profiling.plot import PlotError, draw_steps, plot_steps
from stepgraph.profiling.plot.figure import HEIGHT, WIDTH, roofline_lines
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
"""A chunk in a decode step, three joins, two changes of the bucket, a collection that counts."""


def case(batch_size: int, fraction: float | None, **fields: Any) -> dict[str, Any]:
    roofline = {"fraction": fraction, "bandwidth_gb_s": 40.0}
    base = {"model": "demo", "mode": "eager", "input_len": 128, "batch_size": batch_size}
    return base | {"roofline": roofline} | fields


def axes_of(figure: Figure, label: str) -> Axes:
    """The axes that count something."""
    found = (a for a in figure.findobj(Axes) if label in (a.get_ylabel(), a.get_xlabel()))
    return next(found)


def drawn(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by its label, without the number of points."""
    return {
        str(line.get_label()).partition(" (")[0]: [
            (float(x), float(y)) for x, y in np.asarray(line.get_xydata())
        ]
        for line in axes.lines
    }


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_gaps_percentiles_and_the_budget_are_drawn() -> None:
    figure = draw_steps(MIXED, title="demo", max_itl_ms=40.0)
    lines = drawn(axes_of(figure, "gap between tokens (ms)"))
    series = series_of(MIXED)
    assert [y for _, y in lines["with a prefill chunk"]] == [50]
    assert [y for _, y in lines["held up by a collection"]] == [30]
    kinds = ("decode steps", "with a prefill chunk", "held up by a collection")
    points = [point for name in kinds for point in lines[name]]
    assert sorted(points) == sorted((gap.seconds, gap.ms) for gap in series.gaps)
    assert {y for _, y in lines["p50 11 ms"]} == {11}
    assert {y for _, y in lines["budget 40 ms"]} == {40}
    assert "longest: 50 ms, chunk of 48 tokens" in words(figure)
    assert not any(name.startswith("p99") for name in lines), "11 gaps have no 99th percentile"


def test_every_event_has_a_lane() -> None:
    figure = draw_steps(MIXED, title="demo")
    lanes = drawn(axes_of(figure, "seconds since the first step"))
    counts = {name: len(points) for name, points in lanes.items()}
    assert counts == {"prefill chunk": 2, "join": 3, "bucket change": 2, "collection": 2}
    assert len({points[0][1] for points in lanes.values()}) == 4, "a height for each"
    assert [x for x, _ in lanes["join"]] == [m.seconds for m in series_of(MIXED).marks["join"]]
    after = run_of([10] * 9, first=3, at_ms=4_000, rows=[0] + [1] * 8)
    paused = draw_steps(run_of([10] * 3) + after, title="demo")
    assert "without 1 pause (3.97 s in all, dotted)" in words(paused)


def test_the_histogram_counts_every_gap() -> None:
    axes = axes_of(draw_steps(MIXED, title="demo"), "gaps")
    counts = {str(c[0].get_label()): sum(bar.get_height() for bar in c) for c in axes.containers}
    assert counts == {"decode steps": 9, "with a prefill chunk": 1, "held up by a collection": 1}
    assert {name.split()[0] for name in drawn(axes)} == {"p50", "p90"}, "11 gaps have no p99"


def test_phases_take_the_place_of_a_roofline() -> None:
    figure = draw_steps(run_of([10, 12, 50], prefill_tokens=[0, 0, 64]), title="demo")
    bars = {
        str(container.get_label()): [bar.get_width() for bar in container]
        for axes in figure.findobj(Axes)
        if axes.get_xlabel() == "ms"
        for container in axes.containers
    }
    assert bars["decode step"][:3] == pytest.approx([0.1, 0.1, 10.7])
    assert bars["with a chunk"][:3] == pytest.approx([0.1, 0.1, 49.7])
    text = words(figure)
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
    axes = axes_of(figure, "fraction of the roofline (%)")
    lines = drawn(axes)
    assert lines["eager 128 tokens: 16 %"] == [(1, 2), (8, 16)]
    assert lines["compile 1024 tokens: 240 %"] == [(1, 30), (8, 240)]
    assert {y for _, y in lines["100 %: 40 GB/s"]} == {100}
    assert len(lines) == 4 + 1
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 240
    assert "above 100 %" in words(figure)


def test_labels_of_a_roofline_say_what_sets_lines_apart() -> None:
    one, common = roofline_lines([case(1, 0.5), case(2, 0.6), case(4, None)])
    assert one == {"eager": [(1, 50.0), (2, 60.0)]}
    assert common == "demo, eager, 128 tokens"
    two, common = roofline_lines([case(1, 0.5), case(1, 0.6, kv_dtype="int8", model="other")])
    assert set(two) == {"demo", "other KV int8"}
    assert common == "eager, 128 tokens"
    figure = draw_steps(MIXED, title="demo", cases=[case(1, None), case(4, 0.5, roofline=None)])
    assert "no case has a roofline" in words(figure)
    with pytest.raises(ValueError, match="case 1 has no batch_size or no roofline"):
        roofline_lines([case(1, 0.5), {"roofline": {}}])


@settings(max_examples=2, deadline=None)
@given(records=any_records())
def test_any_records_can_be_drawn(records: list[StepRecord]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw_steps(records, title="any", max_itl_ms=5.0)
        FigureCanvasAgg(figure).draw()
    gaps = series_of(records).gaps
    if gaps:
        axes = axes_of(figure, "gap between tokens (ms)")
        kinds = ("decode steps", "with a prefill chunk", "held up by a collection")
        points = [y for name in kinds for _, y in drawn(axes).get(name, [])]
        assert len(points) == len(gaps)
        assert axes.get_ylim()[1] > max(gap.ms for gap in gaps)
    else:
        assert words(figure).count("no gap between tokens was recorded") == 2


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    for name in ("a.png", "a.svg", "A.PDF"):
        plot_steps(MIXED, tmp_path / name, title="demo")
    assert sorted(os.listdir(tmp_path)) == ["A.PDF", "a.png", "a.svg"]
    png = (tmp_path / "a.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (WIDTH, HEIGHT)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.attrib["viewBox"] == "0 0 1152 720"  # points: 72 for 100 pixels
    assert (tmp_path / "A.PDF").read_bytes().startswith(b"%PDF-")


def test_texts_are_drawn_as_they_are_and_stay_in_the_picture() -> None:
    title = "a $model$ at /tmp/\udcff\n\x00second _{line}_ " + 200 * "long "
    command = "python bench.py $HOME '$x$' " + 900 * "y "
    figure = draw_steps(MIXED, title=title, command=command)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    text = words(figure)
    for part in ("$model$", "second _{line}_ long", "$HOME '$x$'"):
        assert part in text
    for artist in figure.texts:
        assert artist.get_window_extent(canvas.get_renderer()).x1 < WIDTH, artist.get_text()


def test_settings_of_the_process_do_not_show_through(tmp_path: Path) -> None:
    plot_steps(MIXED, tmp_path / "plain.png", title="demo")
    foreign = {"savefig.bbox": "tight", "font.size": 30, "axes.facecolor": "black"}
    with matplotlib.rc_context(foreign):
        plot_steps(MIXED, tmp_path / "foreign.png", title="demo")
    assert (tmp_path / "foreign.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlotError, match=r"its suffix must be one of \.png, \.svg, \.pdf"):
        plot_steps(MIXED, tmp_path / "steps.jpg", title="demo")
    with pytest.raises(PlotError, match="missing is not a directory"):
        plot_steps(MIXED, tmp_path / "missing" / "steps.png", title="demo")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(PlotError, match=r'pip install "stepgraph\[plot\]"'):
        plot_steps(MIXED, tmp_path / "a.png", title="demo")
    assert os.listdir(tmp_path) == []


def test_a_picture_leaves_the_process_alone(tmp_path: Path) -> None:
    program = f"""
import sys
from stepgraph.profiling import plot
assert "matplotlib" not in sys.modules
import matplotlib
def settings():  # but for the backend: reading it chooses one
    return {{name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}}
before = settings()
plot.plot_steps([], {str(tmp_path / "a.png")!r}, title="nothing")
assert settings() == before
assert not {{"matplotlib.pyplot", "torch"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
