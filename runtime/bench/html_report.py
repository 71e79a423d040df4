"""Results of `--scenario steady` as an HTML page, or the steps of its first case as an SVG image.

The page loads nothing, follows the color scheme of the reader, and prints. Charts are drawn in
units of `WIDTH` and scale with the page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ...profiling.atomic_write import write_file
from .comparison import KEYS, ResultsError
from .results import MACHINE, notes, table_rows, warnings

Entry = Mapping[str, Any]

WIDTH, HEIGHT = 480, 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 470, 32, 204
"""Of a chart, without its title and the labels of its axes."""
_CUT = 2.0
"""Charts end at this multiple of the median or behind p99; longer steps are drawn at the end."""
_COLORS = ("#2158d6,#84abff", "#b45309,#f0a04b", "#0f7b5f,#4fc9a4", "#8b35b8,#cf8ff2")
"""Of the series, in light and in dark; they repeat."""

_CHART_STYLE = """
:root{color-scheme:light dark;--paper:light-dark(#fff,#14171b);--ink:light-dark(#181c20,#e6e9ed);
--soft:light-dark(#5b6570,#9aa4af);--rule:light-dark(#dfe3e8,#323942)}svg{background:var(--paper)}
text{font:12px system-ui,sans-serif;fill:var(--soft);paint-order:stroke;stroke:var(--paper);
stroke-width:4px}text.title{font-weight:600;fill:var(--ink)}.end{text-anchor:end}
.mid{text-anchor:middle}path{fill:none;stroke:var(--rule);stroke-linecap:round}
path.limit{stroke:var(--ink);stroke-dasharray:4 3}.floor{stroke:var(--ink);stroke-width:2}
.curve{stroke-width:2}.dots{stroke-width:3.5;stroke-opacity:.55}.mark{stroke-width:7}
.bar,.tail{stroke-width:9;stroke-linecap:butt}.tail{stroke-opacity:.3}
"""
_CHART_STYLE += "".join(
    f"path.s{i}{{stroke:light-dark({c})}}text.s{i}{{fill:light-dark({c})}}"
    for i, c in enumerate(_COLORS)
)
_PAGE_STYLE = """
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:auto;padding:32px 20px}svg{display:block;width:100%;height:auto}
h1{font-size:26px;margin:0}h2{font-size:17px;margin:36px 0 12px}p{margin:4px 0}
.soft,th,dt,small{color:var(--soft);font-weight:400}small{font-size:14px}
.warn{border-left:3px solid light-dark(#b3400f,#ffa277);padding-left:12px;margin-top:14px}
.cards{display:grid;gap:16px;grid-template-columns:repeat(auto-fill,minmax(230px,1fr))}
article{background:light-dark(#f6f7f9,#1c2026);border-radius:8px;padding:14px 16px}
article b{display:block;font-size:32px;line-height:1.25}.pair{display:grid;gap:16px 40px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr))}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;width:100%}th,td{padding:5px 14px 5px 0;
border-bottom:1px solid var(--rule);text-align:left;white-space:nowrap}
dl{display:grid;gap:2px 20px;margin:0;grid-template-columns:max-content 1fr;font-size:13px}
dd{margin:0;overflow-wrap:anywhere}
@media print{:root{color-scheme:light}section,article,svg,tr{break-inside:avoid}main{padding:0}
.pair{grid-template-columns:1fr 1fr}.scroll{overflow:visible}table{font-size:8px}
th,td{white-space:normal;padding-right:6px}}
"""
_PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';style-src 'unsafe-inline'">
<style>{style}</style><main>
{body}
</main></html>
"""


def write_report(path: Path, document: Entry) -> None:
    """Write results as a page, or as an image if the name of the file ends in `.svg`.

    Raises:
        ResultsError: the document lacks a value; results of other versions may.
        WriteError: the file cannot be written.
    """
    try:
        text = (step_image if path.suffix == ".svg" else report_page)(document)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} cannot be drawn, {error!r:.80}: measure again") from error
    write_file(path, text)


def report_page(document: Entry) -> str:
    """Return the HTML page of a document that has at least one case of steady."""
    cases, environment = document["cases"], document["environment"]
    shared, rows = table_rows(document)
    models = ", ".join(dict.fromkeys(case["model"] for case in cases))
    named = [(_name(row), case) for row, case in zip(rows, cases, strict=True)]
    facts = {key: ", ".join(dict.fromkeys(str(case.get(key)) for case in cases)) for key in KEYS}
    facts |= {peer["name"]: str(peer["version"]) for case in cases for peer in case["baselines"]}
    facts |= {name: str(v) for name, v in environment.items() if isinstance(v, str | int)}
    about = [shared.removeprefix(f"{models}, "), MACHINE.format_map(environment)]
    body = [
        f"<h1>{escape(models)}</h1>{_tags('p class=soft', about)}",
        _tags("p class=warn", warnings(document)),
        '<h2>Decode steps</h2><div class="cards">',
        *(_card(name, case) for name, case in named),
        f"</div>{_tags('p class=soft', notes(document))}",
    ]
    for name, case in named:
        pair = f'<div class="pair">{_steps(case)}{_distribution(case)}</div>'
        body.append(f"<section><h2>{escape(name)}</h2>{pair}</section>")
    body += [
        f'<h2>All cases</h2><div class="scroll"><table><tr>{_tags("th", rows[0])}',
        *(f"<tr>{_tags('td', row.values())}" for row in rows),
        f'</table></div><h2>Limits and environment</h2><div class="pair">{_limits(named)}<dl>',
        *(f"{_tags('dt', [name])}{_tags('dd', [value])}" for name, value in facts.items()),
        "</dl></div>",
    ]
    style = _CHART_STYLE + _PAGE_STYLE
    return _PAGE.format(title=escape(f"{models}: decode steps"), style=style, body="\n".join(body))


def step_image(document: Entry) -> str:
    """Return an SVG image: the steps of the first case over time, and their distribution."""
    (case, *_), (shared, rows) = document["cases"], table_rows(document)
    about = "; ".join([shared, _name(rows[0]), MACHINE.format_map(document["environment"])])
    parts = [f"<style>{_CHART_STYLE}</style>"]
    for x, chart in (0, _steps(case)), (WIDTH + 30, _distribution(case)):
        parts.append(f'<g transform="translate({x} 28)">{chart}</g>')
    return _svg(about, parts, HEIGHT + 28, 2 * WIDTH + 30)


def _tags(tag: str, texts: Iterable[str]) -> str:
    """Return an element for each text, of a kind without end tags in HTML."""
    return "".join(f"<{tag}>{escape(text)}" for text in texts)


def _name(row: Mapping[str, str]) -> str:
    """Return what distinguishes a case from the others, by its row of the table."""
    heads = itertools.takewhile(lambda head: head != "tok/s", row)
    return ", ".join(
        row[head] if head in ("model", "dtype", "mode") else f"{head} {row[head]}" for head in heads
    )


def _number(value: float) -> str:
    """Return a value with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _card(name: str, case: Entry) -> str:
    steps, share = case["step_ms"], case["roofline"]["fraction"]
    tails = [f"{p} {_number(steps[p])} ms" for p in ("p90", "p99") if steps[p] is not None]
    return (
        f"<article>{escape(name)}<b>{_number(steps['p50'])} <small>ms a token</small></b>"
        f"{' · '.join(tails)}<br>{case['tokens_per_second']:,.1f} tok/s<br>"
        f"{share:.0%} of the bandwidth limit</article>"
    )


def _series(case: Entry) -> list[tuple[str, str, Entry]]:
    """Return the name, the color and the values of what was measured: ours, then of peers."""
    measured = [("stepgraph", case), *((peer["name"], peer) for peer in case["baselines"])]
    return [(name, f"s{i % len(_COLORS)}", entry) for i, (name, entry) in enumerate(measured)]


def _longest(entries: Iterable[Entry]) -> float:
    """Return the longest step that a chart has room for."""
    each: list[dict[str, float]] = [entry["step_ms"] for entry in entries]
    return max(min(s["max"], max(_CUT * s["p50"], 1.1 * (s["p99"] or 0))) for s in each)


def _axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return a linear scale from values to units of a chart."""
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def _ticks(low: float, high: float) -> list[float]:
    """Return up to six round values."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(
        size for size in (power, 2 * power, 5 * power, 10 * power) if 5 * size >= high - low
    )
    return [n * step for n in range(math.ceil(low / step), int(high / step) + 1)]


def _svg(title: str, parts: Iterable[str], height: int = HEIGHT, width: int = WIDTH) -> str:
    """Return an SVG element; a style sheet may change its width and height."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
    content = _text(0, 14, title, "title") + "".join(parts)
    return f'{head} aria-label="{escape(title)}">{content}</svg>'


def _text(x: float, y: float, text: str, kind: str = "", turn: int = 0) -> str:
    at = f'transform="translate({x} {y}) rotate({turn})"'
    return f'<text {at} class="{kind}">{escape(text)}</text>'


def _path(kind: str, steps: str) -> str:
    return f'<path class="{kind}" d="{steps}"/>'


def _across(y: float, text: str) -> str:
    return _path("", f"M{_LEFT} {y}H{_RIGHT}") + _text(_LEFT - 6, y + 4, text, "end")


def _steps(case: Entry) -> str:
    """Draw all steps in the order of their measurement."""
    steps, repetitions = case["samples"]["step_ms"], len(case["repetition_ms"])
    most, floor, size = _longest([case]), case["roofline"]["floor_ms"], len(steps) / repetitions
    highest = 1.15 * max(most, floor)
    x, y = _axis(0, len(steps), _LEFT, _RIGHT), _axis(0, highest, _BOTTOM, _TOP)
    parts = [_across(y(tick), f"{tick:g}") for tick in _ticks(0, highest)]
    for number in range(repetitions):
        parts.append(_path("", f"M{x((number + 1) * size)} {_BOTTOM}v5"))
        parts.append(_text(x((number + 0.5) * size), _BOTTOM + 18, str(number + 1), "mid"))
    dots = (f"M{x(i + 0.5)} {y(min(ms, most))}h0" for i, ms in enumerate(steps))
    parts.append(_path("dots s0", "".join(dots)))
    p50, below = case["step_ms"]["p50"], min(y(floor) + 15, _BOTTOM - 6)
    for kind, value in ("s0", p50), ("limit", floor):
        parts.append(_path(kind, f"M{_LEFT} {y(value)}H{_RIGHT}"))
    parts.append(_text(_RIGHT, y(p50) - 6, f"p50 {_number(p50)}", "s0 end"))
    parts.append(_text(_LEFT + 4, below, f"bandwidth limit {_number(floor)}"))
    if over := [ms for ms in steps if ms > most]:
        text = f"at the top: {len(over)} of up to {_number(max(over))} ms"
        parts.append(_text(_RIGHT, _TOP - 4, text, "end"))
    return _svg("Time of each step in ms, by repetition", parts)


def _distribution(case: Entry) -> str:
    """Draw the cumulative distribution of the steps, also of other runtimes where it is known."""
    series = [one for one in _series(case) if "samples" in one[2]]
    floor = case["roofline"]["floor_ms"]
    least = min(floor, *(entry["step_ms"]["min"] for *_, entry in series))
    most = max(floor, _longest(entry for *_, entry in series))
    # Room for the labels of the limit and of p99.
    lowest, highest = least - 0.12 * (most - least), most + 0.25 * (most - least)
    x, y = _axis(lowest, highest, _LEFT, _RIGHT), _axis(0, 100, _BOTTOM, _TOP)
    parts = [_across(y(percent), f"{percent} %") for percent in (0, 50, 90, 100)]
    parts += [_text(x(t), _BOTTOM + 18, f"{t:g}", "mid") for t in _ticks(lowest, highest)]
    parts.append(_path("limit", f"M{x(floor)} {_BOTTOM}V{_TOP}"))
    parts.append(_text(x(floor) - 5, _BOTTOM - 8, "bandwidth limit", turn=-90))
    for number, (name, color, entry) in enumerate(series, 1 - len(series)):
        ordered = sorted(entry["samples"]["step_ms"])
        shares = (y(100 * (i + 1) / len(ordered)) for i in range(len(ordered)))
        points = zip((x(min(ms, highest)) for ms in ordered), shares, strict=True)
        line = "".join(f"H{at}V{share}" for at, share in points)
        parts.append(_path(f"curve {color}", f"M{x(ordered[0])} {_BOTTOM}{line}"))
        if len(series) > 1:
            parts.append(_text(_RIGHT, _BOTTOM - 8 + 16 * number, name, f"end {color}"))
    for percent in (50, 90, 99):
        if (value := case["step_ms"][f"p{percent}"]) is not None:
            parts.append(_path("mark s0", f"M{x(value)} {y(percent)}h0"))
            text = f"p{percent} {_number(value)} ms"
            parts.append(_text(x(value) + 7, y(percent) + 13, text, "s0"))
    return _svg("Share of steps that take at most this many ms", parts)


def _limits(named: list[tuple[str, Entry]]) -> str:
    """Draw the steps of all cases and runtimes, and the least time that the bandwidth allows."""
    bars = [(name, case, *one) for name, case in named for one in _series(case)]
    ends = [case["roofline"]["floor_ms"] for _, case in named]
    ends += [entry["step_ms"]["p90"] or entry["step_ms"]["p50"] for *_, entry in bars]
    x, parts = _axis(0, max(ends), 0, _RIGHT), []
    for number, (name, case, runtime, color, entry) in enumerate(bars):
        y, found, steps = 40 + 36 * number, case["roofline"], entry["step_ms"]
        p50, p90 = steps["p50"], steps["p90"] or steps["p50"]
        note = f"{_number(p50)}, {p50 / case['step_ms']['p50']:.2f} times stepgraph"
        if entry is case:
            read = f"{found['bytes_per_step'] / 1e6:,.0f} MB"
            runtime, note = name, f"{_number(p50)} for {read}: {found['fraction']:.0%}"
        parts += [_text(0, y, runtime), _text(_RIGHT, y, note, "end")]
        parts.append(_path(f"tail {color}", f"M0 {y + 11}H{x(p90)}"))
        parts.append(_path(f"bar {color}", f"M0 {y + 11}H{x(p50)}"))
        parts.append(_path("floor", f"M{x(found['floor_ms'])} {y + 3}v16"))
    title = "Step in ms: p50, p90 in pale; line: bandwidth limit"
    return _svg(title, parts, 40 + 36 * len(bars))
