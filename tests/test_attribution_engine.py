"""Every node of the captured steps of whole engines has a layer and an operation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest
from stepgraph.profiling import attribution
from stepgraph.profiling.attribution import KernelNames, StepNodes
from stepgraph.runtime import Engine, SamplingParams

from .fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401

GRAPH = {"mode": "graph", "compile": False, "max_model_len": 32, "buckets": (1, 2), "max_rows": 2}


@pytest.mark.parametrize("variant", ["base", "gemma2", "deepseek_v2"])
def test_x(variant, open_engine, fake_graphs):
    with attribution.recording() as names:
        engine = open_engine(variant, **GRAPH)
    for step in names.steps:
        print(step.phase, step.size, step.read_blocks, step.full_sampler, len(step.nodes))
    for step in (names.steps[0], names.steps[-1]):
        print([(k, len(list(g))) for k, g in groupby(n.label for n in step.nodes)])
    print(names.unattributed, names.reason)
