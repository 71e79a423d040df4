"""Records, metrics and spans of requests, against the outputs, the records and the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import wait
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import prometheus_client
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families
from stepgraph.runtime import AsyncEngine, ChatPrompt, StepgraphError
from stepgraph.runtime.errors import EngineFailedError, OverloadedError, RequestError
from stepgraph.runtime.service.metrics import METRICS, EngineMetrics
from stepgraph.runtime.service.request_handle import RequestRecord
from stepgraph.runtime.service.tracing import trace_requests

from ..rigs.fake_engine import fake_engine, params
from ..rigs.service_rig import SECONDS, config, fail, listening, rig, wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_finished_request_has_a_record() -> None:
    with AsyncEngine(fake_engine) as engine:
        records = listening(engine)
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        options: Any = {"tenant": "t", "priority": 3, "traceparent": "00-x"}
        outputs = [engine.submit(prompt, params(1, n=2), **options).result() for _ in range(2)]
        wait_until(lambda: len(records) == 2)
    for output, record in zip(outputs, records, strict=True):
        assert record.request_id == output.request_id
        assert (record.tenant, record.priority, record.traceparent) == ("t", 3, "00-x")
        assert (record.outcome, record.phase, record.error) == ("length", "decode", None)
        assert record.finish_reasons == ("length", "length")
        assert (record.num_prompt_tokens, record.num_output_tokens) == (9, 12)
        assert record.num_cached_tokens == output.cached_tokens
        assert record.token_ns == tuple(c.token_ns_since(0) for c in output.completions)
        assert record.params == params(1, n=2).resolved()
        times: list[Any] = [record.submitted_ns, record.started_ns, record.first_token_ns]
        times += [record.last_token_ns, record.ended_ns]
        assert times == sorted(times)
        between = dict(zip(("queue", "prefill", "decode"), pairwise(times[:4]), strict=True))
        between |= {"first_token": (times[0], times[2]), "inference": (times[1], times[3])}
        between["e2e"] = (times[0], times[4])
        assert record.seconds == {name: (b - a) / 1e9 for name, (a, b) in between.items()}
    assert records[1].num_cached_tokens > 0


def test_listeners_run_in_the_thread_of_callbacks_and_harm_nothing() -> None:
    def leave(record: RequestRecord) -> None:
        raise SystemExit(record.request_id)

    threads: list[str] = []
    with AsyncEngine(fake_engine) as engine:
        engine.add_listener(leave)
        engine.add_listener(lambda _: threads.append(threading.current_thread().name))
        for seed in range(3):
            engine.submit([1, 2], params(seed)).result()
    (thread,) = set(threads)
    assert thread.startswith("stepgraph-callbacks")
    assert len(threads) == 3


def test_every_outcome_is_recorded_and_counted() -> None:
    with rig(config(max_queued_requests=4), max_num_seqs=2) as r:
        metrics, records = EngineMetrics(r.engine), listening(r.engine)

        def submit(name: str, **options: Any) -> Any:
            return r.engine.submit([1, 2], params(1, 40), request_id=name, **options)

        def expire(*names: str) -> None:
            for name in names:
                handle = r.requests.handles[name]
                handle.deadline_ns = handle.submitted_ns
                r.requests.watch(handle)

        r.steps.close()
        submit("running")
        submit("running-deadline")
        for _ in range(4):  # both have tokens then
            r.steps.wait()
            r.steps.permit()
        r.steps.wait()
        waiting = [submit("waits"), submit("waits-2")]
        submit("queued")
        submit("queued-deadline")
        with pytest.raises(OverloadedError):
            submit("overloaded")
        r.engine.abort("queued")
        r.engine.abort("running")
        r.thread.run(lambda: expire("running-deadline", "queued-deadline"))
        r.steps.open()
        for future in waiting:
            future.result(SECONDS)
        late = submit("late", first_token_deadline=1e-9)
        assert late.result(SECONDS).finish_reason == "deadline"
        assert r.engine.submit([1] * 100, params(1), request_id="invalid").exception(SECONDS)
        assert asyncio.run(r.engine.drain())
        with pytest.raises(StepgraphError):
            submit("draining")
        asyncio.run(r.engine.wake())
        tokens = Scrape(metrics)("generation_tokens_total")
        r.on_step = fail
        assert isinstance(submit("lost").exception(SECONDS), EngineFailedError)
        wait_until(lambda: len(records) == 11)
        scrape = Scrape(metrics)
    ends = {record.request_id: (record.outcome, record.phase) for record in records}
    assert ends == {
        "running": ("abort", "decode"),
        "running-deadline": ("deadline", "decode"),
        "queued": ("abort", "queue"),
        "queued-deadline": ("deadline", "queue"),
        "waits": ("length", "decode"),
        "waits-2": ("length", "decode"),
        "overloaded": ("overloaded", "queue"),
        "late": ("deadline", "queue"),
        "invalid": ("invalid", "queue"),
        "lost": ("failed", "prefill"),
        "draining": ("unavailable", "queue"),
    }
    for record in records:
        answered = record.outcome in ("length", "abort", "deadline")
        assert (record.error is None) == answered, record
    outcomes, phases = Counter(end for end, _ in ends.values()), Counter(ends.values())
    for name, labels in (
        ("request_success", ("length", "abort", "deadline", "stop", "error")),
        ("requests_shed", ("overloaded", "unavailable", "deadline_unreachable")),
    ):
        assert [scrape(f"{name}_total", label) for label in labels] == [
            outcomes[label] for label in labels
        ]
    for name, outcome in (("requests_cancelled", "abort"), ("deadlines_missed", "deadline")):
        for phase in ("queue", "prefill", "decode"):
            assert scrape(f"{name}_total", phase) == phases[outcome, phase]  # type: ignore[index]
    assert scrape("requests_invalid_total") == scrape("requests_failed_total") == 1
    assert scrape("e2e_request_latency_seconds_count") == 5
    assert scrape("generation_tokens_total") >= tokens > 80  # also of the lost engine


class Scrape:
    """Samples of a scrape by name, with the values of their labels."""

    def __init__(self, metrics: EngineMetrics) -> None:
        text, self.content_type = metrics.exposition()
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(text.decode()):
            self.kinds[family.name] = family.type
            for sample in family.samples:
                self.samples[sample.name, *sample.labels.values()] = sample.value

    def __call__(self, name: str, *labels: str) -> float:
        return self.samples[f"stepgraph:{name}", *labels]

    def buckets(self, name: str) -> dict[float, float]:
        """Upper bound → count, of a histogram without labels."""
        return {
            float(key[-1]): value
            for key, value in self.samples.items()
            if key[0] == f"stepgraph:{name}_bucket"
        }


def served(engine: AsyncEngine, records: list[RequestRecord], count: int = 20) -> None:
    """Run requests to their end."""
    before = len(records)
    for seed in range(count):
        engine.submit([1, 2, 3, 4, 5, 6], params(seed, 1 + seed, n=1 + seed % 2))
    wait_until(lambda: len(records) == before + count)


def test_histograms_of_requests_hold_the_values_of_their_records() -> None:
    with AsyncEngine(fake_engine) as engine:
        metrics, records = EngineMetrics(engine), listening(engine)
        served(engine, records)
        scrape = Scrape(metrics)
    expected: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.seconds.items():
            known = {"first_token": "time_to_first_token", "e2e": "e2e_request_latency"}
            expected[known.get(name, f"request_{name}_time") + "_seconds"].append(value)
        expected["request_prompt_tokens"].append(record.num_prompt_tokens)
        expected["request_generation_tokens"].append(record.num_output_tokens)
        latencies = [(b - a) / 1e9 for times in record.token_ns for a, b in pairwise(times)]
        expected["inter_token_latency_seconds"] += latencies
        if latencies:
            expected["request_time_per_output_token_seconds"].append(fmean(latencies))
    without_labels = {m.name for m in METRICS if m.kind == "histogram" and not m.labels}
    assert expected.keys() == without_labels
    for name, values in expected.items():
        assert scrape(f"{name}_count") == len(values)
        assert scrape(f"{name}_sum") == pytest.approx(sum(values))
        for bound, count in scrape.buckets(name).items():
            assert count == sum(value <= bound for value in values), (name, bound)


def test_counters_and_steps() -> None:
    with AsyncEngine(fake_engine) as engine:
        metrics, records = EngineMetrics(engine), listening(engine)
        served(engine, records)
        middle = Scrape(metrics)
        served(engine, records)
        stats = asyncio.run(engine.stats())
        scrape = Scrape(metrics)
    assert scrape("generation_tokens_total") == sum(r.num_output_tokens for r in records)
    prompts = sum(r.num_prompt_tokens * len(r.token_ns) for r in records)
    assert scrape("prompt_tokens_total") == scrape("prefix_cache_queries_total") == prompts
    assert scrape("prefix_cache_hits_total") == stats["cache"]["hit_tokens"] > 0
    assert scrape("request_success_total", "length") == len(records)
    assert scrape("steps_total") == stats["steps"]
    for name in ("step_time_seconds", "step_bucket_size"):
        counts = [scrape(f"{name}_count", kind) for kind in ("decode", "prefill")]
        assert sum(counts) == stats["steps"]
        assert min(counts) > 0
    assert 0 < scrape("step_time_seconds_sum", "decode") < 10
    assert scrape("num_requests_running") == scrape("num_requests_waiting") == 0
    assert scrape("kv_cache_usage_perc") == 0
    assert scrape("cache_config_info", "4", str(stats["blocks"]["usable"])) == 1
    assert (scrape("engine_ready"), scrape("engine_phase", "serving")) == (1, 1)
    for key, value in middle.samples.items():
        if key[0].endswith(("_total", "_bucket", "_count")):
            assert scrape.samples[key] >= value


def test_gauges_while_requests_wait() -> None:
    with rig(max_num_seqs=2) as r:
        metrics = EngineMetrics(r.engine)
        r.steps.close()
        futures = [r.engine.submit([1, 2, 3], params(seed, 40)) for seed in range(5)]
        wait_until(lambda: r.steps.permit() or Scrape(metrics)("num_requests_running") == 2)
        scrape = Scrape(metrics)
        assert scrape("num_requests_waiting") == 3
        assert scrape("num_prompt_tokens_waiting") == 9
        assert 0 < scrape("kv_cache_usage_perc") < 1
        assert 0 < scrape("step_age_seconds") < SECONDS
        r.steps.open()
        wait(futures)
    closed = Scrape(metrics)
    assert (closed("engine_ready"), closed("engine_phase", "closed")) == (0, 1)
    assert closed("num_requests_running") == closed("num_requests_waiting") == 0
    assert closed("generation_tokens_total") >= scrape("generation_tokens_total")


def test_names_kinds_and_labels() -> None:
    before = {family.name for family in prometheus_client.REGISTRY.collect()}
    with AsyncEngine(fake_engine) as engine:
        metrics = EngineMetrics(engine, model_name="m", vllm_names=True)
        plain = EngineMetrics(engine)
        served(engine, listening(engine), 1)
        scrape, without = Scrape(metrics), Scrape(plain)
    assert all(f"`{metric.name}" in PAGE.read_text() for metric in METRICS)
    names = {f"stepgraph:{metric.name}" for metric in METRICS}
    aliases = {f"vllm:{metric.name}" for metric in METRICS if metric.vllm}
    assert set(without.kinds) == names
    assert scrape.kinds == {
        prefix + m.name: m.kind
        for m in METRICS
        for prefix in ("stepgraph:", "vllm:")
        if prefix == "stepgraph:" or m.vllm
    }
    assert aliases
    for (name, *labels), value in scrape.samples.items():
        assert "m" in labels
        if name.startswith("vllm:"):
            assert scrape.samples[name.replace("vllm:", "stepgraph:"), *labels] == value
    assert {family.name for family in prometheus_client.REGISTRY.collect()} == before
    text, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    _, content_type = metrics.exposition("application/openmetrics-text; version=x")
    assert content_type.startswith("text/plain")


def test_a_span_for_each_request() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    before = time.time_ns()
    with AsyncEngine(fake_engine) as engine:
        trace_requests(engine, model_name="m", tracer_provider=provider)
        records = listening(engine)
        own = params(5, 7, n=2, temperature=0.5, top_k=3)
        output = engine.submit([1, 2, 3], own, traceparent=f"00-{TRACE}-{PARENT}-01").result()
        engine.submit([1, 2], params(1), traceparent="not a header").result()
        with pytest.raises(RequestError):  # the fake engine has no tokenizer
            engine.submit(ChatPrompt([{"role": "user", "content": "hi"}])).result()
        wait_until(lambda: len(records) == 3)
    spans: Any = exporter.get_finished_spans()
    finished, second, refused = spans
    attributes = finished.attributes
    assert (finished.name, finished.kind) == ("text_completion m", SpanKind.SERVER)
    assert f"{finished.context.trace_id:032x}" == TRACE
    assert f"{finished.parent.span_id:016x}" == PARENT
    expected = {
        "request.model": "m",
        "response.id": output.request_id,
        "response.finish_reasons": ("length", "length"),
        "usage.input_tokens": 3,
        "usage.output_tokens": 14,
        "request.max_tokens": 7,
        "request.temperature": 0.5,
        "request.top_k": 3,
        "request.choice.count": 2,
        "request.seed": 5,
    }
    assert expected == {name: attributes[f"gen_ai.{name}"] for name in expected}
    assert finished.status.status_code is StatusCode.UNSET
    assert before - 1e6 <= finished.start_time < finished.end_time <= time.time_ns() + 1e6
    seconds = (finished.end_time - finished.start_time) / 1e9
    assert attributes["gen_ai.latency.e2e"] == pytest.approx(seconds)
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert sum(attributes[f"gen_ai.latency.{part}"] for part in parts) <= seconds
    assert second.parent is None
    assert (refused.name, refused.kind) == ("chat m", SpanKind.INTERNAL)
    assert refused.status.status_code is StatusCode.ERROR
    assert refused.attributes["error.type"] == "invalid"
