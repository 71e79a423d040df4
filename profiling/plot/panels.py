"""The panels below the gaps over time: their distribution, and where the time of a step goes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ..stats import Summary
from ..timeline import StepRecord
from .gaps import kinds_of, scale_of
from .layout import bin_edges, histogram
from .series import PhaseTimes, Series, phase_times
from .style import (
    CHUNK,
    COLLECTION,
    DECODE,
    FAINT,
    FONT,
    INK,
    SOFT,
    Look,
    duration,
    head,
    name_axes,
    note,
    panel,
    plain_ticks,
    write,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_histogram", "draw_phases"]

BESIDE: Final = "device, beside"
"""What a device works beside the host is none of the phases that add up to a step."""

BINS: Final = 60

LONG_TAIL: Final = 40
"""Where the fullest bin has so many gaps, one of a single gap cannot be seen on a linear axis."""

SHORT: Final = {DECODE: "decode steps", CHUNK: "with a chunk", COLLECTION: "collection"}

NARROWEST: Final = 0.1
"""Of the longest gap, that a linear axis spans at least: what is all one length looks like that."""

PERCENTILES: Final = (("p50", "-"), ("p90", "-."), ("p99", "--"))


def draw_histogram(figure: "Figure", series: Series) -> None:
    """Draw how many gaps have which length, those with a chunk beside the others."""
    axes = panel(figure, 0.07, 0.105, 0.37, 0.275)  # right of it: names of percentiles
    title = (f"ITL histogram, n = {len(series.gaps):,}", INK)
    if not series.gaps:
        head(axes, [title])
        note(axes, 0.5, 0.5, "no gap between tokens was recorded", ha="center", color=SOFT)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    values = [gap.ms for gap in series.gaps]
    low, high, log = scale_of(series.gaps, None)
    if not log:
        low, high = _widened(min(values), max(values))
    edges = bin_edges(low, high, BINS, log=log)
    kinds = kinds_of(series.gaps)
    head(axes, [title, *((f"{look.sign} {SHORT[look]}", look.written) for look, _ in kinds)])
    counts = {look: histogram((gap.ms for gap in gaps), edges) for look, gaps in kinds}
    fullest = max(max(of_bins) for of_bins in counts.values())
    _draw_bins(axes, counts, edges)
    tall = fullest >= LONG_TAIL
    axes.set_xscale("log" if log else "linear")
    if not log:
        axes.set_xlim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    axes.set_yscale("log" if tall else "linear")
    axes.set_ylim(0.7 if tall else 0, fullest**1.35 if tall else 1.4 * fullest)
    plain_ticks(axes.xaxis, log=log, ratio=high / low if log else 1.0)
    plain_ticks(axes.yaxis, log=tall, ratio=fullest * 10, whole=True)
    axes.grid(True, axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    name_axes(axes, x="gap between tokens (ms)", y="gaps")
    _mark_percentiles(axes, Summary.of(values))


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return ends of a linear axis that holds both; ticks three digits long tell them apart."""
    missing = NARROWEST * (high or 1.0) - (high - low)
    if missing <= 0:
        return low, high
    low = max(0.0, low - missing / 2)
    return low, max(high, low + NARROWEST * (high or 1.0))


def _draw_bins(axes: "Axes", counts: dict[Look, list[int]], edges: Sequence[float]) -> None:
    """Draw the bars of all kinds from one baseline, in each bin the lower ones before the higher.

    What stands before others is narrower: bars of one height can all be seen.
    """
    bars: dict[Look, list[tuple[float, float, int, int]]] = {look: [] for look in counts}
    for index, (left, right) in enumerate(pairwise(edges)):
        order = sorted(
            (look for look in counts if counts[look][index]),
            key=lambda look: -counts[look][index],
        )
        for depth, look in enumerate(order):
            width = (right - left) * (1 - 0.3 * depth)
            bars[look].append((left, width, counts[look][index], depth))
    for look, drawn in bars.items():
        lefts, widths, heights, depths = zip(*drawn, strict=True)
        patches = axes.bar(lefts, heights, widths, align="edge", color=look.color, label=look.name)
        for patch, depth in zip(patches, depths, strict=True):
            patch.set_zorder(2 + 0.1 * depth)


def _mark_percentiles(axes: "Axes", summary: Summary) -> None:
    """Draw the percentiles that there are enough gaps for, their names one below the other.

    A name is to the right of its line, also beyond the axes: there the lines that follow are lower.
    """
    for index, (name, style) in enumerate(PERCENTILES):
        value = getattr(summary, name)
        if value is None:
            continue
        text = f"{name} {duration(value)}"
        height = 0.95 - 0.075 * index
        axes.axvline(
            value, 0, height, color=INK, linewidth=1.2, linestyle=style, label=text, zorder=2.5
        )
        axes.annotate(
            text,
            xy=(value, height),
            xycoords=axes.get_xaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=11,
            fontfamily=FONT,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
            zorder=3,
            annotation_clip=False,
        )


def draw_phases(figure: "Figure", records: Sequence[StepRecord]) -> None:
    """Draw where the time of a step goes, one phase below the other, for both kinds of steps."""
    decode = phase_times(records, prefill=False)
    chunk = phase_times(records, prefill=True)
    kinds = [
        (look, name, times)
        for look, name, times in (
            (DECODE, "decode step", decode),
            (CHUNK, "with a chunk", chunk),
        )
        if times is not None
    ]
    if not kinds:
        axes = panel(figure, 0.575, 0.105, 0.40, 0.275)
        head(axes, [("Where the time of a step goes", INK)])
        note(axes, 0.5, 0.5, "no step was recorded", ha="center", color=SOFT)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    figure_width = (0.405 - 0.02 * (len(kinds) - 1)) / len(kinds)
    names = _phase_names([times for _, _, times in kinds])
    for index, (look, name, times) in enumerate(kinds):
        left = 0.575 + index * (figure_width + 0.02)
        axes = panel(figure, left, 0.105, figure_width, 0.245)
        _draw_phases_of(axes, times, names, look)
        if index:
            axes.tick_params(labelleft=False)
        total = duration(sum(times.phases.values()))
        text = f"{look.sign} {name}: {total}, n = {times.n:,}"
        note(axes, 0.0, 1.03, text, color=look.written, va="bottom", size=12)
    title = "Where the time of a step goes (medians)"
    write(figure, 0.575, 0.386, title, size=13, weight="bold", va="bottom")


def _phase_names(kinds: Sequence[PhaseTimes]) -> list[str]:
    """Return the phases of all kinds, in the order in which they come."""
    order = ("plan", "launch", "device", "commit", "wait", "caller")
    names = [name for name in order if any(name in times.phases for times in kinds)]
    if any(times.device_ms is not None for times in kinds):
        names.append(BESIDE)
    return names


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def _draw_phases_of(axes: "Axes", times: PhaseTimes, names: Sequence[str], look: Look) -> None:
    """Draw a row for each phase, which begins where the one before it ends."""
    total = sum(times.phases.values())
    in_us = total < 1
    scale = 1e3 if in_us else 1.0
    begin = 0.0
    axes.set_ylim(len(names) - 0.5, -0.5)
    for y, name in enumerate(names):
        ms = times.device_ms if name == BESIDE else times.phases.get(name)
        if ms is None:
            continue
        start = 0.0 if name == BESIDE else begin
        share = f", {_percent(ms / total)}" if total and name != BESIDE else ""
        axes.barh(
            y,
            scale * ms,
            left=scale * start,
            height=0.62,
            color=look.color,
            alpha=0.45 if name == BESIDE else 0.9,
            label=name,
        )
        axes.annotate(
            f"{duration(ms)}{share}",
            xy=(scale * (start + ms), y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=11,
            fontfamily=FONT,
            color=INK,
        )
        if name != BESIDE:
            begin += ms
    axes.set_xlim(0, 1.55 * scale * max(total, times.device_ms or 0.0) or 1.0)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    name_axes(axes, x="µs" if in_us else "ms")
    plain_ticks(axes.xaxis, log=False)
    axes.grid(True, axis="x", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
