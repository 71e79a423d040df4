"""Which parts of a step are compiled: none that kernels do as a whole."""

from collections.abc import Callable

import pytest
from stepgraph.runtime import Engine
from stepgraph.runtime.kernels import have_compiler

needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")


@needs_compiler
def test_a_start_whose_steps_are_operators_compiles_nothing(
    open_engine: Callable[..., Engine],
) -> None:
    engine = open_engine("base", mode="compile", dtype="bfloat16", max_rows=2)
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
