"""Which causal language models of transformers run here, and the table of them in docs/models.md.

python -m tests.rigs.model_matrix docs/models.md

The command builds a small model of every class (`causal_models`) and starts engines on it; it takes
about five minutes. The slow tests compare tokens and logits with transformers.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import transformers
from stepgraph.runtime import Engine, EngineConfig, StepgraphError

from .causal_models import MODEL_TYPES, UnbuildableError, save_small_model

__all__ = ["IMPLEMENTATIONS", "Row", "replaced", "row_of", "start", "table"]

IMPLEMENTATIONS = ("native", "transformers")
START, END = "<!-- table -->", "<!-- end of table -->"
_MOST_REASON = 160


class Row(NamedTuple):
    """How the models of a type run."""

    model_type: str
    runs_as: tuple[str, ...]
    """Of `IMPLEMENTATIONS`."""
    reason: str = ""
    """Why it does not run."""


def start(directory: Path, implementation: str, mode: str = "eager") -> Engine:
    """Start an engine in float32; raises `StepgraphError` if it does not run the checkpoint."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        mode=mode,
        model_impl=implementation,
        max_num_seqs=3,
        max_model_len=100,
        block_size=4,
        prefill_chunk=13,
    )
    return Engine.from_pretrained(directory, config, progress=False)


def row_of(model_type: str, directory: Path) -> Row:
    """Build a small model in a directory and return how it runs."""
    try:
        save_small_model(model_type, directory)
    except UnbuildableError as error:
        return Row(model_type, (), f"not tried: {error}")
    refused: dict[str, StepgraphError] = {}
    for name in IMPLEMENTATIONS:
        try:
            start(directory, name).close()
        except StepgraphError as error:
            refused[name] = error
    runs_as = tuple(name for name in IMPLEMENTATIONS if name not in refused)
    return Row(model_type, runs_as, "" if runs_as else _reason(refused["transformers"]))


def _reason(error: StepgraphError) -> str:
    """Return the part of a message that says what was found."""
    text = " ".join(str(error).split())
    text = re.sub(r".* of transformers cannot [^:]*: ", "", text)
    text = re.sub(r"\. model_impl=.*|[;.] [uU]se transformers itself.*", "", text)
    text = re.sub(r"FakeTensor\([^()]*(\([^()]*\)[^()]*)*\)", "a tensor", text)
    text = re.sub(r" by [\d.e+-]+ standard deviations.*", "", text)
    text = re.sub(r"\S*/config\.json: ", "", text).replace("|", "\\|")
    return text if len(text) <= _MOST_REASON else text[: _MOST_REASON - 3] + "..."


def table(rows: Iterable[Row]) -> str:
    """Return the section of the page between `START` and `END`."""
    rows = sorted(rows)
    runs = [row for row in rows if row.runs_as]
    native = sum("native" in row.runs_as for row in runs)
    lines = [
        f"Of the {len(rows)} model types of transformers {transformers.__version__}, {len(runs)}"
        f" run here, {native} of them as native families.",
        "",
        "| model type | class | native | transformers |",
        "|---|---|:-:|:-:|",
    ]
    for row in runs:
        marks = " | ".join("yes" if name in row.runs_as else "" for name in IMPLEMENTATIONS)
        lines.append(f"| `{row.model_type}` | {MODEL_TYPES[row.model_type]} | {marks} |")
    lines += ["", "| refused | class | reason |", "|---|---|---|"]
    for row in rows:
        if not row.runs_as:
            lines.append(f"| `{row.model_type}` | {MODEL_TYPES[row.model_type]} | {row.reason} |")
    return "\n".join([START, *lines, END])


def replaced(page: str, section: str) -> str:
    """Return the page with another table."""
    before, _, rest = page.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {START} and {END}")
    return before + section + after


def _main(path: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model_type in MODEL_TYPES:
            rows.append(row_of(model_type, Path(scratch, model_type)))
            print(*rows[-1], file=sys.stderr)
    path.write_text(replaced(path.read_text(), table(rows)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
