"""The panel of the roofline: how much of a step's time is what its bytes take at least."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .style import (
    FAINT,
    INK,
    LINES,
    SOFT,
    head,
    label_ends,
    name_axes,
    note,
    number,
    panel,
    plain,
    plain_ticks,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_roofline", "roofline_lines"]

Points = list[tuple[int, float]]
"""Batch sizes in order, and the fraction of the roofline in percent."""

NAMES: Final = {
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
"""What may set two lines apart, and how a label says it."""

MARKERS: Final = "osD^vP*X"
STYLES: Final = ("-", "--", "-.", ":")
LABELS: Final = 14
"""That have room beside the axes; of more the letters are smaller."""

LONGEST_LABEL: Final = 25
"""Letters, where they are not smaller."""


def roofline_lines(cases: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Points], str]:
    """Return the lines by their labels, and what all of them have in common.

    A label says what sets its line apart and no more. Cases whose fraction is not known (None) are
    left out; of several with the same label and batch size the last one counts.

    Raises:
        ValueError: a case has no batch size or no fraction of its roofline.
    """
    known: list[tuple[Mapping[str, Any], int, float]] = []
    for index, case in enumerate(cases):
        roofline = case.get("roofline", {})
        if "batch_size" not in case or (roofline is not None and "fraction" not in roofline):
            raise ValueError(f"case {index} has no batch_size or no roofline.fraction")
        if roofline is not None and roofline["fraction"] is not None:
            known.append((case, int(case["batch_size"]), 100 * float(roofline["fraction"])))
    told = [{name: _told(name, case) for name in NAMES} for case, _, _ in known]
    short = [words | {"model": words["model"].rpartition("/")[2]} for words in told]
    if len({words["model"] for words in short}) == len({words["model"] for words in told}):
        told = short  # a name says as much as a path
    varying = [name for name in NAMES if len({words[name] for words in told}) > 1]
    points: dict[str, dict[int, float]] = {}
    for (case, rows, percent), words in zip(known, told, strict=True):
        label = " ".join(words[name] for name in varying if words[name])
        points.setdefault(label or str(case.get("mode", "")), {})[rows] = percent
    common = ", ".join(
        told[0][name]
        for name in ("model", "mode", "input_len")
        if told and name not in varying and told[0][name]
    )
    return {plain(label): sorted(line.items()) for label, line in points.items()}, plain(common)


def _told(name: str, case: Mapping[str, Any]) -> str:
    return "" if case.get(name) is None else NAMES[name].format(case[name])


def draw_roofline(figure: "Figure", cases: Sequence[Mapping[str, Any]]) -> None:
    """Draw the fraction of the roofline that each batch size reaches, a line for each mode.

    Raises:
        ValueError: as `roofline_lines`.
    """
    lines, common = roofline_lines(cases)
    axes = panel(figure, 0.56, 0.105, 0.265, 0.275)
    pieces = [("Roofline by batch size", INK)]
    head(axes, pieces + ([(common, SOFT)] if common else []))
    if not lines:
        note(axes, 0.5, 0.5, "no case has a roofline", ha="center", color=SOFT)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    sizes = sorted({rows for line in lines.values() for rows, _ in line})
    highest = max(percent for line in lines.values() for _, percent in line)
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    axes.set_ylim(0, max(112.0, 1.12 * highest))
    axes.axhline(100, color=INK, linewidth=1.3, linestyle="--", label="100 %")
    shrunk = min(1.0, LABELS / len(lines))
    half = int(LONGEST_LABEL / shrunk / 2)
    labels = []
    for index, (label, line) in enumerate(lines.items()):
        color, written = LINES[index % len(LINES)]
        axes.plot(
            [rows for rows, _ in line],
            [percent for _, percent in line],
            color=color,
            linestyle=STYLES[index // len(LINES) % len(STYLES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=7,
            linewidth=2,
            label=label,
            clip_on=False,
        )
        if len(label) > 2 * half + 1:
            label = f"{label[:half]}…{label[-half:]}"
        labels.append((line[-1][1], f"{label}: {number(line[-1][1])} %", written))
    labels.append((100.0, _limit(cases), INK))
    label_ends(axes, labels, size=11 * shrunk)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    plain_ticks(axes.yaxis, log=False)
    axes.grid(True, axis="y", color=FAINT, linewidth=0.7)
    size = "rows that decode (batch size)"
    if highest > 100:
        size += "\nabove 100 %: read from a cache, not from memory"
    name_axes(axes, x=size, y="fraction of the roofline (%)")


def _limit(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return what the line of 100 % stands for."""
    known = [case["roofline"] for case in cases if case["roofline"] is not None]
    bandwidths = {roofline.get("bandwidth_gb_s") for roofline in known} - {None}
    if len(bandwidths) != 1:
        return "100 %: limit by bandwidth"
    return f"100 %: {number(bandwidths.pop())} GB/s"
