"""The panel of gaps over time: how long rows waited for each token, and what happened meanwhile."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ..stats import Summary
from .layout import columns_of, thinned
from .series import Gap, Mark, Series
from .style import (
    BUCKET,
    CHUNK,
    COLLECTION,
    DECODE,
    FAINT,
    FONT,
    INK,
    MARKS,
    SOFT,
    Look,
    duration,
    head,
    label_ends,
    name_axes,
    note,
    panel,
    plain_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_gaps", "scale_of"]

LEFT, WIDTH = 0.125, 0.775
"""Of both axes, in parts of the figure."""

COLUMNS: Final = 600
"""Of two pixels, that gaps are drawn in where there are too many to tell apart."""

MOST_POINTS: Final = 2400
"""Gaps that are drawn one by one."""

WIDE: Final = 4.0
"""A logarithmic axis is used where the longest gap has so many times the length of the median."""

GAPS_OF: Final = {
    DECODE: "decode steps",
    CHUNK: "with a prefill chunk",
    COLLECTION: "held up by a collection",
}

MOST_SHAPES: Final = 150
"""Events of a kind that have their shape; more are strokes."""

LABEL_PIXELS: Final = 34
"""Room that the number of a bucket needs."""


def scale_of(gaps: Sequence[Gap], max_itl_ms: float | None) -> tuple[float, float, bool]:
    """Return the least and the greatest value of an axis of gaps, and whether it is logarithmic."""
    values = [gap.ms for gap in gaps]
    high = max([*values, max_itl_ms or 0.0])
    positive = [value for value in values if value > 0]
    if positive and high > WIDE * statistics.median(positive):
        return min(positive), high, True
    return 0.0, high or 1.0, False


def draw_gaps(figure: "Figure", series: Series, max_itl_ms: float | None) -> None:
    """Draw the gaps, and below them what happened, on one axis of time."""
    axes = panel(figure, LEFT, 0.595, WIDTH, 0.275)
    lanes = panel(figure, LEFT, 0.488, WIDTH, 0.095)
    for each in (axes, lanes):
        margin = 0.006 * (series.seconds or 1.0)
        each.set_xlim(-margin, (series.seconds or 1.0) + margin)
        for at, _ in series.pauses:
            each.axvline(at, color=SOFT, linewidth=1, linestyle=":")
    axes.tick_params(labelbottom=False)
    _draw_lanes(lanes, series)
    if not series.gaps:
        head(axes, [("ITL over time", INK)])
        note(axes, 0.5, 0.5, "no gap between tokens was recorded", ha="center", color=SOFT)
        axes.set_yticks([])
        return
    low, high, log = scale_of(series.gaps, max_itl_ms)
    axes.set_yscale("log" if log else "linear")
    room = max(2.2, (high / low) ** 0.16) if log else 1.2  # for what is written at the longest
    axes.set_ylim(0.8 * low if log else 0, room * high)
    plain_ticks(axes.yaxis, log=log, ratio=high / low if log else 1.0)
    axes.grid(True, axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    name_axes(axes, y="gap between tokens (ms)")

    many = len(series.gaps) > MOST_POINTS
    kinds = kinds_of(series.gaps)
    for look, gaps in kinds:
        if many and look is not COLLECTION:
            _draw_columns(axes, gaps, look, series.seconds, low)
        else:
            shown = _longest_of_columns(gaps, series.seconds) if many else gaps
            _draw_points(axes, shown, look, 5.5 if len(series.gaps) <= 400 else 4.0, low)
    pieces = [("ITL over time", INK)]
    pieces += [
        (f"{look.sign} {GAPS_OF[look]} ({len(gaps):,})", look.written) for look, gaps in kinds
    ]
    if many:
        pieces.append(("range and median of each pixel column", SOFT))
    head(axes, pieces)
    _point_at_longest(axes, series)
    _draw_levels(axes, series.gaps, max_itl_ms)


def kinds_of(gaps: Sequence[Gap]) -> list[tuple[Look, list[Gap]]]:
    """Return the gaps by what made them long, each in one of the kinds that there are.

    Where Python's collector took a good part of a gap, that is its kind.
    """
    kinds: dict[Look, list[Gap]] = {DECODE: [], CHUNK: [], COLLECTION: []}
    for gap in gaps:
        chunk = CHUNK if gap.record.prefill_tokens > 0 else DECODE
        kinds[COLLECTION if gap.collected else chunk].append(gap)
    return [(look, members) for look, members in kinds.items() if members]


def _draw_points(axes: "Axes", gaps: Sequence[Gap], look: Look, size: float, floor: float) -> None:
    axes.plot(
        [gap.seconds for gap in gaps],
        [max(gap.ms, floor) for gap in gaps],
        linestyle="none",
        marker=look.marker,
        markersize=size,
        markeredgewidth=2 if look.marker == "x" else 0,
        color=look.color,
        label=look.name,
        clip_on=False,
    )


def _draw_columns(
    axes: "Axes", gaps: Sequence[Gap], look: Look, seconds: float, floor: float
) -> None:
    """Draw from the shortest to the longest gap of every column, and its median."""
    columns = columns_of(gaps, seconds, COLUMNS)
    x = [column.seconds for column in columns]
    axes.vlines(
        x,
        [max(column.low, floor) for column in columns],
        [max(column.high, floor) for column in columns],
        color=look.color,
        alpha=0.4,
        linewidth=1.5,
        label=f"{look.name}, range",
    )
    axes.plot(
        x,
        [max(column.median, floor) for column in columns],
        linestyle="none",
        marker=look.marker,
        markersize=2.5,
        markeredgewidth=0,
        color=look.color,
        label=f"{look.name}, median",
    )


def _longest_of_columns(gaps: Sequence[Gap], seconds: float) -> list[Gap]:
    by_column: dict[int, Gap] = {}
    for gap in gaps:
        column = int(gap.seconds / seconds * COLUMNS) if seconds else 0
        if column not in by_column or gap.ms > by_column[column].ms:
            by_column[column] = gap
    return list(by_column.values())


def _point_at_longest(axes: "Axes", series: Series) -> None:
    longest = max(series.gaps, key=lambda gap: gap.ms)
    why = [f"longest: {duration(longest.ms)}"]
    if longest.record.prefill_tokens > 0:
        why.append(f"chunk of {longest.record.prefill_tokens:,} tokens")
    if longest.collected:
        why.append("collection of Python's garbage")
    right = longest.seconds > 0.5 * series.seconds
    axes.annotate(
        ", ".join(why),
        xy=(longest.seconds, longest.ms),
        xytext=(-16 if right else 16, 9),
        textcoords="offset points",
        ha="right" if right else "left",
        va="center",
        fontsize=11,
        fontfamily=FONT,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.8},
        zorder=5,
    )


def _draw_levels(axes: "Axes", gaps: Sequence[Gap], max_itl_ms: float | None) -> None:
    """Draw the median, the 99th percentile where there are enough gaps, and the budget."""
    summary = Summary.of(gap.ms for gap in gaps)
    levels: list[tuple[float, str, str, Any]] = [
        (summary.p50, f"p50 {duration(summary.p50)}", INK, "-")
    ]
    if summary.p99 is not None:
        levels.append((summary.p99, f"p99 {duration(summary.p99)}", INK, "--"))
    if max_itl_ms is not None:
        text = f"budget {duration(max_itl_ms)}"
        levels.append((max_itl_ms, text, COLLECTION.written, (0, (6, 2, 1, 2))))
    for y, text, color, style in levels:
        axes.axhline(y, color=color, linewidth=1.3, linestyle=style, label=text, zorder=1.5)
    label_ends(axes, [(y, text, color) for y, text, color, _ in levels])


def _draw_lanes(axes: "Axes", series: Series) -> None:
    """Draw a lane for each kind of event, named at its beginning."""
    axes.set_ylim(-0.6, len(MARKS) - 0.4)
    heights = range(len(MARKS) - 1, -1, -1)
    axes.set_yticks(
        list(heights),
        [f"{look.sign} {look.name}: {len(series.marks[kind]):,}" for kind, look in MARKS.items()],
    )
    for (kind, look), y, label in zip(MARKS.items(), heights, axes.get_yticklabels(), strict=True):
        label.set_color(look.written)
        axes.axhline(y, color=FAINT, linewidth=0.7, zorder=0)
        marks = series.marks[kind]
        if len(marks) > COLUMNS:
            marks = thinned(marks, series.seconds, COLUMNS)
        dense = len(marks) > MOST_SHAPES
        axes.plot(
            [mark.seconds for mark in marks],
            [y] * len(marks),
            linestyle="none",
            marker="|" if dense else look.marker,
            markersize=10 if dense else 6.5,
            markeredgewidth=1 if dense else 2 if look.marker == "x" else 0,
            color=look.color,
            label=look.name,
        )
        if kind == "bucket" and not dense:
            _write_buckets(axes, marks, y)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    text = "seconds since the first step"
    if series.pauses:
        cut = duration(1e3 * sum(seconds for _, seconds in series.pauses))
        times = "pause" if len(series.pauses) == 1 else "pauses"
        text += f", without {len(series.pauses):,} {times} ({cut} in all, dotted)"
    name_axes(axes, x=text)
    plain_ticks(axes.xaxis, log=False)


def _write_buckets(axes: "Axes", marks: Sequence[Mark], y: float) -> None:
    """Write the new bucket beside each mark that has room for it."""
    pixels = [float(axes.transData.transform((mark.seconds, y))[0]) for mark in marks]
    ends = [*pixels[1:], axes.get_window_extent().x1 + LABEL_PIXELS]
    for mark, at, end in zip(marks, pixels, ends, strict=False):
        if end - at >= LABEL_PIXELS:
            axes.annotate(
                f"{mark.amount:,}",
                xy=(mark.seconds, y),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9.5,
                fontfamily=FONT,
                color=BUCKET.written,
                annotation_clip=False,
            )
