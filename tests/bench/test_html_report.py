"""`stepgraph bench --html`: what a browser gets of measured results, and of hostile ones."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ..rigs.bench_rig import ROOT, measured, run_bench

RANKS = ROOT / "docs" / "results" / "cpu-2x-zen4" / "ranks.json"
SVG = "{http://www.w3.org/2000/svg}"
TAGS = {
    *("html", "meta", "title", "style", "main", "h1", "h2", "p", "div", "section", "article", "b"),
    *("small", "br", "table", "tr", "th", "td", "dl", "dt", "dd", "svg", "path", "text"),
}


class Page(HTMLParser):
    """The text and the elements of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.shown, self.tags, self.attributes = "", set[str](), set[str]()
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.charts = [
            ElementTree.fromstring(chart)
            for chart in re.findall(r"<svg.*?</svg>", self.source, flags=re.DOTALL)
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.shown += data


def drawn(chart: ElementTree.Element, kind: str) -> list[str]:
    """The lines of a kind in a chart."""
    paths = chart.iter(f"{SVG}path")
    return [path.attrib["d"] for path in paths if kind in path.attrib["class"].split()]


@pytest.fixture
def results() -> Any:
    return json.loads(RANKS.read_text())


def render(patch: pytest.MonkeyPatch, folder: Path, results: Any, name: str = "a.html") -> Path:
    (folder / "results.json").write_text(json.dumps(results))
    path = folder / name
    assert run_bench(patch, f"--from-json {folder}/results.json --html {path}") == 0
    return path


def test_report_of_a_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = "--mode eager --batch-size 1 2 --input-len 8 --output-len 6 --num-iters 2"
    document = measured(monkeypatch, tmp_path, f"{flags} --html {tmp_path}/live.html")
    page = Page(tmp_path / "live.html")
    assert page.tags == TAGS
    assert not {"src", "href", "onload"} & page.attributes
    assert "url(" not in page.source
    assert document["environment"]["command"] in page.shown
    for case in document["cases"]:
        assert f"{case['tokens_per_second']:,.1f} tok/s" in page.shown
        assert f"{case['roofline']['fraction']:.0%} of the bandwidth limit" in page.shown
    assert len(page.charts) == 5
    for steps, shares in (page.charts[:2], page.charts[2:4]):
        assert drawn(steps, "dots")[0].count("M") == 2 * 5  # repetitions of 5 steps
        assert len(drawn(shares, "curve")) == 1
    again = render(monkeypatch, tmp_path, document)
    assert again.read_text() == page.source


def test_report_draws_other_runtimes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, results: Any
) -> None:
    """Also from files that lack the single steps of a peer."""
    for case in results["cases"]:
        peer = {"version": "1", "speedup": 2.0, "tokens_equal": None}
        peer |= {key: case[key] for key in ("step_ms", "samples")}
        older = {key: value for key, value in peer.items() if key != "samples"}
        case["baselines"] = [{"name": "fast", **peer}, {"name": "older", **older}]
    page = Page(render(monkeypatch, tmp_path, results))
    *pairs, limits = page.charts
    assert [len(drawn(chart, "curve")) for chart in pairs] == [0, 2] * 4
    assert len(drawn(limits, "bar")) == 3 * 4
    assert "1.00 times stepgraph" in page.shown


def test_report_escapes_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, results: Any
) -> None:
    evil = "\"'><script>alert(1)</script><img src=x onerror=y>&lt;"
    for key, value in results["environment"].items():
        results["environment"][key] = evil if isinstance(value, str) else value
    for case in results["cases"]:
        case |= {key: evil for key, value in case.items() if isinstance(value, str)}
        kept = {key: case[key] for key in ("step_ms", "samples")}
        case["baselines"] = [{"name": evil, "version": evil, **kept, "speedup": 1.0}]
    page = Page(render(monkeypatch, tmp_path, results))
    assert page.tags == TAGS
    assert not {"src", "onerror"} & page.attributes
    assert evil in page.shown
    image = ElementTree.parse(render(monkeypatch, tmp_path, results, "a.svg")).getroot()
    assert {node.tag for node in image.iter()} == {
        f"{SVG}{tag}" for tag in ("svg", "style", "g", "text", "path")
    }


def test_image_has_the_first_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, results: Any
) -> None:
    """The image of the documentation is what the command in its caption draws."""
    path = render(monkeypatch, tmp_path, results, "a.svg")
    assert path.read_text() == (ROOT / "docs" / "images" / "step-times.svg").read_text()
    (dots,) = drawn(ElementTree.parse(path).getroot(), "dots")
    assert dots.count("M") == len(results["cases"][0]["samples"]["step_ms"])


@pytest.mark.parametrize("wrong", [{"roofline": None}, {"samples": {"step_ms": ["x"]}}])
def test_results_that_cannot_be_drawn_are_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    results: Any,
    wrong: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    results["cases"][0] |= wrong
    (tmp_path / "results.json").write_text(json.dumps(results))
    flags = f"--from-json {tmp_path}/results.json --html {tmp_path}/a.html"
    assert run_bench(monkeypatch, flags) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/a.html" in line
    assert not (tmp_path / "a.html").exists()
