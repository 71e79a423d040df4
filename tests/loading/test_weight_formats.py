"""Checkpoints in AWQ, GPTQ and mxfp4: the engine has the logits of the dequantised model."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from stepgraph.runtime.errors import CheckpointError
from stepgraph.runtime.kernels.ops.parameter import HeadRows, Narrowed, Selection, Slice
from stepgraph.runtime.kernels.weights import AWQ, GPTQ, MXFP4, CheckpointFormat
from stepgraph.runtime.loading.checkpoint import read_config
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ..rigs.engine_rig import opened
from ..rigs.sharding_steps import plain_kernels, sharded_runs, whole_run
from ..rigs.tiny_models import TinyModel

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each 4 bits of a word hold, from the lowest on."""


def packed(codes: np.ndarray[Any, Any], order: Iterable[int] = range(8)) -> Tensor:
    """Words of 8 consecutive columns, one code after the other."""
    rows, outputs = codes.shape
    words = np.zeros((rows, outputs // 8), dtype=np.uint32)
    for place, output in enumerate(order):
        words |= codes[:, output::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def quantised(
    stored_as: CheckpointFormat,
    n: int,
    k: int,
    group: int,
    seed: int,
    dtype: torch.dtype = torch.float16,
) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors of a weight by suffix, and the weight in float64."""
    rng = np.random.default_rng(seed)
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    scales = torch.from_numpy(rng.uniform(0.01, 0.05, zeros.shape)).to(dtype)
    of_input = np.arange(k) // group
    weight = (codes - zeros[of_input]) * scales.double().numpy()[of_input]
    if stored_as is GPTQ:
        words, zero_words = packed(codes.T).T.contiguous(), packed(zeros) - 0x11111111
    else:
        words, zero_words = packed(codes, ORDER), packed(zeros, ORDER)
    tensors = {".qweight": words, ".qzeros": zero_words, ".scales": scales}
    if stored_as is GPTQ:
        tensors[".g_idx"] = torch.from_numpy(of_input.astype(np.int32))
    return tensors, torch.from_numpy(weight.T.copy())


Change = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]
"""Returns the tensors that a weight is stored as, by name, and its new numbers; None: unchanged."""


def save(model: TinyModel, directory: Path, change: Change, **options: Any) -> AutoModelForCausalLM:
    """Write the checkpoint with changed weights; return the model with their numbers."""
    shutil.copytree(model.directory, directory, dirs_exist_ok=True)
    tensors: dict[str, Tensor] = {}
    reference = AutoModelForCausalLM.from_pretrained(
        model.directory, attn_implementation="eager", experts_implementation="eager"
    )
    state, changed = reference.eval().state_dict(), 0
    for name, tensor in load_file(model.directory / "model.safetensors").items():
        if (found := change(name, tensor)) is None:
            tensors[name] = tensor
            continue
        state[name].copy_(found[1])
        tensors |= found[0]
        changed += 1
    assert changed >= 4
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((model.directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    return reference


def save_as(
    stored_as: CheckpointFormat,
    model: TinyModel,
    directory: Path,
    group: int,
    *,
    drop: str = "",
    **options: Any,
) -> AutoModelForCausalLM:
    """With linear layers in AWQ or GPTQ, where their sizes allow it."""
    seeds = itertools.count()

    def change(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not name.endswith("proj.weight") or tensor.shape[0] % 8 or tensor.shape[1] % group:
            return None
        stored, weight = quantised(stored_as, *tensor.shape, group, next(seeds))
        prefix = name.removesuffix(".weight")
        return {f"{prefix}{suffix}": t for suffix, t in stored.items() if suffix != drop}, weight

    own = {"quant_method": stored_as.name, "group_size": group, **stored_as.required}
    return save(model, directory, change, **(own | options))


def save_as_mxfp4(model: TinyModel, directory: Path, *, drop: str = "") -> AutoModelForCausalLM:
    """With experts in mxfp4."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)

    def change(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        experts, columns, rows = tensor.shape
        blocks = draw(256, (experts, rows, columns // 32, 16))
        scales = draw(121, 126, blocks.shape[:-1])
        stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
        kept = {n: t for n, t in stored.items() if not (drop and n.endswith(drop))}
        return kept, convert_moe_packed_tensors(blocks, scales).float()

    return save(model, directory, change, quant_method="mxfp4", modules_to_not_convert=[])


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
    ("stored_as", "variant", "group", "settings"),
    [
        (AWQ, "base", 16, {}),
        (AWQ, "base", 48, {"mode": "auto", "kernels": "native"}),
        (AWQ, "qwen2", 16, {"mode": "auto", "kernels": "native"}),
        (AWQ, "qwen3", 8, {}),
        (GPTQ, "base", 48, {"mode": "auto", "kernels": "native"}),
        (GPTQ, "qwen2", 16, {}),
    ],
)
def test_an_engine_has_the_logits_of_the_dequantised_model(
    tiny: Callable[[str], TinyModel],
    tmp_path: Path,
    stored_as: CheckpointFormat,
    variant: str,
    group: int,
    settings: dict[str, Any],
) -> None:
    model = tiny(variant)
    reference = save_as(stored_as, model, tmp_path, group)
    check_logits(tmp_path, model, reference, 5e-4, prefill_chunk=16, block_size=4, **settings)


@pytest.mark.parametrize("stored_as", [AWQ, GPTQ], ids=lambda stored_as: stored_as.name)
def test_ranks_read_their_parts(
    tiny: Callable[[str], TinyModel], tmp_path: Path, stored_as: CheckpointFormat
) -> None:
    """Rows and columns of a rank, which begin and end within groups."""
    save_as(stored_as, tiny("base"), tmp_path, 48)
    config: Any = read_config(tmp_path)
    expected = whole_run(config, tmp_path)
    for run in sharded_runs(config, tmp_path, 2, plain_kernels()):
        torch.testing.assert_close(run.logits, expected.logits, rtol=1e-4, atol=1e-4)


@given(data=st.data())
def test_a_part_is_the_part_of_the_whole(data: st.DataObject) -> None:
    stored_as = data.draw(st.sampled_from([AWQ, GPTQ]))
    groups = data.draw(st.integers(1, 5))
    group = data.draw(st.sampled_from([1, 4, 32] if stored_as is AWQ else [8, 32]))
    n, k = 8 * data.draw(st.integers(1, 4)), group * groups
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16]))
    stored, weight = quantised(stored_as, n, k, group, data.draw(st.integers(0, 99)), dtype)
    headers = {
        suffix: ("F16" if suffix == ".scales" else "I32", tuple(t.shape))
        for suffix, t in stored.items()
    }
    assert stored_as.shape(headers) == (n, k)
    for suffix, (kind, (first, *rest)) in headers.items():
        wrong = [(kind, (first, *rest, 1)), (kind, (first, *rest)[:-1])]
        wrong += [(kind, (first, *(size + 1 for size in rest)))] if rest else []
        wrong += [("F32", (first, *rest)) if suffix == ".qweight" else (kind, (first + 1, *rest))]
        assert not any(stored_as.shape(headers | {suffix: header}) for header in wrong)

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
        assert torch.equal(stored_as.read(stored, selection).decode().double(), expected)


@pytest.mark.parametrize(
    ("stored_as", "drop", "options"),
    [
        (AWQ, ".qzeros", {}),
        (AWQ, ".scales", {}),
        (AWQ, "", {"bits": 3}),
        (AWQ, "", {"version": "gemv"}),
        (AWQ, "", {"version": ["gemm"]}),
        (AWQ, "", {"quant_method": "hqq"}),
        (GPTQ, ".g_idx", {}),
        (GPTQ, "", {"bits": 8}),
        (GPTQ, "", {"desc_act": True}),
        (GPTQ, "", {"format": "gptq_v2"}),
        (GPTQ, "", {"checkpoint_format": "gptq_v2"}),
    ],
)
def test_what_is_not_the_format_is_refused(
    base: TinyModel,
    tmp_path: Path,
    stored_as: CheckpointFormat,
    drop: str,
    options: dict[str, Any],
) -> None:
    save_as(stored_as, base, tmp_path, 16, drop=drop, **options)
    with pytest.raises(CheckpointError), opened(tmp_path):
        pass


def test_gptq_with_inputs_in_another_order(base: TinyModel, tmp_path: Path) -> None:
    """As quantising with desc_act orders them, although the config does not say so."""
    save_as(GPTQ, base, tmp_path, 16)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".g_idx"))
    save_file(tensors | {name: tensors[name].flip(0)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught, opened(tmp_path):
        pass
    assert name.removesuffix(".g_idx") in str(caught.value)


def test_every_byte_with_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    decoded = MXFP4.weight(blocks, scales).decode()
    assert decoded.shape == (1, 256, 512)
    theirs = convert_moe_packed_tensors(blocks.contiguous(), scales.contiguous())
    assert torch.equal(decoded, theirs.transpose(1, 2).float())


def test_an_engine_of_experts_in_mxfp4(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny("gpt_oss_mxfp4")
    check_logits(tmp_path, model, save_as_mxfp4(model, tmp_path), 2e-4)


def test_blocks_without_scales(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    save_as_mxfp4(tiny("gpt_oss_mxfp4"), tmp_path, drop="down_proj_scales")
    with pytest.raises(CheckpointError, match="down_proj_blocks"), opened(tmp_path):
        pass
