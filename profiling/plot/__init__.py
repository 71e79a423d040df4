"""A picture of a timeline: gaps between tokens over time, their distribution, and the roofline.

    plot_steps(engine.timeline().records(), "steps.png", title="my service, compile, 8 rows")

Needs matplotlib, the extra `plot`, which is imported when a picture is drawn. pyplot is not used
and no backend is chosen.
"""

import importlib.util
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..atomic_write import WriteError, check_writable, write_file
from ..timeline import StepRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PlotError", "check_plot", "draw_steps", "plot_steps"]

FORMATS: Final = ("png", "svg", "pdf")


class PlotError(Exception):
    """A picture cannot be drawn or written."""


def check_plot(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture, if one can be written there.

    Does not import matplotlib: its objects would lengthen garbage collections in a measurement.

    Raises:
        PlotError: matplotlib is missing, the suffix is none of `FORMATS`, or the folder is missing
            or not writable.
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
    """Draw the steps of a timeline and write the picture atomically.

    Args:
        records: in the order of their steps, as `Timeline.records` returns them.
        path: of a `.png` (1600 x 1000 pixels), `.svg` or `.pdf` file.
        title: what was measured: model, mode, device. Two lines at most.
        cases: of the benchmark's JSON, for the roofline of each batch size. None: the picture
            shows where the time of a step goes instead.
        max_itl_ms: the time budget of a step, if there is one.
        command: the command line that was measured.

    Raises:
        PlotError: as `check_plot`, or the file cannot be written.
        ValueError: a case has no batch size or no fraction of its roofline.
    """
    path = check_plot(path)
    from .figure import DPI, style

    figure = draw_steps(records, title=title, cases=cases, max_itl_ms=max_itl_ms, command=command)
    file = io.BytesIO()
    with style():
        figure.savefig(file, format=path.suffix.lower().removeprefix("."), dpi=DPI)
    try:
        write_file(path, file.getvalue())
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
    """Return the figure that `plot_steps` writes, to be drawn on. Needs matplotlib."""
    from .figure import draw

    return draw(records, title=title, cases=cases, max_itl_ms=max_itl_ms, command=command)
