"""Compares the routing policies of replicas on prompts with shared prefixes (extra `ray`).

    python -m stepgraph.runtime.bench.load.prefix_routing --output-json routing.json

It runs Ray on this machine, with replicas whose caches are too small for all prefixes together.
Some clients send prompts without pause: a prefix, drawn from `--prefixes` by Zipf's law, and tokens
of its own. The hit rate is the share of prompt tokens found in a cache; the time to first token
(TTFT) is measured by the client. In each round every policy is deployed anew, with empty caches.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....profiling.command_line import CommandParser

__all__ = ["main"]

POLICIES = ("prefix", "balanced", "round_robin")
TIMEOUT_SECONDS = 300
BLOCK_SIZE = 16
PORT = 8713
"""Of Serve's HTTP proxy."""


@dataclass(frozen=True)
class Workload:
    """Prompts with shared prefixes, and the replicas that serve them."""

    model: str
    replicas: int
    clients: int
    requests: int
    """In a round, for each policy."""
    prefixes: int
    prefix_tokens: int
    own_tokens: int
    output_tokens: int
    zipf: float
    """The k-th prefix has a weight of 1 / k to this power; 0: all the same."""
    cached_prefixes: float
    """Prefixes that fit the cache of one replica."""
    rounds: int
    seed: int

    def prompts(self, round_number: int) -> list[list[int]]:
        """Return the prompts of a round, the same for every policy."""
        rng = random.Random(f"{self.seed}/{round_number}")
        prefixes = [self._tokens(rng, self.prefix_tokens) for _ in range(self.prefixes)]
        weights = [(k + 1) ** -self.zipf for k in range(self.prefixes)]
        chosen = rng.choices(prefixes, weights, k=self.requests)
        return [[*prefix, *self._tokens(rng, self.own_tokens)] for prefix in chosen]

    @staticmethod
    def _tokens(rng: random.Random, n: int) -> list[int]:
        return [rng.randrange(3, 400) for _ in range(n)]

    def arguments(self, policy: str) -> dict[str, Any]:
        """Return the arguments of `build`."""
        rows = -(-self.clients // self.replicas) + 1
        own = -(-(self.own_tokens + self.output_tokens) // BLOCK_SIZE) + 1
        blocks = int(self.cached_prefixes * self.prefix_tokens / BLOCK_SIZE) + rows * own + 1
        engine = {"max_num_seqs": rows, "threads": 1, "num_blocks": blocks, "mode": "eager"}
        return {
            "model": self.model,
            "engine": {**engine, "block_size": BLOCK_SIZE},
            "routing": {"policy": policy},
            "replicas": self.replicas,
            "num_cpus": 1,
        }


@dataclass(frozen=True)
class _Answer:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = vars(_parser().parse_args(arguments))
    output, workload = options.pop("output_json"), Workload(**options)
    answers: dict[str, list[_Answer]] = {policy: [] for policy in POLICIES}
    results: list[dict[str, Any]] = []
    for round_number in range(workload.rounds):
        prompts = workload.prompts(round_number)
        turn = round_number % len(POLICIES)
        for policy in POLICIES[turn:] + POLICIES[:turn]:
            answers[policy] += _run(workload, policy, prompts)
            print(f"round {round_number + 1}, {policy}", file=sys.stderr, flush=True)
        results = [_summary(policy, found) for policy, found in answers.items()]
        if output:  # after each round, so that an interrupted run leaves whole ones
            done = dataclasses.replace(workload, rounds=round_number + 1)
            _write(Path(output), done, results, arguments or sys.argv[1:])
    print(_table(results))
    return 0


def _write(
    path: Path, workload: Workload, results: list[dict[str, Any]], arguments: Sequence[str]
) -> None:
    environment = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(("python -m", __spec__.name, *arguments)),
    }
    document = {
        "environment": environment,
        "workload": dataclasses.asdict(workload),
        "policies": results,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _run(workload: Workload, policy: str, prompts: list[list[int]]) -> list[_Answer]:
    """Deploy the replicas with a policy and send all prompts."""
    import ray
    from ray import serve

    from ...service.ray_app import build

    arguments = workload.arguments(policy)
    ray.init(
        num_cpus=workload.replicas,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        serve.start(http_options={"port": PORT})
        serve.run(build(arguments), name="routing")
        body = {"max_tokens": workload.output_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"repetition_penalty": 1}  # whatever the model's default is
        for _ in range(2 * workload.replicas):  # the first requests of a process are slower
            _send({**body, "prompt": [5] * 40})
        with ThreadPoolExecutor(workload.clients) as clients:
            return list(clients.map(lambda prompt: _send({**body, "prompt": prompt}), prompts))
    finally:
        serve.shutdown()
        ray.shutdown()


def _send(body: dict[str, Any]) -> _Answer:
    """Stream one completion."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=TIMEOUT_SECONDS)
    try:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps({**body, **usage}))
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(1000)!r}")
        first, last = None, b""
        for line in response:
            if first is None:
                first = time.perf_counter()
            if line.startswith(b"data: {"):
                last = line
        assert first is not None, "a stream has an event"
        used = json.loads(last.removeprefix(b"data: "))["usage"]
    finally:
        connection.close()
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return _Answer(first - began, used["prompt_tokens"], cached)


def _summary(policy: str, answers: list[_Answer]) -> dict[str, Any]:
    times = sorted(1e3 * answer.ttft_s for answer in answers)
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    cached = sum(answer.cached_tokens for answer in answers)
    return {
        "policy": policy,
        "n": len(answers),
        "hit_rate": cached / sum(answer.prompt_tokens for answer in answers),
        "ttft_ms": {
            "mean": statistics.fmean(times),
            **{f"p{percent}": cuts[percent - 1] for percent in (50, 90, 99)},
        },
    }


def _table(results: list[dict[str, Any]]) -> str:
    lines = ["policy       hit rate   TTFT mean / p50 / p90 / p99 ms"]
    for result in results:
        times = " / ".join(f"{value:.0f}" for value in result["ttft_ms"].values())
        lines.append(f"{result['policy']:<12} {result['hit_rate']:8.3f}   {times}")
    return "\n".join(lines)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m stepgraph.runtime.bench.load.prefix_routing",
        description="Compare the routing policies of replicas on prompts with shared prefixes.",
    )
    for name, default, text in (
        ("replicas", 2, "replicas of one CPU each"),
        ("clients", 4, "requests at the same time"),
        ("requests", 96, "requests for each policy, in a round"),
        ("prefixes", 12, "different prefixes"),
        ("prefix-tokens", 768, "tokens of a prefix"),
        ("own-tokens", 32, "tokens of a prompt after its prefix"),
        ("output-tokens", 8, "tokens of an answer"),
        ("rounds", 2, "rounds, in each of which every policy is deployed"),
        ("seed", 0, "seed of the prompts"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (%(default)s)"
        )
    for name, number, text in (
        ("zipf", 0.5, "exponent of the popularity of prefixes"),
        ("cached-prefixes", 7.0, "prefixes that fit the cache of one replica"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=number, metavar="X", help=f"{text} (%(default)s)"
        )
    parser.add_argument("--model", default="demo", metavar="MODEL", help="(%(default)s)")
    parser.add_argument("--output-json", metavar="FILE", help="write the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
