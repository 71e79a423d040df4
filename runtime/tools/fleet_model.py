"""Predicts how many requests a fleet of GPUs serves within latency objectives, and what limits it.

python -m stepgraph.runtime.tools.fleet_model --model preset:llama-3.1-8b --gpus 1000

Arithmetic on the step times of `replica_model.py`; nothing is measured. docs/scaling.md describes
the model and lists its assumptions.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence

from ...profiling.command_line import CommandParser
from ...profiling.markdown import aligned
from ..config import EngineConfig
from ..errors import StepgraphError
from .arguments import positive_int
from .replica_model import GPUS, Gpu, Replica
from .service_points import Host, Point, Service, best_mixed, best_separate
from .step_report import read_model

__all__ = ["explain_fleet", "main"]

ROUTE_CPU_SECONDS = 1e-3
"""Of a router for a request: assumed."""
GPU_FAILURE_HOURS = 16384 * 54 * 24 / 419
"""Mean time between failures of a GPU with its share of a machine: 419 unexpected interruptions of
16,384 H100 in 54 days (Llama Team, The Llama 3 Herd of Models, 2024, section 3.3.4)."""
START_SECONDS = 20.0
"""Of a replica, without its weights: docs/gpu-predictions.md."""
LOAD_BYTES_PER_S = 1e9
"""At which each GPU gets its weights: assumed."""
MACHINE_GPUS = 8
REPAIR_HOURS = 24.0
"""Until a machine is back after a failure: assumed."""

_HEAD = ["ranks", "prefill", "replicas", "rows", "chunk", "TTFT ms", "ITL ms", "requests/s"]
_HEAD += ["tokens/s a GPU", "first limit", "memory", "FLOPs", "link", "KV", "host CPU"]


def explain_fleet(
    source: str, gpu: Gpu, gpus: int, ranks: Sequence[int], service: Service, host: Host
) -> list[str]:
    """Return lines of Markdown: the best points of each size of replica, and the best fleet.

    Args:
        source: as `Engine.from_pretrained`; only the configuration is read.
        gpu: each of them.
        gpus: their number.
        ranks: sizes of replicas to compare.
        service: requests and objectives.
        host: CPU time and network of a replica.

    Raises:
        CheckpointError: as `Engine.from_pretrained`.
        ConfigError: requests are longer than the model's context, or as `rank_plans`.
    """
    read_model(source, EngineConfig(), service.prompt + service.output)
    replicas = [Replica(source, gpu, count) for count in ranks]
    rows, best = [], None
    for replica in replicas:
        for point, prefill in _points(replica, replicas, service, host):
            where = "mixed"
            if point and prefill:
                where = f"{gpus * point.prefill_gpus / prefill.ranks:,.0f} x {prefill.ranks}"
            rows.append([str(replica.ranks), where, *_cells(point, replica, gpus, service)])
            if point and (best is None or point.gpu_requests_per_s > best[0].gpu_requests_per_s):
                best = point, replica
    title = f"{source}, {gpus:,} {gpu.name}, prompts of {service.prompt:,} tokens, answers of"
    title += f" {service.output:,}, p99 of TTFT {service.ttft_seconds * 1e3:g} ms and of ITL"
    title += f" {service.itl_seconds * 1e3:g} ms (predicted, not measured)"
    table = aligned(_HEAD, rows, 2)
    return [title, "", *table, *([] if best is None else ["", *_fleet(*best, gpus, service)])]


def _points(
    replica: Replica, replicas: Sequence[Replica], service: Service, host: Host
) -> Iterator[tuple[Point | None, Replica | None]]:
    """Yield the mixed point, and the best separate one with its prefill replica."""
    yield best_mixed(replica, service, host), None
    pairs = [(best_separate(other, replica, service, host), other) for other in replicas]
    found = [(point, other) for point, other in pairs if point is not None]
    if found:
        yield max(found, key=lambda pair: pair[0].gpu_requests_per_s)


def _cells(point: Point | None, replica: Replica, gpus: int, service: Service) -> list[str]:
    if point is None:
        why = "objectives" if replica.cached_tokens > 0 else "weights do not fit"
        return ["-"] * 7 + [why] + ["-"] * 5
    used, limits = point.used, point.limits
    requests = gpus * point.gpu_requests_per_s
    return [
        f"{gpus * (1 - point.prefill_gpus) / replica.ranks:,.0f}",
        str(point.rows),
        str(point.chunk or "-"),
        f"{point.ttft_seconds * 1e3:,.0f}",
        f"{point.itl_seconds * 1e3:.1f}",
        f"{requests:,.0f}",
        f"{point.gpu_requests_per_s * service.output:,.0f}",
        point.exceeded,
        *(f"{used[name]:.0%}" for name in ("memory", "FLOPs", "link")),
        *(f"{limits[name]:.0%}" for name in ("KV capacity", "host CPU")),
    ]


def _fleet(point: Point, replica: Replica, gpus: int, service: Service) -> list[str]:
    """What the best fleet needs around its GPUs."""
    requests = gpus * point.gpu_requests_per_s
    hours = GPU_FAILURE_HOURS / gpus
    restart = START_SECONDS + replica.weight_bytes / LOAD_BYTES_PER_S
    absent = min(1.0, MACHINE_GPUS * REPAIR_HOURS / hours / gpus)
    facts = {
        "router CPUs": f"{requests * ROUTE_CPU_SECONDS:,.1f} for {requests:,.0f} requests/s",
        "KV transfer": f"{point.used['network']:.1%} of the network of a prefill GPU"
        if "network" in point.used
        else "none",
        "a GPU fails every": f"{hours:,.1f} h",
        "requests cut off by a failure": f"{point.rows:,}",
        "restart of the replica": f"{restart:,.0f} s, {replica.ranks} GPUs idle",
        "GPUs under repair": f"{absent:.2%}",
    }
    return aligned(["the fleet with the most requests", ""], [[k, v] for k, v in facts.items()], 2)


def _lengths(text: str) -> tuple[int, int]:
    """Read PROMPT:OUTPUT."""
    prompt, colon, output = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not PROMPT:OUTPUT, such as 1024:256")
    return positive_int(prompt), positive_int(output)


def _milliseconds(text: str) -> float:
    return positive_int(text) / 1e3


def _microseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:  # NaN fails too
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of microseconds")
    return value / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = CommandParser(prog="fleet_model", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["preset:llama-3.1-8b"], metavar="MODEL")
    parser.add_argument("--gpu", choices=tuple(GPUS), default="H200")
    parser.add_argument("--gpus", type=positive_int, default=1000)
    parser.add_argument("--tensor-parallel", nargs="+", type=positive_int, default=[1, 2, 4, 8])
    lengths = "mean tokens of prompts and answers (default: 1024:256 512:2048)"
    usual = [(1024, 256), (512, 2048)]
    parser.add_argument(
        "--lengths", nargs="+", type=_lengths, default=usual, metavar="P:O", help=lengths
    )
    parser.add_argument("--ttft-ms", type=_milliseconds, default=2.0, help="p99 (default: 2000)")
    parser.add_argument("--itl-ms", type=_milliseconds, default=0.03, help="p99 (default: 30)")
    parser.add_argument(
        "--token-cpu-us",
        type=_microseconds,
        default=Host().token,
        help=f"CPU time of a token on its path to a socket (default: {Host().token * 1e6:g})",
    )
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="add the times of memory traffic and operations of a step; default: the longer one",
    )
    options = parser.parse_args(arguments)
    gpu = GPUS[options.gpu]._replace(overlaps=not options.no_overlap)
    host = Host(token=options.token_cpu_us)
    for source in options.model:
        for prompt, output in options.lengths:
            service = Service(prompt, output, options.ttft_ms, options.itl_ms)
            try:
                lines = explain_fleet(
                    *(source, gpu, options.gpus, options.tensor_parallel, service, host)
                )
            except StepgraphError as error:
                print(f"{parser.prog}: error: {source}: {error}", file=sys.stderr)
                return 1
            print("\n".join(lines), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
