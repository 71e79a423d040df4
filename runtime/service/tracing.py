"""Spans of requests for OpenTelemetry (extra `otel`).

A span lasts from the submission of a request to its end. Its attributes follow the semantic
conventions for generative AI, and the `gen_ai.latency` attributes of vLLM.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .async_engine import AsyncEngine
from .request_handle import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

Attribute = str | int | float | list[str]


def trace_requests(
    engine: AsyncEngine,
    *,
    model_name: str | None = None,
    tracer_provider: TracerProvider | None = None,
) -> None:
    """Make a span for each request of an engine that ends from now on.

    The thread of the engine's callbacks makes it. Its parent is the request's `traceparent`.
    `model_name` is the value of `gen_ai.request.model`; without a `tracer_provider`, the global one
    makes the spans. The configuration of exporters and sampling is the application's.
    """
    try:
        from opentelemetry.trace import SpanKind, Status, StatusCode, get_tracer
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'spans need OpenTelemetry: pip install "stepgraph[otel]"', name=error.name
        ) from error

    tracer = get_tracer("stepgraph", tracer_provider=tracer_provider)
    propagator = TraceContextTextMapPropagator()

    def make_span(record: RequestRecord) -> None:
        offset_ns = time.time_ns() - time.perf_counter_ns()
        headers = {} if record.traceparent is None else {"traceparent": record.traceparent}
        attributes = _attributes(record, model_name)
        operation = str(attributes["gen_ai.operation.name"])
        span = tracer.start_span(
            f"{operation} {model_name}" if model_name else operation,
            context=propagator.extract(headers),
            kind=SpanKind.SERVER if headers else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=record.submitted_ns + offset_ns,
        )
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR, str(record.error)))
        span.end(record.ended_ns + offset_ns)

    engine.add_listener(make_span)


def _attributes(record: RequestRecord, model_name: str | None) -> dict[str, Attribute]:
    reasons = [str(reason or "error") for reason in record.finish_reasons]
    params, seconds = record.params, record.seconds
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": "chat" if record.is_chat else "text_completion",
        "gen_ai.provider.name": "stepgraph",
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.latency.e2e": seconds["e2e"],
        "gen_ai.latency.time_in_queue": seconds.get("queue"),
        "gen_ai.latency.time_to_first_token": seconds.get("first_token"),
        "gen_ai.latency.time_in_model_prefill": seconds.get("prefill"),
        "gen_ai.latency.time_in_model_decode": seconds.get("decode"),
        "gen_ai.request.model": model_name,
        "gen_ai.response.finish_reasons": reasons or None,
        "error.type": None if record.outcome in ("stop", "length", "abort") else record.outcome,
    }
    if params is not None:
        for name in ("max_tokens", "temperature", "top_p", "seed"):
            attributes[f"gen_ai.request.{name}"] = getattr(params, name)
        attributes["gen_ai.request.top_k"] = params.top_k or None
        attributes["gen_ai.request.choice.count"] = params.n if params.n > 1 else None
    return {name: value for name, value in attributes.items() if value is not None}
