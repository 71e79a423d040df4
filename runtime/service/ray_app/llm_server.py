"""`StepgraphServer`: an engine behind the ingress of Ray Serve LLM (`ray.serve.llm`).

    LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": "demo"},
        server_cls="stepgraph.runtime.service.ray_app.llm_server:StepgraphServer",
        engine_kwargs={"engine": {"threads": 2}, "num_cpus": 2},
    )

`engine_kwargs` are the arguments of `build` that concern one replica. The request and response
types of Ray Serve LLM come from vLLM or SGLang, so one of them must be installed too.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ...bounded_repr import bounded_repr
from ...errors import ConfigError, EngineUnavailableError
from ..health import Phase
from .engine_replica import EngineReplica
from .options import ReplicaOptions
from .ray_version import check_ray
from .remote_call import Head, RemoteRequest, respond
from .resources import checked_bundle

if TYPE_CHECKING:
    from ray.serve.llm import LLMConfig

__all__ = ["StepgraphServer"]

OF_ONE_REPLICA = ("engine", "service", "http", "num_cpus", "num_gpus", "step_seconds")


class StepgraphServer(EngineReplica):
    """Implements the server protocol of Ray Serve LLM with the HTTP service of an engine."""

    def __init__(self, llm_config: LLMConfig) -> None:
        """Load the model of a configuration, and wait until it is ready.

        Raises:
            CheckpointError, ConfigError, MemoryBudgetError, StepPreparationError: as
                `Engine.from_pretrained`.
        """
        self._llm_config = llm_config
        super().__init__(_options(llm_config))

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Return the options of the deployment: one bundle for all ranks of a replica.

        Raises:
            ConfigError: Ray is of another version, `engine_kwargs` are invalid, or the model or the
                cluster does not allow them.
        """
        check_ray()
        options = _options(llm_config)
        bundle = checked_bundle(options)
        deployment = copy.deepcopy(llm_config.deployment_config)
        actor = deployment.setdefault("ray_actor_options", {})
        actor["num_cpus"] = bundle["CPU"]
        if "GPU" in bundle:
            actor["num_gpus"] = bundle["GPU"]
        if llm_config.runtime_env:
            actor.setdefault("runtime_env", {}).update(llm_config.runtime_env)
        strategy = {"placement_group_strategy": "STRICT_PACK"}
        return {**deployment, "placement_group_bundles": [bundle], **strategy}

    async def start(self) -> None:
        """Do nothing: the engine has started."""

    async def llm_config(self) -> LLMConfig:
        """Return the configuration."""
        return self._llm_config

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Yield the events of a stream as text, or one response or error."""
        from ray.serve.llm.openai_api_models import ChatCompletionResponse

        answer = self._answer("/v1/chat/completions", request, ChatCompletionResponse)
        async for part in answer:
            yield part

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Yield the events of a stream as text, or one response or error."""
        from ray.serve.llm.openai_api_models import CompletionResponse

        async for part in self._answer("/v1/completions", request, CompletionResponse):
            yield part

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Yield one response or error."""
        from ray.serve.llm.openai_api_models import TokenizeResponse

        async for part in self._answer("/tokenize", request, TokenizeResponse):
            yield part

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Yield one response or error."""
        from ray.serve.llm.openai_api_models import DetokenizeResponse

        async for part in self._answer("/detokenize", request, DetokenizeResponse):
            yield part

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Yield an error: a decoder has none."""
        yield _error(501, "embeddings are not supported")

    async def transcriptions(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncIterator[Any]:
        """Yield an error: the model reads no audio."""
        yield _error(501, "transcriptions are not supported")

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Yield an error: pairs of texts are not scored."""
        yield _error(501, "scores are not supported")

    async def reset_prefix_cache(self) -> None:
        """Drop the prefix cache."""
        await self._engine.reset_prefix_cache()

    async def sleep(self, **options: Any) -> None:
        """Finish the requests and free the memory of the engine."""
        await self._engine.sleep()

    async def wakeup(self, **options: Any) -> None:
        """Load the model again."""
        await self._engine.wake()

    async def is_sleeping(self) -> bool:
        """Return whether the engine holds no model."""
        return self._engine.health().phase is Phase.ASLEEP

    async def pause(self, **options: Any) -> None:
        """Finish the requests and refuse new ones."""
        await self._engine.drain()

    async def resume(self, **options: Any) -> None:
        """Serve again after `pause`.

        Raises:
            EngineUnavailableError: the engine sleeps: wake it up.
        """
        if await self.is_sleeping():
            raise EngineUnavailableError("the engine sleeps: call wakeup")
        await self._engine.wake()

    async def is_paused(self) -> bool:
        """Return whether new requests are refused."""
        return self._engine.health().phase is Phase.DRAINING

    async def _answer(self, path: str, request: Any, kind: Any) -> AsyncIterator[Any]:
        """Run a request in the HTTP service: text of events, an object of `kind`, or an error."""
        body = request.model_dump_json(exclude_unset=True).encode()
        parts = respond(self._app, RemoteRequest("POST", path, b"", (), body))
        head = await anext(parts)
        assert isinstance(head, Head), "a response begins with its head"
        if head.status < 400 and getattr(request, "stream", False):
            async for part in parts:
                assert isinstance(part, bytes), "the body follows the head"
                yield part.decode()
            return
        whole = b"".join([part async for part in parts if isinstance(part, bytes)])
        if head.status < 400:
            yield kind.model_validate_json(whole)
        else:
            yield _error(head.status, json.loads(whole)["error"]["message"])


def _options(llm_config: LLMConfig) -> ReplicaOptions:
    """Return the options of a replica, of which `engine_kwargs` are some."""
    loading, given = llm_config.model_loading_config, llm_config.engine_kwargs
    for name in given:
        if name not in OF_ONE_REPLICA:
            raise ConfigError(
                f"engine_kwargs has {bounded_repr(name)}; allowed are {', '.join(OF_ONE_REPLICA)}"
            )
    return ReplicaOptions.of(
        {
            **given,
            "http": {"model_names": [loading.model_id], **given.get("http", {})},
            "model": loading.model_source or loading.model_id,
            "accelerator_type": llm_config.accelerator_type,
        }
    )


def _error(status: int, message: str) -> Any:
    from ray.serve.llm.openai_api_models import ErrorResponse

    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "code": status}
    return ErrorResponse.model_validate({"error": error})
