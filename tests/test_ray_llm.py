"""The server of Ray Serve LLM, with the ingress and the types of that library."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from stepgraph import Engine, EngineConfig, SamplingParams

try:
    from ray.serve.llm import LLMConfig, build_openai_app
except ImportError:
    pytest.skip("needs ray[llm], or ray[serve] and vLLM", allow_module_level=True)

from ray import serve
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.service.ray_app.llm_server import StepgraphServer

from .ray_cluster import BOUND_S, ENGINE, Cluster, local_cluster

pytestmark = pytest.mark.slow
SERVER = "stepgraph.runtime.service.ray_app.llm_server:StepgraphServer"


def config(**engine_kwargs: object) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "small", "model_source": "demo"},
        server_cls=SERVER,
        engine_kwargs={"engine": ENGINE, "num_cpus": 1, **engine_kwargs},
        deployment_config={"num_replicas": 1},
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster() as found:
        ingress = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
        args = {"llm_configs": [config()], "ingress_deployment_config": ingress}
        serve.run(build_openai_app(args), name="llm", route_prefix="/")
        yield found


def test_the_ingress_of_ray_serve_llm_gets_the_tokens_of_the_engine(cluster: Cluster) -> None:
    with Engine.from_pretrained("demo", EngineConfig(**ENGINE)) as engine:
        params = SamplingParams(max_tokens=12, temperature=0)
        expected = engine.generate(["def main("], params)[0].text
    body = {"model": "small", "prompt": "def main(", "max_tokens": 12, "temperature": 0}
    url = f"{cluster.url}/v1/completions"
    reply = httpx.post(url, json=body, timeout=BOUND_S)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == expected
    texts = []
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=BOUND_S) as lines:
        for line in lines.iter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                texts.append(json.loads(data)["choices"][0]["text"])
    assert "".join(texts) == expected
    assert httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"] == "small"
    refused = httpx.post(url, json={**body, "prompt": [1 << 40]}, timeout=BOUND_S)
    assert refused.status_code == 400


def test_engine_kwargs_are_checked_before_anything_is_loaded() -> None:
    for kwargs, named in (
        ({"replicas": 2}, "replicas"),
        ({"engine": {"rows": 1}}, "rows"),
        ({"num_gpus": 3}, "tensor_parallel"),
    ):
        with pytest.raises(ConfigError, match=named):
            StepgraphServer.get_deployment_options(config(**kwargs))
    options = StepgraphServer.get_deployment_options(config())
    assert options["placement_group_bundles"] == [{"CPU": 1.0}]
