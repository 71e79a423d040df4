"""Grammars with drafts and in company: outputs stay what they are, and forced text is drafted."""

from __future__ import annotations

import contextlib
import random
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from stepgraph.runtime import Engine, GrammarError, RequestOutput, SamplingParams
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.loading.tokenizer import load_tokenizer
from stepgraph.runtime.structured.compiler import GrammarCompiler
from stepgraph.runtime.structured_output import StructuredOutput

from ..rigs.engine_rig import Open
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.speculation_rig import guess
from ..rigs.structured_rig import DEMO, GRAMMARS, LONG, PROMPTS, bits_of, masks_of, mixed
from ..rigs.tiny_models import Tiny
from ..speculation.test_speculation import SIZES, run_mixed
from .test_structured_compiler import a_request
from .test_structured_schemas import schema_of

pytestmark = pytest.mark.native_kernels

CAPTURED = {"mode": "graph", "compile": False, "buckets": (4,)}


def random_params(engine: Engine, count: int) -> list[SamplingParams]:
    """Requests with random schemas that are not refused, and some without."""
    draw = random.Random(count)
    params = []
    for seed in range(count):
        structured = draw.choice([None, *GRAMMARS, *[{"json": schema_of(draw)}] * 9])
        more: dict[str, Any] = draw.choice(
            [
                {"temperature": 0.0},
                {"temperature": 0.0, "logprobs": 2},
                {},
                {"top_p": 0.8, "logprobs": 0},
                {"temperature": 0.0, "ignore_eos": True},
                {"min_tokens": 9},
                {"stop": ["e", '":']},
                {"stop_token_ids": [40, 50, 60], "min_tokens": 4},
                {"presence_penalty": 0.5},
                {"n": 2},
            ]
        )
        own = SamplingParams(max_tokens=24, seed=seed, structured=structured, **more)
        with contextlib.suppress(GrammarError):
            engine.prepare([5], own, "probe")
            params.append(own)
    return params


@pytest.mark.parametrize(
    ("config", "right"),
    [
        ({}, 0.9),
        ({}, 0.4),
        ({"num_blocks": 24}, 0.9),
        ({"num_blocks": 24}, 0.4),
        (CAPTURED, 0.9),
        pytest.param(CAPTURED, 0.4, marks=pytest.mark.slow),
        ({"mode": "compile"}, 0.9),
        ({"mode": "compile"}, 0.4),
    ],
    ids=str,
)
def test_random_schemas_with_right_and_wrong_drafts(
    open_engine: Open, fake_graphs: FakeGraphs, config: dict[str, Any], right: float
) -> None:
    config = {"mode": "eager", "structured_output": True, "dtype": "float32"} | config
    if config["mode"] == "compile":
        if not have_compiler():
            pytest.skip("needs a C++ compiler")
        fake_graphs.kernels = "compile"
    fake_graphs.stream.behind = config["mode"] == "graph"
    plain = open_engine("text", **SIZES | config)
    params = random_params(plain, 24)
    draw = random.Random(1)
    prompts = [[draw.randrange(4, 120) for _ in range(draw.randrange(2, 9))] for _ in params]
    expected = run_mixed(plain, prompts, params)
    engine = open_engine("text", **SIZES | config, speculation={"num_speculative_tokens": 4})
    guesses = guess(engine, {name: own[0] for name, own in expected.items()}, right)
    assert run_mixed(engine, prompts, params) == expected
    assert guesses.accepted > 20
    assert guesses.rejected > 0  # few, as most wrong ones are forbidden and cut
    assert engine.stats()["fallbacks"] == 0


@pytest.mark.parametrize(
    ("kernels", "behind"), [("eager", False), ("compile", False), ("eager", True)]
)
def test_drafters_beside_grammars(
    open_engine: Open,
    tiny: Tiny,
    fake_graphs: FakeGraphs,
    kernels: Literal["eager", "compile"],
    behind: bool,
) -> None:
    """Steps without grammars propose; those with them verify forced text and what is left."""
    if kernels == "compile" and not have_compiler():
        pytest.skip("needs a C++ compiler")
    fake_graphs.kernels, fake_graphs.stream.behind = kernels, behind
    config = SIZES | {"mode": "eager", "structured_output": True, "dtype": "float32"}
    if behind:
        config |= CAPTURED
    plain = open_engine("text", **config)
    prompts, params = mixed()
    expected = run_mixed(plain, prompts, params)
    speculation = {
        "method": "draft_model",
        "model": str(tiny("text").directory),
        "num_speculative_tokens": 1 if behind else 3,  # captures are slow
        "adaptive": False,
    }
    engine = open_engine("text", **config, speculation=speculation)
    assert run_mixed(engine, prompts, params) == expected
    stats = engine.stats()
    assert stats["fallbacks"] == 0
    assert 0 < stats["speculation"]["proposing_steps"] < stats["steps"]
    assert stats["speculation"]["accepted"] > 10


@pytest.mark.parametrize("adaptive", [True, False])
def test_forced_text_is_drafted_and_always_accepted(open_engine: Open, adaptive: bool) -> None:
    config: dict[str, Any] = {"mode": "eager", "structured_output": True, "dtype": "float32"}
    params = SamplingParams(
        max_tokens=200,
        temperature=0.0,
        structured={"regex": f"[ab](?:{LONG * 2})[ab]".replace(".", "[.]")},
    )
    (expected,) = open_engine("text", **config).generate([[5, 7, 11]], params)
    assert LONG * 2 in expected.text
    engine = open_engine(
        "text", **config, speculation={"num_speculative_tokens": 7, "adaptive": adaptive}
    )
    steps = engine.stats()["steps"]
    (output,) = engine.generate([[5, 7, 11]], params)
    assert output.token_ids == expected.token_ids
    stats = engine.stats()
    counts = stats["speculation"]
    assert counts["accepted"] == counts["drafted"] > 40
    assert stats["steps"] - steps < len(output.token_ids) // 3


@pytest.mark.parametrize("grammar", [*GRAMMARS, {"regex": "[ab]x1234567y(?:, 98765)+z"}], ids=str)
def test_masks_after_drafts_are_those_of_outputs(grammar: dict[str, Any]) -> None:
    """Tokens are drawn from the masks; drafts are the next of them, with wrong ones at the end."""
    compiler = GrammarCompiler(load_tokenizer(DEMO), 4096, (0,))
    masks, draw = masks_of(5, 4096), np.random.default_rng(0)
    one, other = compiler.matchers(StructuredOutput(**grammar), 2)
    request, found = a_request(), []
    for _ in range(40):
        outcome, _ = one.fill(request, masks)
        found.append((masks[0].array.copy(), outcome))
        if outcome is not None:
            break
        allowed = np.flatnonzero(bits_of(masks[0]))
        if 0 in allowed:  # the end-of-sequence token
            break
        request.append_token(int(draw.choice(allowed)), 0)
    tokens, request = request.output_ids, a_request()
    for at, token in enumerate(tokens):
        drafts = [*tokens[at : at + 3], 0]
        outcome, kept = other.fill(request, masks, drafts)
        assert outcome is None
        assert kept == len(drafts) - 1 or at + kept == len(found) - 1
        for mask, (array, _) in zip(masks[: 1 + kept], found[at:], strict=False):
            assert (mask.array == array).all()
        request.append_token(token, 0)


# Requests with and without grammars join, leave and are preempted ---------------------------------


CHOICES = [None, *GRAMMARS]
TIGHT = {"num_blocks": 12, "block_size": 4, "prefill_chunk": 4, "max_num_seqs": 3}


FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 20},
    {"max_tokens": 25},
    {"max_tokens": 9, "n": 2, "logprobs": 1},
    {"max_tokens": 20, "min_tokens": 12},
    {"max_tokens": 20, "ignore_eos": True, "presence_penalty": 1.0},
]


@pytest.mark.parametrize(
    "config",
    [
        TIGHT,
        TIGHT | {"host_cache_bytes": 1 << 16, "kernels": "native"},
        TIGHT | {"speculation": {"adaptive": False, "prompt_lookup_min": 2}},
    ],
    ids=["recompute", "swap", "drafts"],
)
def test_outputs_depend_on_nothing_else(open_engine: Open, config: dict[str, Any]) -> None:
    engine = open_engine("text", structured_output=True, **config)
    alone = open_engine("text", structured_output=True, prefix_cache=False)
    draw = random.Random(0)

    @cache
    def params_of(grammar: int, seed: int, fields: int) -> SamplingParams:
        return SamplingParams(seed=seed, structured=CHOICES[grammar], **FIELDS[fields])

    @cache
    def expected(prompt: int, *params: int) -> list[tuple[tuple[int, ...], Any]]:
        return shown(alone.generate([PROMPTS[prompt]], params_of(*params))[0])

    def shown(output: RequestOutput) -> list[tuple[tuple[int, ...], Any]]:
        return [(c.token_ids, c.finish_reason) for c in output.completions]

    def step() -> None:
        for output in engine.step():
            if output.finished and output.request_id in unfinished:
                request = unfinished.pop(output.request_id)
                assert shown(output) == expected(*request), request
        engine.check_integrity()

    unfinished: dict[str, tuple[int, ...]] = {}
    for number in range(150):
        action = draw.random()
        if action < 0.5:
            request = tuple(map(draw.randrange, (len(PROMPTS), len(CHOICES), 3, len(FIELDS))))
            unfinished[f"r{number}"] = request
            engine.add_request(PROMPTS[request[0]], params_of(*request[1:]), f"r{number}")
        elif action < 0.6 and unfinished:
            request_id = draw.choice(sorted(unfinished))
            del unfinished[request_id]
            engine.abort(request_id)
        else:
            for _ in range(draw.randrange(1, 13)):
                step()
    while engine.has_unfinished():
        step()
    assert not unfinished
    if config.get("num_blocks"):
        assert engine.stats()["preemptions"] > 0
