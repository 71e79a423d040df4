"""The model of a fleet, against simulated queues and replicas."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import deque
from typing import Any

import numpy as np
import pytest
from stepgraph.runtime.tools import fleet_model, step_validation
from stepgraph.runtime.tools.replica_model import GPUS, Gpu, Replica, StepSeconds
from stepgraph.runtime.tools.service_points import (
    Host,
    Service,
    best_mixed,
    best_separate,
    queueing_seconds,
)

from .bench_rig import ROOT

H200 = GPUS["H200"]
SMALL = Replica("preset:llama-3.2-1b", H200, 1)
CHAT = Service(1024, 256, ttft_seconds=0.5, itl_seconds=0.02)
HOST = Host()


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_waits_in_a_simulated_queue(load: float) -> None:
    """Lindley's recursion with exponential service times, of which the formula is exact."""
    draw = np.random.default_rng(1)
    served = draw.exponential(2.0, 400_000)
    gaps = draw.exponential(2.0 / load, 400_000)
    waits, wait = [], 0.0
    for gap, service in zip(gaps, served, strict=True):
        waits.append(wait)
        wait = max(0.0, wait + service - gap)
    assert queueing_seconds(load, 2.0) == pytest.approx(np.quantile(waits, 0.99), rel=0.1)


def test_queues_without_and_with_too_much_load() -> None:
    assert queueing_seconds(0.0, 1.0) == queueing_seconds(0.009, 1.0) == 0.0
    assert queueing_seconds(1.0, 1.0) == math.inf


def simulated(replica: Replica, service: Service, chunk: int, rate: float) -> tuple[float, float]:
    """Serve random requests step by step; return the p99 of the ITL and of the TTFT in seconds."""
    draw = random.Random(2)
    part = replica.prefill(chunk, max(service.prompt - chunk, 0) // 2).total
    now, arrival = 0.0, draw.expovariate(rate)
    waiting = deque[list[float]]()  # arrival, prompt tokens that are left
    decoding: list[float] = []  # tokens that are left
    itls, ttfts = [], []
    while len(ttfts) < 3000:
        while arrival <= now:
            waiting.append([arrival, max(1.0, draw.expovariate(1 / service.prompt))])
            arrival += draw.expovariate(rate)
        if not decoding and not waiting:
            now = arrival
            continue
        rows = -(-len(decoding) // 8) * 8
        step = replica.decode(rows, service.context).total if rows else 0.0
        room = float(chunk)
        now += step + (part if waiting else 0.0)
        itls += [step + (part if waiting else 0.0)] * len(decoding)
        decoding = [left - 1 for left in decoding if left > 1]
        while waiting and room > 0:
            used = min(room, waiting[0][1])
            waiting[0][1] -= used
            room -= used
            if waiting[0][1] <= 0:
                ttfts.append(now - waiting.popleft()[0])
                decoding.append(max(1.0, draw.expovariate(1 / service.output)))
    return float(np.quantile(itls[len(itls) // 5 :], 0.99)), float(np.quantile(ttfts[600:], 0.99))


def test_a_simulated_replica_meets_the_objectives_at_its_best_point() -> None:
    point = best_mixed(SMALL, CHAT, HOST)
    assert point is not None
    itl, ttft = simulated(SMALL, CHAT, point.chunk, point.gpu_requests_per_s)
    assert itl == pytest.approx(point.itl_seconds, rel=0.25)
    assert ttft < 2 * CHAT.ttft_seconds
    overloaded = simulated(SMALL, CHAT, point.chunk, 2 * point.gpu_requests_per_s)
    assert overloaded[1] > 2 * CHAT.ttft_seconds


@pytest.mark.parametrize("separate", [False, True])
def test_looser_objectives_and_faster_devices_serve_no_fewer(separate: bool) -> None:
    def rate(service: Service, gpu: Gpu = H200) -> float:
        replica = Replica("preset:llama-3.1-8b", gpu, 1)
        if separate:
            point = best_separate(replica, replica, service, HOST)
        else:
            point = best_mixed(replica, service, HOST)
        return 0.0 if point is None else point.gpu_requests_per_s

    rates = [rate(CHAT._replace(itl_seconds=itl)) for itl in (0.004, 0.008, 0.02, 0.1)]
    assert rates == sorted(rates)
    assert rates[-1] > 0
    rates = [rate(CHAT._replace(ttft_seconds=ttft)) for ttft in (0.02, 0.2, 2.0)]
    assert rates == sorted(rates)
    fast = H200._replace(bytes_per_s=2 * H200.bytes_per_s, flops=2 * H200.flops)
    assert rate(CHAT, fast) > rate(CHAT) > rate(CHAT, H200._replace(overlaps=False))


def test_points_hold_their_limits() -> None:
    for point in (best_mixed(SMALL, CHAT, HOST), best_separate(SMALL, SMALL, CHAT, HOST)):
        assert point is not None
        assert max(point.limits.values()) <= 1
        assert max(point.used.values()) <= 1
        assert point.exceeded in point.limits
    no_room = Replica("preset:llama-3.1-70b", H200, 1)
    assert no_room.cached_tokens < 0
    patient = CHAT._replace(ttft_seconds=99.0, itl_seconds=9.0)
    assert best_mixed(no_room, patient, HOST) is None
    assert best_separate(no_room, SMALL, patient, HOST) is None


def test_separate_replicas_serve_one_rate() -> None:
    point = best_separate(SMALL, SMALL, CHAT, HOST)
    assert point is not None
    decoded = point.rows / (CHAT.output * point.itl_seconds)
    assert (1 - point.prefill_gpus) * decoded == pytest.approx(point.gpu_requests_per_s)
    prefilled = point.gpu_requests_per_s / point.prefill_gpus
    assert prefilled * SMALL.prefill(CHAT.prompt, 0).total < 1


def test_steps_of_a_replica() -> None:
    """Hand-computed for a model of 1.24 billion weights, tied, of two bytes each."""
    weights = 1_235_814_400
    assert SMALL.weight_bytes == 2 * weights
    assert SMALL.kv_bytes == 2 * 16 * 8 * 64 * 2
    scores = 16 * 4 * 32 * 64
    head = 128_256 * 2048
    assert SMALL.flops(10, 100, sampled=10) == 10 * (2 * weights + 100 * scores)
    assert SMALL.flops(10, 100, sampled=1) == 10 * (2 * (weights - head) + 100 * scores) + 2 * head
    assert SMALL.cached_tokens == (0.9 * 141e9 - 2 * weights) // SMALL.kv_bytes
    half = dataclasses.replace(SMALL, ranks=2)
    assert half.kv_bytes == SMALL.kv_bytes / 2
    assert half.weight_bytes == pytest.approx(weights, rel=1e-3)
    assert SMALL.decode(8, 100).link == 0 < half.decode(8, 100).link
    assert StepSeconds(1.0, 2.0, 3.0).total == 5.0
    assert StepSeconds(1.0, 2.0, 3.0, overlaps=False).total == 6.0


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model preset:llama-3.2-1b --gpus 64 --tensor-parallel 1 2 --lengths 1024:256 64:16"
    assert fleet_model.main(flags.split()) == 0
    out, _ = capsys.readouterr()
    titles = [line for line in out.splitlines() if line.startswith("preset:")]
    assert [title.split(", ")[1] for title in titles] == ["64 H200"] * 2
    rows = [line.strip("| ").split("|") for line in out.splitlines() if " mixed " in line]
    replicas = [int(row[2]) for row in rows]
    assert replicas == [64, 32] * 2
    assert fleet_model.main(["--model", "preset:none"]) == 1
    assert fleet_model.main(["--lengths", "130000:8000"]) == 1
    assert "a context of 138000 exceeds" in capsys.readouterr().err
    for wrong in (["--lengths", "1024"], ["--token-cpu-us", "nan"]):
        with pytest.raises(SystemExit):
            fleet_model.main(wrong)


def test_validation_of_steps_that_the_model_predicts(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = Replica("preset:smollm2-135m", H200, 1)
    bandwidth, flops = 30e9, 5e11

    def case(rows: int, prompt: int) -> dict[str, Any]:
        size = 270_000_000 + 20_000 * rows * prompt
        computed = replica.flops(rows, prompt + 8, sampled=rows) / flops
        first = replica.flops(prompt, prompt // 2, sampled=1) / flops
        return {
            "model": "preset:smollm2-135m", "dtype": "bfloat16", "mode": "compile",
            "batch_size": rows, "input_len": prompt, "output_len": 16,
            "roofline": {"bytes_per_step": size}, "ttft_ms": {"p50": 1e3 * first},
            "step_ms": {"p50": 1e3 * (size / bandwidth + computed)},
        }  # fmt: skip

    cases = [case(rows, prompt) for prompt in (1024, 128) for rows in (1, 8)]
    found = step_validation.validate(cases, overlaps=False)
    assert len(found) == 6
    for _, measured, predicted in found:
        assert predicted == pytest.approx(measured)
    (tmp_path / "broken.json").write_text("{}")
    assert step_validation.main([str(tmp_path / "broken.json")]) == 1
    assert "broken.json" in capsys.readouterr().err


SHORT, LONG = "--lengths 1024:256 512:2048", "--lengths 8192:256 --ttft-ms 5000"


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("llama-3.1-8b", "--lengths 1024:256"),
        *(
            pytest.param(f"llama-3.1-{size}b", flags, marks=pytest.mark.slow)
            for size in (8, 70)
            for flags in (SHORT, LONG)
        ),
    ],
)
def test_the_page_has_the_output_of_the_tool(
    model: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert fleet_model.main(["--model", f"preset:{model}", *flags.split()]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    assert lines
    for line in lines:
        assert line in page
