"""Kernels built beforehand, and machines without compiler, home or cache that run with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels import library_store
from stepgraph.runtime.kernels.cpu import build as cpu
from stepgraph.runtime.kernels.cpu.features import cpu_features
from stepgraph.runtime.tools import build_kernels

needs_compiler = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")


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
    found, refused = library_store.find_libraries(out, cpu._source_key(False), cpu_features())
    assert found[0].path == paths[0], "this CPU's own comes first"
    assert len(found) + len(refused) == len(marches)
    oldest, _ = library_store.find_libraries(out, cpu._source_key(False), {"sse", "sse2"})
    assert [library.path for library in oldest] == paths[1:2]
    for path in (out, *out.rglob("*")):
        assert path.stat().st_mode & 0o044, "an image is built by one user and run by another"


def test_what_fails_is_the_exit_status(
    fake_build: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("")
    assert build_kernels.main(["--out", str(tmp_path / "file" / "kernels")]) == 1
    assert build_kernels.main(["--march", "no-such-cpu"]) == 1
    monkeypatch.setattr(cpu, "_find_compiler", lambda: "/nowhere/g++")
    assert build_kernels.main([]) == 1
    assert "install g++" in capsys.readouterr().err


@needs_compiler
def test_what_a_process_takes(fake_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder that was named, else one for this very CPU, else any without compiler."""
    loaded: list[Path] = []
    monkeypatch.setattr("torch.ops.load_library", loaded.append)
    load = cpu.load_cpu_ops.__wrapped__
    monkeypatch.setenv("STEPGRAPH_QUIET", "1")
    everywhere = "x86-64" if os.uname().machine == "x86_64" else "armv8-a"
    plain = kernels.build_kernels(march=everywhere)
    with monkeypatch.context() as without:
        without.setattr(cpu, "_find_compiler", lambda: "/nowhere/g++")
        assert load() == cpu.KernelLibrary(plain, built=False)
    own = load()
    assert own.built
    assert own.path != plain
    assert load() == cpu.KernelLibrary(own.path, built=False)
    named = kernels.build_kernels(fake_build.parent / "named", march=everywhere)
    monkeypatch.setenv("STEPGRAPH_KERNEL_DIR", str(named.parent.parent))
    assert load().path == named
    named.write_bytes(named.read_bytes()[:10])
    with pytest.warns(RuntimeWarning, match="STEPGRAPH_KERNEL_DIR was passed over.*10 bytes"):
        assert load().path == own.path
    monkeypatch.setenv("STEPGRAPH_KERNEL_DIR", str(fake_build / "nowhere"))
    with pytest.warns(RuntimeWarning, match="STEPGRAPH_KERNEL_DIR was passed over.*nowhere"):
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
