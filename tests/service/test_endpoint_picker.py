"""What the endpoint picker of the Gateway API inference extension and llm-d reads from `/metrics`.

Model server protocol: gateway-api-inference-extension, docs/proposals/003-model-server-protocol.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stepgraph.runtime import AsyncEngine

from ..rigs.fake_engine import params
from ..rigs.service_rig import wait_until
from .test_request_records import SlowEngine

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families
from stepgraph.runtime.service.metrics import EngineMetrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "replicas.md"


def documented_specs() -> dict[str, str]:
    """The metric of each field of `engineConfigs`, as documented."""
    return dict(re.findall(r'^ +(\w+Spec): "(.*)"$', PAGE.read_text(), re.MULTILINE))


def test_the_picker_finds_gauges_of_the_documented_names() -> None:
    """Queued and running requests, cache usage from 0 to 1, and the size of the cache as labels."""
    specs = documented_specs()
    assert specs.keys() == {
        "queuedRequestsSpec",
        "runningRequestsSpec",
        "kvUsageSpec",
        "cacheInfoSpec",
        "loraSpec",
    }
    assert specs.pop("loraSpec") == "", "the picker expects a metric of LoRA adapters"

    def scrape() -> dict[str, tuple[float, dict[str, str]]]:
        families = {
            family.name: family
            for family in text_string_to_metric_families(metrics.exposition()[0].decode())
        }
        found = {}
        for field, name in specs.items():
            family = families[name]
            assert family.type == "gauge"
            (sample,) = family.samples
            found[field] = (sample.value, sample.labels)
        return found

    with AsyncEngine(SlowEngine().start) as engine:
        metrics = EngineMetrics(engine)
        futures = [engine.submit([1, 2, 3], params(n, 40)) for n in range(5)]
        wait_until(lambda: engine.snapshot().gauges.running == 2)
        found = scrape()
        assert found["runningRequestsSpec"][0] == 2
        assert found["queuedRequestsSpec"][0] == 3
        assert 0 < found["kvUsageSpec"][0] <= 1
        labels = found["cacheInfoSpec"][1]
        gauges = engine.snapshot().gauges
        assert int(labels["block_size"]) == gauges.block_size
        assert int(labels["num_gpu_blocks"]) == gauges.usable_blocks
        for future in futures:
            future.cancel()

        def counts() -> list[float]:
            found = scrape()
            return [found[f"{name}Spec"][0] for name in ("runningRequests", "queuedRequests")]

        wait_until(lambda: counts() == [0, 0])
        assert scrape()["kvUsageSpec"][0] == 0
