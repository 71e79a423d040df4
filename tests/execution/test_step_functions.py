"""Which steps are compiled: none whose layers are one operation, and others whole."""

from collections import Counter
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.engine import self_test
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.kernels.result_check import Fallback
from stepgraph.runtime.sampling import reference_sampler

from ..rigs.engine_rig import Open

needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")


@needs_compiler
def test_a_start_whose_steps_are_operators_compiles_nothing(open_engine: Open) -> None:
    engine = open_engine("base", mode="compile", dtype="bfloat16", max_num_seqs=2)
    start = engine.stats()["start"]
    assert start["code_cache"] == {"hits": 0, "misses": 0}
    assert start["kernels_built"] in (True, False)
    assert {"kernels", "load", "cache", "prepare", "measure"} <= set(start["phases"])
    assert sum(start["phases"].values()) <= start["seconds"]
    assert engine.stats()["prepared"]["steps"] > 0


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the graphs of each part of a step, traced as for inductor, but run as they are."""
    compile_, traced = torch.compile, Counter[str]()

    def compile_traced(code: Any, *, options: object, **own: Any) -> Any:
        part = code.__func__.__name__.rpartition("_")[0]

        def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
            traced[part] += 1
            return graph

        return compile_(code, backend=backend, **own)

    def no_thresholds(weights_BV: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return weights_BV[:, 0] * 0.0  # the loop takes long to trace

    monkeypatch.setattr(torch, "compile", compile_traced)
    monkeypatch.setattr(reference_sampler, "bisect_thresholds", no_thresholds)
    return traced


SIZES = {"max_num_seqs": 2, "max_model_len": 64, "dtype": "float32"}
SAMPLED = SamplingParams(max_tokens=5, top_p=0.9, seed=3, ignore_eos=True, presence_penalty=1.5)
PROMPTS = [[3, 5, 7, 11, 13], [2, 4]]


def tokens(engine: Engine, *params: SamplingParams) -> list[Any]:
    outputs = [engine.generate(PROMPTS[:n], wanted) for wanted in params for n in (1, 2)]
    return [output.token_ids for generated in outputs for output in generated]


@needs_compiler
def test_steps_of_plain_torch_share_their_code(open_engine: Open, traced: Counter[str]) -> None:
    """Decode and verify steps of one row and of any number, each with the sampler."""
    parts = {"_forward_chunks": 1, "_forward_rows": 4, "_drawn": 3}
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True), SAMPLED
    config = SIZES | {"prefill_chunk": 16}
    expected = tokens(open_engine("micro", mode="eager", **config), *params)
    config |= {"kernels": "torch", "speculation": {"num_speculative_tokens": 2}}
    engine = open_engine("micro", mode="compile", **config)
    assert traced == parts
    assert tokens(engine, *params) == expected
    assert traced == parts
    assert (engine.stats()["kernels"], engine.stats()["kernel_fallbacks"]) == ("torch", [])
    assert engine.stats()["fallbacks"] == 0
    engine.check_integrity()


@needs_compiler
def test_a_native_sampler_that_fails_its_self_test_is_replaced(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, traced: Counter[str]
) -> None:
    """The layers stay native, without padding between rows."""
    failure = Fallback("native sampler", "1 row", "broken")
    monkeypatch.setattr(self_test, "sampler_failure", lambda *_: failure)
    monkeypatch.setattr(self_test, "warn_of_fallbacks", lambda _: None)
    expected, engine = (open_engine("base", mode=mode, **SIZES) for mode in ("eager", "compile"))
    assert [fallback["name"] for fallback in engine.stats()["kernel_fallbacks"]] == [failure.name]
    # Of one row and of any number.
    parts = {"_drawn": 2, "_greedy_tokens": 2, "_masked_logits": 2}
    assert traced == parts
    assert tokens(engine, SAMPLED) == tokens(expected, SAMPLED)
    assert traced == parts
