"""Spans of requests, against their outputs and records."""

from __future__ import annotations

import time
from typing import Any

import pytest
from stepgraph.runtime import AsyncEngine, ChatPrompt, ServiceConfig
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.service.tracing import trace_requests

from ..rigs.fake_engine import fake_engine, params
from .test_request_records import listening, wait_until

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_span_for_each_request() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    before = time.time_ns()
    with AsyncEngine(lambda: fake_engine(), ServiceConfig()) as engine:
        trace_requests(engine, model_name="m", tracer_provider=provider)
        records = listening(engine)
        own = params(5, 7, n=2, temperature=0.5, top_k=3)
        output = engine.submit([1, 2, 3], own, traceparent=f"00-{TRACE}-{PARENT}-01").result()
        engine.submit([1, 2], params(1), traceparent="not a header").result()
        conversation = ChatPrompt([{"role": "user", "content": "hi"}])
        with pytest.raises(RequestError):  # the fake engine has no tokenizer
            engine.submit(conversation).result()
        wait_until(lambda: len(records) == 3)
    finished, second, refused = exporter.get_finished_spans()
    attributes: dict[str, Any] = dict(finished.attributes or {})
    assert finished.name == "text_completion m"
    assert finished.kind is SpanKind.SERVER
    assert finished.context is not None
    assert finished.parent is not None
    assert f"{finished.context.trace_id:032x}" == TRACE
    assert f"{finished.parent.span_id:016x}" == PARENT
    assert attributes["gen_ai.request.model"] == "m"
    assert attributes["gen_ai.response.id"] == output.request_id
    assert attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 14
    assert attributes["gen_ai.request.max_tokens"] == 7
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.top_k"] == 3
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.request.seed"] == 5
    assert finished.status.status_code is StatusCode.UNSET
    assert finished.start_time is not None
    assert finished.end_time is not None
    assert before - 1e6 <= finished.start_time < finished.end_time <= time.time_ns() + 1e6
    seconds = (finished.end_time - finished.start_time) / 1e9
    assert attributes["gen_ai.latency.e2e"] == pytest.approx(seconds)
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert sum(attributes[f"gen_ai.latency.{part}"] for part in parts) <= seconds
    assert second.parent is None
    assert refused.name == "chat m"
    assert refused.kind is SpanKind.INTERNAL
    assert refused.status.status_code is StatusCode.ERROR
    assert (refused.attributes or {})["error.type"] == "invalid"
