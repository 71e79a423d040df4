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


def no_thresholds(weights_BV: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """In the place of the loop that bisects them, which takes long to trace."""
    return weights_BV[:, 0] * 0.0


@needs_compiler
@pytest.mark.parametrize(
    ("speculation", "parts"),
    [
        # Prefill, and decode of one row and of any number; the full sampler of one row and of any.
        (None, {"_prefill_parts": 1, "_decode_parts": 2, "_drawn": 2}),
        (
            {"num_speculative_tokens": 2},
            {"_prefill_parts": 1, "_decode_parts": 2, "_verify_parts": 2, "_drawn_lanes": 2},
        ),
    ],
)
def test_steps_of_plain_torch_share_their_code(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, speculation: Any, parts: dict[str, int]
) -> None:
    """Traced as for inductor, but run as they are."""
    compile_, traced = torch.compile, Counter[str]()

    def compile_traced(code: Any, *, options: object, **own: Any) -> Any:
        part = code.__func__.__name__.rpartition("_")[0]

        def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
            traced[part] += 1
            return graph

        return compile_(code, backend=backend, **own)

    monkeypatch.setattr(torch, "compile", compile_traced)
    monkeypatch.setattr(reference_sampler, "bisect_thresholds", no_thresholds)
    prompts = [[3, 5, 7, 11, 13], [2, 4]]
    params = [
        SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.9, seed=3, ignore_eos=True),
    ]
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "prefill_chunk": 16}

    def tokens(engine: Engine) -> list[Any]:
        outputs = [engine.generate(prompts[:n], wanted) for wanted in params for n in (1, 2)]
        return [output.token_ids for generated in outputs for output in generated]

    expected = tokens(open_engine("micro", mode="eager", **sizes))
    engine = open_engine("micro", mode="compile", kernels="torch", speculation=speculation, **sizes)
    assert traced == parts
    assert tokens(engine) == expected
    assert traced == parts
    assert (engine.stats()["kernels"], engine.stats()["kernel_fallbacks"]) == ("torch", [])
    assert engine.stats()["fallbacks"] == 0
    engine.check_integrity()


@needs_compiler
def test_a_native_sampler_that_fails_its_self_test_is_replaced(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers stay native, without padding between rows."""
    failure = Fallback("native sampler", "1 row", "broken")
    monkeypatch.setattr(self_test, "sampler_failure", lambda *_: failure)
    monkeypatch.setattr(self_test, "warn_of_fallbacks", lambda _: None)
    monkeypatch.setattr(reference_sampler, "bisect_thresholds", no_thresholds)
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda code, *, options, **own: compile_(code, backend="eager", **own)
    )
    sampled = SamplingParams(max_tokens=5, temperature=0.9, seed=3, ignore_eos=True)
    config = {"max_num_seqs": 2, "buckets": (2,), "max_model_len": 64, "dtype": "float32"}
    expected, engine = (open_engine("base", mode=mode, **config) for mode in ("eager", "compile"))
    assert [fallback["name"] for fallback in engine.stats()["kernel_fallbacks"]] == [failure.name]
    prompts = [[3, 5, 7, 11, 13], [2, 4]]
    ours, theirs = (e.generate(prompts, sampled) for e in (engine, expected))
    assert [o.token_ids for o in ours] == [o.token_ids for o in theirs]
