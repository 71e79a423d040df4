"""Checkpoints in AWQ's 4-bit format: the engine has the logits of the dequantised model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.kernels.ops.parameter import HeadRows, Narrowed, Selection, Slice
from stepgraph.runtime.kernels.weights import AWQ
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..rigs.engine_rig import opened
from ..rigs.sharding_steps import plain_kernels, sharded_runs, whole_run

if TYPE_CHECKING:
    from conftest import TinyModel

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each 4 bits of a word hold, from the lowest on."""


def packed(codes: np.ndarray[Any, Any]) -> Tensor:
    """Words of 8 consecutive outputs, one code after the other."""
    rows, outputs = codes.shape
    words = np.zeros((rows, outputs // 8), dtype=np.uint32)
    for place, output in enumerate(ORDER):
        words |= codes[:, output::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def quantised(
    n: int, k: int, group: int, seed: int, dtype: torch.dtype = torch.float16
) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors of a weight by suffix, and the weight in float64."""
    rng = np.random.default_rng(seed)
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    scales = torch.from_numpy(rng.uniform(0.01, 0.05, zeros.shape)).to(dtype)
    of_input = np.arange(k) // group
    weight = (codes - zeros[of_input]) * scales.double().numpy()[of_input]
    tensors = {".qweight": packed(codes), ".qzeros": packed(zeros), ".scales": scales}
    return tensors, torch.from_numpy(weight.T.copy())


def save_as_awq(
    model: TinyModel, directory: Path, group: int, *, drop: str = "", **options: Any
) -> AutoModelForCausalLM:
    """Write the checkpoint, with linear layers whose sizes allow it in AWQ; return the model with
    their numbers."""
    shutil.copytree(model.directory, directory, dirs_exist_ok=True)
    tensors = load_file(model.directory / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(model.directory, attn_implementation="eager")
    state = reference.eval().state_dict()
    shapes = {n: t.shape for n, t in tensors.items() if n.endswith("proj.weight")}
    linear = [name for name, (n, k) in shapes.items() if not (n % 8 or k % group)]
    for seed, name in enumerate(linear):
        stored, weight = quantised(*tensors.pop(name).shape, group, seed)
        state[name].copy_(weight)
        prefix = name.removesuffix(".weight")
        tensors |= {f"{prefix}{suffix}": t for suffix, t in stored.items() if suffix != drop}
    assert len(linear) >= 4
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((model.directory / "config.json").read_text())
    awq = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"} | options
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": awq}))
    return reference


def check_logits(
    directory: Path, model: TinyModel, reference: AutoModelForCausalLM, within: float, **config: Any
) -> None:
    """Compare an engine on a directory with the dequantised model."""
    (token_ids,) = model.prompts(40)
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0, 19:]
    assert expected.std() > 0.1
    with opened(directory, **config) as engine:
        torch.testing.assert_close(engine.score(token_ids, 20), expected, rtol=0, atol=within)


@pytest.mark.parametrize(
    ("variant", "group", "settings"),
    [
        ("base", 16, {}),
        ("base", 48, {"mode": "auto", "kernels": "native"}),
        ("qwen2", 16, {"mode": "auto", "kernels": "native"}),
        ("qwen3", 8, {}),
    ],
)
def test_an_engine_has_the_logits_of_the_dequantised_model(
    tiny: Callable[[str], TinyModel],
    tmp_path: Path,
    variant: str,
    group: int,
    settings: dict[str, Any],
) -> None:
    model = tiny(variant)
    reference = save_as_awq(model, tmp_path, group)
    check_logits(tmp_path, model, reference, 5e-4, prefill_chunk=16, block_size=4, **settings)


def test_ranks_read_their_parts(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Rows and columns of a rank, which begin and end within groups."""
    save_as_awq(tiny("base"), tmp_path, 48)
    from stepgraph.runtime.loading.checkpoint import read_config

    config: Any = read_config(tmp_path)
    expected = whole_run(config, tmp_path)
    for run in sharded_runs(config, tmp_path, 2, plain_kernels()):
        torch.testing.assert_close(run.logits, expected.logits, rtol=1e-4, atol=1e-4)


@given(data=st.data())
def test_a_part_is_the_part_of_the_whole(data: st.DataObject) -> None:
    group, groups = data.draw(st.sampled_from([1, 4, 32])), data.draw(st.integers(1, 5))
    n, k = 8 * data.draw(st.integers(1, 4)), group * groups
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16]))
    stored, weight = quantised(n, k, group, data.draw(st.integers(0, 99)), dtype)
    headers = {s: (str(t.dtype), tuple(t.shape)) for s, t in stored.items()}
    headers = {s: ("I32" if "int32" in d else "F16", shape) for s, (d, shape) in headers.items()}
    assert AWQ.shape(headers) == (n, k)

    def part(dim: int, size: int) -> Slice:
        start = data.draw(st.integers(0, size - 1))
        return Slice(dim, start, data.draw(st.integers(1, size - start)))

    rows: Selection = data.draw(st.sampled_from([part(0, n), HeadRows(n - 8, 1, 8, 4)]))
    columns = part(1, k)
    narrowed = Narrowed(columns, part(1, columns.count))
    for selection in (
        *(None, rows, columns, Narrowed(rows, columns), narrowed, Narrowed(narrowed, part(0, n))),
    ):
        expected = weight if selection is None else selection.read(weight)
        assert torch.equal(AWQ.read(stored, selection).double(), expected)


@pytest.mark.parametrize(
    ("drop", "options"),
    [
        (".qzeros", {}),
        (".scales", {}),
        ("", {"bits": 3}),
        ("", {"version": "gemv"}),
        ("", {"version": ["gemm"]}),
        ("", {"quant_method": "gptq"}),
    ],
)
def test_what_is_not_the_format_is_refused(
    base: TinyModel, tmp_path: Path, drop: str, options: dict[str, Any]
) -> None:
    save_as_awq(base, tmp_path, 16, drop=drop, **options)
    with pytest.raises(CheckpointError), opened(tmp_path):
        pass


@pytest.mark.parametrize(
    ("suffix", "header"),
    [
        (".qweight", ("I32", (64,))),
        (".qweight", ("I32", (64, 3))),
        (".qweight", ("U8", (64, 2))),
        (".qweight", ("I32", (63, 2))),
        (".qzeros", ("I32", (3, 2))),
        (".scales", ("F16", (0, 16))),
        (".scales", ("F16", (4, 17))),
    ],
)
def test_tensors_of_other_shapes_are_no_weight(suffix: str, header: tuple[str, Any]) -> None:
    headers = {
        ".qweight": ("I32", (64, 2)),
        ".qzeros": ("I32", (4, 2)),
        ".scales": ("F16", (4, 16)),
    }
    assert AWQ.shape(headers) == (16, 64)
    assert AWQ.shape(headers | {suffix: header}) is None
