"""`generation_config.json` sets the parameters that a request leaves out."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stepgraph.runtime.demo
from stepgraph.runtime import SamplingParams
from stepgraph.runtime.loading.checkpoint import read_sampling_defaults
from stepgraph.runtime.sampling_params import SamplingDefaults

from ..rigs.engine_rig import opened

DEMO = Path(stepgraph.runtime.demo.__path__[0])
PROMPT = "def main("
SEEDS = range(4)
WIDE = {"max_tokens": 6, "ignore_eos": True}

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes the demo checkpoint with more keys in its `generation_config.json`."""

    def made(**more: Any) -> Path:
        for path in DEMO.iterdir():
            if path.suffix in (".json", ".safetensors") and path.stem != "generation_config":
                (tmp_path / path.name).symlink_to(path)
        config = json.loads((DEMO / "generation_config.json").read_text())
        (tmp_path / "generation_config.json").write_text(json.dumps(config | more))
        return tmp_path

    return made


def texts(source: Path, config: str = "auto", **fields: Any) -> list[str]:
    """The texts of some seeds, with these fields alone."""
    with opened(source, max_model_len=64, generation_config=config) as engine:
        params = [SamplingParams(**WIDE, **fields, seed=seed) for seed in SEEDS]
        outputs = engine.generate([PROMPT] * len(params), params)
    return [output.text for output in outputs]


def test_generation_config_applies_to_fields_that_are_left_out(make: Make) -> None:
    source = make(top_k=1, temperature=0.9)
    greedy = texts(source, temperature=0.0, top_k=0)
    assert texts(source) == greedy
    assert texts(source, top_k=0, temperature=2.0) != greedy
    assert texts(source, config="none") != greedy


def test_generation_config_without_sampling_is_greedy(make: Make) -> None:
    assert read_sampling_defaults(make(do_sample=False, temperature=0.9)).temperature == 0.0


def test_generation_config_limits_tokens_unless_the_request_does(make: Make) -> None:
    source = make(max_new_tokens=3)
    with opened(source, max_model_len=64) as engine:
        assert engine.sampling_defaults.max_tokens == 3
        for fields, expected in (({}, 3), ({"max_tokens": 5}, 5), ({"min_tokens": 7}, 7)):
            (output,) = engine.generate(PROMPT, SamplingParams(ignore_eos=True, **fields))
            assert len(output.token_ids) == expected


def test_generation_config_values_that_are_invalid_are_ignored(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {"temperature": "hot", "top_p": 7, "top_k": True, "min_p": -1, "do_sample": "yes"}
    source = make(**wrong, repetition_penalty=1.1, max_new_tokens=None)
    with caplog.at_level(logging.WARNING, "stepgraph.runtime"):
        assert read_sampling_defaults(source) == SamplingDefaults(repetition_penalty=1.1)
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in wrong)
