"""Engines of several processes follow grammars with the tokens of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import Engine
from stepgraph.runtime.kernels import have_compiler

from ..rigs.engine_rig import loop_of
from ..rigs.parallel_rig import SIZES, children, opened
from ..rigs.speculation_rig import guess
from ..rigs.structured_rig import mixed, run_with_a_failing_grammar
from ..rigs.tiny_models import Tiny
from ..speculation.test_speculation import run_mixed

pytestmark = pytest.mark.native_kernels

Pair = tuple[Engine, Engine]


@contextmanager
def pair_of(directory: Path, **config: Any) -> Iterator[Pair]:
    """A plain engine of one process, and one of two that verifies drafts."""
    config = SIZES | {"structured_output": True, "max_model_len": 128, "buckets": (4,)} | config
    drafts = {"num_speculative_tokens": 3, "adaptive": False}
    with (
        opened(directory, **config) as one,
        opened(directory, 2, **config, speculation=drafts) as two,
    ):
        yield one, two
    assert not children()


def check_equal(pair: Pair) -> None:
    """With the drafts of the engine, and with right and wrong ones."""
    prompts, params = mixed()
    one, two = pair
    expected = run_mixed(one, prompts, params)
    assert run_mixed(two, prompts, params) == expected
    assert two.stats()["speculation"]["accepted"] > 20, "forced text at least"
    speculator = loop_of(two).speculator
    guesses = guess(two, {name: own[0] for name, own in expected.items()}, 0.7)
    assert run_mixed(two, prompts, params) == expected
    loop_of(two).speculator = speculator
    assert guesses.accepted > 20
    assert guesses.rejected > 0
    assert two.stats()["fallbacks"] == 0


@pytest.fixture(scope="module", name="pair")
def make_pair(tiny: Tiny) -> Iterator[Pair]:
    kernels = "native" if have_compiler() else "torch"
    with pair_of(tiny("text").directory, kernels=kernels) as pair:
        yield pair


def test_tokens_of_rows_with_and_without_grammars(pair: Pair) -> None:
    check_equal(pair)


def test_a_failing_grammar_ends_its_request_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for engine in pair:
        with monkeypatch.context() as patched:
            final = run_with_a_failing_grammar(engine, patched)
        found.append([(final[name].token_ids, final[name].finish_reason) for name in sorted(final)])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"kernels": "torch"},
        {"mode": "compile", "kernels": "torch"},
        {"mode": "compile", "kernels": "native"},
        {"num_blocks": 24, "host_cache_bytes": 1 << 20},
    ],
    ids=str,
)
def test_modes(tiny: Tiny, config: dict[str, Any]) -> None:
    if not have_compiler():
        pytest.skip("needs a C++ compiler")
    with pair_of(tiny("text").directory, **config) as pair:
        check_equal(pair)
