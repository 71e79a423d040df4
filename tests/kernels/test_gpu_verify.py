"""Kernels of a decode step are checked against their references, and wrong ones are found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime import EngineConfig
from stepgraph.runtime.kernels.triton.stack import Operations
from stepgraph.runtime.models.layers.experts import ExpertsConfig
from stepgraph.runtime.models.presets import PRESETS
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.tools.verify_kernels import Verified, check_operations, main

from ..rigs.tiny_models import Tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NATIVE = Operations()
EXPERTS = ExpertsConfig(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)


def check(
    name: str,
    *kernels: str,
    rows: int = 1,
    operations: Operations = NATIVE,
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
    shape: dict[str, Any] = {"rows": rows, "context": 7, "replays": 20, "kernels": kernels or None}
    return list(check_operations(model, resolved, operations, **shape))


MLP = {
    "norm_linear",
    "decode_attention",
    "output",
    "gate_up",
    "down",
    "final_norm",
    "head",
    "layer",
}


@pytest.mark.parametrize(
    ("name", "rows", "settings", "expected"),
    [
        pytest.param("llama-3.2-1b", 1, {}, MLP, marks=pytest.mark.slow),
        pytest.param("qwen3-0.6b", 5, {"weight_dtype": "int8"}, MLP, marks=pytest.mark.slow),
        # What layers return waits to be normed and added.
        ("gemma-2-2b", 2, {"kv_dtype": "int8"}, MLP),
        ("qwen3-moe-7b-a1b", 2, {"experts": EXPERTS}, {"route", "experts", "norm_rows"}),
    ],
)
def test_right_kernels_pass(
    name: str, rows: int, settings: dict[str, Any], expected: set[str]
) -> None:
    found = check(name, *expected, rows=rows, **settings)
    assert {result.kernel for result in found} == expected
    assert all(result.passed for result in found), "\n".join(map(str, found))


def skips_a_row(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **more: Any) -> None:
        x, linear, out = arguments
        kernel(x[:-1].clone(), linear, out[:-1], **more)

    return run


def is_off_by_a_little(kernel: Callable[..., Any], out: int = 2) -> Callable[..., Any]:
    def run(*arguments: Any, **more: Any) -> None:
        kernel(*arguments, **more)
        arguments[out].mul_(1.05)

    return run


def does_not_compile(*arguments: Any, **more: Any) -> None:
    raise RuntimeError("out of resource: shared memory\nand more")


@pytest.mark.parametrize(
    ("name", "kernel", "wrong"),
    [
        ("llama-3.2-1b", "norm_linear", {"norm_linear": skips_a_row(NATIVE.norm_linear)}),
        ("llama-3.2-1b", "down", {"residual_linear": is_off_by_a_little(NATIVE.residual_linear)}),
        ("qwen3-moe-7b-a1b", "experts", {"experts": is_off_by_a_little(NATIVE.experts, 5)}),
        ("llama-3.2-1b", "norm_linear", {"norm_linear": does_not_compile}),
    ],
    ids=["row", "factor", "experts", "error"],
)
def test_wrong_kernels_are_found(
    name: str, kernel: str, wrong: dict[str, Callable[..., Any]]
) -> None:
    operations, other = Operations(**wrong), "route" if kernel == "experts" else "gate_up"
    experts = EXPERTS if kernel == "experts" else None
    found = check(name, kernel, other, rows=2, operations=operations, experts=experts)
    assert {result.kernel: result.passed for result in found} == {kernel: False, other: True}
    if does_not_compile in wrong.values():
        assert "RuntimeError: out of resource" in str(found[0])


def test_command_writes_what_it_found(tiny: Tiny, tmp_path: Path) -> None:
    file, model = tmp_path / "found.json", str(tiny("micro").directory)
    arguments = "--rows 1 2 --context 7 --replays 9 --kernel gate_up --model"
    assert main([*arguments.split(), model, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = [(entry["kernel"], entry["rows"], entry["passed"]) for entry in found]
    assert set(rows) == {("gate_up", 1, True), ("gate_up", 2, True)}
