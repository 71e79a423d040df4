"""docs/configuration.md and the docstrings it is made of: complete, current and correct."""

from __future__ import annotations

import dataclasses
import math
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import EngineConfig, SamplingParams, ServiceConfig, StepgraphError
from stepgraph.runtime.service.configuration_reference import described_fields, reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
RANGE = re.compile(r"(above )?(-?\d+) to (\d+(?:\^\d+)?(?: - 1)?)")


def test_the_page_is_current() -> None:
    command = "python -m stepgraph.runtime.service.configuration_reference docs/configuration.md"
    assert PAGE.read_text() == reference(), f"run {command}"


@pytest.mark.parametrize("configured", [EngineConfig, SamplingParams, ServiceConfig])
def test_help_describes_every_field(configured: type) -> None:
    text = " ".join(pydoc.render_doc(configured).replace("|", " ").split())
    for name, description in described_fields(configured).items():
        assert f"{name}: {description}" in text


def documented_ranges() -> Iterator[Any]:
    """Class, field, and the lowest and highest values inside and nearest values outside."""
    for configured in (EngineConfig, SamplingParams, ServiceConfig):
        texts = described_fields(configured)
        for field in dataclasses.fields(configured):
            number = str(field.type).split(" | ")[0]
            found = RANGE.search(texts[field.name])
            if number not in ("int", "float") or found is None:
                continue
            low, high = (eval(bound.replace("^", "**")) for bound in found.groups()[1:])
            inside, outside = [low, high], [low - 1, high + 1]
            if number == "float":
                outside = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf)]
            if found[1]:
                inside[0], outside[0] = math.nextafter(low, math.inf), low
            yield pytest.param(configured, field.name, inside, outside, id=field.name)


def test_ranges_are_found() -> None:
    assert len([*documented_ranges()]) >= 20


@pytest.mark.parametrize(("configured", "name", "inside", "outside"), [*documented_ranges()])
def test_a_documented_range_is_the_accepted_one(
    configured: type, name: str, inside: list[float], outside: list[float]
) -> None:
    others = {"max_num_seqs": 1} if name == "max_batch_tokens" else {}
    for value in inside:
        assert getattr(configured(**{name: value}, **others), name) == value
    for value in outside:
        with pytest.raises(StepgraphError):
            configured(**{name: value}, **others)


@pytest.mark.parametrize(
    ("section", "difference"),
    [
        ("rows: how many.", "columns"),
        ("rows: how many.\n    columns: how many.\n    depth: how much.", "depth"),
        ("columns: how many.\n    rows: how many.", "the order"),
    ],
)
def test_a_field_without_description_is_named(section: str, difference: str) -> None:
    made = dataclasses.make_dataclass("Made", [("rows", int), ("columns", int)])
    made.__doc__ = f"Has a size.\n\nAttributes:\n    {section}\n\nRaises:\n    Error: no."
    with pytest.raises(ValueError, match=f"Made's docstring and its fields differ in {difference}"):
        described_fields(made)
