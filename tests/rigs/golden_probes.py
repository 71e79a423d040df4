"""What `golden.py` runs in the tree of each side: `golden_probes.py PROBE MODELS TREE`.

Only the public interface is used, and parameters that the oldest base has.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
"""Has room for a tokenizer of bytes."""
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-c]{2,5}-[0-9]+"},
    {"choice": ["yes", "no", "naïve café"]},
    {"grammar": 'start: "(" inner ")"\ninner: /[xy]*/ | start'},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


STEP_MODEL = "preset:smollm2-135m"
STEP_POINTS = [(1, 128), (8, 128), (32, 128), (1, 1024), (8, 1024)]
HOST_ROWS = (1, 32, 256)


def outputs(models: Path, case: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that callers see of a few requests, which fill an engine."""
    from stepgraph import ConfigError, Engine, EngineConfig

    model = case.partition("/")[0]
    source = model if model == "demo" else models / model
    try:
        started = Engine.from_pretrained(source, EngineConfig(**settings))
    except ConfigError as error:
        return {"refused": type(error).__name__}
    with started as engine:
        masks = bool(settings.get("structured_output"))
        prompts, params = _requests(masks, case.endswith("/schema"))
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

    draws = random.Random(5)
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


def memory_plan(case: str, flags: str) -> dict[str, int]:
    """Return the terms of the memory plan of a preset in bytes."""
    from stepgraph.__main__ import main

    command = ["explain", "memory", "--model", f"preset:{case.partition('/')[2]}", *flags.split()]
    main(command)  # loads the modules
    with contextlib.redirect_stdout(io.StringIO()) as text, _exact_bytes():
        status = main(command)
    terms = re.findall(r"^([a-z][a-z ]*?) {2,}(\d+) B", text.getvalue(), re.MULTILINE)
    assert status == 0, text.getvalue()
    assert len(terms) > 5, text.getvalue()
    return {term: int(size) for term, size in terms}


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


class Steps:
    """Times steps of the preset, or (`host`) of a model whose steps are mostly host time."""

    def __init__(self, models: Path, kind: str) -> None:
        from stepgraph import Engine, EngineConfig

        host, points = kind == "host", STEP_POINTS
        rows = max(HOST_ROWS) if host else max(rows for rows, _ in points)
        limits: dict[str, Any] = {"max_num_seqs": rows, "max_model_len": 2048}
        if host:
            limits |= {"dtype": "float32", "threads": 1, "max_model_len": 1024}
        config = EngineConfig(
            device="cpu", mode="compile", memory_tokens=rows * 1024, prefix_cache=False, **limits
        )
        self.count = 20 if host else 8
        self.point = (0, 0)
        self.engine = Engine.from_pretrained(models / "host" if host else STEP_MODEL, config)

    def seconds(self, rows: int, context: int) -> float:
        """Return the median time of the next steps that decode such rows."""
        if self.point != (rows, context):
            self._begin(rows, context)
        times = []
        for _ in range(self.count):
            begin = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def _begin(self, rows: int, context: int) -> None:
        from stepgraph import SamplingParams

        for row in range(self.point[0]):
            self.engine.abort(f"{row}")
        while self.engine.has_unfinished():
            self.engine.step()
        self.point = (rows, context)
        draws = random.Random(rows + context)
        params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
        for row in range(rows):
            length = context - row % 16  # blocks begin in different steps
            prompt = [draws.randrange(30) for _ in range(length)]
            self.engine.add_request(prompt, params, f"{row}")
        seen: Counter[str] = Counter()
        while len(seen) < rows or min(seen.values()) < 3:
            seen.update(output.request_id for output in self.engine.step())


def answer_with(name: str, models: Path, begin: float) -> Callable[[Any], Any]:
    """Return what a probe makes of a question. Of `start`: the seconds to the first token."""
    if name in ("steps", "host"):
        steps = Steps(models, name)
        return lambda point: steps.seconds(*point)
    if name == "start":
        from stepgraph import Engine, SamplingParams

        with Engine.from_pretrained("demo") as engine:
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
            seconds = time.perf_counter() - begin
        return lambda _: seconds

    def result(question: list[Any]) -> Any:
        case, given = question
        try:
            if case.startswith("memory/"):
                return memory_plan(case, given)
            return outputs(models, case, given)
        except Exception as error:  # is reported as a failure of the case
            return {"crashed": repr(error)}

    return result


def run_probe(name: str, models: Path, tree: Path) -> None:
    """Answer questions with the package of a tree, which this process imports, a line each."""
    if name != "outputs":
        with contextlib.suppress(PermissionError):
            os.nice(-20)
    begin = time.perf_counter()
    import stepgraph.runtime

    found = Path(stepgraph.runtime.__file__).resolve()
    assert found.is_relative_to(tree.resolve()), f"{found} is not in {tree}"
    answer, stdout = answer_with(name, models, begin), sys.stdout
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            found_answer = answer(json.loads(line))
        print(json.dumps(found_answer), file=stdout, flush=True)


if __name__ == "__main__":
    run_probe(sys.argv[1], *map(Path, sys.argv[2:]))
