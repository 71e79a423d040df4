"""The panels of a picture, drawn by matplotlib with its own defaults and a few settings."""

import contextlib
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib import style as styles
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogFormatter

from ..stats import Summary
from ..timeline import StepRecord
from .series import MarkKind, Series, TokenGap, phase_times, series_of

__all__ = ["DPI", "HEIGHT", "WIDTH", "draw", "roofline_lines", "style"]

WIDTH, HEIGHT, DPI = 1600, 1000, 100
"""Size of a picture in pixels, and its resolution in pixels per inch."""

_SETTINGS: Final = {
    "font.size": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "text.parse_math": False,  # a dollar sign of a path is no formula
}

_DECODE, _CHUNK, _COLLECTION = "C0", "C1", "C3"
_LANES: Final[Mapping[MarkKind, tuple[str, str]]] = {
    "chunk": ("prefill chunk", _CHUNK),
    "join": ("join", "C2"),
    "bucket": ("bucket change", "C4"),
    "collection": ("collection", _COLLECTION),
}

LOG_RATIO: Final = 4.0
"""The axis of gaps is logarithmic if the longest gap exceeds this multiple of the median."""

MAX_VECTOR_POINTS: Final = 2400
"""Larger numbers of points are drawn as pixels in SVG and PDF files."""

MAX_BUCKET_LABELS: Final = 30
"""With more bucket changes than this, the new buckets are not labelled."""


def style() -> contextlib.AbstractContextManager[None]:
    """Return matplotlib's defaults with the settings of pictures, whatever the process has set."""
    return styles.context(["default", _SETTINGS])


def draw(
    records: Sequence[StepRecord],
    *,
    title: str,
    cases: Sequence[Mapping[str, Any]] | None,
    max_itl_ms: float | None,
    command: str | None,
) -> Figure:
    """Draw all panels; the arguments are those of `plot_steps`."""
    series = series_of(records)
    steps = sum(max(1, record.steps) for record in records)
    launches = f" in {len(records):,} launches" if steps != len(records) else ""
    lines = [line for part in title.splitlines() for line in _wrapped(part, 150, 1)][:2]
    lines.append(
        f"n = {len(series.gaps):,} (gaps between the tokens of consecutive steps);"
        f" {steps:,} steps{launches} in {duration(1e3 * series.seconds)}"
    )
    with style():
        figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
        figure.suptitle("\n".join(lines), x=0.01, ha="left", size=13)
        if command is not None:
            figure.supxlabel("\n".join(_wrapped(command, 190, 2)), x=0.01, ha="left", size=9)
        rows: Any = figure.subfigures(2, 1, height_ratios=(3, 2))
        gaps, lanes = rows[0].subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _draw_gaps(gaps, series, max_itl_ms)
        _draw_lanes(lanes, series)
        left, right = rows[1].subfigures(1, 2)
        _draw_histogram(left.subplots(), series)
        if cases:
            _draw_roofline(right.subplots(), cases)
        else:
            _draw_phases(right, records)
    return figure


def _kinds_of(gaps: Sequence[TokenGap]) -> list[tuple[str, str, list[TokenGap]]]:
    """Return names, colours and gaps by what made them long: a collection before a chunk."""
    kinds: dict[tuple[str, str], list[TokenGap]] = {
        ("decode steps", _DECODE): [],
        ("with a prefill chunk", _CHUNK): [],
        ("held up by a collection", _COLLECTION): [],
    }
    decode, chunk, collection = kinds.values()
    for gap in gaps:
        kind = chunk if gap.record.prefill_tokens > 0 else decode
        (collection if gap.collected else kind).append(gap)
    return [(name, color, found) for (name, color), found in kinds.items() if found]


def _limits(gaps: Sequence[TokenGap]) -> tuple[float, float, bool]:
    """Return the shortest and the longest gap in ms, and whether their axis is logarithmic."""
    values = [gap.ms for gap in gaps if gap.ms > 0] or [1.0]
    log = max(values) > LOG_RATIO * statistics.median(values)
    return min(values), max(values), log


def _draw_gaps(axes: Axes, series: Series, max_itl_ms: float | None) -> None:
    """Draw a point for each gap, the percentiles, the budget and the reason of the longest gap."""
    axes.set_title("ITL over time")
    if not series.gaps:
        _say(axes, "no gap between tokens was recorded")
        return
    low, high, log = _limits(series.gaps)
    for name, color, gaps in _kinds_of(series.gaps):
        axes.plot(
            [gap.seconds for gap in gaps],
            [max(gap.ms, low) if log else gap.ms for gap in gaps],
            ".",
            color=color,
            label=f"{name} ({len(gaps):,})",
            rasterized=len(gaps) > MAX_VECTOR_POINTS,
        )
    summary = Summary.of(gap.ms for gap in series.gaps)
    lines = (("p50", summary.p50, "-"), ("p99", summary.p99, "--"), ("budget", max_itl_ms, "-."))
    for name, ms, ls in lines:
        if ms is not None:
            axes.axhline(ms, color="black", ls=ls, label=f"{name} {duration(ms)}")
            low, high = min(low, ms or low), max(high, ms)
    if log:
        _set_log(axes, "y")
    axes.set_ylim(0.8 * low if log else 0, (1.5 if log else 1.15) * high)
    axes.set_ylabel("gap between tokens (ms)")
    _legend_outside(axes)
    longest = max(series.gaps, key=lambda gap: gap.ms)
    why = f"longest: {duration(longest.ms)}"
    if longest.record.prefill_tokens > 0:
        why += f", chunk of {longest.record.prefill_tokens:,} tokens"
    if longest.collected:
        why += ", Python's garbage collector"
    at = (longest.seconds, max(longest.ms, low))
    side = "right" if longest.seconds > 0.5 * series.seconds else "left"
    axes.annotate(why, at, (0, 6), textcoords="offset points", ha=side)


def _draw_lanes(axes: Axes, series: Series) -> None:
    """Draw a lane for each kind of event."""
    labels = []
    for y, (kind, (name, color)) in enumerate(_LANES.items()):
        marks = series.marks[kind]
        seconds = [mark.seconds for mark in marks]
        axes.plot(seconds, [y] * len(marks), "|", markersize=11, color=color, label=name)
        labels.append(f"{name}: {len(marks):,}")
        if kind == "bucket" and len(marks) <= MAX_BUCKET_LABELS:
            for mark in marks:
                axes.annotate(f" {mark.amount:,}", (mark.seconds, y), va="center", size=9)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    text = "seconds since the first step"
    if series.pauses:
        cut = duration(1e3 * sum(seconds for _, seconds in series.pauses))
        times = "pause" if len(series.pauses) == 1 else "pauses"
        text += f", without {len(series.pauses):,} {times} ({cut} in all, dotted)"
    for at, _ in series.pauses:
        axes.axvline(at, color="black", ls=":")
    axes.set_xlabel(text)
    axes.set_xlim(0, 1.01 * series.seconds or 1.0)


def _draw_histogram(axes: Axes, series: Series) -> None:
    """Draw the distribution of the gaps by kind, and its percentiles."""
    axes.set_title(f"ITL histogram, n = {len(series.gaps):,}")
    if not series.gaps:
        _say(axes, "no gap between tokens was recorded")
        return
    low, high, log = _limits(series.gaps)
    if log:
        edges = np.geomspace(low, high, 61)
        _set_log(axes, "x")
    else:  # gaps of almost one length are not spread over the whole axis
        low = min(0.9 * high, min(gap.ms for gap in series.gaps))
        edges = np.linspace(low, high, 61)
    for name, color, gaps in _kinds_of(series.gaps):
        values = np.clip([gap.ms for gap in gaps], low, high)
        axes.hist(values, edges.tolist(), color=color, alpha=0.7, label=name)
    summary = Summary.of(gap.ms for gap in series.gaps)
    for name, ls in (("p50", "-"), ("p90", "-."), ("p99", "--")):
        value = getattr(summary, name)
        if value is not None:
            axes.axvline(value, color="black", ls=ls, label=f"{name} {duration(value)}")
    _set_log(axes, "y")  # a single gap stays visible next to thousands
    axes.set_ylim(bottom=0.7)
    axes.set_xlabel("gap between tokens (ms)")
    axes.set_ylabel("gaps")
    _legend_outside(axes)


def _draw_phases(figure: SubFigure, records: Sequence[StepRecord]) -> None:
    """Draw where the time of a step goes: each phase begins where the one before it ends."""
    kinds = [("decode step", _DECODE, False), ("with a chunk", _CHUNK, True)]
    found = [(name, color, phase_times(records, prefill=chunk)) for name, color, chunk in kinds]
    known = [(name, color, times) for name, color, times in found if times is not None]
    figure.suptitle("Where the time of a step goes (medians)", x=0.01, ha="left")
    if not known:
        _say(figure.subplots(), "no step was recorded")
        return
    panels = figure.subplots(1, len(known), squeeze=False)[0]
    for axes, (name, color, times) in zip(panels, known, strict=True):
        total = sum(times.phases.values())
        bars = dict(times.phases)
        starts = np.cumsum([0.0, *bars.values()])[:-1].tolist()
        texts = [f"{duration(ms)}, {ms / total if total else 0.0:.1%}" for ms in bars.values()]
        if times.device_ms is not None:  # of an asynchronous device: no part of the sum
            bars["device"] = times.device_ms
            starts.append(0.0)
            texts.append(duration(times.device_ms))
        drawn = axes.barh(list(bars), list(bars.values()), left=starts, color=color, label=name)
        axes.bar_label(drawn, texts, padding=4)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.7 * max(map(sum, zip(starts, bars.values(), strict=True))) or 1.0)
        axes.set_xlabel("ms")
        axes.set_title(f"{name}: {duration(total)}, n = {times.n:,}", size=11)


_LABELS: Final = {
    "model": "{}",
    "dtype": "{}",
    "weight_dtype": "weights {}",
    "kv_dtype": "KV {}",
    "mode": "{}",
    "input_len": "{} tokens",
    "output_len": "+{}",
    "prefill_chunk": "chunk {}",
    "steps_per_launch": "{} a launch",
}
"""The settings in which two lines may differ, and how a label states them."""


def roofline_lines(
    cases: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, list[tuple[int, float]]], str]:
    """Return the lines (rows, percent of the roofline) by label, and what they have in common.

    A label states only the settings in which the lines differ. Cases of unknown fraction (None) are
    omitted; of several with the same label and batch size the last one counts.

    Raises:
        ValueError: a case has no batch size or no fraction of its roofline.
    """
    known: list[tuple[dict[str, str], int, float]] = []
    for index, case in enumerate(cases):
        try:
            rows, roofline = int(case["batch_size"]), case["roofline"]
            fraction = None if roofline is None else roofline["fraction"]
        except KeyError as error:
            raise ValueError(f"case {index} has no batch_size or no roofline.fraction") from error
        if fraction is not None:
            words = {
                name: form.format(case[name])
                for name, form in _LABELS.items()
                if case.get(name) is not None
            }
            known.append((words, rows, 100 * float(fraction)))
    varying = [name for name in _LABELS if len({words.get(name) for words, _, _ in known}) > 1]
    points: dict[str, dict[int, float]] = {}
    for words, rows, percent in known:
        label = " ".join(words[name] for name in varying if name in words) or words["mode"]
        points.setdefault(_printable(label), {})[rows] = percent
    first = known[0][0] if known else {}
    shared = [name for name in ("model", "mode", "input_len") if name not in varying]
    common = ", ".join(first[name] for name in shared if name in first)
    return {label: sorted(line.items()) for label, line in points.items()}, _printable(common)


def _draw_roofline(axes: Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    """Draw the fraction of the roofline by batch size, a line for each mode and context."""
    lines, common = roofline_lines(cases)
    axes.set_title("Roofline by batch size")
    if not lines:
        _say(axes, "no case has a roofline")
        return
    for index, (label, line) in enumerate(lines.items()):
        rows, percents = zip(*line, strict=True)
        label = label if len(label) < 50 else f"{label[:24]}…{label[-24:]}"
        text = f"{label}: {number(percents[-1])} %"
        axes.plot(rows, percents, marker="osD^vP*X"[index % 8], label=text, clip_on=False)
    rooflines = [case["roofline"] for case in cases if case["roofline"] is not None]
    bandwidths = {roofline.get("bandwidth_gb_s") for roofline in rooflines} - {None}
    limit = f"{number(bandwidths.pop())} GB/s" if len(bandwidths) == 1 else "limit by bandwidth"
    axes.axhline(100, color="black", ls="--", label=f"100 %: {limit}")
    sizes = sorted({rows for line in lines.values() for rows, _ in line})
    highest = max(percent for line in lines.values() for _, percent in line)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_ylim(0, 1.12 * max(100.0, highest))
    text = "rows that decode (batch size)" + (f"; {common}" if common else "")
    if highest > 100:
        text += "\nabove 100 %: read from a cache, not from memory"
    axes.set_xlabel(text)
    axes.set_ylabel("fraction of the roofline (%)")
    _legend_outside(axes)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center")


def _legend_outside(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def _set_log(axes: Axes, which: str) -> None:
    """Make an axis logarithmic, with plain numbers instead of powers of ten."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(_PlainFormatter())
    axis.set_minor_formatter(_PlainFormatter(minor_thresholds=(2, 0.5)))


class _PlainFormatter(LogFormatter):
    def __call__(self, x: float, pos: int | None = None) -> str:
        return number(x) if super().__call__(x, pos) else ""


def number(value: float) -> str:
    """Return a number with three significant digits, without powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def duration(ms: float) -> str:
    """Return milliseconds with the unit that reads best."""
    if 0 < ms < 1:
        return f"{number(1e3 * ms)} µs"
    return f"{number(ms)} ms" if ms < 1000 else f"{number(ms / 1e3)} s"


def _printable(text: str) -> str:
    """Return a text on one line, of characters that can be drawn."""
    drawable = text.encode("utf-8", "replace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in drawable).split())


def _wrapped(text: str, width: int, lines: int) -> list[str]:
    return textwrap.wrap(_printable(text), width, max_lines=lines, placeholder=" …")
