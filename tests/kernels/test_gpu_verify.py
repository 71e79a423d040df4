"""Kernels of a decode step are checked against their references, and wrong ones are found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime import EngineConfig
from stepgraph.runtime.kernels.triton.operations import Operations
from stepgraph.runtime.models.families import ExpertsConfig
from stepgraph.runtime.models.presets import PRESETS
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.tools import verify_kernels
from stepgraph.runtime.tools.verify_kernels import Verified, check_operations, main

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(
    name: str,
    *kernels: str,
    rows: int = 1,
    operations: Operations | None = None,
    experts: ExpertsConfig | None = None,
    **settings: Any,
) -> list[Verified]:
    model = dataclasses.replace(
        PRESETS[name], vocab_size=40, hidden_size=32, intermediate_size=24, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, layer_types=(),
        sliding_window=None,
        experts=experts,
        bos_token_id=None,
        eos_token_ids=(),
    )  # fmt: skip
    config = EngineConfig(device=DEVICE.type, mode="eager", block_size=4, **settings)
    resolved = ResolvedConfig.resolve(config, model)
    return list(
        check_operations(
            model, resolved, rows=rows, context=7, replays=20,
            kernels=kernels or None, operations=operations,
        )
    )  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "rows", "settings"),
    [
        ("llama-3.2-1b", 1, {}),
        ("qwen3-0.6b", 5, {"weight_dtype": "int8"}),
        ("gemma-2-2b", 2, {"kv_dtype": "int8"}),  # what layers return waits to be normed and added
    ],
)
def test_right_kernels_pass(name: str, rows: int, settings: dict[str, str]) -> None:
    found = check(name, rows=rows, **settings)
    assert {"norm_linear", "decode_attention", "gate_up", "down", "head", "layer"} <= {
        result.kernel for result in found
    }
    assert all(result.passed for result in found), "\n".join(map(str, found))


@pytest.mark.parametrize("rows", [2, 5])
def test_experts_are_verified(rows: int) -> None:
    experts = ExpertsConfig(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
    found = check("qwen3-moe-7b-a1b", "route", "experts", "norm_rows", rows=rows, experts=experts)
    assert {result.kernel for result in found} == {"route", "experts", "norm_rows"}
    assert all(result.passed for result in found), "\n".join(map(str, found))
    wrong = dataclasses.replace(Operations(), experts=experts_off_by_a_little)
    (result,) = check("qwen3-moe-7b-a1b", "experts", experts=experts, operations=wrong)
    assert not result.passed


def experts_off_by_a_little(*arguments: Any, **more: Any) -> None:
    Operations().experts(*arguments, **more)
    arguments[5].mul_(1.05)  # out_TD


def skip_a_row(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, *arguments: Any, **more: Any) -> None:
        head, out = arguments[:2], arguments[2]
        kernel(x[:-1].clone(), *head, out[:-1], *arguments[3:], **more)

    return run


def off_by_a_little(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **more: Any) -> None:
        kernel(*arguments, **more)
        arguments[3].mul_(1.05)

    return run


def does_not_compile(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("out of resource: shared memory\nand more")

    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fault", [skip_a_row, off_by_a_little, does_not_compile])
def test_wrong_kernels_are_found(fault: Callable[..., Any], dtype: str) -> None:
    operation, kernel = "norm_linear", "norm_linear"
    if fault is off_by_a_little:
        operation, kernel = "residual_linear", "down"
    native = Operations()
    wrong = dataclasses.replace(native, **{operation: fault(getattr(native, operation))})
    for result in check("llama-3.2-1b", kernel, "gate_up", rows=2, dtype=dtype, operations=wrong):
        assert result.passed == (result.kernel == "gate_up"), str(result)
        if fault is does_not_compile and not result.passed:
            assert result.failure == "RuntimeError: out of resource: shared memory"
            assert str(result).startswith("FAILED norm_linear")


def test_lost_device_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_two(*_: Any, rows: int, **__: Any) -> Iterator[Verified]:
        yield Verified("down", rows, False, error=0.0)
        if rows == 8:
            yield Verified("head", rows, False, failure="AcceleratorError: illegal", lost=True)

    monkeypatch.setattr(verify_kernels, "check_operations", check_two)
    monkeypatch.setattr(verify_kernels, "INTERPRETED", True)
    file = tmp_path / "found.json"
    models = "--model preset:llama-3.2-1b preset:qwen3-0.6b"
    assert main(f"{models} --rows 1 8 32 --json {file}".split()) == 1
    found = json.loads(file.read_text())
    assert [(e["kernel"], e["rows"], e["lost"]) for e in found] == [
        ("down", 1, False),
        ("down", 8, False),
        ("head", 8, True),
    ]
    last = capsys.readouterr().out.splitlines()[-1]
    left = ["preset:llama-3.2-1b 32 rows"]
    left += [f"preset:qwen3-0.6b {rows} rows" for rows in (1, 8, 32)]
    assert last.endswith(", ".join(left))
