"""The command that times reload and wake, on the demo model."""

from __future__ import annotations

import re

import pytest
from stepgraph.runtime.tools.reload_times import main

FLAGS = ["--mode", "eager", "--rounds", "1", "--memory-tokens", "512"]


def test_each_time_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--other", "preset:smollm2-135m", *FLAGS]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^\| `[\w ]+` \| \d+\.\d s \|", printed, flags=re.MULTILINE)) == 3


def test_a_model_of_the_same_config_measures_no_new_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--other", "demo", *FLAGS]) == 1
    assert "demo has the config of demo: give another model" in capsys.readouterr().err
