"""The command that times steps with and without batch-invariant mode, on the demo model."""

from __future__ import annotations

import re

import pytest
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.tools.batch_invariance_cost import main


@pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")
def test_each_time_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--rounds", "1", "--prefill", "40"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^\| [\w ,]+ \| [\d.]+ \| [\d.]+ \|", printed, flags=re.MULTILINE)) == 3


def test_a_model_that_is_refused_ends_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--dtype", "float16"]) == 1
    assert "batch_invariant=True does not support dtype='float16'" in capsys.readouterr().err
