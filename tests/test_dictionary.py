"""The dictionary's page, and the command that writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.profiling import dictionary

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepgraph.profiling.dictionary", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_name_and_field_is_in_the_tables() -> None:
    tables = dictionary.markdown()
    infos = (dictionary.RANGES, dictionary.MARKS, dictionary.COUNTERS)
    for name, info in ((n, i) for table in infos for n, i in table.items()):
        (line,) = (
            line
            for line in tables.splitlines()
            if line.startswith(f"| `{name}` |") and info.description in line
        )
        assert all(f"`{field.name}`" in tables for field in info.fields)
        if getattr(info, "parent", None):
            assert f"| `{info.parent}` |" in line
    for block in tables.split("\n\n"):
        widths = {line.count("|") for line in block.splitlines()}
        assert len(widths) == 1, "every row has as many cells as its head"


@given(st.text(), st.text(), st.text())
def test_only_what_is_between_the_markers_changes(before: str, between: str, after: str) -> None:
    begin, end = dictionary.BEGIN, dictionary.END
    page = dictionary.replace_tables(f"{before}{begin}{between}{end}{after}")
    assert page == f"{before}{begin}\n\n{dictionary.markdown()}\n\n{end}{after}"
    assert dictionary.replace_tables(page) == page


@pytest.mark.parametrize(
    "page",
    [
        "",
        dictionary.BEGIN,
        dictionary.END,
        dictionary.END + dictionary.BEGIN,
        dictionary.BEGIN + dictionary.BEGIN + dictionary.END,
        dictionary.BEGIN + dictionary.END + dictionary.END,
    ],
)
def test_a_page_without_its_markers_is_refused(page: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the page needs one line .* and behind it one line"):
        dictionary.replace_tables(page)


def test_the_command_prints_the_tables() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (0, dictionary.markdown() + "\n")


def test_the_command_brings_a_page_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Read.\n{dictionary.BEGIN}\noutdated\n{dictionary.END}\nOn.\n")
    assert run(page).returncode == 0
    assert dictionary.markdown() in page.read_text()
    assert "outdated" not in page.read_text()
    assert os.listdir(tmp_path) == ["page.md"]


def test_what_the_command_cannot_do_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no markers")
    (tmp_path / "bytes.md").write_bytes(b"\xff\xfe\x00")
    wrong = (page, tmp_path / "missing.md", tmp_path, tmp_path / "bytes.md")
    for arguments in (*((path,) for path in wrong), (page, page)):
        done = run(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("stepgraph.profiling.dictionary: error: ")
        assert done.stderr.count("\n") == 1
        assert not done.stdout
    assert page.read_text() == "no markers"
    assert sorted(os.listdir(tmp_path)) == ["bytes.md", "page.md"]
