"""CPU kernels: which libraries are built, found and loaded, and who gets which kernels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels.cpu import build as cpu
from stepgraph.runtime.kernels.cpu.features import cpu_features, features_of_macros, parse_cpuinfo
from stepgraph.runtime.kernels.triton.decode_attention import paged_attention_on_gpu
from stepgraph.runtime.kernels.weights import FP8, INT8, MODEL
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import preset
from stepgraph.runtime.tools import build_kernels

needs_compiler = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")
SOURCE = "5" * 64
CODE = bytes(range(256)) * 64
EVERYWHERE = "x86-64" if os.uname().machine == "x86_64" else "armv8-a"
OLDER = [EVERYWHERE, *["x86-64-v2", "x86-64-v3"] * (EVERYWHERE == "x86-64")]
"""Processors without AVX512, some without AVX2."""


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("march", OLDER)
def test_code_for_other_cpus_passes_the_same_tests(tmp_path: Path, march: str) -> None:
    """In a process of its own: a library registers its operations for good."""
    kernels.build_kernels(tmp_path, march=march)
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    subjects = ("codes", "attention", "kv_storage", "stack", "experts")
    files = [str(here / f"test_kernels_{subject}.py") for subject in subjects]
    files.append(str(here / "test_weight_dtype.py"))
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=root,
        env=os.environ | {"STEPGRAPH_KERNEL_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr


def test_a_compiler_that_fails_or_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    failing = tmp_path / "failing-compiler"
    failing.write_text("#!/bin/sh\necho 'error: no such vector' >&2\nexit 3\n")
    failing.chmod(0o755)
    for compiler in (str(failing), "/nowhere/g++", None):

        def find(compiler: str | None = compiler) -> str:
            if compiler is None:
                raise RuntimeError("no working compiler")
            return compiler

        monkeypatch.setattr(cpu, "_find_compiler", find)
        assert kernels.have_compiler() == (compiler == str(failing))
        with pytest.raises(kernels.KernelBuildError) as error:
            kernels.build_cpu_ops()
        assert ("no such vector" in str(error.value)) == kernels.have_compiler()
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_cpu_compile_gets_the_fast_kernels() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        chosen = kernels.select_kernels("cpu", "compile", dtype)
        assert chosen.attention is kernels.paged_attention
        assert chosen.linear is kernels.packed_linear
        assert chosen.pack_parts is kernels.pack_parts
        assert (chosen.bounded_by_length, chosen.masks) == (True, 0)
    half = kernels.select_kernels("cpu", "compile", torch.float16)
    assert half.attention is kernels.paged_attention
    assert half.linear is kernels.reference_linear
    assert half.pack_parts is None


@pytest.mark.parametrize(
    ("device", "dtype", "weights", "latent", "reason"),
    [
        ("cpu", torch.bfloat16, INT8, False, None),
        ("cpu", torch.bfloat16, FP8, False, None),
        ("cuda", torch.float16, FP8, False, None),
        ("cpu", torch.float32, MODEL, True, "latent attention"),
        ("cuda", torch.bfloat16, MODEL, True, "latent attention"),
        ("cpu", torch.float16, MODEL, False, "no linear layer in float16"),
    ],
)
def test_what_native_kernels_do_not_support(
    device: str, dtype: torch.dtype, weights: Any, latent: bool, reason: str | None
) -> None:
    plan = model_plan(preset("mla-small" if latent else "smollm2-135m"))
    obstacle = kernels.native_obstacle(device, dtype, weights, plan)
    assert (obstacle is None) if reason is None else (reason in str(obstacle))


def test_cuda_gets_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(choice: kernels.KernelChoice, mode: kernels.Mode = "graph") -> kernels.Kernels:
        return kernels.select_kernels("cuda", mode, torch.bfloat16, MODEL, choice)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for choice in ("native", "torch"):
        with pytest.raises(kernels.KernelBuildError):
            select(choice)
    assert select("torch", "eager").name == "torch"
    monkeypatch.delenv("TRITON_INTERPRET")
    for choice in ("native", "torch"):
        chosen = select(choice)
        assert chosen.attention is paged_attention_on_gpu
        assert (chosen.bounded_by_length, chosen.masks) == (True, 0)
        assert (chosen.make_stack is not None) == (choice == "native")
    monkeypatch.setattr(kernels, "have_triton", lambda: False)
    plain = select("torch")
    assert plain.attention is kernels.paged_attention
    assert (plain.bounded_by_length, plain.masks) == (False, 1)


# Libraries on disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "libraries"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cpu._temporary_folder.cache_clear()
    umask = os.umask(0o022)
    yield
    os.umask(umask)
    cpu._temporary_folder.cache_clear()


def add(folder: Path, *features: str, code: bytes = CODE, source: str = SOURCE) -> Path:
    os.umask(0o002)  # files of others are writable to the group, a library's are not
    with tempfile.TemporaryDirectory(dir=folder) as name:
        return cpu._add_library(Path(name), code, source, features, folder)


def found(folder: Path, *features: str) -> list[Path]:
    return [library.path for library in cpu.find_libraries(folder, SOURCE, features)[0]]


def test_what_was_added_is_found_by_those_who_can_run_it(folder: Path) -> None:
    os.umask(os.umask(0o002))
    plain, wide, wider = add(folder), add(folder, "a"), add(folder, "a", "b")
    add(folder, source="6" * 64)
    assert found(folder, "a", "b", "c") == [wider, wide, plain]
    assert found(folder, "a") == [wide, plain]
    assert found(folder, "b") == [plain]
    libraries, refused = cpu.find_libraries(folder, SOURCE, ())
    assert [library.path for library in libraries] == [plain]
    assert any("needs a CPU with a, b" in reason for reason in refused)
    assert plain.read_bytes() == CODE


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("cpu_ops.so", code) for code in (CODE[:-1], b"", CODE[:-1] + b"x")),
        *(("manifest.json", text) for text in (b"", b"{}", b"[" * 10**5)),
        ("manifest.json", b'{"size": ' + b"9" * 5000 + b"}"),
    ],
)
def test_a_damaged_library_is_refused_and_replaced(folder: Path, name: str, content: bytes) -> None:
    path = add(folder)
    (path.parent / name).write_bytes(content)
    libraries, refused = cpu.find_libraries(folder, SOURCE, ())
    assert not libraries
    assert str(path.parent) in refused[0]
    assert len(refused[0]) < 1000
    assert add(folder) == path
    assert found(folder) == [path]


def place_of(library: Path, part: str) -> Path:
    """A file of a library, or one of the directories that it is in."""
    library = library.parent
    places = {".": library.parent, "..": library.parent.parent, "library": library}
    return places.get(part, library / part)


@pytest.mark.parametrize("part", [".", "..", "library", "cpu_ops.so", "manifest.json"])
def test_what_others_can_replace_is_refused(folder: Path, tmp_path: Path, part: str) -> None:
    """What they can write to, own, or link to another place."""
    place = place_of(add(folder), part)
    mode = place.stat().st_mode
    for wrong in (0o702, 0o770)[: 1 if part == ".." else 2]:  # a group may share the outermost
        place.chmod(wrong)
        assert not found(folder)
    place.chmod(mode)
    assert found(folder)
    if part == "..":
        return
    if os.geteuid() == 0:  # only root gives files away
        os.chown(place, 54321, -1)
        libraries, refused = cpu.find_libraries(folder, SOURCE, ())
        assert not libraries
        assert refused
        os.chown(place, 0, -1)
    if part != ".":
        moved = tmp_path / "moved"
        place.rename(moved)
        place.symlink_to(moved)
        assert not found(folder)


def spoil(kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a cache that cannot be used, unless it is `usable`."""
    if kind == "a file":
        cache.write_text("")
    elif kind == "open to all":
        (cache / "stepgraph").mkdir(parents=True)
        (cache / "stepgraph").chmod(0o777)
    elif kind == "noexec":
        real = os.statvfs

        def statvfs(path: Path) -> object:
            flags = os.ST_NOEXEC if str(path).startswith(str(cache)) else 0
            return os.statvfs_result((*real(path)[:8], flags, 255))

        monkeypatch.setattr(os, "statvfs", statvfs)
    elif kind == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@pytest.mark.parametrize("kind", ["usable", "a file", "open to all", "noexec", "no home"])
def test_without_a_cache_a_private_temporary_folder_serves(
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spoil(kind, tmp_path / "cache", monkeypatch)
    folder = cpu._folder_for_builds()
    assert len(recwarn) == (kind != "usable")
    assert (cpu.cache_directory() == folder) == (kind in ("usable", "no home"))
    assert folder.parent == (
        tmp_path / "cache" if kind == "usable" else Path(tempfile.gettempdir())
    )
    assert folder.stat().st_mode & 0o777 == 0o700
    assert found(folder) == []
    path = add(folder)
    assert found(folder) == [path]
    shutil.rmtree(folder)


CPUINFO = """processor\t: 0
model name\t: a CPU
flags\t\t: fpu sse sse2 pni ssse3 sse4_1 avx2 bmi1 bmi2 abm avx512f avx512_bf16 avx512_vnni ibrs

processor\t: 1
flags\t\t: fpu sse sse2 pni ssse3 sse4_1 avx2 bmi1 bmi2 abm avx512f avx512_bf16
"""
MACROS = """#define __AVX512BF16__ 1
#define __SSE3__ 1
#define __SSE4_1__ 1
#define __BMI__ 1
#define __LZCNT__ 1
#define __SSE_MATH__ 1
#define __AVX512VPOPCNTDQ__ 1
#define __GNUC__ 12
"""


def test_one_name_for_an_instruction_set() -> None:
    assert parse_cpuinfo(CPUINFO) == {
        *("sse", "sse2", "sse3", "ssse3", "sse41", "avx2", "bmi", "bmi2", "lzcnt"),
        *("avx512f", "avx512bf16"),
    }
    used = features_of_macros(MACROS)
    assert used - parse_cpuinfo(CPUINFO) == {"avx512vpopcntdq"}
    arm = parse_cpuinfo("Features\t: fp asimd atomics asimddp sve i8mm bf16\n")
    assert (
        features_of_macros("#define __ARM_FEATURE_SVE 1\n#define __ARM_FEATURE_DOTPROD 1\n") <= arm
    )
    assert "sve2" in features_of_macros("#define __ARM_FEATURE_SVE2 1\n") - arm


# Builds for other machines


@pytest.fixture
def fake_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Builds take no time, and their code is the flags; returns the cache."""

    def compile_nothing(compiler: str, flags: Sequence[str], scratch: Path) -> Path:
        (scratch / "code").write_text(" ".join(flags))
        return scratch / "code"

    monkeypatch.setattr(cpu, "_compile", compile_nothing)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("STEPGRAPH_KERNEL_DIR", raising=False)
    monkeypatch.delenv("STEPGRAPH_QUIET", raising=False)
    return tmp_path / "stepgraph"


@needs_compiler
def test_library_needed_by_several_is_built_once(
    fake_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[str] = []
    compile_nothing = cpu._compile

    def compile_slowly(compiler: str, flags: Sequence[str], scratch: Path) -> Path:
        builds.append(compiler)
        time.sleep(0.2)
        return compile_nothing(compiler, flags, scratch)

    monkeypatch.setattr(cpu, "_compile", compile_slowly)
    with ThreadPoolExecutor(3) as pool:  # each opens the lock on its own, like a process
        paths = list(pool.map(lambda _: cpu.build_cpu_ops(), range(3)))
    assert len(builds) == 1
    assert len(set(paths)) == 1


@needs_compiler
def test_a_library_for_each_cpu_that_was_named(
    fake_build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels"
    marches = ["native"]
    if os.uname().machine == "x86_64":
        marches += ["x86-64", "x86-64-v3"]
    assert build_kernels.main(["--out", str(out), "--march", *marches]) == 0
    printed, announced = capsys.readouterr()
    paths = [Path(line) for line in printed.splitlines()]
    assert [f"={march} " in path.read_text() for path, march in zip(paths, marches, strict=True)]
    assert announced.count("compiling the CPU kernels") == len(marches)
    assert not fake_build.exists()
    found, refused = cpu.find_libraries(out, cpu._source_key(), cpu_features())
    assert found[0].path == paths[0], "this CPU's own comes first"
    assert len(found) + len(refused) == len(marches)
    oldest, _ = cpu.find_libraries(out, cpu._source_key(), {"sse", "sse2"})
    assert [library.path for library in oldest] == paths[1:2]
    for path in (out, *out.rglob("*")):
        assert path.stat().st_mode & 0o044, "an image is built by one user and run by another"


@needs_compiler
def test_what_a_process_takes(fake_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder that was named, else one for this very CPU, else any without compiler."""
    loaded: list[Path] = []
    monkeypatch.setattr("torch.ops.load_library", loaded.append)
    load = cpu.load_cpu_ops.__wrapped__
    monkeypatch.setenv("STEPGRAPH_QUIET", "1")
    plain = kernels.build_kernels(march=EVERYWHERE)
    with monkeypatch.context() as without:
        without.setattr(cpu, "_find_compiler", lambda: "/nowhere/g++")
        assert load() == cpu.KernelLibrary(plain, built=False)
    own = load()
    assert own.built
    assert own.path != plain
    assert load() == cpu.KernelLibrary(own.path, built=False)
    named = kernels.build_kernels(fake_build.parent / "named", march=EVERYWHERE)
    monkeypatch.setenv("STEPGRAPH_KERNEL_DIR", str(named.parent.parent))
    assert load().path == named
    named.write_bytes(named.read_bytes()[:10])
    with pytest.warns(RuntimeWarning, match="STEPGRAPH_KERNEL_DIR"):
        assert load().path == own.path
    monkeypatch.setenv("STEPGRAPH_KERNEL_DIR", str(fake_build / "nowhere"))
    with pytest.warns(RuntimeWarning, match="STEPGRAPH_KERNEL_DIR"):
        assert load().path == own.path
    assert loaded == [plain, own.path, own.path, named, own.path, own.path]


SLIM = """
import json, os, sys, warnings
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
import stepgraph.runtime.loading.tokenizer, torch._inductor.cpp_builder

if os.geteuid() == 0:
    os.setuid(54321)  # no entry in the password database, nothing to write to but /tmp
config = EngineConfig(device="cpu", max_num_seqs=2, memory_tokens=64)
results = []
for kernels in ("", sys.argv[2]):
    os.environ["STEPGRAPH_KERNEL_DIR"] = kernels
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        with Engine.from_pretrained(sys.argv[1], config) as engine:
            (output,) = engine.generate([[1, 2]], SamplingParams(max_tokens=2, temperature=0.0))
            results.append([engine.config.mode, engine.config.kernels, output.token_ids])
    results[-1].append([str(w.message) for w in caught if w.category is RuntimeWarning])
print(json.dumps(results))
"""


@pytest.mark.slow
@needs_compiler
def test_a_slim_container(base: object) -> None:
    """No compiler, home or cache; a user without an entry in the password database."""
    library = kernels.build_cpu_ops().parent
    with tempfile.TemporaryDirectory() as outside:
        Path(outside).chmod(0o755)
        model = shutil.copytree(base.directory, Path(outside) / "model")  # type: ignore[attr-defined]
        for path in (model, *model.iterdir()):
            path.chmod(0o755)
        shutil.copytree(library, Path(outside) / "kernels" / library.name)
        environment = {"PATH": "/nowhere", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        result = subprocess.run(
            [sys.executable, "-c", SLIM, str(model), f"{outside}/kernels"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    slow, fast = json.loads(result.stdout.splitlines()[-1])
    assert slow[:2] == ["eager", "torch"]
    assert any("many times slower" in warning for warning in slow[3])
    assert fast[:2] == ["compile", "native"]
    assert fast[3] == []
    assert fast[2] == slow[2]
