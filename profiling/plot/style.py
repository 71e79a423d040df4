"""What all panels of a picture share: colours, letters, frames, and how numbers are written.

Everything is said to matplotlib at each call, so that no setting of the process shows through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .layout import spread
from .series import MarkKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "CHUNK",
    "COLLECTION",
    "DECODE",
    "FAINT",
    "FONT",
    "INK",
    "LINES",
    "MARKS",
    "SOFT",
    "duration",
    "head",
    "label_ends",
    "name_axes",
    "note",
    "number",
    "panel",
    "plain",
    "plain_ticks",
    "write",
]

# The palette of Okabe and Ito, "Color Universal Design" (2008), which people with any of the usual
# deficiencies of colour vision can tell apart; what is written is darker, to be read on white.
BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
VERMILLION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
INK: Final = "#222222"
SOFT: Final = "#666666"
FAINT: Final = "#DDDDDD"

FONT: Final = "DejaVu Sans"
"""It comes with matplotlib."""


@dataclass(frozen=True, slots=True)
class Look:
    """How one thing looks wherever it is drawn.

    Attributes:
        name: what it is called.
        color: of its shape.
        written: of its letters.
        marker: its shape, as matplotlib names it.
        sign: the same among letters.
    """

    name: str
    color: str
    written: str
    marker: str
    sign: str


DECODE: Final = Look("decode step", BLUE, BLUE, "o", "\N{BLACK CIRCLE}")
CHUNK: Final = Look("prefill chunk", ORANGE, "#8F6200", "^", "\N{BLACK UP-POINTING TRIANGLE}")
JOIN: Final = Look("join", GREEN, "#00735A", "P", "\N{HEAVY GREEK CROSS}")
BUCKET: Final = Look("bucket change", PURPLE, "#A03C76", "D", "\N{BLACK DIAMOND}")
COLLECTION: Final = Look("collection", VERMILLION, "#A84A00", "x", "\N{MULTIPLICATION X}")
MARKS: Final[dict[MarkKind, Look]] = {
    "chunk": CHUNK,
    "join": JOIN,
    "bucket": BUCKET,
    "collection": COLLECTION,
}
LINES: Final = (
    (BLUE, BLUE),
    (VERMILLION, COLLECTION.written),
    (GREEN, JOIN.written),
    (PURPLE, BUCKET.written),
    (ORANGE, CHUNK.written),
    (SKY, "#2A7FAF"),
    (SOFT, SOFT),
)
"""Colours of lines that stand for nothing but themselves, and of their names."""


def panel(figure: "Figure", left: float, bottom: float, width: float, height: float) -> "Axes":
    """Return new axes at a place that is told in parts of the figure."""
    axes = figure.add_axes((left, bottom, width, height), facecolor="white")
    axes.grid(False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.tick_params(which="both", labelsize=11, colors=INK, labelfontfamily=FONT)
    return axes


def head(axes: "Axes", pieces: Sequence[tuple[str, str]]) -> None:
    """Write what axes show above them: texts and their colours, the first one is the title."""
    from matplotlib.artist import Artist
    from matplotlib.font_manager import FontProperties
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea

    letters = [_letters(12, {"color": color}) for _, color in pieces]
    letters[0] |= {"fontsize": 13, "weight": "bold"}
    texts: list[Artist] = [
        TextArea(text, textprops=props) for (text, _), props in zip(pieces, letters, strict=True)
    ]
    axes.add_artist(
        AnchoredOffsetbox(
            loc="lower left",
            child=HPacker(children=texts, sep=16, pad=0, align="baseline"),
            bbox_to_anchor=(0, 1.0),
            bbox_transform=axes.transAxes,
            frameon=False,
            borderpad=0.3,
            prop=FontProperties(size=12),
            pad=0,
        )
    )


def name_axes(axes: "Axes", *, x: str | None = None, y: str | None = None) -> None:
    """Write what the axes count and in which unit."""
    if x is not None:
        axes.set_xlabel(x, **_letters(12, {}))
    if y is not None:
        axes.set_ylabel(y, **_letters(12, {}))


def write(
    figure: "Figure", x: float, y: float, text: str, *, size: float, **properties: Any
) -> None:
    """Write a text on the figure, at a place that is told in parts of it."""
    figure.text(x, y, text, **_letters(size, properties))


def note(axes: "Axes", x: float, y: float, text: str, *, size: float = 11, **kind: Any) -> None:
    """Write a text at a place that is told in parts of the axes."""
    axes.text(x, y, text, transform=axes.transAxes, **_letters(size, kind))


def _letters(size: float, properties: dict[str, Any]) -> dict[str, Any]:
    # Texts hold what users wrote: a dollar sign is no formula.
    letters = {"color": INK, "fontfamily": FONT, "parse_math": False, "usetex": False}
    return {**letters, "fontsize": size, **properties}


def label_ends(axes: "Axes", labels: Sequence[tuple[float, str, str]], *, size: float = 11) -> None:
    """Write labels right of the axes, each where its line ends; none lies upon another.

    Args:
        axes: whose limits are set.
        labels: the height at which a line ends (in data), the text and its colour.
        size: of the letters, in points.
    """
    pixels = 1.55 * size * axes.figure.dpi / 72
    wanted = [float(axes.transData.transform((0, y))[1]) for y, _, _ in labels]
    box = axes.get_window_extent()
    places = spread(wanted, pixels, box.y0, box.y1)
    for (y, text, color), place in zip(labels, places, strict=True):
        axes.annotate(
            text,
            xy=(1, y),
            xycoords=axes.get_yaxis_transform(),
            xytext=(1.02, (place - box.y0) / box.height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkB": 0,
            },
            **_letters(size, {"color": color}),
        )


def plain_ticks(axis: Any, *, log: bool, ratio: float = 1.0, whole: bool = False) -> None:
    """Let the ticks of an axis have plain numbers; `ratio` is what a logarithmic one spans.

    `whole`: what it counts has no halves.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if log:
        steps = (1.0, 2.0, 5.0) if ratio < 500 else (1.0,)
        axis.set_major_locator(LogLocator(base=10, subs=steps, numticks=12))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def number(value: float) -> str:
    """Return a number as people write it: three digits that count, no powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def duration(ms: float) -> str:
    """Return milliseconds with the unit that reads best."""
    if 0 < ms < 1:
        return f"{number(1e3 * ms)} µs"
    return f"{number(ms)} ms" if ms < 1000 else f"{number(ms / 1e3)} s"


def plain(text: str) -> str:
    """Return a text on one line, of characters that can be drawn."""
    drawable = text.encode("utf-8", "replace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in drawable).split())
