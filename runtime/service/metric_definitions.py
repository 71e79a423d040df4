"""The metrics of `EngineMetrics`: names, kinds, labels and buckets. Standard library only.

    python -m stepgraph.runtime.service.metric_definitions docs/metrics.md

writes the table of that page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from .health import Phase

__all__ = ["METRICS", "PREFIX", "VLLM_PREFIX", "Metric", "with_table"]

PREFIX: Final = "stepgraph:"
VLLM_PREFIX: Final = "vllm:"

_LONG = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_LONG)
"""Buckets of times that requests take."""
TOKEN_SECONDS: Final = (
    *(1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
"""Buckets of times between tokens, and of steps."""
TOKENS: Final = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
SIZES: Final = tuple(float(1 << e) for e in range(14))


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of an `AsyncEngine`."""

    name: str
    """Without prefix, and without the `_total` of a counter."""
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label → its values; empty for values that depend on the engine."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
    vllm: bool = False
    """Whether vLLM has a metric of this name and meaning."""

    @property
    def series(self) -> tuple[str, ...]:
        """The values of its only label, each of which has a series; of no label: empty."""
        return next(iter(self.labels.values()), ("",))


_ENDED = {"phase": ("queue", "prefill", "decode")}
_KIND = {"kind": ("decode", "prefill")}


def _histogram(
    name: str, text: str, bounds: tuple[float, ...], labels: Mapping[str, tuple[str, ...]] = {}
) -> Metric:
    return Metric(name, "histogram", text, labels, bounds, vllm=not labels)


METRICS: Final = (
    Metric("num_requests_running", "gauge", "Completions that have a row.", vllm=True),
    Metric(
        "num_requests_waiting",
        "gauge",
        "Requests that wait for a row, those being tokenised included.",
        vllm=True,
    ),
    Metric("num_prompt_tokens_waiting", "gauge", "Prompt tokens of the queued requests."),
    Metric("kv_cache_usage_perc", "gauge", "Blocks that requests hold, 0 to 1.", vllm=True),
    Metric(
        "cache_config_info",
        "gauge",
        "1, with the size of the KV cache as labels.",
        {"block_size": (), "num_gpu_blocks": ()},
        vllm=True,
    ),
    Metric(
        "engine_phase",
        "gauge",
        "1 for the present phase, 0 for the others.",
        {"phase": tuple(phase.value for phase in Phase)},
    ),
    Metric("engine_ready", "gauge", "1 if new requests are served, as `health().ready`."),
    Metric(
        "step_age_seconds", "gauge", "Time since the last step, while work is due; 0 without work."
    ),
    Metric("kernel_fallbacks", "gauge", "Operations that run on slower kernels than configured."),
    Metric("prompt_tokens", "counter", "Prompt tokens of admitted completions.", vllm=True),
    Metric(
        "prompt_tokens_cached",
        "counter",
        "Of them, those found in the cache.",
        vllm=True,
    ),
    Metric("generation_tokens", "counter", "Output tokens.", vllm=True),
    Metric("prefix_cache_queries", "counter", "Tokens looked up in the prefix cache.", vllm=True),
    Metric("prefix_cache_hits", "counter", "Tokens found in the prefix cache.", vllm=True),
    Metric("evicted_blocks", "counter", "Cached blocks that were allocated again."),
    Metric("num_preemptions", "counter", "Preemptions of completions.", vllm=True),
    Metric("spec_decode_num_draft_tokens", "counter", "Drafts that steps verified.", vllm=True),
    Metric("spec_decode_num_accepted_tokens", "counter", "Of them, those accepted.", vllm=True),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Of them, by their number in the draft of a row, from 0.",
        {"position": ()},
        vllm=True,
    ),
    Metric("steps", "counter", "Launched steps."),
    Metric("step_fallbacks", "counter", "Launches without a prepared step."),
    Metric("gc_collections", "counter", "Runs of Python's garbage collector."),
    Metric("gc_seconds", "counter", "Time of Python's garbage collector."),
    Metric("engine_restarts", "counter", "Restarts after failures."),
    Metric(
        "request_success",
        "counter",
        "Requests that ended with an output.",
        {"finished_reason": ("stop", "length", "abort", "deadline", "error")},
        vllm=True,
    ),
    Metric("requests_cancelled", "counter", "Aborted requests, by where they were.", _ENDED),
    Metric("deadlines_missed", "counter", "Requests that ended with `deadline`.", _ENDED),
    Metric(
        "requests_shed",
        "counter",
        "Requests refused for now.",
        {"reason": ("overloaded", "deadline_unreachable", "unavailable")},
    ),
    Metric("requests_invalid", "counter", "Requests that can never be served."),
    Metric("send_timeouts", "counter", "Streams that ended because their client did not read."),
    Metric("requests_failed", "counter", "Requests lost to a failure of the engine."),
    _histogram("time_to_first_token_seconds", "From submission to the first token.", SECONDS),
    _histogram("inter_token_latency_seconds", "Between two tokens.", TOKEN_SECONDS),
    _histogram(
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a request.",
        TOKEN_SECONDS,
    ),
    _histogram(
        "e2e_request_latency_seconds", "From submission to the end, unless aborted.", SECONDS
    ),
    _histogram(
        "request_queue_time_seconds", "From submission to the entry into the engine.", SECONDS
    ),
    _histogram("request_prefill_time_seconds", "From that entry to the first token.", SECONDS),
    _histogram("request_decode_time_seconds", "From the first to the last token.", SECONDS),
    _histogram("request_inference_time_seconds", "Prefill and decode time.", SECONDS),
    _histogram("request_prompt_tokens", "Prompt tokens of a request with an output.", TOKENS),
    _histogram("request_generation_tokens", "Its output tokens.", TOKENS),
    _histogram("step_time_seconds", "Launches, from plan to commit.", TOKEN_SECONDS, _KIND),
    _histogram("step_bucket_size", "Buckets of the launches, in rows or tokens.", SIZES, _KIND),
)


def with_table(page: str) -> str:
    """Return a page with the table of all metrics between its two marks."""
    begin, end = "<!-- metrics -->\n", "<!-- end of metrics -->\n"
    lines = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        name = metric.name + ("_total" if metric.kind == "counter" else "")
        labels = "; ".join(
            f"`{label}`" + (": " + ", ".join(f"`{value}`" for value in values) if values else "")
            for label, values in metric.labels.items()
        )
        alias = " (vLLM)" if metric.vllm else ""
        lines.append(f"| `{name}`{alias} | {metric.kind} | {labels} | {metric.help} |")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))
