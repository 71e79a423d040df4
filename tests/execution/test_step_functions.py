"""Which steps are compiled: none whose layers are one operation, and others whole."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.execution import step_functions
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.sampling.sample_output import SampleOutput

needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")


@needs_compiler
def test_a_start_whose_steps_are_operators_compiles_nothing(
    open_engine: Callable[..., Engine],
) -> None:
    engine = open_engine("base", mode="compile", dtype="bfloat16", max_num_seqs=2)
    start = engine.stats()["start"]
    assert start["code_cache"] == {"hits": 0, "misses": 0}
    assert start["kernels_built"] in (True, False)
    assert {"kernels", "load", "cache", "prepare", "measure"} <= set(start["phases"])
    assert sum(start["phases"].values()) <= start["seconds"]
    assert engine.stats()["prepared"]["steps"] > 0


@needs_compiler
def test_steps_of_plain_torch_are_compiled_whole(open_engine: Callable[..., Engine]) -> None:
    prompts = [[3, 5, 7, 11, 13], [2, 4]]
    params = [
        SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.9, top_p=0.8, seed=3, ignore_eos=True),
    ]

    def tokens(engine: Engine) -> list[Any]:
        outputs = [engine.generate(prompts[:n], wanted) for wanted in params for n in (1, 2)]
        return [output.token_ids for generated in outputs for output in generated]

    expected = tokens(open_engine("micro", mode="eager", max_num_seqs=2))
    engine = open_engine("micro", mode="compile", kernels="torch", max_num_seqs=2)
    stats = engine.stats()
    assert (stats["kernels"], stats["kernel_fallbacks"]) == ("torch", [])
    # Prefill, and decode of one row and of any number; the full sampler of one row and of any.
    assert sum(stats["start"]["code_cache"].values()) == 5
    assert tokens(engine) == expected
    assert engine.stats()["fallbacks"] == 0
    assert sum(engine.stats()["start"]["code_cache"].values()) == 5
    engine.check_integrity()


@needs_compiler
def test_verify_steps_share_their_code(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as for inductor, but run as they are; and without most of the full sampler."""
    compile_, traced = torch.compile, Counter[str]()

    def compile_traced(code: Any, *, options: object, **own: Any) -> Any:
        part = code.__func__.__name__.rpartition("_")[0]

        def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
            traced[part] += 1
            return graph

        return compile_(code, backend=backend, **own)

    def draw(logits_TV: torch.Tensor, *_: object) -> SampleOutput:
        logprobs_TV, ids_TV = logits_TV.float().log_softmax(-1).topk(20)
        return SampleOutput(ids_TV[:, 0], logprobs_TV[:, 0], ids_TV, logprobs_TV)

    monkeypatch.setattr(torch, "compile", compile_traced)
    monkeypatch.setattr(step_functions, "sample_lanes", draw)
    engine = open_engine(
        "micro",
        mode="compile",
        kernels="torch",
        max_num_seqs=4,
        speculation={"num_speculative_tokens": 7},
    )
    parts = {"_prefill_parts": 1, "_decode_parts": 2, "_verify_parts": 2, "_drawn_lanes": 2}
    assert traced == parts
    assert engine.stats()["prepared"]["steps"] > 30
