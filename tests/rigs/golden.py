"""Compare a base commit with HEAD: tokens, log-probabilities, memory plans and times.

python tests/rigs/golden.py --base e818c78 --quick     tokens, log-probabilities, memory plans
python tests/rigs/golden.py --base e818c78             the same, and torch.compile for every family
python tests/rigs/golden.py --base e818c78 --times     times, paired and interleaved

Both trees are exported to a folder and run the same probes of this file, which use the public
interface only: `Engine`, `EngineConfig`, `SamplingParams`, `generate`, `step`, `stats`, and the
command `stepgraph explain memory`. They read the same models, written once from a seed. A
difference ends with status 1, unless `ALLOWED` has a reason for it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("base", "head")


class Allowed(NamedTuple):
    """A difference that is known."""

    cases: str
    """Pattern of cases, such as `gemma*/compile/torch/*` or `memory/*`."""
    reason: str
    """Why the results differ."""
    any_value: bool = False
    """Results may differ in anything; otherwise only numbers, by the tolerance of the dtype."""


ALLOWED: tuple[Allowed, ...] = ()

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of log-probabilities, by the dtype of a case; for `ALLOWED` differences."""

# Families and the variants of `tests/tiny_models.py` that cover them, with changes: a vocabulary
# that has room for a tokenizer of bytes, and sizes that two ranks can share.
VOCAB_SIZE = 320
FAMILIES: dict[str, dict[str, Any]] = {
    "base": {},  # llama
    "mistral": {},
    "qwen2": {"num_key_value_heads": 2},
    "mimo": {"num_key_value_heads": 2},
    "qwen3": {},
    "gemma2": {},
    "gemma3": {},
    "deepseek_v2_moe": {"moe_intermediate_size": 24},
    "deepseek_v3_moe": {},
    "mixtral": {"intermediate_size": 36},
    "qwen3_moe": {"moe_intermediate_size": 22},
    "gpt_oss": {"intermediate_size": 32},
    "llama4": {},
    "smollm3": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "granite4": {},
    "glm": {"num_key_value_heads": 2},
    "glm4": {},
    "llama_longrope": {},
}
EOS_TOKEN_IDS = [13, 22]

PATHS = {  # mode and kernels
    "eager/native": {"mode": "eager", "kernels": "native"},
    "eager/torch": {"mode": "eager", "kernels": "torch"},
    "compile/native": {"mode": "compile", "kernels": "native"},
    "compile/torch": {"mode": "compile", "kernels": "torch"},
}
LIMITS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "block_size": 8,
    "num_blocks": 34,  # two requests are preempted
    "preemption": "recompute",  # `auto` depends on times
    "max_num_seqs": 4,
    "max_model_len": 128,
    "prefill_chunk": 24,
}
MORE_BLOCKS = {"num_blocks": 70}
SEVERAL_GROUPS = ("qwen2", "mimo", "qwen3", "gemma3", "smollm3", "olmo3")
"""Models whose layers are in several groups, each with blocks of its own: they get more."""
FEW_STEPS = {"max_num_seqs": 2, "buckets": (2,), "prefill_chunk": 16}
"""torch.compile takes seconds for each prepared step."""
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts+masks": {
        "speculation": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 2},
        "structured_output": True,
    },
    "ranks": {"tensor_parallel": 2, "prefill_chunk": 32},
}
EXTRAS: list[tuple[str, str, str, dict[str, Any]]] = [  # model, path, feature, settings
    ("base", "compile/native", "bfloat16", {"dtype": "bfloat16"}),
    ("base", "eager/torch", "bfloat16", {"dtype": "bfloat16"}),
    ("gpt_oss", "compile/native", "bfloat16", {"dtype": "bfloat16"}),
    ("base", "compile/native", "int8", {"weight_dtype": "int8", "kv_dtype": "int8"}),
    ("base", "compile/native", "fp8", {"kv_dtype": "fp8"}),
    ("base", "eager/torch", "fp8", {"weight_dtype": "fp8", "kv_dtype": "fp8"}),
    ("base", "compile/native", "batch_invariant", {"batch_invariant": True}),
    ("base", "compile/native", "launches", {"steps_per_launch": 4}),
    ("base", "compile/native", "swap", {"preemption": "swap", "host_cache_bytes": 1 << 20}),
    ("base", "compile/native", "suffix", {"speculation": {"method": "suffix", "adaptive": False}}),
    ("base", "compile/native", "threads", {"threads": 2}),
    ("base", "compile/native", "schema", {"structured_output": True}),
    ("mimo", "compile/native", "mtp", {"speculation": {"method": "mtp", "adaptive": False}}),
    ("demo", "compile/native", "plain", {}),
    ("demo", "compile/native", "eagle3", {"speculation": {"method": "eagle3", "adaptive": False}}),
    (
        "demo",
        "compile/native",
        "eagle3+masks+ranks",
        {
            "speculation": {"method": "eagle3", "adaptive": False},
            "structured_output": True,
            "tensor_parallel": 2,
            "prefill_chunk": 32,
        },
    ),
]
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-c]{2,5}-[0-9]+"},
    {"choice": ["yes", "no", "naïve café"]},
    {"grammar": 'start: "(" inner ")"\ninner: /[xy]*/ | start'},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

MEMORY_PLANS = {
    "smollm2-135m": "--device cpu --device-memory 24GB --batch-size 8",
    "qwen2.5-0.5b": "--device cpu --device-memory 24GB --batch-size 32 --weight-dtype int8",
    "llama-3.1-8b": "--device cuda --device-memory 80GB --batch-size 64",
    "gpt-oss-20b": "--device cuda --device-memory 80GB --batch-size 16 --tensor-parallel 2",
    "deepseek-v2-lite": "--device cuda --device-memory 40GB --batch-size 4 --kv-dtype fp8",
}

STEP_MODEL = "preset:smollm2-135m"
STEP_POINTS = [(1, 128), (8, 128), (32, 128), (1, 1024), (8, 1024)]
HOST_ROWS = (1, 32, 256)
MOST_RATIO = 1.02


# ---------------------------------------------------------------- probes, run by both trees


def probe_tokens(models: Path, cases: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the outputs of each case."""
    found = {}
    for model, path, feature, settings in cases:
        name = f"{model}/{path}/{feature}"
        try:
            found[name] = _outputs(models, model, feature, settings)
        except Exception as error:  # is reported as a failure of the case
            found[name] = {"crashed": repr(error)}
    return found


def _outputs(models: Path, model: str, feature: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that callers see of a few requests, which fill an engine."""
    from stepgraph import ConfigError, Engine, EngineConfig

    source = model if model == "demo" else models / model
    try:
        started = Engine.from_pretrained(source, EngineConfig(**settings))
    except ConfigError as error:
        return {"refused": getattr(error, "field", None) or str(error)[:120]}
    with started as engine:
        masks = bool(settings.get("structured_output"))
        prompts, params = _requests(masks, feature == "schema")
        outputs = engine.generate(prompts, params)
        engine.check_integrity()
        drafts = engine.stats()["speculation"] or {}
        score = engine.score(prompts[2], 50)
    return {
        "requests": [
            {
                "refused": type(output.error).__name__ if output.error else None,
                "prompt": [_numbers(entry) for entry in output.prompt_logprobs or ()],
                "completions": [
                    {
                        "tokens": done.token_ids,
                        "text": done.text,
                        "reason": done.finish_reason,
                        "logprobs": [_numbers(entry) for entry in done.logprobs],
                    }
                    for done in output.completions
                ],
            }
            for output in outputs
        ],
        "drafts": {key: drafts.get(key) for key in ("drafted", "accepted")},
        "score": [score.sum().item(), *score.flatten()[::61].tolist()],
    }


def _requests(masks: bool, schema: bool) -> tuple[list[list[int]], list[Any]]:
    """Return prompts and parameters that use every part of the sampler."""
    from stepgraph import SamplingParams

    draws = random.Random(5)  # parameters are limited to what the oldest base has
    phrase = [draws.randrange(VOCAB_SIZE) for _ in range(7)]
    lengths = (5, 40, 61, 17, 30, 9)
    prompts = [[draws.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]
    prompts[1:3] = [phrase * 5, prompts[2][:40] + phrase * 3]  # drafts follow repetitions
    prompts[4] = prompts[2][:24] + prompts[4][:6]  # a cached prefix, and a block of it
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 3}
    drawn: dict[str, Any] = {"temperature": 0.9, "logprobs": 2}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    params = [
        greedy | {"max_tokens": 40},
        greedy | {"max_tokens": 40},
        greedy | {"max_tokens": 30, "prompt_logprobs": 2},
        drawn | {"max_tokens": 32, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "n": 2},
        drawn | {"max_tokens": 40, "seed": 8, "min_tokens": 9, "logit_bias": {13: 3.0}} | penalties,
        greedy | {"max_tokens": 20, "stop_token_ids": [40, 41, 42, 43]} | penalties,
    ]
    if masks:
        grammars = [{"json": SCHEMA}] if schema else GRAMMARS
        for index, grammar in enumerate(grammars):
            params[3 + index] |= {"structured": grammar, "ignore_eos": False, "min_tokens": 0}
    return prompts, [SamplingParams(**one) for one in params]


def _numbers(entry: Any) -> Any:
    """Return a token, its log-probability and the most probable tokens."""
    return entry and [entry.token_id, entry.logprob, sorted(entry.top.items())]


def probe_memory() -> dict[str, Any]:
    """Return the terms of the memory plan of each preset in bytes."""
    from stepgraph.__main__ import main

    found = {}
    for preset, flags in MEMORY_PLANS.items():
        command = ["explain", "memory", "--model", f"preset:{preset}", *flags.split()]
        for exact in (False, True):  # the first run loads the modules
            text = io.StringIO()
            with contextlib.redirect_stdout(text), _exact_bytes() if exact else io.StringIO():
                status = main(command)
        terms = re.findall(r"^([a-z][a-z ]*?) {2,}(\d+) B", text.getvalue(), re.MULTILINE)
        enough = status == 0 and len(terms) > 5
        values = {term: int(size) for term, size in terms}
        found[f"memory/{preset}"] = values if enough else {"crashed": text.getvalue()[:200]}
    return found


@contextlib.contextmanager
def _exact_bytes() -> Iterator[None]:
    """Let the package print sizes in bytes, where it rounds them."""
    names = [name for name in sys.modules if name.startswith("stepgraph")]
    old = {n: f for n in names if (f := getattr(sys.modules[n], "format_bytes", None))}
    for name in old:
        vars(sys.modules[name])["format_bytes"] = lambda size: f"{size} B"
    try:
        yield
    finally:
        for name, function in old.items():
            vars(sys.modules[name])["format_bytes"] = function


def probe_start(models: Path) -> float:
    """Return the seconds from the import to the first token of the demo model."""
    begin = time.perf_counter()
    from stepgraph import Engine, SamplingParams

    with Engine.from_pretrained("demo") as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        return time.perf_counter() - begin


def serve_steps(models: Path, kind: str) -> None:
    """Time steps on command: `begin ROWS CONTEXT`, `steps COUNT`, `end`; answer with a line."""
    from stepgraph import Engine, EngineConfig, SamplingParams

    rows = max(HOST_ROWS) if kind == "host" else max(rows for rows, _ in STEP_POINTS)
    limits: dict[str, Any] = {"max_num_seqs": rows, "max_model_len": 2048, "prefix_cache": False}
    if kind == "host":
        limits |= {"dtype": "float32", "threads": 1, "max_model_len": 1024}
    config = EngineConfig(device="cpu", mode="compile", memory_tokens=rows * 1024, **limits)
    source = str(models / "host") if kind == "host" else STEP_MODEL
    with Engine.from_pretrained(source, config) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            command, *numbers = line.split()
            if command == "begin":
                count, context = map(int, numbers)
                draws = random.Random(count + context)
                params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
                for row in range(count):
                    length = context - row % 16  # blocks begin in different steps
                    engine.add_request(
                        [draws.randrange(30) for _ in range(length)], params, f"{row}"
                    )
                seen: Counter[str] = Counter()
                while len(seen) < count or min(seen.values()) < 3:
                    seen.update(output.request_id for output in engine.step())
            if command == "end":
                for row in range(count):
                    engine.abort(f"{row}")
                while engine.has_unfinished():
                    engine.step()
            times = []
            for _ in range(int(numbers[0]) if command == "steps" else 0):
                begin = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - begin)
            print(json.dumps(times), flush=True)


def write_models(models: Path) -> None:
    """Write the models of `FAMILIES` and one whose steps are mostly host time, from a seed."""
    sys.path.insert(0, str(ROOT))
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from tests import mtp_models
    from tests.tiny_models import BASE, VARIANTS, byte_level_tokenizer, randomize

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
            model_type = settings.pop("model_type", "llama")
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
            randomize(model)
            model.save_pretrained(directory)
        GenerationConfig(eos_token_id=EOS_TOKEN_IDS).save_pretrained(directory)
        byte_level_tokenizer(VOCAB_SIZE).save(str(directory / "tokenizer.json"))


def run_probe(name: str, models: Path, tree: Path) -> None:
    """Run a probe in this process, which imports the package of a tree; print the result."""
    with contextlib.suppress(PermissionError):
        os.nice(-20 if name in ("start", "steps", "host") else 0)
    if name == "models":
        write_models(models)
        return
    import stepgraph.runtime

    found = Path(stepgraph.runtime.__file__).resolve()
    assert found.is_relative_to(tree.resolve()), f"{found} is not in {tree}"
    if name in ("steps", "host"):
        serve_steps(models, name)
        return
    given = json.loads(sys.stdin.read()) if name == "tokens" else None
    with contextlib.redirect_stdout(sys.stderr):
        if name == "start":
            result: Any = probe_start(models)
        else:
            result = probe_memory() if given is None else probe_tokens(models, given)
    print(json.dumps(result))


# ---------------------------------------------------------------- trees and processes


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
        command = [sys.executable, __file__, "--probe", probe, "--models", str(models)]
        environment = os.environ | {"PYTHONPATH": str(self.links)}
        if probe in ("tokens", "host"):
            environment["OMP_NUM_THREADS"] = "1"
        return subprocess.Popen(
            [*command, "--tree", str(self.source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=self.links,
            text=True,
        )


def results(process: subprocess.Popen[str], given: str = "") -> Any:
    """Return what a probe prints."""
    printed, _ = process.communicate(given)
    if process.returncode:
        raise RuntimeError(f"a probe failed with status {process.returncode}: {process.args}")
    return json.loads(printed) if printed.strip() else None


def token_cases(quick: bool, chosen: str) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Return model, path, feature and settings of each case."""
    cases = []
    for model, (path, how), (feature, more) in itertools.product(
        FAMILIES, PATHS.items(), FEATURES.items()
    ):
        compiles = path == "compile/torch"
        if quick and (compiles or (feature == "ranks" and path.startswith("eager"))):
            continue  # seconds to minutes each
        cases.append((model, path, feature, how | more | (FEW_STEPS if compiles else {})))
    cases += [(model, path, name, PATHS[path] | more) for model, path, name, more in EXTRAS]
    cases = [
        (model, path, name, LIMITS | (MORE_BLOCKS if model in SEVERAL_GROUPS else {}) | more)
        for model, path, name, more in cases
    ]
    return [case for case in cases if fnmatch.fnmatch("/".join(case[:3]), chosen)]


# ---------------------------------------------------------------- comparison


class Verdict(NamedTuple):
    """The comparison of a case."""

    case: str
    result: str
    """`equal`, `refused` (by both), `allowed` or `different`."""
    detail: str = ""


def compare_case(case: str, base: Any, head: Any) -> Verdict:
    """Compare what the two trees computed."""
    crashed = [f"{side}: {r['crashed']}" for side, r in zip(SIDES, (base, head)) if "crashed" in r]
    if crashed:
        return Verdict(case, "different", "; ".join(crashed))
    if base == head:
        return Verdict(case, "refused" if "refused" in base else "equal")
    place, distance = difference(base, head)
    detail = f"{place}; numbers differ by {distance:.2g}" if distance < float("inf") else place
    for allowed in ALLOWED:
        if fnmatch.fnmatch(case, allowed.cases):
            dtype = "bfloat16" if "bfloat16" in case else "float32"
            if allowed.any_value or distance <= TOLERANCES[dtype]:
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
        pairs = [(f"{place}[{i}]", *pair) for i, pair in enumerate(zip(base, head))]
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


# ---------------------------------------------------------------- times


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
        sides = [statistics.median(side) for side in zip(*pairs)]
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
            pair[side] = results(trees[side].start("start", models))
        starts.append(pair)
    found.append(Timing.of("start demo", "s", starts))
    print(found[-1], flush=True)
    return found


def _answer(server: subprocess.Popen[str], command: str = "") -> str:
    assert server.stdin is not None and server.stdout is not None
    if command:
        server.stdin.write(command + "\n")
        server.stdin.flush()
    line = server.stdout.readline()
    if not line:
        raise RuntimeError(f"a probe ended with status {server.wait()}: {server.args}")
    return line


# ---------------------------------------------------------------- the command


def compare(options: argparse.Namespace, work: Path) -> int:
    """Compare the two trees; return the status."""
    trees = [Tree.make(rev, work, side) for rev, side in zip((options.base, options.head), SIDES)]
    models = work / "models"
    if not models.exists():
        results(Tree.make(str(ROOT), work, "models").start("models", models))
    verdicts: list[Verdict] = []
    timings: list[Timing] = []
    if not options.times:
        cases = token_cases(options.quick, options.cases)
        given = json.dumps(cases)
        running = [tree.start("tokens", models) for tree in trees]
        for process in running:  # both are working before the first is read
            assert process.stdin is not None
            process.stdin.write(given)
            process.stdin.close()
            process.stdin = None
        base, head = map(results, running)
        for probe in ("memory",) if options.cases == "*" else ():
            more = [results(tree.start(probe, models)) for tree in trees]
            base, head = base | more[0], head | more[1]
        verdicts = [compare_case(case, base[case], head[case]) for case in base]
        print(table(verdicts))
    if options.times:
        print(f"{'':24}{'base':>10}{'HEAD':>10}{'':4}{'ratio':>8}  middle half{'n':>8}")
        timings = measure_times(trees, models, options.pairs)
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="e818c78", help="a commit or a directory")
    parser.add_argument("--head", default="HEAD", help="a commit or a directory, such as .")
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--times", action="store_true", help="times only")
    parser.add_argument("--cases", default="*", help="a pattern, such as 'gemma*/eager/*'")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of each time")
    parser.add_argument("--work", type=Path, help="folder to keep trees and models in")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        run_probe(options.probe, options.models, options.tree)
        return 0
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        return compare(options, options.work.resolve())
    with tempfile.TemporaryDirectory() as scratch:
        return compare(options, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
