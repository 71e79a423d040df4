"""What fields of configurations allow: docs/configuration.md, constructors and flags agree."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import EngineConfig, SamplingParams, ServiceConfig, StepgraphError
from stepgraph.runtime.arguments import allowed_values
from stepgraph.runtime.config import Speculation
from stepgraph.runtime.service.configuration_reference import reference
from stepgraph.runtime.tools.arguments import add_config_flags, config_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    command = "python -m stepgraph.runtime.service.configuration_reference docs/configuration.md"
    assert PAGE.read_text() == reference(), f"run {command}"


def ranges() -> Iterator[Any]:
    """Class, field, and the lowest and highest values inside and nearest values outside."""
    for configured in (EngineConfig, Speculation, SamplingParams, ServiceConfig):
        for name, allowed in allowed_values(configured).items():
            if allowed.range is None or allowed.kind not in (int, float):
                continue
            low, high = allowed.range.low, allowed.range.high
            inside, outside = [low, high], [low - 1, high + 1]
            if allowed.kind is float:
                outside = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf), math.nan]
            if allowed.range.above:
                inside[0], outside[0] = math.nextafter(low, math.inf), low
            yield pytest.param(configured, name, inside, outside, id=name)


STORED_AS = {("top_k", -1): 0, ("top_p", 0): 1.0, ("seed", -1): None}


@pytest.mark.parametrize(("configured", "name", "inside", "outside"), [*ranges()])
def test_a_range_is_what_the_constructor_accepts(
    configured: type, name: str, inside: list[float], outside: list[float]
) -> None:
    others = {"max_num_seqs": 1} if name == "max_batch_tokens" else {}
    for value in inside:
        expected = STORED_AS.get((name, value), value)
        assert getattr(configured(**{name: value}, **others), name) == expected
    for value in (*outside, True, "1", [1], 1j, 10**5000):
        with pytest.raises(StepgraphError) as raised:
            configured(**{name: value}, **others)
        assert name in str(raised.value)
        assert len(str(raised.value)) < 300


def test_flags_read_what_fields_allow() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_config_flags(parser, EngineConfig, defaults={})
    for name, allowed in allowed_values(EngineConfig).items():
        flag = f"--{name.replace('_', '-')}"
        if allowed.kind is bool:
            config = config_of(EngineConfig, parser.parse_args([flag]))
            assert getattr(config, name) is True
        for choice in allowed.choices:
            config = config_of(EngineConfig, parser.parse_args([flag, choice]))
            assert getattr(config, name) == choice
        if allowed.range is not None and allowed.kind in (int, float):
            with pytest.raises(argparse.ArgumentError):
                parser.parse_args([flag, str(allowed.range.high * 2)])
