"""Quantised checkpoints: an engine has the logits of the dequantised model."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from stepgraph.runtime import Engine
from stepgraph.runtime.errors import CheckpointError, ConfigError
from stepgraph.runtime.kernels.ops.parameter import (
    HeadRows,
    Narrowed,
    Parameter,
    Selection,
    Slice,
    Source,
)
from stepgraph.runtime.kernels.weights import Header, checkpoint_formats
from stepgraph.runtime.kernels.weights.float4 import GPT_OSS
from stepgraph.runtime.kernels.weights.grouped import NF4
from stepgraph.runtime.loading.checkpoint import CheckpointReader, check_layout, check_tied_head
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ..rigs.engine_rig import opened
from ..rigs.tiny_models import TinyModel

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a weight by suffix, and the weight in float64."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each 4 bits of a word hold, from the lowest on."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def words_of(codes: np.ndarray[Any, Any], bits: int = 4, order: Iterable[int] = ()) -> Tensor:
    """int32 words of consecutive columns, one code after the other."""
    count = 32 // bits
    words = np.zeros((len(codes), codes.shape[1] // count), dtype=np.uint32)
    for place, column in enumerate(order or range(count)):
        words |= codes[:, column::count].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def nibbles_of(codes: np.ndarray[Any, Any], first: int = 0) -> Tensor:
    """Bytes of two columns each, the first one from this bit on."""
    return torch.from_numpy((codes[:, ::2] << first | codes[:, 1::2] << 4 - first).astype(np.uint8))


def scales_of(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.from_numpy(rng.uniform(0.005, 0.02, shape)).to(dtype)


def over(numbers: Any, scales: Tensor, of_column: Any, zeros: Any = 0) -> Tensor:
    """The weight in float64, of numbers, and scales and zero points of groups of columns.

    `of_column` is the group of each column, or the size of all groups.
    """
    if isinstance(of_column, int):
        of_column = np.arange(numbers.shape[1]) // of_column
    zeros = zeros[:, of_column] if isinstance(zeros, np.ndarray) else zeros
    return torch.as_tensor(numbers - zeros).double() * scales.double()[:, of_column]


def integers(
    rng: np.random.Generator, n: int, k: int, group: int, bits: int = 4
) -> tuple[Any, Any, Tensor]:
    """Codes, and zero points and scales of groups."""
    codes, zeros = (rng.integers(0, 1 << bits, (n, width)) for width in (k, -(-k // group)))
    return codes, zeros, scales_of(rng, *zeros.shape)


def awq(rng: np.random.Generator, n: int, k: int, group: int) -> Stored:
    codes, zeros, scales = integers(rng, n, k, group)
    words, points = (words_of(numbers.T, order=AWQ_ORDER) for numbers in (codes, zeros))
    tensors = {".qweight": words, ".qzeros": points, ".scales": scales.T}
    return tensors, over(codes, scales, group, zeros)


def gptq(
    rng: np.random.Generator,
    n: int,
    k: int,
    group: int,
    *,
    bits: int = 4,
    offset: int = 1,
    g_idx: str = "ordered",
) -> Stored:
    codes, zeros, scales = integers(rng, n, k, group, bits)
    ones = sum(offset << shift for shift in range(0, 32, bits))
    points = words_of(zeros.T, bits) - ones
    tensors = {".qweight": words_of(codes, bits).T, ".qzeros": points, ".scales": scales.T}
    of_column = np.arange(k) // group
    if g_idx == "reordered":
        rng.shuffle(of_column)
    if g_idx != "none":
        tensors[".g_idx"] = torch.from_numpy(of_column.astype(np.int32))
    return tensors, over(codes, scales, of_column, zeros)


def pack_quantized(
    rng: np.random.Generator, n: int, k: int, group: int, *, bits: int = 4, zeros: bool = False
) -> Stored:
    codes, points, scales = integers(rng, n, k, group, bits)
    shape, words = torch.tensor([n, k]), words_of(codes, bits)
    tensors = {".weight_packed": words, ".weight_scale": scales, ".weight_shape": shape}
    if not zeros:
        return tensors, over(codes, scales, group, 1 << bits - 1)
    tensors[".weight_zero_point"] = words_of(points.T, bits).T
    return tensors, over(codes, scales, group, points)


def not_reordered(rng: np.random.Generator, n: int, k: int, group: int) -> Stored:
    """compressed-tensors leaves -1 in `g_idx` where it did not reorder inputs."""
    tensors, weight = pack_quantized(rng, n, k, group, zeros=True)
    return tensors | {".weight_g_idx": torch.full((k,), -1, dtype=torch.int32)}, weight


def mlx(rng: np.random.Generator, n: int, k: int, group: int, *, bits: int = 4) -> Stored:
    codes, _, scales = integers(rng, n, k, group, bits)
    biases = scales_of(rng, *scales.shape) - 0.01
    words = words_of(codes, bits).view(torch.uint32)
    weight = over(codes, scales, group) + biases.double().repeat_interleave(group, 1)
    return {".weight": words, ".scales": scales, ".biases": biases}, weight


def float8(rng: np.random.Generator, n: int, k: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=(n, k)) * 4).to(torch.float8_e4m3fn)


def fp8(rng: np.random.Generator, n: int, k: int, block: int) -> Stored:
    data = float8(rng, n, k)
    scales = scales_of(rng, -(-n // block), -(-k // block), dtype=torch.float32)
    of_rows = scales.repeat_interleave(block, 0)[:n]
    stored = {".weight": data, ".weight_scale_inv": scales}
    return stored, over(data.double(), of_rows, block)


def fp8_of_tensor(
    rng: np.random.Generator, n: int, k: int, _: int, *, suffix: str = ".weight_scale"
) -> Stored:
    data, scale = float8(rng, n, k), scales_of(rng, 1, dtype=torch.float32)[0]
    stored = {".weight": data, suffix: scale, ".input_scale": torch.tensor(1.0)}
    return stored, data.double() * scale.double()


def rows8(rng: np.random.Generator, n: int, k: int, _: int, *, suffix: str = ".SCB") -> Stored:
    """bitsandbytes stores the largest number of a row, not its scale."""
    data = torch.from_numpy(rng.integers(-127, 128, (n, k)).astype(np.int8))
    scales = scales_of(rng, n, 1, dtype=torch.float32) / 100
    stored = (127 * scales)[:, 0] if suffix == ".SCB" else scales
    return {".weight": data, suffix: stored}, data.double() * scales.double()


def exponents_of(rng: np.random.Generator, n: int, groups: int) -> tuple[Tensor, Tensor]:
    """Biased exponents as bytes, and the scales that they stand for."""
    exponents = torch.from_numpy(rng.integers(119, 123, (n, groups)).astype(np.uint8))
    return exponents, 2.0 ** (exponents.double() - 127)


def mxfp8(rng: np.random.Generator, n: int, k: int, _: int) -> Stored:
    data, (exponents, scales) = float8(rng, n, k), exponents_of(rng, n, k // 32)
    return {".weight": data, ".weight_scale": exponents}, over(data.double(), scales, 32)


def mxfp4(rng: np.random.Generator, n: int, k: int, _: int, *, packed: bool = False) -> Stored:
    codes, (exponents, scales) = rng.integers(0, 16, (n, k)), exponents_of(rng, n, k // 32)
    stored = {".weight_packed": nibbles_of(codes), ".weight_scale": exponents}
    if not packed:
        blocks = nibbles_of(codes).view(n, -1, 16)
        stored = {".weight_blocks": blocks, ".weight_scales": exponents}
    return stored, over(E2M1[codes], scales, 32)


def nvfp4(rng: np.random.Generator, n: int, k: int, _: int, *, modelopt: bool = False) -> Stored:
    codes, numbers = rng.integers(0, 16, (n, k)), float8(rng, n, k // 16).abs()
    factor = scales_of(rng, 1, dtype=torch.float32) / 4
    stored = {".weight_packed": nibbles_of(codes), ".weight_global_scale": 1 / factor}
    if modelopt:
        stored = {".weight": nibbles_of(codes), ".weight_scale_2": factor[0]}
        stored[".input_scale"] = torch.tensor(1.0)
    weight = over(E2M1[codes], numbers.double() * factor.double(), 16)
    return stored | {".weight_scale": numbers}, weight


def nf4(rng: np.random.Generator, n: int, k: int, block: int, *, nested: bool = True) -> Stored:
    codes, levels = rng.integers(0, 16, (n, k)), NF4.table().clone()
    absmax = scales_of(rng, n * k // block, dtype=torch.float32) * 4
    state: dict[str, Any] = {"shape": [n, k], "blocksize": block, "quant_type": "nf4"}
    stored = {".weight.quant_map": levels, ".weight.absmax": absmax}
    if nested:
        numbers = torch.from_numpy(rng.integers(0, 256, len(absmax)).astype(np.uint8))
        outer = scales_of(rng, -(-len(absmax) // 256), dtype=torch.float32)
        of_numbers = torch.from_numpy(rng.normal(size=256)).float()
        absmax = of_numbers[numbers.int()] * outer.repeat_interleave(256)[: len(absmax)] + 0.04
        stored[".weight.absmax"] = numbers
        stored |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": of_numbers}
        state |= {"nested_blocksize": 256, "nested_offset": 0.04}
    stored[".weight"] = nibbles_of(codes, first=4).reshape(-1, 1)
    as_bytes = list(json.dumps(state).encode())
    stored[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(as_bytes, dtype=torch.uint8)
    return stored, over(levels.double()[codes], absmax.view(n, -1), block)


Write = Callable[[np.random.Generator, int, int, int], Stored]
"""Draws a weight `[n, k]` in groups, which some formats ignore."""


def method(name: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": name, **more}


COMPRESSED = method("compressed-tensors")
BITSANDBYTES = method("bitsandbytes", load_in_4bit=True)
LAYOUTS: dict[str, tuple[Write, dict[str, Any]]] = {
    "awq": (awq, method("awq", bits=4, version="gemm")),
    "gptq": (gptq, method("gptq", bits=4, desc_act=False)),
    "gptq_2_bits": (partial(gptq, bits=2), method("gptq", bits=2)),
    "gptq_8_bits": (partial(gptq, bits=8), method("gptq", bits=8)),
    "gptq_v2": (partial(gptq, offset=0), method("gptq", checkpoint_format="gptq_v2")),
    "gptq_desc_act": (partial(gptq, g_idx="reordered"), method("gptq", desc_act=True)),
    "auto_round": (partial(gptq, g_idx="none"), method("auto-round")),
    "auto_round_awq": (awq, method("auto-round", packing_format="auto_round:auto_awq")),
    "pack_quantized": (pack_quantized, COMPRESSED),
    "pack_quantized_zeros": (partial(pack_quantized, zeros=True), COMPRESSED),
    "pack_quantized_8_bits": (partial(pack_quantized, bits=8), COMPRESSED),
    "pack_quantized_g_idx": (not_reordered, COMPRESSED),
    "int_quantized": (partial(rows8, suffix=".weight_scale"), COMPRESSED),
    "float_quantized": (fp8_of_tensor, COMPRESSED),
    "fp8_blocks": (fp8, method("fp8")),
    "fp8_static": (
        partial(fp8_of_tensor, suffix=".weight_scale_inv"),
        method("fp8", activation_scheme="static", weight_block_size=None),
    ),
    "modelopt_fp8": (fp8_of_tensor, method("modelopt", quant_algo="FP8")),
    "modelopt_nvfp4": (partial(nvfp4, modelopt=True), method("modelopt", quant_algo="NVFP4")),
    "nvfp4": (nvfp4, COMPRESSED),
    "mxfp8": (mxfp8, method("modelopt", quant_algo="MXFP8")),
    "mxfp4": (mxfp4, method("mxfp4")),
    "mxfp4_packed": (partial(mxfp4, packed=True), COMPRESSED),
    "nf4": (nf4, BITSANDBYTES),
    "nf4_plain": (partial(nf4, nested=False), BITSANDBYTES),
    "bnb_int8": (rows8, method("bitsandbytes", load_in_8bit=True)),
    "mlx": (mlx, method("mlx", bits=4)),
    "mlx_8_bits": (partial(mlx, bits=8), method("mlx", bits=8)),
}
SIZES = {"nvfp4": 16, "modelopt_nvfp4": 16, "mxfp4": 32, "mxfp4_packed": 32, "mxfp8": 32}
"""Groups of formats that have no choice."""
Change = Callable[[str, Tensor], Stored | None]
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
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((model.directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    return reference


def save_as(layout: str, model: TinyModel, directory: Path, seed: int = 7) -> AutoModelForCausalLM:
    """With linear layers in a format, where their sizes allow it."""
    write, settings = LAYOUTS[layout]
    rng, group = np.random.default_rng(seed), SIZES.get(layout, 32)

    def change(name: str, tensor: Tensor) -> Stored | None:
        # MLX quantises embeddings too, with which a tied head multiplies.
        ends = "proj.weight" if not layout.startswith("mlx") else ("proj.weight", "tokens.weight")
        if not name.endswith(ends) or tensor.shape[1] % group:
            return None
        stored, weight = write(rng, *tensor.shape, group)
        prefix = name.removesuffix(".weight")
        return {f"{prefix}{suffix}": t for suffix, t in stored.items()}, weight

    return save(model, directory, change, **settings, group_size=group)


def save_as_mxfp4(model: TinyModel, directory: Path) -> AutoModelForCausalLM:
    """With experts in mxfp4."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)

    def change(name: str, tensor: Tensor) -> Stored | None:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        experts, columns, rows = tensor.shape
        blocks = draw(256, (experts, rows, columns // 32, 16))
        scales = draw(121, 126, blocks.shape[:-1])
        stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return stored, convert_moe_packed_tensors(blocks, scales).float()

    return save(model, directory, change, quant_method="mxfp4", modules_to_not_convert=[])


def check_logits(engine: Engine, model: TinyModel, reference: AutoModelForCausalLM) -> None:
    """Compare an engine with the dequantised model."""
    (token_ids,) = model.prompts(40)
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0, 19:]
    assert expected.std() > 0.1
    within = 5e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(engine.score(token_ids, 20), expected, rtol=0, atol=within)


DECODED = {"gptq_desc_act", "pack_quantized_g_idx", "nf4", "nf4_plain"}
"""Formats that no kernel takes: scales of single inputs, and levels that bfloat16 rounds."""


_TRANSFORMERS = {"model_impl": "transformers", "mode": "compile"}
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    **{kernels: {"kernels": kernels} for kernels in ("torch", "native")},
    "transformers": _TRANSFORMERS,
}


@pytest.mark.parametrize(
    ("implementation", "layout"),
    [
        *itertools.product(("torch", "native"), (*LAYOUTS, "gpt_oss")),
        *itertools.product(
            ("transformers",),
            ("awq", "fp8_blocks", "gptq", "mlx", "nvfp4", "pack_quantized_zeros", "nf4"),
        ),
    ],
)
def test_an_engine_has_the_logits_of_the_dequantised_model(
    tiny: Callable[[str], TinyModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    implementation: str,
    layout: str,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda part, **options: part)  # takes a minute
    if layout == "gpt_oss":
        model = tiny("gpt_oss_mxfp4")
        reference = save_as_mxfp4(model, tmp_path)
    else:
        model = tiny("wide_groups")
        reference = save_as(layout, model, tmp_path)
    sizes = {"prefill_chunk": 16, "block_size": 4}
    with opened(tmp_path, **IMPLEMENTATIONS[implementation], **sizes) as engine:
        check_logits(engine, model, reference)
        is_small = engine.weight_bytes_read(1) < 0.5 * 4 * reference.num_parameters()
        weights = engine.stats()["memory"]["weights"]
    assert weights["planned"] == weights["measured"]
    kept = implementation != "torch" and layout not in DECODED
    assert layout == "gpt_oss" or is_small == kept
    assert caplog.text.count("decoded while they are loaded") == (not kept)  # warned once


def kind_of(tensor: Tensor) -> str:
    """The safetensors name of its dtype."""
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.uint8: "U8"}
    kind = "U" if tensor.dtype == torch.uint32 else "F" if tensor.is_floating_point() else "I"
    return names.get(tensor.dtype, f"{kind}{tensor.element_size() * 8}")


@given(data=st.data())
def test_a_part_is_the_part_of_the_whole(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    write, settings = LAYOUTS[layout]
    shorter = [128] if layout.startswith(("awq", "gptq", "auto", "pack")) else []
    group = SIZES.get(layout, data.draw(st.sampled_from([32, 64, *shorter])))
    n, k = 32 * data.draw(st.integers(1, 4)), 64 * data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    stored, weight = write(rng, n, k, group)
    headers = {suffix: Header(kind_of(t), tuple(t.shape)) for suffix, t in stored.items()}
    found = [
        candidate
        for candidate in checkpoint_formats(settings | {"group_size": group})
        if headers.keys() >= set(candidate.suffixes)
        and candidate.shape("layer", headers, stored.__getitem__) == (n, k)
    ]
    stored_as = found[0]

    def part(dim: int, size: int) -> Slice:
        start = data.draw(st.integers(0, size - 1))
        return Slice(dim, start, data.draw(st.integers(1, size - start)))

    rows: Selection = data.draw(st.sampled_from([part(0, n), HeadRows(n - 8, 1, 8, 4)]))
    columns = part(1, k)
    narrowed = Narrowed(columns, part(1, columns.count))
    on_meta = {suffix: tensor.to("meta") for suffix, tensor in stored.items()}
    for selection in (
        *(None, rows, columns, Narrowed(rows, columns), narrowed, Narrowed(narrowed, part(0, n))),
    ):
        expected = weight if selection is None else selection.read(weight)
        read = stored_as.read(stored, (n, k), selection)
        torch.testing.assert_close(read.decode().double(), expected, rtol=3e-7, atol=1e-9)
        described = stored_as.read(on_meta, (n, k), selection)
        assert described.codes.is_meta
        assert (described.shape, described.group) == (read.shape, read.group)
        assert described.levels.bits == read.levels.bits


def state_of(nested: bool, **state: Any) -> dict[str, Tensor]:
    stored, _ = nf4(np.random.default_rng(1), 4, 64, 64, nested=nested)
    name = ".weight.quant_state.bitsandbytes__nf4"
    changed = json.loads(bytes(stored[name].tolist())) | state
    return {name: torch.tensor(list(json.dumps(changed).encode()), dtype=torch.uint8)}


def nan(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("awq", {".qzeros": None}),
        ("awq", {".scales": None}),
        ("awq", {"bits": 3}),
        ("awq", {"version": "gemv"}),
        ("awq", {"version": ["gemm"]}),
        ("awq", {"quant_method": "hqq"}),
        ("gptq", {"bits": 3}),
        ("gptq", {"format": "marlin"}),
        ("gptq_desc_act", {"desc_act": False}),
        ("pack_quantized", {".weight_shape": None}),
        ("pack_quantized", {"format": "marlin-24"}),
        ("pack_quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}),
        ("pack_quantized", {"transform_config": {"config_groups": {"a": 1}}}),
        ("fp8_blocks", {".weight_scale_inv": None}),
        ("fp8_blocks", {"fmt": "e5m2"}),
        ("fp8_blocks", {"weight_block_size": 128}),
        ("modelopt_nvfp4", {".weight_scale_2": None}),
        ("modelopt_nvfp4", {"quant_algo": "NVFP4_AWQ"}),
        ("mxfp4", {".weight_scales": None}),
        ("nf4", {".weight.absmax": None}),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}),
        ("mlx", {"mode": "mxfp4"}),
        ("mlx", {"bits": 8}),
        ("gptq_desc_act", {".g_idx": torch.full((64,), 9, dtype=torch.int32)}),
        ("gptq_desc_act", {".g_idx": torch.full((64,), -1, dtype=torch.int32)}),
        ("pack_quantized", {".weight_g_idx": torch.arange(64, dtype=torch.int32)}),
        ("pack_quantized", {".weight_g_idx": torch.zeros(3, dtype=torch.int32)}),
        ("pack_quantized", {".weight_shape": torch.tensor([4.0, float("nan")])}),
        ("pack_quantized_zeros", {".weight_zero_point": torch.zeros(1, 5, dtype=torch.int32)}),
        ("int_quantized", {".weight_zero_point": torch.zeros(3, 1, dtype=torch.int8)}),
        ("int_quantized", {".weight_scale": torch.ones(32, 1, dtype=torch.float64)}),
        ("float_quantized", {".weight": torch.zeros(2, 4, 64).to(torch.float8_e4m3fn)}),
        ("nvfp4", {".weight_global_scale": torch.ones(3)}),
        ("nf4", {".weight.quant_map": torch.zeros(5)}),
        ("nf4", {".weight.nested_quant_map": torch.zeros(0)}),
        ("nf4", state_of(True, nested_blocksize=None)),
        ("nf4_plain", state_of(False, shape=[-4, -64])),
        ("awq", {".scales": nan(2, 32)}),
        ("fp8_blocks", {".weight_scale_inv": nan(1, 2)}),
        ("nvfp4", {".weight_scale": nan(32, 4).to(torch.float8_e4m3fn)}),
        ("mlx", {".biases": nan(32, 2)}),
    ],
)
def test_what_is_not_the_format_is_refused(
    tmp_path: Path, layout: str, changes: dict[str, Any]
) -> None:
    """Changes are of the settings, or of the tensors: None leaves one out."""
    write, settings = LAYOUTS[layout]
    group = SIZES.get(layout, 32)
    stored: dict[str, Tensor | None] = {**write(np.random.default_rng(1), 32, 64, group)[0]}
    settings = settings | {"group_size": group}
    for key, value in changes.items():
        (stored if key.startswith(".") else settings)[key] = value
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    tensors = {f"layer{suffix}": t.contiguous() for suffix, t in stored.items() if t is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    source = Source("layer.weight", (32, 64))
    parameters = {"layer.weight": Parameter("layer.weight", (source,))}

    def read() -> None:
        with CheckpointReader(tmp_path) as reader:
            check_layout(reader, parameters, lambda name: True)
            reader.read(source)

    with pytest.raises(CheckpointError) as caught:
        read()
    assert "layer" in str(caught.value)


def test_every_byte_with_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    decoded = GPT_OSS.read({"_blocks": blocks, "_scales": scales}, (1, 256, 512), None).decode()
    assert decoded.shape == (1, 256, 512)
    theirs = convert_moe_packed_tensors(blocks.contiguous(), scales.contiguous())
    assert torch.equal(decoded, theirs.transpose(1, 2).float())


@pytest.mark.parametrize(
    "config",
    [{"kernels": "native"}, {"kernels": "native", "tensor_parallel": 2}, _TRANSFORMERS],
)
def test_weights_are_replaced_by_others_in_the_same_format(
    tiny: Callable[[str], TinyModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
) -> None:
    monkeypatch.setattr(torch, "compile", lambda part, **options: part)
    model = tiny("wide_groups")
    save_as("pack_quantized", model, tmp_path / "a")
    save_as("awq", model, tmp_path / "other")
    reference = save_as("pack_quantized", model, tmp_path / "b", seed=11)
    with opened(tmp_path / "a", **config) as engine:
        with pytest.raises(ConfigError):  # for which `AsyncEngine.reload` starts a new engine
            engine.reload_weights(tmp_path / "other")
        engine.reload_weights(tmp_path / "b")
        check_logits(engine, model, reference)


def test_a_head_in_codes_is_compared_with_the_embedding(tmp_path: Path) -> None:
    stored, weight = awq(np.random.default_rng(1), 32, 64, 32)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": LAYOUTS["awq"][1]}))
    for embedding, equal in ((weight.float(), True), (-weight.float(), False)):
        tensors = {f"lm_head{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
        tensors["model.embed_tokens.weight"] = embedding
        save_file(tensors, tmp_path / "model.safetensors")
        with (
            nullcontext() if equal else pytest.raises(CheckpointError),
            CheckpointReader(tmp_path) as reader,
        ):
            check_tied_head(reader)
