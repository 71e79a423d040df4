"""Builds, finds and loads the CPU kernels: C++ next to this file, compiled once for each machine.

A library is looked for in the folder that `STEPGRAPH_KERNEL_DIR` names (see `build_kernels`), then
in the user's cache; only a missing one is compiled. Finding one takes no compiler: it is known by
the digest of sources, flags and torch's version. A library is a folder with the code and a manifest
that names the instruction sets it needs and the digest of the code. The folder is renamed into
place when both are on the disk.

Loading a library runs its code, so nothing is loaded that another user could have written.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import KernelBuildError
from ..result_check import warn
from .features import cpu_features, features_of_macros

logger = logging.getLogger("stepgraph.runtime")

KERNEL_DIR = "STEPGRAPH_KERNEL_DIR"
"""The environment variable that names a folder of libraries which were built beforehand."""

_HERE = Path(__file__).parent / "csrc"
_FLAGS = ("-O3", "-ffp-contract=fast", "-std=c++20", "-fPIC", "-pthread", "-w")
_CODE, _MANIFEST = "cpu_ops.so", "manifest.json"
_MOST_MANIFEST_BYTES = 1 << 16
_SCRATCH = "build-"
_SECONDS_OF_A_BUILD = 3600.0
"""Older scratch folders are of builds that were killed."""
_TAIL_LINES = 30
_QUIET = "STEPGRAPH_QUIET"


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """A library that may be loaded, or that this process has loaded."""

    path: Path
    built: bool = False
    """By this process; otherwise it was found."""
    features: frozenset[str] = field(default=frozenset(), compare=False)
    """Instruction sets (`cpu_features`) of the CPUs that can run it."""

    @property
    def is_native(self) -> bool:
        """Whether the compiler optimised for a CPU like this one."""
        return self.features == cpu_features()


def cache_directory() -> Path:
    """Return where this machine keeps what is built or tuned once; it need not exist.

    `TORCHINDUCTOR_CACHE_DIR`, else `XDG_CACHE_HOME`, else `~/.cache`; a temporary folder of this
    process where the user has no home.
    """
    return _users_cache() or _temporary_folder()


def _users_cache() -> Path | None:
    if (inductor := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) and not _default_of_torch(inductor):
        return Path(inductor) / "stepgraph"
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "stepgraph"
    try:
        return Path.home() / ".cache" / "stepgraph"
    except RuntimeError:  # no HOME, and no entry in the password database
        return None


def _default_of_torch(directory: str) -> bool:
    """Whether torch put its own default into the environment, as it does once it compiles.

    What is found must not depend on that, and the name is the same for whoever makes it first.
    """
    path = Path(directory)
    return path.parent == Path(tempfile.gettempdir()) and path.name.startswith("torchinductor_")


def find_libraries(
    folder: Path, source: str, features: Collection[str]
) -> tuple[list[KernelLibrary], list[str]]:
    """Return the libraries in `folder` that may be loaded here, those that use most features first.

    Args:
        folder: what `build_kernels` wrote to.
        source: what they must have been made from.
        features: of this CPU.

    Returns:
        The libraries, and why others (or the folder) were refused.
    """
    if (obstacle := _untrusted(folder)) is not None:
        return [], [obstacle]
    found, refused = [], []
    try:
        paths = sorted(folder.glob(f"cpu_ops-{source[:24]}-*"))
    except OSError as error:
        return [], [f"{folder} cannot be listed: {error.strerror}"]
    for path in paths:
        try:
            library = _checked(path, source)
        except ValueError as error:
            refused.append(f"{path} is damaged or foreign: {str(error)[:200]}")
            continue
        if missing := library.features - set(features):
            refused.append(f"{path} needs a CPU with {', '.join(sorted(missing))}")
        else:
            found.append(library)
    found.sort(key=lambda library: len(library.features), reverse=True)
    return found, refused


def _manifest(code: bytes, source: str, features: Collection[str]) -> dict[str, Any]:
    """Describe a library: its code, what it was made from, and the instruction sets it needs."""
    digest = hashlib.sha256(code).hexdigest()
    return {"source": source, "features": sorted(features), "size": len(code), "sha256": digest}


def _checked(path: Path, source: str) -> KernelLibrary:
    """Return the library in a folder, after comparing the code with its manifest.

    Raises ValueError for whatever makes the library one that must not be loaded.
    """
    try:
        for part in (path, path / _MANIFEST, path / _CODE):
            status = part.lstat()
            if not (stat.S_ISDIR if part == path else stat.S_ISREG)(status.st_mode):
                raise ValueError(f"{part.name} is of the wrong kind")
            if (reason := _writable_by_others(status)) is not None:
                raise ValueError(f"{part.name} {reason}")
        with (path / _MANIFEST).open("rb") as file:
            document = json.loads(file.read(_MOST_MANIFEST_BYTES))
        code = (path / _CODE).read_bytes()
        expected = _manifest(code, source, list(map(str, document["features"])))
    except (OSError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{_MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    if document != expected:
        raise ValueError(f"{_MANIFEST} is not of these sources and this code ({len(code)} bytes)")
    return KernelLibrary(path / _CODE, features=frozenset(expected["features"]))


def _untrusted(folder: Path) -> str | None:
    """Return why code in `folder` must not be run; None where it may."""
    try:
        status, parent = folder.stat(), folder.resolve().parent.stat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is not a folder"
        if (reason := _writable_by_others(status)) is not None:
            return f"{folder} {reason}"
        if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
            return f"{folder.parent} can be written to by every user: chmod o-w {folder.parent}"
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return f"{folder} is on a file system that is mounted noexec"
    except (OSError, ValueError) as error:
        return f"{folder} cannot be read: {error}"[:400]
    return None


def _writable_by_others(status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by other users: chmod go-w makes it private"
    return None


def _folder_for_builds() -> Path:
    """Return where a process may build libraries: the cache, or a temporary folder with a warning.

    Raises KernelBuildError where neither can be written to.
    """
    folder, obstacle = _users_cache(), "the user has no home directory"
    if folder is not None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                obstacle = _untrusted(folder) or ""
        except OSError as error:
            obstacle = f"{folder} cannot be written to: {error.strerror}"
        if not obstacle:
            return folder
    temporary = _temporary_folder()
    warn(
        f"{obstacle}. The compiled kernels of this process are kept in {temporary}, and the next"
        " one builds them again: set XDG_CACHE_HOME to a folder of this user's own, or"
        f" {KERNEL_DIR} to a built library"
    )
    return temporary


@functools.cache
def _temporary_folder() -> Path:
    """Return a private folder that lasts as long as the process."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="stepgraph-kernels-"))
    except OSError as error:
        raise KernelBuildError(
            f"no place for compiled kernels, and no temporary folder either: {error.strerror}; set"
            f" XDG_CACHE_HOME or TMPDIR to a folder of this user's own, or {KERNEL_DIR} to a built"
            " library"
        ) from error
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork has this function too
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _add_library(
    scratch: Path, code: bytes, source: str, features: Collection[str], folder: Path
) -> Path:
    """Move a library into `folder`, whole or not at all; a damaged one of that name is replaced.

    Args:
        scratch: a folder on the same file system.
        code: the shared library.
        source: what it was made from.
        features: instruction sets of the CPUs that can run it.
        folder: where it goes.

    Returns the path of the code.
    """
    needed = hashlib.sha256("\0".join(sorted(features)).encode()).hexdigest()
    final = folder / f"cpu_ops-{source[:24]}-{needed[:12]}"
    whole = scratch / "whole"
    whole.mkdir()
    text = json.dumps(_manifest(code, source, features), indent=1).encode()
    for name, data, mode in ((_CODE, code, 0o755), (_MANIFEST, text, 0o644)):
        with (whole / name).open("wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.flush()
            os.fsync(file.fileno())
    whole.chmod(0o755)
    try:
        whole.rename(final)
    except OSError:  # the name exists: an equal one of another process, or a damaged one
        with contextlib.suppress(ValueError):
            return _checked(final, source).path
        final.rename(scratch / "damaged")
        whole.rename(final)
    return final / _CODE


def _find_compiler() -> str:
    """The compiler inductor would use. Raises whatever inductor raises where there is none."""
    usual = os.environ.get("CXX", "g++")
    if sys.platform == "linux" and "torch._inductor" not in sys.modules and shutil.which(usual):
        return usual  # as inductor would say: to ask it takes seconds of imports
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def have_compiler() -> bool:
    """Whether the C++ compiler is there that `load_cpu_ops` (and torch.compile) needs."""
    try:
        return shutil.which(_find_compiler()) is not None
    except RuntimeError:  # inductor's InvalidCxxCompiler among others
        return False


def _run(command: Sequence[str], purpose: str, scratch: Path | None = None) -> str:
    """Run a compiler, whose temporary files go to `scratch`; return what it printed."""
    environment = os.environ if scratch is None else os.environ | {"TMPDIR": str(scratch)}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
    except OSError as error:
        raise KernelBuildError(f"{purpose} failed: {command[0]}: {error.strerror}") from error
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).splitlines()[-_TAIL_LINES:])
        raise KernelBuildError(
            f"{purpose} failed with status {result.returncode}; the command was\n"
            f"{' '.join(command)}\nand ended with\n{tail}"
        )
    return result.stdout


def cpu_kernels_obstacle() -> str | None:
    """Return what this machine lacks for the CPU kernels; None where they exist or can be built."""
    if have_compiler():
        return None
    found, refused = _find()
    if found:
        return None
    reasons = f" (not usable: {'; '.join(refused[:3])})" if refused else ""
    return (
        "a C++ compiler (install g++, or name one in CXX), or a library that "
        f"`stepgraph build-kernels` built ({KERNEL_DIR}, see docs/containers.md){reasons}"
    )


def _find() -> tuple[list[KernelLibrary], list[str]]:
    """Return the libraries that may be loaded, in the order to try them, and why others may not.

    With a compiler, one in the cache is only taken if it is for a CPU like this one.
    """
    source, found, refused = _source_key(), list[KernelLibrary](), list[str]()
    if given := os.environ.get(KERNEL_DIR):
        found, refused = find_libraries(Path(given), source, cpu_features())
        if not found and not refused:
            why = f"{given} holds no library of this version for torch {torch.__version__}"
            refused.append(why)
    cache = cache_directory()
    if os.path.exists(cache):  # not Path.exists, which raises where it may not be searched
        usable, reasons = find_libraries(cache, source, cpu_features())
        found += [library for library in usable if library.is_native or not have_compiler()]
        refused += reasons
    return found, refused


def build_cpu_ops() -> Path:
    """Path of the compiled library, built (in half a minute) if the cache does not hold it yet.

    Of processes that need the library at the same time, one builds it, and the others wait.

    Raises KernelBuildError if there is no compiler, or if it fails.
    """
    folder = _folder_for_builds()
    with contextlib.ExitStack() as stack:  # a process that ends releases its lock
        with contextlib.suppress(OSError):  # a file system without locks: each builds on its own
            fcntl.flock(stack.enter_context((folder / ".lock").open("a")), fcntl.LOCK_EX)
        for library in find_libraries(folder, _source_key(), cpu_features())[0]:
            if library.is_native:
                return library.path
        return _build(folder)


def build_kernels(out: Path | None = None, *, march: str = "native") -> Path:
    """Compile the CPU kernels for processes to come, also on other machines.

    Args:
        out: the folder they go to, made if need be, which processes find by
            `STEPGRAPH_KERNEL_DIR`; it may hold libraries for several CPUs. None: the user's cache,
            where processes look anyway.
        march: the CPU, as the compiler names it (`-march`, on ARM `-mcpu`), for instance
            `x86-64-v4`; `native`: this one. A process takes the library that uses most of the
            instruction sets its CPU has.

    Returns the path of the library.

    Raises:
        KernelBuildError: there is no compiler, it fails, or `out` cannot be written to.
    """
    return _build(_folder_for_builds() if out is None else out, march=march)


def _source_key() -> str:
    """Digest of what decides a library, but for the CPU and the compiler."""
    key = hashlib.sha256("\0".join([torch.__version__, platform.machine(), *_FLAGS]).encode())
    for path in sorted(_HERE.iterdir()):
        key.update(path.read_bytes())
    return key.hexdigest()


def _build(folder: Path, *, march: str = "native") -> Path:
    if not have_compiler():
        raise KernelBuildError(
            "no C++ compiler found for the CPU kernels; install g++ (or name one in CXX), "
            "or use mode='eager'"
        )
    compiler = _find_compiler()
    cpu_option = "-mcpu" if platform.machine() in ("aarch64", "arm64") else "-march"
    flags = [f"{cpu_option}={march}", *_FLAGS]
    if march == "native":
        features = cpu_features()
    else:
        macros = [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
        features = features_of_macros(_run(macros, "listing macros"))
    _announce(
        f"stepgraph: compiling the CPU kernels into {folder}, which takes some twenty seconds of "
        f"two cores; later starts find them ({_QUIET}=1 keeps this message away)"
    )
    began = time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{_SCRATCH}*"):
            if time.time() - old.lstat().st_mtime > _SECONDS_OF_A_BUILD:
                shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as name:
            scratch = Path(name)
            code = _compile(compiler, flags, scratch).read_bytes()
            path = _add_library(scratch, code, _source_key(), features, folder)
    except OSError as error:
        raise KernelBuildError(
            f"the CPU kernels cannot be written to {folder}: {error.strerror or error}"
        ) from error
    _announce(f"stepgraph: compiled the CPU kernels in {time.perf_counter() - began:.0f} s")
    return path


def _compile(compiler: str, flags: Sequence[str], scratch: Path) -> Path:
    """Compile and link all units; return the library, which lies in `scratch`."""
    torch_root = Path(torch.__file__).parent
    compile_unit = [compiler, *flags, f"-I{torch_root}/include", "-c"]

    def compiled(unit: Path) -> str:
        output = f"{scratch}/{unit.stem}.o"
        _run([*compile_unit, str(unit), "-o", output], "compiling the CPU kernels", scratch)
        return output

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted(_HERE.glob("*.cpp"))))
    linked = scratch / _CODE
    torch_libraries = [f"-L{torch_root}/lib", "-ltorch_cpu", "-lc10"]
    command = [compiler, "-shared", "-pthread", *objects, "-o", str(linked), *torch_libraries]
    _run(command, "linking the CPU kernels", scratch)
    return linked


def _announce(message: str) -> None:
    """Log a message, and print it on stderr unless the process is quiet."""
    logger.info("%s", message.removeprefix("stepgraph: "))
    if not os.environ.get(_QUIET) and sys.stderr is not None:
        print(message, file=sys.stderr, flush=True)


@functools.cache
def load_cpu_ops() -> KernelLibrary:
    """Makes `torch.ops.stepgraph.*` run on CPU; builds the library first if need be. Idempotent.

    A library in `STEPGRAPH_KERNEL_DIR` that this CPU can run is taken as it is. One in the cache is
    taken if it was compiled for a CPU like this one, or if there is no compiler. Returns what was
    loaded, the same each time.

    Raises KernelBuildError as `build_cpu_ops`, and if the library cannot be loaded.
    """
    found, refused = _find()
    given = os.environ.get(KERNEL_DIR)
    for library in found:
        try:
            torch.ops.load_library(library.path)
            break
        except OSError as error:
            refused.append(f"{library.path} does not load: {error}")
    else:
        library = None
    if given and not (library and library.path.is_relative_to(given)):
        warn(f"{KERNEL_DIR} was passed over: {'; '.join(refused[:3])}")
    elif library is None and refused:
        logger.warning("no compiled CPU kernels are usable: %s", "; ".join(refused[:3]))
    if library is not None:
        return library
    path = build_cpu_ops()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise KernelBuildError(f"loading {path} failed; delete it to rebuild: {error}") from error
    return KernelLibrary(path, built=True)
