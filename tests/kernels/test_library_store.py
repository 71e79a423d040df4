"""Compiled libraries on disk: only whole ones of this user, for this CPU, are ever loaded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgraph.runtime.errors import KernelBuildError
from stepgraph.runtime.kernels import library_store as store
from stepgraph.runtime.kernels.cpu.features import features_of_macros, parse_cpuinfo
from stepgraph.runtime.kernels.library_store import Manifest

SOURCE = "5" * 64
CODE = bytes(range(256)) * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "libraries"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    store._temporary_folder.cache_clear()
    umask = os.umask(0o022)
    yield
    os.umask(umask)
    store._temporary_folder.cache_clear()


def add(folder: Path, *features: str, code: bytes = CODE, source: str = SOURCE) -> Path:
    os.umask(0o002)  # files of others are writable to the group, a library's are not
    with store.scratch_folder(folder) as scratch:
        compiled = scratch / "compiled"
        compiled.write_bytes(code)
        manifest = Manifest(source, features, features, 0, "")
        return store.add_library(scratch, compiled, manifest, folder).path


def found(folder: Path, *features: str) -> list[Path]:
    return [library.path for library in store.find_libraries(folder, SOURCE, features)[0]]


def test_what_was_added_is_found_by_those_who_can_run_it(folder: Path) -> None:
    os.umask(os.umask(0o002))
    plain, wide, wider = add(folder), add(folder, "a"), add(folder, "a", "b")
    add(folder, source="6" * 64)
    assert found(folder, "a", "b", "c") == [wider, wide, plain]
    assert found(folder, "a") == [wide, plain]
    assert found(folder, "b") == [plain]
    libraries, refused = store.find_libraries(folder, SOURCE, ())
    assert [library.path for library in libraries] == [plain]
    assert any("needs a CPU with a, b" in reason for reason in refused)
    assert plain.read_bytes() == CODE
    assert not list(folder.glob("build-*"))


@given(cut=st.integers(0, len(CODE) - 1), flip=st.integers(0, len(CODE) - 1), part=st.booleans())
@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_damaged_file_is_refused_and_replaced(
    folder: Path, cut: int, flip: int, part: bool
) -> None:
    path = add(folder)
    if part:
        path.write_bytes(CODE[:cut])
    else:
        path.write_bytes(CODE[:flip] + bytes((CODE[flip] ^ 1,)) + CODE[flip + 1 :])
    libraries, refused = store.find_libraries(folder, SOURCE, ())
    assert not libraries
    assert "not what its manifest says" in refused[0]
    assert add(folder) == path
    assert found(folder) == [path]


@pytest.mark.parametrize(
    "manifest", ["", "[]", "{}", "[" * 10**5, '{"size": ' + "9" * 5000 + "}", " " * 10**6, "\xff"]
)
def test_a_damaged_manifest_is_refused(folder: Path, manifest: str) -> None:
    path = add(folder)
    (path.parent / "manifest.json").write_text(manifest, encoding="latin-1")
    libraries, refused = store.find_libraries(folder, SOURCE, ())
    assert not libraries
    assert str(path.parent) in refused[0]
    assert len(refused[0]) < 1000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("part", [".", "..", "library", "cpu_ops.so", "manifest.json"])
def test_what_others_can_write_to_is_refused(folder: Path, part: str, mode: int) -> None:
    path = add(folder)
    places = {".": folder, "..": folder.parent, "library": path.parent}
    places.get(part, path.parent / part).chmod(mode)
    if part == ".." and mode == 0o770:
        return  # a group may share what private folders lie in
    assert not found(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("part", [".", "library", "cpu_ops.so", "manifest.json"])
def test_what_belongs_to_another_user_is_refused(folder: Path, part: str) -> None:
    path = add(folder)
    places = {".": folder, "library": path.parent}
    os.chown(places.get(part, path.parent / part), 54321, -1)
    libraries, refused = store.find_libraries(folder, SOURCE, ())
    assert not libraries
    assert "belongs to another user (uid 54321)" in refused[0]


def test_links_are_refused(folder: Path, tmp_path: Path) -> None:
    path = add(folder)
    moved = tmp_path / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    assert not found(folder)


def test_processes_that_build_together(folder: Path) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda i=i: paths.append(add(folder, code=CODE + bytes((i,)))))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8
    assert found(folder) == [paths[0]]


KILLED = """
import sys, time
from pathlib import Path
from stepgraph.runtime.kernels.library_store import scratch_folder
with scratch_folder(Path(sys.argv[1])) as scratch:
    (scratch / "half").write_text("half")
    print(scratch, flush=True)
    time.sleep(600)
"""


def test_leftovers_of_killed_builds_are_cleared_and_running_ones_kept(folder: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        scratch = Path(process.stdout.readline().strip())
        add(folder)
        assert (scratch / "half").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    unlocked = folder / "build-unlocked"
    unlocked.mkdir()
    add(folder)
    assert not scratch.exists()
    assert unlocked.exists(), "its build may be about to lock it"
    os.utime(unlocked, (time.time() - 7200,) * 2)
    add(folder)
    assert not unlocked.exists()


def test_the_cache_is_made_and_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    folder = store.folder_for_builds()
    assert folder == tmp_path / "new" / "cache" / "stepgraph"
    assert folder.stat().st_mode & 0o777 == 0o700


def spoil(kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a cache that cannot be used."""
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
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@pytest.mark.parametrize("kind", ["a file", "open to all", "noexec", "no home"])
def test_without_a_cache_a_private_temporary_folder_serves(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spoil(kind, tmp_path / "cache", monkeypatch)
    with pytest.warns(RuntimeWarning, match="XDG_CACHE_HOME"):
        folder = store.folder_for_builds()
    assert (store.cache_directory() == folder) == (kind == "no home")
    assert folder.parent == Path(tempfile.gettempdir())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert found(folder) == []
    path = add(folder)
    assert found(folder) == [path]
    shutil.rmtree(folder)


def test_without_any_place_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    noexec = os.statvfs_result((*os.statvfs(tmp_path)[:8], os.ST_NOEXEC, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    with pytest.raises(KernelBuildError, match=r"noexec.*STEPGRAPH_KERNEL_DIR"):
        store.folder_for_builds()
    store._temporary_folder.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(KernelBuildError, match="TMPDIR"):
        store.folder_for_builds()


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
