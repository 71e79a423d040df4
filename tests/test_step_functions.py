"""Which steps are compiled: none whose layers are one operation, and others whole."""

from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.kernels import have_compiler

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


def test_eager_steps_have_no_kernels_to_build(open_engine: Callable[..., Engine]) -> None:
    start = open_engine("base", mode="eager").stats()["start"]
    assert start["kernels_built"] is None
    assert start["code_cache"] == {"hits": 0, "misses": 0}


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
