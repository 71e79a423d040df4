"""Building and loading the CPU kernels, the portable version, and who gets which kernels."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels.cpu import build as cpu
from stepgraph.runtime.kernels.triton.paged_attention import paged_attention_on_gpu

needs_compiler = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")


@needs_compiler
def test_a_library_is_built_once_and_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = kernels.build_cpu_ops()
    changed = library.stat().st_mtime_ns
    assert kernels.build_cpu_ops() == library
    assert library.stat().st_mtime_ns == changed
    assert kernels.build_cpu_ops(portable=True) != library
    monkeypatch.setattr(torch, "__version__", "another")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled: list[list[str]] = []
    monkeypatch.setattr(cpu, "_run", lambda command, *_: compiled.append(command) or "")
    with pytest.raises(kernels.KernelBuildError, match="No such file"):
        kernels.build_cpu_ops()  # nothing was linked, so there is nothing to move into place
    assert len(compiled) == 2 + len(cpu._UNITS)  # the macros, the sources, the library


PORTABLE = """
import itertools

import torch
from stepgraph.runtime import kernels

torch.ops.load_library(kernels.build_cpu_ops(portable=True))
torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
    x, weight, bias = torch.randn(9, 65).to(dtype), torch.randn(50, 65).to(dtype), torch.ones(50)
    packed = kernels.pack_linear(weight)
    out = kernels.packed_linear(x, packed, bias.to(dtype), 50)
    expected = x.double() @ weight.double().T + 1
    torch.testing.assert_close(out.double(), expected, atol=10 * tolerance, rtol=tolerance)
    assert torch.equal(kernels.packed_linear(x[4:5], packed, bias.to(dtype), 50)[0], out[4])
    data, scales = kernels.quantise_weight(weight)
    out = kernels.packed_linear(x, kernels.pack_linear(data), bias.to(dtype), 50, scales)
    expected = x.double() @ kernels.dequantise_weight(data, scales).double().T + 1
    torch.testing.assert_close(out.double(), expected, atol=10 * tolerance, rtol=tolerance)

plain = kernels.AttentionForm(16, 0.2, value_dim=40)
forms = [
    plain,
    plain._replace(window=70, softcap=3.0),
    plain._replace(storage="int8", window=150),
    plain._replace(storage="fp8", softcap=2.0),
]
types = ((torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2))
for form, (dtype, tolerance) in itertools.product(forms, types):
    if form.storage == "model":
        arena = torch.full((1, 2, 30, 2, 16, 40), torch.nan, dtype=dtype)
    else:
        arena = torch.full((1, 2, 30, 2, 16 * 42), 0xFF, dtype=torch.uint8)
    tables = torch.arange(1, 29, dtype=torch.int32).view(2, 14)
    positions = torch.arange(200)
    q, k, v = (torch.randn(200, heads, 40).to(dtype) for heads in (6, 2, 2))
    k[..., :9] /= 512  # small numbers beside large ones: those below the normal ones of fp8
    rows = torch.zeros(200, dtype=torch.int64)
    slots = tables[0, positions // 16] * 16 + positions % 16
    fixed = (0, slots, tables, rows, torch.tensor([0]), positions, 14, form)
    written = [arena.clone(), arena.clone()]
    results = [
        attention(q, k, v, into, *fixed)
        for attention, into in zip(
            (kernels.paged_attention, kernels.reference_paged_attention), written, strict=True
        )
    ]
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
    assert torch.equal(*(into.view(torch.uint8) for into in written))
    last = slice(199, 200)
    alone = kernels.paged_attention(
        q[last], k[last], v[last], written[0], 0, slots[last], tables, rows[last], rows[last],
        positions[last], 14, form,
    )
    assert torch.equal(alone[0], results[0][199])
"""


PORTABLE_STACK = """
import torch
from stepgraph.cache.spec import group_layers
from stepgraph.runtime import kernels
from stepgraph.runtime.loading.loader import random_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.decoder import AttentionInputs, Decoder, attention_specs

torch.ops.load_library(kernels.build_cpu_ops(portable=True))
fast = kernels.Kernels(
    name="test", attention=kernels.paged_attention, linear=kernels.packed_linear,
    pack=kernels.pack_linear, bounded_by_length=True, masks=0,
    make_stack=kernels.DecoderStack,
)
torch.manual_seed(0)
for kind in ("llama", "gemma2"):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        config = ModelConfig(
            model_type=kind, vocab_size=9, hidden_size=70, intermediate_size=96, num_layers=3,
            num_heads=4, num_kv_heads=2, head_dim=22, rms_norm_eps=1e-5, rope_theta=1e4,
            max_position_embeddings=64, tie_word_embeddings=True,
            hidden_act="silu" if kind == "llama" else "gelu_pytorch_tanh",
        )
        groups = group_layers(attention_specs(config, dtype.itemsize))
        decoder = Decoder(config, fast, dtype, torch.device("cpu"), groups)
        decoder.store(random_weights(config, dtype))
        arena = torch.full((3, 2, 9, 2, 8, 22), torch.nan, dtype=dtype)
        positions = torch.arange(40)
        tables = torch.arange(1, 9, dtype=torch.int32).view(1, 1, 8)
        rows = torch.zeros(40, dtype=torch.int64)
        inputs = AttentionInputs(
            positions=positions, slots=(positions + 8)[None], token_rows=rows, rows=rows[:1],
            block_tables=tables, read_blocks=8, block_size=8,
        )
        x = torch.randn(40, 70).to(dtype)
        with torch.no_grad():
            stacked = decoder.decode(x, arena.clone(), inputs)
            decoder.stack = None
            expected = decoder.decode(x, arena.clone(), inputs)
        largest = float(expected.abs().max())
        torch.testing.assert_close(stacked, expected, atol=tolerance * largest, rtol=0)
"""


@needs_compiler
@pytest.mark.parametrize("script", [PORTABLE, PORTABLE_STACK], ids=["operations", "stack"])
def test_portable_version_computes_the_same(script: str) -> None:
    """In a process of its own: a library registers its operations for good."""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_what_the_compiler_said_is_in_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    failing = tmp_path / "failing-compiler"
    failing.write_text("#!/bin/sh\necho 'error: no such vector' >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(cpu, "_find_compiler", lambda: str(failing))
    with pytest.raises(kernels.KernelBuildError, match=r"status 3(.|\n)*no such vector"):
        kernels.build_cpu_ops()
    assert not list(tmp_path.rglob("*.so"))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu, "_find_compiler", lambda: "/nowhere/g++")
    assert not kernels.have_compiler()
    with pytest.raises(kernels.KernelBuildError, match="install g"):
        kernels.build_cpu_ops()

    def none_found() -> str:
        raise RuntimeError("no working compiler")

    monkeypatch.setattr(cpu, "_find_compiler", none_found)
    assert not kernels.have_compiler()


def test_a_library_that_does_not_load_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "cpu_ops.so"
    broken.write_text("not a library")
    monkeypatch.setattr(cpu, "_find", lambda: ([], []))
    monkeypatch.setattr(cpu, "build_cpu_ops", lambda: broken)
    with pytest.raises(kernels.KernelBuildError, match="delete it to rebuild"):
        cpu.load_cpu_ops.__wrapped__()


@needs_compiler
def test_cpu_compile_gets_the_fast_kernels() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        chosen = kernels.select_kernels("cpu", "compile", dtype)
        assert chosen.attention is kernels.paged_attention
        assert chosen.linear is kernels.packed_linear
        assert chosen.pack is kernels.pack_linear
        assert (chosen.bounded_by_length, chosen.masks) == (True, 0)
    half = kernels.select_kernels("cpu", "compile", torch.float16)
    assert half.attention is kernels.paged_attention
    assert half.linear is kernels.reference_linear
    assert half.pack is None


def test_kernels_know_how_weights_are_stored() -> None:
    for device, mode in (("cpu", "eager"), ("cuda", "graph")):
        for weights, scales in (("int8", 1), ("fp8", 2)):
            chosen = kernels.select_kernels(device, mode, torch.bfloat16, weights)
            assert chosen.weights == weights
            assert chosen.stored_bytes(33, 165, torch.bfloat16) == 33 * 165 + 33 * scales * 4
            assert chosen.unpacked_bytes(33, 165) == 33 * 165 * 4
        plain = kernels.select_kernels(device, mode, torch.bfloat16)
        assert plain.weights == "model"
        assert plain.stored_bytes(33, 165, torch.bfloat16) == 33 * 165 * 2
        assert plain.unpacked_bytes(33, 165) == 0


@needs_compiler
def test_fp8_weights_of_a_cpu_run_in_plain_torch_around_native_attention() -> None:
    chosen = kernels.select_kernels("cpu", "compile", torch.bfloat16, "fp8")
    assert chosen.linear is kernels.reference_linear
    assert (chosen.pack, chosen.make_stack) == (None, None)
    assert chosen.attention is kernels.paged_attention


@needs_compiler
def test_torch_kernels_are_plain_torch_around_paged_attention() -> None:
    for device in ("cpu", "cuda"):
        chosen = kernels.select_kernels(device, "compile", torch.bfloat16, "model", "torch")
        assert chosen.attention is kernels.paged_attention
        assert (chosen.linear, chosen.pack) == (kernels.reference_linear, None)
        assert (chosen.make_stack, chosen.make_decode_step) == (None, None)
        assert chosen.bounded_by_length
    native = kernels.select_kernels("cpu", "eager", torch.bfloat16, "model", "native")
    assert native.make_stack is not None


@pytest.mark.parametrize(
    ("device", "dtype", "weights", "latent", "reason"),
    [
        ("cpu", torch.bfloat16, "int8", False, None),
        ("cuda", torch.float16, "fp8", False, None),
        ("cpu", torch.float32, "model", True, "latent attention"),
        ("cuda", torch.bfloat16, "model", True, "latent attention"),
        ("cpu", torch.float16, "model", False, "no linear layer in float16"),
        ("cpu", torch.bfloat16, "fp8", False, "no linear layer over fp8 weights"),
    ],
)
def test_what_native_kernels_do_not_support(
    device: str, dtype: torch.dtype, weights: Any, latent: bool, reason: str | None
) -> None:
    obstacle = kernels.native_obstacle(device, dtype, weights, latent=latent)
    assert (obstacle is None) if reason is None else (reason in str(obstacle))


def test_eager_gets_plain_torch() -> None:
    for device in ("cpu", "cuda"):
        eager = kernels.select_kernels(torch.device(device), "eager", torch.bfloat16)
        assert eager.attention is kernels.reference_paged_attention
        assert eager.linear is kernels.reference_linear
        assert eager.pack is None
        assert (eager.bounded_by_length, eager.masks) == (False, 1)


def test_cuda_gets_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("compile", "graph"):
        chosen = kernels.select_kernels("cuda", mode, torch.bfloat16)
        assert chosen.make_stack is not None
        assert (chosen.bounded_by_length, chosen.masks) == (True, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for choice in ("native", "torch"):
        with pytest.raises(kernels.KernelBuildError, match="unset it, or use mode='eager'"):
            kernels.select_kernels("cuda", "graph", torch.bfloat16, "model", choice)
    assert kernels.select_kernels("cuda", "eager", torch.bfloat16).name == "torch"
    monkeypatch.delenv("TRITON_INTERPRET")
    for choice in ("native", "torch"):
        chosen = kernels.select_kernels("cuda", "graph", torch.bfloat16, "model", choice)
        assert chosen.attention is paged_attention_on_gpu
    monkeypatch.setattr(kernels, "have_triton", lambda: False)
    plain = kernels.select_kernels("cuda", "graph", torch.bfloat16, "model", "torch")
    assert plain.attention is kernels.paged_attention
    assert (plain.bounded_by_length, plain.masks) == (False, 1)
