"""Compares a base commit with HEAD: tokens, log-probabilities, memory plans and times.

make golden ARGS=--quick    tokens, log-probabilities and memory plans
make golden                 the same, and torch.compile for every family (an hour or more)
make golden ARGS=--times    times of steps, of the host and of the start, in pairs

`--base REVISION` and `--head REVISION` choose commits or directories. Both trees run
`golden_probes.py` in processes of their own, on models that are written once from a seed. A
difference ends with status 1, unless `ALLOWED` has a reason for it.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers import GenerationConfig

from . import mtp_models
from .golden_probes import HOST_ROWS, STEP_POINTS, VOCAB_SIZE
from .tiny_models import BASE, VARIANTS, byte_level_tokenizer, random_model

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("base", "head")


class Allowed(NamedTuple):
    """A difference that is known."""

    cases: str
    """Pattern of cases, such as `gemma*/compile/torch/*` or `memory/*`."""
    reason: str
    """Why the results differ."""


ALLOWED = (
    Allowed("*/schema", "outputs of JSON schemas no longer have line breaks or several spaces"),
    Allowed(
        "memory/*",
        "token masks are on by default on a CPU, and prompt scores are stored like sampled tokens:"
        " the plan counts both",
    ),
)

EOS_TOKEN_IDS = [13, 22]
UNCHANGED = (
    *("base", "mistral", "qwen3", "gemma2", "gemma3", "deepseek_v3_moe", "llama4", "smollm3"),
    *("phi3", "olmo2", "olmo3", "granite", "granite4", "glm4", "llama_longrope"),
)
FAMILIES: dict[str, dict[str, Any]] = {
    **{variant: {} for variant in UNCHANGED},
    **{variant: {"num_key_value_heads": 2} for variant in ("qwen2", "mimo", "glm")},
    "deepseek_v2_moe": {"moe_intermediate_size": 24},
    "qwen3_moe": {"moe_intermediate_size": 22},
    "mixtral": {"intermediate_size": 36},
    "gpt_oss": {"intermediate_size": 32},
}
"""Variants of `tests/rigs/tiny_models.py`, one at least a family (`base` is Llama), with changes so
that two ranks can share them."""

PATHS = {
    f"{mode}/{kernels}": {"mode": mode, "kernels": kernels}
    for mode in ("eager", "compile")
    for kernels in ("native", "torch")
}
LIMITS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "block_size": 8,
    "num_blocks": 34,  # two requests are preempted
    "max_num_seqs": 4,
    "max_model_len": 128,
    "prefill_chunk": 24,
}
MORE_BLOCKS = {"num_blocks": 70}
SEVERAL_GROUPS = ("qwen2", "mimo", "qwen3", "gemma3", "smollm3", "olmo3")
"""Models whose layers are in several groups, each with blocks of its own: they get more."""
FEW_STEPS = {"max_num_seqs": 2, "buckets": (2,)}
"""torch.compile takes seconds for each prepared step."""
MASKS = {"structured_output": True}
RANKS = {"tensor_parallel": 2, "rank_timeout": 60.0, "prefill_chunk": 32}
QUICK_RANKS = ("base", "gemma3", "phi3", "mixtral", "gpt_oss", "llama4")


def drafts(method: str, **more: Any) -> dict[str, Any]:
    """Return settings for drafts whose number does not depend on times."""
    return {"speculation": {"method": method, "adaptive": False} | more}


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts+masks": drafts("ngram", prompt_lookup_min=2) | MASKS,
    "ranks": RANKS,
}
EXTRAS: dict[str, dict[str, Any]] = {
    "base/compile/native/bfloat16": {"dtype": "bfloat16"},
    "base/eager/torch/bfloat16": {"dtype": "bfloat16"},
    "gpt_oss/compile/native/bfloat16": {"dtype": "bfloat16"},
    "base/compile/native/int8": {"weight_dtype": "int8", "kv_dtype": "int8"},
    "base/compile/native/fp8": {"kv_dtype": "fp8"},
    "base/eager/torch/fp8": {"weight_dtype": "fp8", "kv_dtype": "fp8"},
    "base/compile/native/batch_invariant": {"batch_invariant": True},
    "base/compile/native/swap": {"host_cache_bytes": 1 << 20},
    "base/compile/native/threads": {"threads": 2},
    "base/compile/native/suffix": drafts("suffix"),
    "base/compile/native/schema": MASKS,
    "mimo/compile/native/mtp": drafts("mtp"),
    "demo/compile/native/plain": {},
    "demo/compile/native/eagle3": drafts("eagle3"),
    "demo/compile/native/eagle3+masks+ranks": drafts("eagle3") | MASKS | RANKS,
}
"""Further settings, each with one path of one model."""
MEMORY_PLANS = {
    "memory/smollm2-135m": "--device cpu --device-memory 24GB --batch-size 8",
    "memory/qwen2.5-0.5b": "--device cpu --device-memory 24GB --batch-size 32 --weight-dtype int8",
    "memory/llama-3.1-8b": "--device cuda --device-memory 80GB --batch-size 64",
    "memory/gpt-oss-20b": "--device cuda --device-memory 80GB --batch-size 16 --tensor-parallel 2",
    "memory/deepseek-v2-lite": "--device cuda --device-memory 40GB --batch-size 4 --kv-dtype fp8",
}


MOST_RATIO = 1.02


def write_models(models: Path) -> None:
    """Write the models of `FAMILIES` and one whose steps are mostly host time, from a seed."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    host = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    host |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    for name, changes in [*FAMILIES.items(), ("host", host)]:
        directory = models / name
        if name == "mimo":
            directory.mkdir(parents=True)
            mtp_models.write(directory, name, vocab_size=VOCAB_SIZE, **changes)
        else:
            settings = BASE | VARIANTS.get(name, {}) | {"vocab_size": VOCAB_SIZE} | changes
            random_model(settings).save_pretrained(directory)
        GenerationConfig(eos_token_id=EOS_TOKEN_IDS).save_pretrained(directory)
        byte_level_tokenizer(VOCAB_SIZE).save(str(directory / "tokenizer.json"))


class Tree(NamedTuple):
    """One of the two sides: its source, and links to it under the installed names."""

    source: Path
    links: Path

    @classmethod
    def make(cls, revision: str, work: Path, side: str) -> Tree:
        """Export a commit, or take a directory as it is."""
        source = Path(revision).resolve()
        if not source.is_dir():
            source = work / side
            shutil.rmtree(source, ignore_errors=True)
            source.mkdir()
            archive = subprocess.run(
                ["git", "-C", str(ROOT), "archive", revision], capture_output=True, check=True
            )
            subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
        links = work / f"{side}-links"
        shutil.rmtree(links, ignore_errors=True)
        package = links / "stepgraph"
        package.mkdir(parents=True)
        project = tomllib.loads((source / "pyproject.toml").read_text())
        for name, folder in project["tool"]["setuptools"]["package-dir"].items():
            if name == "stepgraph":
                for file in (source / folder).iterdir():
                    if file.is_file():
                        (package / file.name).symlink_to(file)
            elif name.count(".") == 1:
                (package / name.partition(".")[2]).symlink_to(source / folder)
        return cls(source, links)

    def start(self, probe: str, models: Path) -> subprocess.Popen[str]:
        """Start a probe."""
        program = Path(__file__).with_name("golden_probes.py")
        environment = os.environ | {"PYTHONPATH": str(self.links)}
        if probe in ("outputs", "host"):
            environment["OMP_NUM_THREADS"] = "1"
        return subprocess.Popen(
            [sys.executable, program, probe, models, self.source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=self.links,
            text=True,
        )


def results(process: subprocess.Popen[str], cases: Iterable[str]) -> dict[str, Any]:
    """Return what a probe prints for each case, a line each."""
    printed, _ = process.communicate()
    ended = {"crashed": f"the probe ended with status {process.returncode}"}
    return dict.fromkeys(cases, ended) | dict(map(json.loads, printed.splitlines()))


def token_cases(quick: bool, chosen: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each case."""
    cases = {}
    for model, path, feature in itertools.product(FAMILIES, PATHS, FEATURES):
        compiles = path == "compile/torch"
        slow = feature == "ranks" and (path != "compile/native" or model not in QUICK_RANKS)
        if quick and (compiles or slow):  # seconds to minutes each
            continue
        cases[f"{model}/{path}/{feature}"] = FEATURES[feature] | (FEW_STEPS if compiles else {})
    found = {}
    for case, more in (cases | EXTRAS).items():
        model, path = case.partition("/")[0], "/".join(case.split("/")[1:3])
        blocks = MORE_BLOCKS if model in SEVERAL_GROUPS else {}
        if fnmatch.fnmatch(case, chosen):
            found[case] = LIMITS | blocks | PATHS[path] | more
    return found


class Verdict(NamedTuple):
    """The comparison of a case."""

    case: str
    result: str
    """`equal`, `refused` (by both), `allowed` or `different`."""
    detail: str = ""


def compare_case(case: str, base: Any, head: Any) -> Verdict:
    """Compare what the two trees computed."""
    crashed = [
        f"{side}: {r['crashed']}"
        for side, r in zip(SIDES, (base, head), strict=True)
        if "crashed" in r
    ]
    if crashed:
        return Verdict(case, "different", "; ".join(crashed))
    if base == head:
        return Verdict(case, "refused" if "refused" in base else "equal")
    place, distance = difference(base, head)
    detail = f"{place}; numbers differ by {distance:.2g}" if distance < float("inf") else place
    for allowed in ALLOWED:
        if fnmatch.fnmatch(case, allowed.cases):
            return Verdict(case, "allowed", f"{allowed.reason} ({detail})")
    return Verdict(case, "different", detail)


def difference(base: Any, head: Any, place: str = "") -> tuple[str, float]:
    """Return where results differ first, and by how much; infinite if not in a number."""
    if isinstance(base, float) and isinstance(head, float):
        return place, abs(base - head)
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(base, dict) and isinstance(head, dict) and base.keys() == head.keys():
        pairs = [(f"{place}.{key}", base[key], head[key]) for key in base]
    elif isinstance(base, list) and isinstance(head, list) and len(base) == len(head):
        pairs = [(f"{place}[{i}]", *pair) for i, pair in enumerate(zip(base, head, strict=True))]
    if not pairs:
        return f"{place}: {str(base)[:60]} → {str(head)[:60]}", float("inf")
    found = [difference(b, h, where) for where, b, h in pairs if b != h]
    return found[0][0], max(distance for _, distance in found)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the counts of each family and the differences as text."""
    columns = ("equal", "refused", "allowed", "different")
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        counts.setdefault(verdict.case.partition("/")[0], Counter())[verdict.result] += 1
    counts["all"] = sum(counts.values(), Counter())
    lines = [f"{'':18}" + "".join(f"{name:>11}" for name in columns)]
    for family, count in counts.items():
        verdict = "FAIL" if count["different"] else "pass"
        lines.append(f"{family:18}" + "".join(f"{count[c]:11}" for c in columns) + f"   {verdict}")
    found = [v for v in verdicts if v.detail]
    return "\n".join([*lines, *(f"{v.result}: {v.case}: {v.detail}" for v in found)])


class Timing(NamedTuple):
    """Pairs of times of a point."""

    point: str
    unit: str
    base: float
    head: float
    ratio: float
    """The median of the ratios of the pairs."""
    low: float
    high: float
    """The middle half of these ratios."""
    pairs: int

    @classmethod
    def of(cls, point: str, unit: str, pairs: Sequence[Sequence[float]]) -> Timing:
        """Summarise pairs of base and HEAD, in `unit`."""
        ratios = [head / base for base, head in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sides = [statistics.median(side) for side in zip(*pairs, strict=True)]
        return cls(point, unit, *sides, middle, low, high, len(pairs))

    def __str__(self) -> str:
        verdict = f"beyond {MOST_RATIO}" if self.ratio > MOST_RATIO else ""
        return (
            f"{self.point:24}{self.base:10.2f}{self.head:10.2f} {self.unit:3}{self.ratio:8.3f}"
            f"  {self.low:.3f} to {self.high:.3f}{self.pairs:5}  {verdict}".rstrip()
        )


def in_turns(number: int) -> tuple[int, int]:
    """Return the order of the sides in a pair, which alternates."""
    return (0, 1) if number % 2 == 0 else (1, 0)


def measure_times(trees: Sequence[Tree], models: Path, pairs: int) -> list[Timing]:
    """Time steps and starts; the sides alternate, each in a process of its own."""
    found = []
    for kind, points, scale, unit in (
        ("steps", STEP_POINTS, 1e3, "ms"),
        ("host", [(rows, 64) for rows in HOST_ROWS], 1e6, "µs"),
    ):
        servers = [tree.start(kind, models) for tree in trees]
        for server in servers:
            _answer(server)
        for rows, context in points:
            for server in servers:
                _answer(server, f"begin {rows} {context}")
            count = 8 if kind == "steps" else 20
            medians = []
            for number in range(pairs):
                pair = [0.0, 0.0]
                for side in in_turns(number):
                    times = json.loads(_answer(servers[side], f"steps {count}"))
                    pair[side] = scale * statistics.median(times)
                medians.append(pair)
            for server in servers:
                _answer(server, "end")
            found.append(Timing.of(f"{kind} {rows} x {context}", unit, medians))
            print(found[-1], flush=True)
        for server in servers:
            server.communicate()
    starts = []
    for number in range(max(5, pairs // 3)):
        pair = [0.0, 0.0]
        for side in in_turns(number):
            pair[side] = float(_answer(trees[side].start("start", models)))
        starts.append(pair)
    found.append(Timing.of("start demo", "s", starts))
    print(found[-1], flush=True)
    return found


def _answer(server: subprocess.Popen[str], command: str = "") -> str:
    assert server.stdin is not None
    assert server.stdout is not None
    if command:
        server.stdin.write(command + "\n")
        server.stdin.flush()
    line = server.stdout.readline()
    if not line:
        raise RuntimeError(f"a probe ended with status {server.wait()}: {server.args}")
    return line


def compare(options: argparse.Namespace, work: Path) -> int:
    """Compare the two trees; return the status."""
    trees = [Tree.make(getattr(options, side), work, side) for side in SIDES]
    models = work / "models"
    if not models.exists():
        partial = work / "models-partial"
        shutil.rmtree(partial, ignore_errors=True)
        write_models(partial)
        partial.rename(models)
    verdicts: list[Verdict] = []
    timings: list[Timing] = []
    if options.times:
        print(f"{'':24}{'base':>10}{'HEAD':>10}{'':4}{'ratio':>8}  middle half{'n':>8}")
        timings = measure_times(trees, models, options.pairs)
    else:
        plans = {c: f for c, f in MEMORY_PLANS.items() if fnmatch.fnmatch(c, options.cases)}
        cases: dict[str, Any] = plans | token_cases(options.quick, options.cases)
        running = [tree.start("outputs", models) for tree in trees]
        for process in running:  # both are working before the first is read
            assert process.stdin is not None
            process.stdin.write(json.dumps(cases))
            process.stdin.close()
            process.stdin = None
        base, head = (results(process, cases) for process in running)
        verdicts = [compare_case(case, base[case], head[case]) for case in cases]
        print(table(verdicts))
    if options.output:
        document = {
            "base": options.base,
            "head": options.head,
            "cases": [verdict._asdict() for verdict in verdicts],
            "times": [timing._asdict() for timing in timings],
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    slower = any(timing.ratio > MOST_RATIO for timing in timings)
    return int(slower or any(verdict.result == "different" for verdict in verdicts))


def main() -> int:
    """Run the command line; return the status."""
    parser = argparse.ArgumentParser(description="Compare a base commit with HEAD.")
    parser.add_argument("--base", default="e818c78", help="a commit or a directory")
    parser.add_argument("--head", default="HEAD", help="a commit or a directory, such as .")
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--times", action="store_true", help="times only")
    parser.add_argument("--cases", default="*", help="a pattern, such as 'gemma*/eager/*'")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of each time")
    parser.add_argument("--work", type=Path, help="folder to keep trees and models in")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        return compare(options, options.work.resolve())
    with tempfile.TemporaryDirectory() as scratch:
        return compare(options, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
