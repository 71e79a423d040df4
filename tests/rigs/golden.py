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
import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from stepgraph.runtime.bench.workload import interleave
from transformers import GenerationConfig

from . import mtp_models
from .golden_probes import HOST_ROWS, STEP_POINTS, VOCAB_SIZE
from .tiny_models import BASE, VARIANTS, byte_level_tokenizer, random_model

ROOT = Path(__file__).resolve().parents[2]
MOST_RATIO = 1.02
ALLOWED = {
    "*/schema": "outputs of JSON schemas no longer have line breaks or several spaces",
    "memory/*": "token masks are on by default on a CPU, and prompt scores are stored like sampled"
    " tokens: the plan counts both",
}
"""Known differences: a pattern of cases, such as `gemma*/compile/torch/*`, and why they differ."""

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
        source, links = Path(revision).resolve(), work / f"{side}-links"
        if not source.is_dir():
            source = work / side
            shutil.rmtree(source, ignore_errors=True)
            source.mkdir()
            export = ["git", "-C", str(ROOT), "archive", revision]
            archive = subprocess.run(export, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
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
        """Start a probe, which reads lines and answers each with one."""
        program = Path(__file__).with_name("golden_probes.py")
        threads = {"OMP_NUM_THREADS": "1"} if probe in ("outputs", "host") else {}
        return subprocess.Popen(
            [sys.executable, program, probe, models, self.source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(self.links)} | threads,
            cwd=self.links,
            text=True,
        )


def ask(probe: subprocess.Popen[str], question: object) -> Any:
    """Return the answer of a probe. Raises `RuntimeError` if it has ended."""
    assert probe.stdin is not None
    assert probe.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        probe.stdin.write(json.dumps(question) + "\n")
        probe.stdin.flush()
        if line := probe.stdout.readline():
            return json.loads(line)
    raise RuntimeError(f"the probe ended with status {probe.wait()}")


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


def compare_case(case: str, base: Any, head: Any) -> tuple[str, str]:
    """Return `equal`, `refused` (by both), `allowed` or `different`, and how results differ."""
    crashed = [r["crashed"] for r in (base, head) if "crashed" in r]
    if not crashed and base == head:
        return "refused" if "refused" in base else "equal", ""
    reasons = [why for pattern, why in ALLOWED.items() if fnmatch.fnmatch(case, pattern)]
    if crashed or not reasons:
        return "different", "; ".join(crashed) or difference(base, head)
    return "allowed", f"{reasons[0]} ({difference(base, head)})"


def difference(base: Any, head: Any) -> str:
    """Return where results differ first, and by how much if they do in numbers only."""
    before, after = dict(leaves(base)), dict(leaves(head))
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    pairs = [(before.get(key), after.get(key)) for key in changed]
    if all(isinstance(value, float) for pair in pairs for value in pair):
        return f"{changed[0]}; numbers differ by {max(abs(a - b) for a, b in pairs):.2g}"
    return f"{changed[0]}: {str(pairs[0][0])[:60]} → {str(pairs[0][1])[:60]}"


def leaves(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Return the values within dictionaries and lists, with their places."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{place}.{key}")
    else:
        yield place, tree


def compare_cases(trees: Sequence[Tree], models: Path, cases: Mapping[str, Any]) -> bool:
    """Print the cases whose results are not equal; return whether all differences are allowed."""

    def results(tree: Tree) -> dict[str, Any]:
        probe, found = tree.start("outputs", models), {}
        for case, given in cases.items():
            try:
                found[case] = ask(probe, [case, given])
            except RuntimeError as error:
                found[case] = {"crashed": str(error)}
        return found

    with ThreadPoolExecutor(len(trees)) as pool:
        base, head = pool.map(results, trees)
    verdicts = {case: compare_case(case, base[case], head[case]) for case in cases}
    for case, (verdict, detail) in verdicts.items():
        if detail:
            print(f"{verdict}: {case}: {detail}")
    counts = Counter(verdict for verdict, _ in verdicts.values())
    print(f"{len(cases)} cases: {dict(counts)}")
    return not counts["different"]


def compare_times(trees: Sequence[Tree], models: Path, pairs: int) -> bool:
    """Time steps and starts of both sides in turns; return whether HEAD is fast enough."""

    def compare(point: str, unit: str, scale: float, *measures: Callable[[], float]) -> bool:
        times: list[list[float]] = [[], []]
        sides = zip(times, measures, strict=True)
        interleave([lambda t=t, m=m: t.append(scale * m()) for t, m in sides], pairs)
        ratios = [after / before for before, after in zip(*times, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        base, head = map(statistics.median, times)
        verdict = f"  beyond {MOST_RATIO}" if ratio > MOST_RATIO else ""
        print(
            f"{point:20}{base:10.2f}{head:10.2f} {unit:3}{ratio:8.3f}  {low:.3f} to {high:.3f}"
            f"{verdict}",
            flush=True,
        )
        return ratio <= MOST_RATIO

    print(f"{'':20}{'base':>10}{'HEAD':>10}{'':4}{'ratio':>8}  middle half")
    passed = []
    for kind, points, unit, scale in (
        ("steps", STEP_POINTS, "ms", 1e3),
        ("host", [(rows, 64) for rows in HOST_ROWS], "µs", 1e6),
    ):
        probes = [tree.start(kind, models) for tree in trees]
        for point in points:
            asks = [partial(ask, probe, point) for probe in probes]
            passed.append(compare(f"{kind} {point[0]} x {point[1]}", unit, scale, *asks))
        for probe in probes:
            probe.communicate()

    def start(tree: Tree) -> float:
        with tree.start("start", models) as probe:
            return float(ask(probe, None))

    starts = [partial(start, tree) for tree in trees]
    return all([*passed, compare("start demo", "s", 1.0, *starts)])


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
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        work = work.resolve()
        trees = [Tree.make(getattr(options, side), work, side) for side in ("base", "head")]
        if not (models := work / "models").exists():
            partial_models = work / "models-partial"
            shutil.rmtree(partial_models, ignore_errors=True)
            write_models(partial_models)
            partial_models.rename(models)
        if options.times:
            return int(not compare_times(trees, models, options.pairs))
        plans = {c: f for c, f in MEMORY_PLANS.items() if fnmatch.fnmatch(c, options.cases)}
        cases = plans | token_cases(options.quick, options.cases)
        return int(not compare_cases(trees, models, cases))


if __name__ == "__main__":
    sys.exit(main())
