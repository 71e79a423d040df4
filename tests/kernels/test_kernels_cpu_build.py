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
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import preset

needs_compiler = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")


@needs_compiler
def test_a_library_is_built_once_and_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = kernels.build_cpu_ops()
    changed = library.stat().st_mtime_ns
    assert kernels.build_cpu_ops() == library
    assert library.stat().st_mtime_ns == changed
    monkeypatch.setattr(torch, "__version__", "another")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled: list[list[str]] = []
    monkeypatch.setattr(cpu, "_run", lambda command, *_: compiled.append(command) or "")
    with pytest.raises(kernels.KernelBuildError, match="No such file"):
        kernels.build_cpu_ops()  # nothing was linked, so there is nothing to move into place
    assert len(compiled) == 2 + len(cpu._UNITS)  # the macros, the sources, the library


PORTABLE = """
import sys
import pytest
from stepgraph.runtime.kernels.cpu import build

native = build.build_cpu_ops()
portable = build.build_cpu_ops(portable=True)
build._find, build.build_cpu_ops = lambda: ([], []), lambda: portable
assert build.load_cpu_ops().path == portable != native
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@needs_compiler
@pytest.mark.slow
def test_portable_version_passes_the_same_tests() -> None:
    """In a process of its own: a library registers its operations for good."""
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    subjects = ("linear", "attention", "kv_storage", "stack", "stack_plans", "experts")
    files = [str(here / f"test_kernels_{subject}.py") for subject in subjects]
    command = [sys.executable, "-c", PORTABLE, "-m", "not slow", *files]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr


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
    plan = model_plan(preset("mla-small" if latent else "smollm2-135m"))
    obstacle = kernels.native_obstacle(device, dtype, weights, plan)
    assert (obstacle is None) if reason is None else (reason in str(obstacle))


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
