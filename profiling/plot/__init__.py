"""A picture of a timeline: gaps between tokens over time, their distribution, and the roofline.

    plot_steps(engine.timeline().records(), "steps.png", title="my service, compile, 8 rows")

Needs matplotlib, the extra `plot`, which is imported when a picture is drawn. Figures are made of
matplotlib's objects alone: no pyplot, no backend is chosen, nothing of the process changes.
"""

import importlib.util
import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..atomic_write import WriteError, check_writable, write_file
from ..timeline import StepRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .series import Series

__all__ = ["PlotError", "check_plot", "draw_steps", "plot_steps"]

WIDTH, HEIGHT = 1600, 1000
"""Of a picture, in pixels."""

DPI: Final = 100
FORMATS: Final = ("png", "svg", "pdf")
_TITLE_SIZE, _LEAST_TITLE_SIZE = 16, 11
_TITLE_COLUMNS: Final = 112
"""Letters of the full size in a line of the title; longer lines have smaller ones."""

_COMMAND_COLUMNS: Final = 185


class PlotError(Exception):
    """A picture cannot be drawn or written."""


def check_plot(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture, if one can be written there.

    matplotlib is looked for and not imported, so that it is in nobody's way who measures first: its
    objects would make Python's collections longer.

    Raises:
        PlotError: matplotlib is missing, the suffix is none of a known format, or the folder is
            missing or not writable.
    """
    path = Path(path)
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise PlotError(f"cannot write {path}: its suffix must be one of {known}")
    try:
        check_writable(path)
    except WriteError as error:
        raise PlotError(str(error)) from error
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError(
            'plots need matplotlib, which is not installed: pip install "stepgraph[plot]"'
        )
    return path


def plot_steps(
    records: Sequence[StepRecord],
    path: str | os.PathLike[str],
    *,
    title: str,
    cases: Sequence[Mapping[str, Any]] | None = None,
    max_itl_ms: float | None = None,
    command: str | None = None,
) -> None:
    """Draw the steps of a timeline and write the picture, in the format of its suffix.

    A file that is there is replaced once the new one is complete.

    Args:
        records: in the order of their steps, as `Timeline.records` returns them.
        path: of a `.png` (1600 x 1000 pixels), `.svg` or `.pdf` file.
        title: what was measured: model, mode, device. Two lines at most.
        cases: those of the benchmark's JSON, for the roofline of each batch size. None: where the
            time of a step goes is shown in its place.
        max_itl_ms: the time budget of a step, if there is one.
        command: what the picture was made with.

    Raises:
        PlotError: as `check_plot`, or the file cannot be written.
        ValueError: a case lacks what its roofline is drawn from.
    """
    path = check_plot(path)
    figure = draw_steps(records, title=title, cases=cases, max_itl_ms=max_itl_ms, command=command)
    rendered = _render(figure, path.suffix.lower())
    try:
        write_file(path, rendered)
    except WriteError as error:
        raise PlotError(str(error)) from error


def draw_steps(
    records: Sequence[StepRecord],
    *,
    title: str,
    cases: Sequence[Mapping[str, Any]] | None = None,
    max_itl_ms: float | None = None,
    command: str | None = None,
) -> "Figure":
    """Return the figure that `plot_steps` writes, for who draws on. Needs matplotlib."""
    from matplotlib.figure import Figure

    from .gaps import draw_gaps
    from .panels import draw_histogram, draw_phases
    from .roofline_panel import draw_roofline
    from .series import series_of
    from .style import plain, write

    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor="white")
    most = _TITLE_COLUMNS * _TITLE_SIZE // _LEAST_TITLE_SIZE
    lines = [
        line
        for part in title.splitlines()
        for line in textwrap.wrap(plain(part), most, max_lines=1, placeholder=" …")
    ][:2]
    size = _TITLE_SIZE * min(1.0, _TITLE_COLUMNS / max(map(len, lines), default=1))
    write(figure, 0.02, 0.985, "\n".join(lines), size=size, weight="bold", va="top")
    series = series_of(records)
    below = 0.929 if len(lines) > 1 else 0.955
    write(figure, 0.02, below, _described(records, series), size=12, va="top")
    draw_gaps(figure, series, max_itl_ms)
    draw_histogram(figure, series)
    if cases:
        draw_roofline(figure, cases)
    else:
        draw_phases(figure, records)
    if command is not None:
        lines = textwrap.wrap(plain(command), _COMMAND_COLUMNS, max_lines=2, placeholder=" …")
        write(figure, 0.02, 0.01, "\n".join(lines), size=10, va="bottom", color="#555555")
    return figure


def _described(records: Sequence[StepRecord], series: "Series") -> str:
    """Return what the picture rests on."""
    from .style import duration

    steps = sum(max(1, record.steps) for record in records)
    launches = f" in {len(records):,} launches" if steps != len(records) else ""
    return (
        f"n = {len(series.gaps):,} (gaps between the tokens of one step and of the next);"
        f" {steps:,} steps{launches} in {duration(1e3 * series.seconds)}"
    )


def _render(figure: "Figure", suffix: str) -> bytes:
    """Return the picture as a file of a format."""
    file = io.BytesIO()
    # The canvases write what they are told to; `savefig` would ask the settings of the process.
    if suffix == ".png":
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        FigureCanvasAgg(figure).print_png(file, pil_kwargs={"optimize": True})
    elif suffix == ".svg":
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        FigureCanvasSVG(figure).print_svg(file)
    else:
        from matplotlib.backends.backend_pdf import FigureCanvasPdf

        FigureCanvasPdf(figure).print_pdf(file)
    return file.getvalue()
