"""Tokens that a benchmark timed are scored again by the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine
from stepgraph.runtime.bench.token_check import MOST_ROWS, TokenCheck
from stepgraph.runtime.bench.workload import greedy
from stepgraph.runtime.kernels import have_compiler

from ..rigs.bench_rig import measured, run_bench
from ..rigs.engine_rig import opened
from ..rigs.tiny_models import TinyModel

SMALL = "--batch-size 2 --input-len 8 --output-len 8 --num-warmup 0 --num-iters 2"


DEMO: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 64, "buckets": (6,)}


def decode(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[set[tuple[int, ...]]]:
    outputs = engine.generate(prompts, greedy(max_tokens))
    return [{tuple(output.token_ids)} for output in outputs]


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("gemma3", {}),  # several layer groups, windows, output norms
        ("deepseek_v3", {}),  # latent attention
        ("odd", {"weight_dtype": "int8", "kv_dtype": "int8"}),
        ("qwen3", {"weight_dtype": "fp8", "kv_dtype": "fp8"}),
    ],
)
def test_right_tokens_pass_and_wrong_ones_fail(
    tiny: Callable[[str], TinyModel],
    open_engine: Callable[..., Engine],
    variant: str,
    settings: dict[str, Any],
) -> None:
    model = tiny(variant)
    prompts = model.prompts(30, 7)
    with open_engine(variant, **settings) as engine:
        outputs = decode(engine, prompts, 9)
        check = TokenCheck(engine, str(model.directory))
        found = check.check(prompts, outputs)
        assert found["passed"], found
        assert (found["rows"], found["tokens"], found["equal"]) == (2, 18, 18)
        assert found["repetitions_equal"]
        for place in (0, 8):
            (right,) = outputs[1]
            wrong = [*right]
            wrong[place] = (wrong[place] + 1) % model.vocab_size
            found = check.check(prompts, [outputs[0], {right, tuple(wrong)}])
            assert not found["passed"]
            assert not found["repetitions_equal"]
            assert found["worst_gap"] > found["tolerance"]
            assert found["tokens"] == 27


def test_wrong_weights_of_the_engine_are_caught() -> None:
    """The native engine's are packed, so the reference has read its own; NaN is not a logit."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(500, (6, 20), generator=generator).tolist()
    kernels = "native" if have_compiler() else "torch"
    with opened("demo", **DEMO, kernels=kernels) as engine:
        check = TokenCheck(engine, "demo")
        found = check.check(prompts, decode(engine, prompts, 6))
        assert found["passed"], found
        assert found["rows"] == MOST_ROWS
        engine.reset_prefix_cache()
        norm = engine.decoder.norm.weight
        assert norm is not None
        norm.data[int(norm.abs().argmax())] *= -20
        found = check.check(prompts, decode(engine, prompts, 6))
        assert not found["passed"]
    with opened("demo", **DEMO) as engine:
        outputs = decode(engine, prompts, 3)
        norm = engine.decoder.norm.weight
        assert norm is not None
        norm.data[0] = float("nan")
        found = TokenCheck(engine, "demo").check(prompts, outputs)
    assert (found["passed"], found["worst_gap"]) == (False, None)


def test_a_benchmark_with_wrong_tokens_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"{SMALL} --mode eager --check"
    (case,) = measured(monkeypatch, tmp_path, arguments)["cases"]
    assert case["check"]["passed"]
    assert case["check"]["tokens"] >= 2 * 8
    assert case["check"]["repetitions_equal"]
    assert f"{case['check']['tokens']} ok" in capsys.readouterr().out

    def shifted(self: TokenCheck, prompts: Any, outputs: Any) -> dict[str, Any]:
        return real(self, prompts, [{tuple(t ^ 1 for t in o) for o in row} for row in outputs])

    real = TokenCheck.check
    monkeypatch.setattr(TokenCheck, "check", shifted)
    assert run_bench(monkeypatch, arguments) == 1
    captured = capsys.readouterr()
    assert "FAILED |" in captured.out
    assert "its times do not count" in captured.err
    assert run_bench(monkeypatch, arguments.replace("--check", "--no-check")) == 0
