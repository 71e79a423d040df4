"""Speculation changes the time of tokens, and no token."""

from __future__ import annotations

from typing import Any

import pytest
from stepgraph.runtime import Engine, SamplingParams, Speculation
from stepgraph.runtime.kernels import have_compiler

from ..rigs.engine_rig import Open, greedy, run
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.speculation_rig import guess
from ..rigs.tiny_models import Tiny, TinyModel

pytestmark = pytest.mark.native_kernels

SIZES: dict[str, Any] = {"block_size": 4, "prefill_chunk": 32, "max_model_len": 64}
MIXED = [
    SamplingParams(max_tokens=26, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.9, top_k=20, top_p=0.9, seed=5, n=3),
    SamplingParams(max_tokens=19, temperature=0.0, min_tokens=7, logprobs=3),
    SamplingParams(
        max_tokens=23, temperature=1.1, seed=8, logprobs=2, repetition_penalty=1.3,
        presence_penalty=0.4, frequency_penalty=0.3, min_p=0.01, logit_bias={4: 3.0},
    ),
    SamplingParams(max_tokens=200, temperature=0.7, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=1, temperature=0.0),
]  # fmt: skip
CASES = {
    "eager": ("base", {"kernels": "torch"}),
    "native": ("base", {"mode": "compile"}),
    "native windows": ("gemma3", {"mode": "compile"}),
    "native fp8": ("qwen3", {"mode": "compile", "kv_dtype": "fp8"}),
    "graph": ("base", {"mode": "graph", "compile": False, "buckets": (4,)}),
    "windows": ("mistral", {}),
    "graph windows": ("gemma2", {"mode": "graph", "compile": False, "buckets": (4,)}),
    "int8": ("gemma3", {"kv_dtype": "int8"}),
    "latent": ("deepseek_v3", {}),
    "no prefix cache": ("base", {"prefix_cache": False}),
    "swap": ("base", {"num_blocks": 24, "host_cache_bytes": 1 << 20}),
    "recompute": ("base", {"num_blocks": 24}),
}


def run_mixed(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> dict[str, Any]:
    """Requests that come one after the other, checked after every step; all that they return."""
    todo = list(zip(prompts, params, strict=True))
    found: dict[str, Any] = {}
    while todo or engine.has_unfinished():
        if todo:
            prompt, own = todo.pop(0)
            engine.add_request(prompt, own, f"r{len(todo)}")
        for output in engine.step():
            if output.finished:
                for index, c in enumerate(output.completions):
                    top = [(p.token_id, list(p.top)) for p in c.logprobs]
                    own = c.token_ids, c.finish_reason, c.text, top
                    found[f"{output.request_id}/{index}"] = own
        engine.check_integrity()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("right", [0.9, 0.3])
@pytest.mark.parametrize("case", [*CASES, "convolutions"])
def test_tokens_are_those_of_plain_decoding(
    open_engine: Open, tiny: Tiny, fake_graphs: FakeGraphs, case: str, right: float
) -> None:
    """Of all parameters, with drafts that are right and wrong; one request is as long as can be."""
    variant, config = CASES.get(case, ("lfm2", {"block_size": 8}))
    if config.get("mode") == "compile":
        if not have_compiler():
            pytest.skip("needs a C++ compiler")
        fake_graphs.kernels = "compile"
    prompts = tiny(variant).prompts(30, 4, 12, 7, 9, 5)
    plain = open_engine(variant, **SIZES | config, dtype="float32")
    engine = open_engine(
        variant,
        **SIZES | config,
        dtype="float32",
        speculation={"num_speculative_tokens": 1 if config.get("mode") == "graph" else 4},
    )
    fake_graphs.stream.behind = config.get("mode") == "graph"
    expected = run_mixed(plain, prompts, MIXED)
    guesses = guess(engine, {name: own[0] for name, own in expected.items()}, right)
    for _ in range(2):  # the second time prompts are cached
        assert run_mixed(engine, prompts, MIXED) == expected
    assert guesses.accepted > 10
    assert guesses.rejected > 3
    stats = engine.stats()
    assert stats["fallbacks"] == 0
    assert stats["preemptions"] >= ("num_blocks" in config)


REPETITIVE = [7, 3, 9, 1, 5, 7, 3, 9, 1, 5, 7, 3, 9, 1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["suffix", "ngram"])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_drafts_of_the_proposers(
    open_engine: Open,
    base: TinyModel,
    fake_graphs: FakeGraphs,
    method: str,
    adaptive: bool,
    mode: str,
) -> None:
    speculation = Speculation(
        method=method, num_speculative_tokens=2, prompt_lookup_min=2, adaptive=adaptive
    )
    config = SIZES | {"mode": mode, "compile": False, "buckets": (4,)}
    prompts = [REPETITIVE, *base.prompts(5, 9)]
    bias = {7: 9.0, 3: 9.0}  # so that the output repeats, of whatever it makes
    params = [
        greedy(40, logit_bias=bias),
        SamplingParams(temperature=1.0, seed=3, logit_bias=bias, max_tokens=40, ignore_eos=True),
        greedy(30, n=2),
    ]
    plain, engine = (open_engine("base", **config, speculation=s) for s in (None, speculation))
    fake_graphs.stream.behind = mode == "graph"
    assert run_mixed(engine, prompts, params) == run_mixed(plain, prompts, params)
    stats = engine.stats()["speculation"]
    assert stats["method"] == method
    assert sum(stats["accepted_by_position"]) == stats["accepted"] <= stats["drafted"]
    assert sum(stats["drafted_by_position"]) == stats["drafted"]
    if not adaptive:
        assert stats["accepted"] > 5
        assert engine.stats()["steps"] < plain.stats()["steps"]
    assert plain.stats()["speculation"] is None


def test_requests_draft_from_outputs_of_their_salt(open_engine: Open) -> None:
    """Outputs without repetition, of prompts that differ in the first token."""
    speculation = Speculation(adaptive=False, share_outputs=True)
    bias = {"logit_bias": {7: 5.0}}
    engine = open_engine("base", speculation=speculation, **SIZES)
    plain = open_engine("base", **SIZES)
    params = SamplingParams(max_tokens=24, temperature=1.2, seed=3, ignore_eos=True, **bias)  # type: ignore[arg-type]
    prompt = [5, 6, 9, 12]

    def accepted(salt: str | None) -> int:
        before = engine.stats()["speculation"]["accepted"]
        engine.add_request(prompt, params, "r", cache_salt=salt)
        assert run(engine)["r"].token_ids == plain.generate([prompt], params)[0].token_ids
        return int(engine.stats()["speculation"]["accepted"]) - before

    alone = accepted("a")
    assert accepted("b") == alone
    assert accepted(None) == alone
    assert accepted("a") > alone + 8
    assert accepted("c") == alone
    assert accepted(None) > alone + 8
