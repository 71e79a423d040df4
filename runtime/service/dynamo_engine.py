"""`DynamoEngine`: an engine as a backend of NVIDIA Dynamo (extra `dynamo`), token ids in and out.

    python -m stepgraph.runtime.service.dynamo_engine path/to/checkpoint --namespace dynamo

Dynamo's frontend tokenises, routes and detokenises; this worker registers the model and decodes.
The interface is `dynamo.common.backend.LLMEngine` of ai-dynamo 1.6.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from ..errors import RequestError
from ..request import TokenLogprobs
from ..sampling_params import MAX_TOKENS_LIMIT, SamplingParams
from .async_engine import AsyncEngine
from .http.config_flags import add_config_flags, config_of
from .http.server_flags import ENGINE_DEFAULTS, SERVICE_DEFAULTS, WITHOUT_FLAG
from .request_handle import Delta
from .service_config import ServiceConfig

try:
    from dynamo.common.backend import EngineConfig as Registration
    from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
    from dynamo.common.backend.health_check import build_health_check_payload
    from dynamo.common.backend.publisher import ComponentSnapshot
    from dynamo.common.backend.run import run
    from dynamo.common.utils.token_ids import normalize_request_token_ids
except ImportError as error:
    raise ModuleNotFoundError(
        f'the Dynamo backend needs ai-dynamo 1.6 ({error}): pip install "stepgraph[dynamo]"',
        name=error.name,
    ) from error

__all__ = ["DynamoEngine", "main"]

SNAPSHOT_SECONDS = 0.25
"""Time between two reports of the cache's usage to Dynamo's router."""

_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
)
_STOPS = ("min_tokens", "ignore_eos")
_REFUSED = ("guided_decoding", "use_beam_search", "bad_words_token_ids")
"""Fields whose effect cannot be left out silently."""
_REASONS = {"abort": "cancelled", "deadline": "length"}
"""Dynamo's names of finish reasons that differ."""


class DynamoEngine(LLMEngine):  # type: ignore[misc]  # ai-dynamo is untyped
    """Serves the requests of a Dynamo worker with an `AsyncEngine`."""

    def __init__(self, model: str, engine: AsyncEngine) -> None:
        """Serve `model`, which an engine that has not started loads."""
        self._model = model
        self._engine = engine
        self._started = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._publisher: Any = None
        self._publishing: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoEngine, WorkerConfig]:
        """Return an engine and the configuration of its worker, for a command line.

        Raises:
            ConfigError: a field of the engine's configuration is invalid.
        """
        options = _parser().parse_args(argv)
        engine = AsyncEngine.from_pretrained(
            options.model,
            config_of(EngineConfig, options, **ENGINE_DEFAULTS),
            config_of(ServiceConfig, options, **SERVICE_DEFAULTS),
        )
        name = options.served_model_name or options.model
        worker = WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            endpoint=options.endpoint,
            model_name=options.model,
            served_model_name=name,
            endpoint_types=options.endpoint_types,
            discovery_backend=options.discovery_backend,
            request_plane=options.request_plane,
            event_plane=options.event_plane,
        )
        return cls(name, engine), worker

    async def start(self, worker_id: int) -> Registration:
        """Load the model and return what Dynamo registers.

        Raises:
            CheckpointError, ConfigError, MemoryBudgetError, StepPreparationError: as
                `Engine.from_pretrained`.
        """
        self._started = True
        self._loop = asyncio.get_running_loop()
        await self._engine.__aenter__()
        gauges = self._engine.snapshot().gauges
        assert gauges is not None, "the engine has just started"
        return Registration(
            model=self._model,
            served_model_name=self._model,
            llm=LlmRegistration(
                context_length=self._engine.max_model_len,
                kv_cache_block_size=gauges.block_size,
                total_kv_blocks=gauges.usable_blocks,
                max_num_seqs=gauges.rows,
            ),
        )

    async def generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks of token ids.

        Raises:
            RequestError: the request is invalid or needs what this engine lacks.
            StepgraphError: as `AsyncStream.accepted`.
        """
        normalize_request_token_ids(request)
        prompt = list(request["token_ids"])
        routing = request.get("routing") or {}
        params = _params(request)
        async with self._engine.stream(
            prompt,
            params,
            request_id=context.id(),
            priority=-int(routing.get("priority") or 0),  # Dynamo's larger ones come first
        ) as stream:
            num_tokens, open_completions = 0, params.n
            async for delta in stream:
                num_tokens += len(delta.token_ids)
                open_completions -= delta.finish_reason is not None
                chunk = _chunk(delta, self._spelling(delta.logprobs))
                if not open_completions:
                    output = stream.output
                    assert output is not None, "a delta is of an output"
                    chunk["completion_usage"] = {
                        "prompt_tokens": len(prompt),
                        "completion_tokens": num_tokens,
                        "total_tokens": len(prompt) + num_tokens,
                        "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
                    }
                yield chunk

    async def abort(self, context: Any) -> None:
        """End a request whose client has left, within one step."""
        self._engine.abort(context.id())

    async def cleanup(self) -> None:
        """Close the engine. Idempotent, also after a start that failed."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
        if self._started:
            await self._engine.aclose()

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a request of one token, for probes of an idle worker."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=1)
        return payload

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the one rank whose cache usage is published."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Publish the cache's usage to Dynamo's router and metrics from now on.

        Dynamo calls it after `start`, in a thread of its own.
        """
        assert self._loop is not None, "the engine has started"
        self._publisher = publisher
        self._loop.call_soon_threadsafe(self._begin_publishing)

    def _begin_publishing(self) -> None:
        self._publishing = asyncio.create_task(self._publish())

    async def _publish(self) -> None:
        while True:
            snapshot = self._engine.snapshot()
            gauges, counters = snapshot.gauges, snapshot.counters
            if gauges is not None:
                queried = counters.prompt_tokens
                usage = ComponentSnapshot(
                    kv_used_blocks=gauges.held_blocks,
                    kv_total_blocks=gauges.usable_blocks,
                    gpu_cache_usage=gauges.held_blocks / gauges.usable_blocks,
                    kv_cache_hit_rate=counters.cached_tokens / queried if queried else None,
                    dp_rank=0,
                )
                self._publisher.publish(0, usage)
            await asyncio.sleep(SNAPSHOT_SECONDS)

    def _spelling(self, logprobs: tuple[TokenLogprobs, ...]) -> Callable[[int], str]:
        """Return what spells a token; nothing is spelt without log-probabilities."""
        tokenizer = self._engine.tokenizer if logprobs else None
        return str if tokenizer is None else lambda token: tokenizer.decode([token])


def _params(request: Mapping[str, Any]) -> SamplingParams:
    """Return how the tokens of a request are chosen; Dynamo's frontend finds stop strings."""
    sampling = {k: v for k, v in (request.get("sampling_options") or {}).items() if v is not None}
    stops = {k: v for k, v in (request.get("stop_conditions") or {}).items() if v is not None}
    output = request.get("output_options") or {}
    for name in _REFUSED:
        if sampling.get(name):
            raise RequestError(f"{name} is not supported")
    fields = {name: sampling[name] for name in _SAMPLING if name in sampling}
    fields |= {name: stops[name] for name in _STOPS if name in stops}
    ids = {*stops.get("stop_token_ids", ()), *stops.get("stop_token_ids_hidden", ())}
    most = stops.get("max_tokens")
    return SamplingParams(
        **fields,
        max_tokens=MAX_TOKENS_LIMIT if most is None else most,
        stop_token_ids=sorted(ids),
        logprobs=output.get("logprobs"),
    )


def _chunk(delta: Delta, spell: Callable[[int], str]) -> dict[str, Any]:
    """Return what a completion has gained, in Dynamo's shape."""
    chunk: dict[str, Any] = {"token_ids": list(delta.token_ids), "index": delta.index}
    if delta.logprobs:
        chunk["log_probs"] = [entry.logprob for entry in delta.logprobs]
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": spell(token), "logprob": logprob}
                for rank, (token, logprob) in enumerate(entry.top.items(), 1)
            ]
            for entry in delta.logprobs
        ]
    if delta.finish_reason is not None:
        chunk["finish_reason"] = _REASONS.get(delta.finish_reason, delta.finish_reason)
    return chunk


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m stepgraph.runtime.service.dynamo_engine",
        description="Serve a model as a worker of NVIDIA Dynamo.",
    )
    parser.add_argument("model", help="checkpoint directory, which the frontend reads too")
    worker = parser.add_argument_group("worker", "Where Dynamo finds it.")
    worker.add_argument("--served-model-name", metavar="NAME", help="default: MODEL")
    worker.add_argument("--namespace", default="dynamo", metavar="NAME")
    worker.add_argument("--component", default="backend", metavar="NAME")
    worker.add_argument("--endpoint", default="generate", metavar="NAME")
    worker.add_argument("--endpoint-types", default="chat,completions", metavar="TYPES")
    worker.add_argument("--discovery-backend", default="etcd", metavar="NAME")
    worker.add_argument("--request-plane", default="tcp", metavar="NAME")
    worker.add_argument("--event-plane", metavar="NAME")
    service = parser.add_argument_group("service", "Fields of ServiceConfig.")
    add_config_flags(service, ServiceConfig, defaults=SERVICE_DEFAULTS)
    engine = parser.add_argument_group("engine", "Fields of EngineConfig.")
    add_config_flags(engine, EngineConfig, defaults=ENGINE_DEFAULTS, without=WITHOUT_FLAG)
    return parser


def main() -> None:
    """Run a worker until SIGTERM or SIGINT, which Dynamo handles."""
    run(DynamoEngine)


if __name__ == "__main__":
    main()
