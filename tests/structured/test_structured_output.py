"""Outputs follow their grammar, in every mode, and rows without one are not affected."""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stepgraph.runtime import (
    ConfigError,
    Engine,
    GrammarError,
    RequestError,
    SamplingParams,
)
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.models.resolved_config import resolve_masks

from ..execution.test_graph_mode import check_captured, open_both, open_captured  # noqa: F401
from ..rigs.engine_rig import Open, opened, shown
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.structured_rig import (
    GRAMMARS,
    PROMPTS,
    ll_tokenizer,
    mixed,
    reference,
    run_with_a_failing_grammar,
)
from ..rigs.tiny_models import EOS_TOKEN_IDS, Tiny

pytestmark = pytest.mark.native_kernels

EOS = (2, *EOS_TOKEN_IDS)  # that of config.json, and those of generation_config.json


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Iterator[Engine]:
    kernels = "native" if have_compiler() else "torch"
    with opened(tiny("text").directory, structured_output=True, kernels=kernels) as engine:
        yield engine
        engine.check_integrity()


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "temperature": 0.0, **more})


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[list[int]]:
    """Reference outputs of the prompts: with a grammar each, and then without."""
    model = tiny("text")
    tokenizer = ll_tokenizer(model.directory, model.reference.config.vocab_size, EOS)
    return [
        reference(model.reference, tokenizer, prompt, grammar, 40, EOS)
        for prompt, grammar in [
            *zip(PROMPTS, GRAMMARS, strict=True),
            *((prompt, None) for prompt in PROMPTS),
        ]
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"kernels": "torch"},
        {"mode": "compile"},
        {"kernels": "native"},
        pytest.param({"mode": "compile", "kernels": "torch"}, marks=pytest.mark.slow),
        {"num_blocks": 14, "block_size": 4, "prefill_chunk": 4},
        {"num_blocks": 14, "block_size": 4, "host_cache_bytes": 1 << 20},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("full", [False, True])
def test_greedy_tokens_are_those_of_masked_logits(
    open_engine: Open, expected: list[list[int]], config: dict[str, Any], full: bool
) -> None:
    more = {"logprobs": 2} if full else {}
    engine = open_engine("text", structured_output=True, **({"max_num_seqs": 5} | config))
    outputs = engine.generate(
        PROMPTS * 2,
        [
            *(greedy(structured=grammar, **more) for grammar in GRAMMARS),
            *(greedy(**more) for _ in PROMPTS),
        ],
    )
    engine.check_integrity()
    assert [list(output.completions[0].token_ids) for output in outputs] == expected
    if "num_blocks" in config:
        assert engine.stats()["preemptions"] > 0
    assert engine.stats()["fallbacks"] == 0


def test_log_probabilities_are_those_after_the_mask(engine: Engine) -> None:
    params = greedy(structured={"regex": "[ab]c"}, logprobs=5)
    (output,) = engine.generate([PROMPTS[0]], params)
    first = output.completions[0].logprobs[0]
    assert math.isclose(sum(math.exp(value) for value in first.top.values()), 1.0, abs_tol=1e-3)
    last = output.completions[0].logprobs[-1]
    assert set(last.top) <= set(EOS)


def test_completions_have_grammars_of_their_own(engine: Engine) -> None:
    params = SamplingParams(max_tokens=60, n=4, seed=1, structured={"regex": "[a-z]{1,9}#"})
    (output,) = engine.generate([PROMPTS[0]], params)
    texts = [completion.text for completion in output.completions]
    assert len(set(texts)) > 1
    assert all(text.endswith("#") for text in texts)


@pytest.mark.parametrize(
    ("structured", "fields", "text"),
    [
        ({"choice": ["abc"]}, {"ignore_eos": True}, "abc"),  # complete, and the end is forbidden
        ({"choice": ["abc"]}, {"ignore_eos": True, "logprobs": 0}, "abc"),
        ({"choice": ["abc"]}, {"min_tokens": 30}, "abc"),
        ({"choice": ["abc"]}, {"min_tokens": 30, "logprobs": 0}, "abc"),
        ({"choice": ["one two three"]}, {"stop": " two"}, "one"),
        ({"regex": "[a-z]*"}, {"min_tokens": 20, "temperature": 1.0, "seed": 2}, "[a-z]{20,}"),
    ],
    ids=str,
)
def test_where_an_output_ends(
    engine: Engine, structured: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    params = greedy(structured=structured, **fields)
    (output,) = engine.generate([PROMPTS[0]], params)
    (completion,) = output.completions
    assert re.fullmatch(text, completion.text)
    if "choice" in structured:
        assert completion.finish_reason == "stop"
        assert not set(completion.token_ids) & set(EOS)
    assert len(completion.token_ids) >= (20 if "regex" in structured else 1)


def test_a_failing_grammar_ends_its_request_alone(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    final = run_with_a_failing_grammar(engine, monkeypatch)
    assert list(final["good"].completions[0].token_ids) == expected[0]
    assert list(final["plain"].completions[0].token_ids) == expected[len(PROMPTS) + 2]
    bad = final["bad"].completions[0]
    assert bad.finish_reason == "error"
    assert list(bad.token_ids) == expected[1][:2]


def test_refusals(open_engine: Open) -> None:
    structured = greedy(structured={"regex": "a"})
    without = open_engine("text", structured_output=False)
    for engine in (without, open_engine("base", structured_output=True)):
        with pytest.raises(RequestError) as refused:
            engine.add_request([5], structured)
        assert refused.value.field == "structured"
    for field, value in (("allowed_token_ids", [1]), ("bad_words", ["a"])):
        with pytest.raises(RequestError) as refused:
            without.add_request([5], greedy(**{field: value}))
        assert refused.value.field == field
    engine = open_engine("text", structured_output=True)
    with pytest.raises(GrammarError) as invalid:
        engine.add_request([5], greedy(structured={"regex": "(a"}))
    assert invalid.value.field == "structured"
    good, bad = engine.generate([[5], [5]], [structured, greedy(structured={"regex": "(a"})])
    assert good.completions[0].text == "a"
    assert isinstance(bad.error, GrammarError)


def test_masks_are_on_by_default_on_a_cpu_and_need_no_package(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        engine = open_engine("text")
        (plain,) = engine.generate([[5]], greedy(max_tokens=4))
        allowed = sorted(set(plain.completions[0].token_ids))[:1]
        (only,) = engine.generate([[5]], greedy(allowed_token_ids=allowed, max_tokens=4))
        assert set(only.completions[0].token_ids) == set(allowed)
        with pytest.raises(RequestError) as missing:
            engine.add_request([5], greedy(structured={"regex": "a"}))
        assert missing.value.field == "structured"
        with pytest.raises(ConfigError) as refused:
            open_engine("text", structured_output=True)
        assert refused.value.field == "structured_output"
    (found,) = engine.generate([[5]], greedy(structured={"regex": "abc"}))
    assert found.completions[0].text == "abc"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("given", [None, True, False])
def test_masks_are_off_by_default_where_they_cost_others(given: bool | None) -> None:
    config = EngineConfig(structured_output=given)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_masks(config, cpu, "eager", "torch") is (given is not False)
    assert resolve_masks(config, cpu, "compile", "auto") is (given is not False)
    assert resolve_masks(config, cpu, "compile", "torch") is bool(given)
    assert resolve_masks(config, cuda, "graph", "native") is bool(given)


# Captured steps on an asynchronous device ---------------------------------------------------------


def test_captured_steps_with_masks(
    open_both: Callable[..., tuple[Engine, Engine]],  # noqa: F811
) -> None:
    config = {"block_size": 4, "num_blocks": 25, "prefill_chunk": 8, "host_cache_bytes": 1 << 18}
    captured, eager = open_both("text", structured_output=True, **config)
    prompts, params = mixed()
    assert shown(captured.generate(prompts, params)) == shown(eager.generate(prompts, params))
    check_captured(captured)
    captured.check_integrity()


def test_one_step_stays_in_flight(
    open_both: Callable[..., tuple[Engine, Engine]],  # noqa: F811
    fake_graphs: FakeGraphs,
) -> None:
    captured, _ = open_both("text", structured_output=True)
    captured.add_request(PROMPTS[0], SamplingParams(max_tokens=20, structured={"regex": "[a-z]*"}))
    threads = set(threading.enumerate())
    for _ in range(4):
        captured.step()
    started = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not any("masks" in name for name in started), "the host has nothing else to do"
    del fake_graphs.log[:]
    captured.step()
    kinds = [entry[0] for entry in fake_graphs.log]
    replays = [i for i, kind in enumerate(kinds) if kind == "replay"]
    assert len(replays) == 2, fake_graphs.log
    assert replays[0] < kinds.index("read") < replays[1], fake_graphs.log
