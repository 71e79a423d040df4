"""Engines of several processes verify drafts and follow grammars.

The tokens are those of plain decoding, and the drafts those of one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import Engine
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.scheduling.plan import Proposed

from ..rigs.engine_rig import MIXED_PARAMS, loop_of, parts_of
from ..rigs.mtp_models import IN_PYTORCH
from ..rigs.parallel_rig import SIZES, children, opened
from ..rigs.speculation_rig import guess
from ..rigs.structured_rig import mixed, run_with_a_failing_grammar
from ..rigs.tiny_models import Tiny, TinyModel
from ..speculation.test_drafter_engine import MTP, prompts, speculation
from ..speculation.test_speculation import run_mixed

pytestmark = [
    pytest.mark.native_kernels,
    pytest.mark.filterwarnings("ignore:no native decoder layers"),
]

DRAFTERS = ("draft_model", "eagle3", "eagle3 shared", "dflash", *MTP)
CONFIGS: dict[str, dict[str, Any]] = {
    "torch": {"kernels": "torch"},
    "native": {"kernels": "native"},
    "swapped": {
        "kernels": "native",
        "max_model_len": 64,
        "num_blocks": 11,
        "host_cache_bytes": 1 << 20,
    },
    "compiled": {"kernels": "torch", "mode": "compile", "buckets": (4,)},
    "cache in 8 bits": {"kernels": "native", "kv_dtype": "int8"},
}


def proposals(engine: Engine) -> list[Proposed]:
    """The drafts of each step, and their probabilities, from now on."""
    found: list[Proposed] = []
    runner = loop_of(engine).runner
    read = runner.read_drafts

    def watched(step: Any) -> Any:
        proposed = list(read(step))
        found.extend(proposed)
        return proposed

    runner.read_drafts = watched  # type: ignore[method-assign]
    return found


def check_memory(engine: Engine) -> None:
    """A rank plans for the whole drafter, besides its part of the model."""
    parts = parts_of(engine)
    drafter, terms = parts.runner.drafter, parts.plan.terms
    assert drafter is not None
    assert terms["weights"] == parts.model.weight_bytes + drafter.drafter.weight_bytes
    assert terms["cache"] == parts.runner.arena.nbytes + drafter.arena.nbytes


def check_equal(
    base: TinyModel,
    directory: Path,
    kind: str,
    config: dict[str, Any],
    *,
    plain_ranks: int = 2,
    times: int = 2,
) -> None:
    """The tokens of plain decoding, and the drafts of one process; the second time prompts are
    cached."""
    target, fields = speculation(kind, base, directory)
    if config.get("mode") == "compile":  # code of its own for each number of drafts
        fields["num_speculative_tokens"] = 1
    drafts: list[list[Proposed]] = []
    accepted = []
    with opened(target, plain_ranks, **config) as plain:
        expected = run_mixed(plain, prompts(target), MIXED_PARAMS)
    for ranks in (1, 2):
        with opened(target, ranks, **config, speculation=fields) as engine:
            check_memory(engine)
            drafts.append(proposals(engine))
            for _ in range(times):
                assert run_mixed(engine, prompts(target), MIXED_PARAMS) == expected, ranks
            stats = engine.stats()
            accepted.append(stats["speculation"]["accepted"])
            assert stats["fallbacks"] == 0
            assert stats["speculation"]["drafted"] > 50
            assert times == 1 or stats["cache"]["hit_tokens"] > 0
            assert bool(stats["cache"]["swapped_in"]) == ("host_cache_bytes" in config)
    assert not children()
    assert accepted[0] == accepted[1]
    assert len(drafts[0]) == len(drafts[1])
    # The rounding of sums can change how a key or value is stored in 8 bits.
    error = 2e-2 if "kv_dtype" in config else 1e-3
    for ours, theirs in zip(*drafts, strict=True):
        assert (ours.request.id, ours.drafts) == (theirs.request.id, theirs.drafts)
        assert ours.probabilities == pytest.approx(theirs.probabilities, abs=error)
    assert kind.startswith(("eagle3", "dflash")) or accepted[0] > 20


def test_head_that_shares_embedding_and_output_projection(base: TinyModel, tmp_path: Path) -> None:
    check_equal(base, tmp_path, "eagle3 shared", CONFIGS["native"], plain_ranks=1, times=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *itertools.product(DRAFTERS, ("torch", "native", "swapped")),
        ("eagle3 shared", "compiled"),
        ("dflash", "cache in 8 bits"),
    ],
)
def test_every_drafter(base: TinyModel, kind: str, config: str, tmp_path: Path) -> None:
    fields = CONFIGS[config]
    if not have_compiler():
        pytest.skip("needs a C++ compiler")
    if kind.removeprefix("mtp ") in IN_PYTORCH and fields["kernels"] == "native":
        fields = fields | {"kernels": "auto"}  # there are no layers in C++
    if kind.startswith("mtp mimo") and "num_blocks" in fields:
        fields = fields | {"num_blocks": 25}  # of three layer groups
    check_equal(base, tmp_path, kind, fields)


@pytest.mark.slow
def test_outputs_with_a_grammar(tiny: Tiny) -> None:
    """Rows with a grammar verify forced text, and others what the drafter proposes."""
    directory = tiny("text").directory
    config: dict[str, Any] = {"structured_output": True, "max_model_len": 128}
    drafter = {"method": "draft_model", "model": str(directory), "adaptive": False}
    requests, params = mixed()
    with opened(directory, 2, **config) as plain:
        expected = run_mixed(plain, requests, params)
    with opened(directory, 2, **config, speculation=drafter) as engine:
        assert run_mixed(engine, requests, params) == expected
        stats = engine.stats()["speculation"]
        assert stats["proposing_steps"] > 5
        assert stats["accepted"] > 20


# Grammars -----------------------------------------------------------------------------------------


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


def check_grammars(pair: Pair) -> None:
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
    check_grammars(pair)


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
def test_grammars_in_every_mode(tiny: Tiny, config: dict[str, Any]) -> None:
    if not have_compiler():
        pytest.skip("needs a C++ compiler")
    with pair_of(tiny("text").directory, **config) as pair:
        check_grammars(pair)
