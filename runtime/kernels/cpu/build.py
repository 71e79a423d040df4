"""Builds, finds and loads the CPU kernels: C++ next to this file, compiled once for each machine.

A library is looked for in the folder that `STEPGRAPH_KERNEL_DIR` names (see `build_kernels`), then
in the user's cache; only a missing one is compiled. Finding one takes no compiler: it is known by
the digest of sources, flags and torch's version, and its manifest says which instruction sets it
uses.
"""

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import KernelBuildError
from ...progress import progress_bar
from ..library_store import (
    KERNEL_DIR,
    Manifest,
    StoredLibrary,
    add_library,
    cache_directory,
    find_libraries,
    folder_for_builds,
    scratch_folder,
)
from ..result_check import warn
from .features import cpu_features, features_of_macros

logger = logging.getLogger("stepgraph.runtime")

_HERE = Path(__file__).parent / "csrc"
# Those that take longest to compile come first.
_UNITS = (
    "ops.cpp",
    "attention_int8.cpp",
    "attention.cpp",
    "attention_fp8.cpp",
    "linear.cpp",
    "drafting.cpp",
    "mixture.cpp",
    "sampling.cpp",
    "stack.cpp",
    "communicator.cpp",
    "pool.cpp",
)
_HEADERS = (
    "kernels.h",
    "vec.h",
    "int8.h",
    "exp.h",
    "storage.h",
    "attention_plan.h",
    "attention_math.h",
    "attention_worker.h",
    "attention.h",
    "attention_scaled.h",
    "sampling.h",
    "sampling_math.h",
    "sampling_ops.h",
    "argument_reader.h",
    "checks.h",
    "collective_ops.h",
    "communicator.h",
    "draft_ops.h",
    "drafting.h",
    "elementwise_ops.h",
    "embedding_ops.h",
    "head_ops.h",
    "linear.h",
    "linear_ops.h",
    "mixture.h",
    "mixture_job.h",
    "mixture_ops.h",
    "mixture_thread.h",
    "phases.h",
    "pool.h",
    "routing.h",
    "stack.h",
    "stack_create.h",
    "stack_job.h",
    "stack_math.h",
    "stack_ops.h",
    "verify_ops.h",
    "stack_thread.h",
    "work_space.h",
)
_TAIL_LINES = 30
_QUIET = "STEPGRAPH_QUIET"


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """The kernels that this process runs."""

    path: Path
    built: bool
    """By this process; otherwise it was found."""


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


def _find() -> tuple[list[StoredLibrary], list[str]]:
    """Return the libraries that may be loaded, best first, and why others may not."""
    found: list[StoredLibrary] = []
    refused: list[str] = []
    source = _source_key(portable=False)
    if (given := _given_folder()) is not None:
        found, refused = find_libraries(given, source, cpu_features())
        if not found and not refused:
            refused.append(
                f"{given} holds no library of this version for torch {torch.__version__}"
            )
    cache = cache_directory()
    if os.path.exists(cache):  # not Path.exists, which raises where it may not be searched
        usable, reasons = find_libraries(cache, source, cpu_features())
        found += usable
        refused += reasons
    return found, refused


def _given_folder() -> Path | None:
    given = os.environ.get(KERNEL_DIR)
    return Path(given) if given else None


def build_cpu_ops(portable: bool = False) -> Path:
    """Path of the compiled library, built (in half a minute) if the cache does not hold it yet.

    `portable` leaves out every instruction the compiler is not asked for by plain C++. Processes
    may build at the same time: each builds on its own and moves its library into place.

    Raises KernelBuildError if there is no compiler, or if it fails.
    """
    folder = folder_for_builds()
    for library in find_libraries(folder, _source_key(portable), cpu_features())[0]:
        if _is_native(library):
            return library.path
    return _build(folder, portable=portable)


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
    if out is None:
        return _build(folder_for_builds(), march=march)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(f"{out} cannot be made: {error.strerror}") from error
    return _build(out, march=march)


def _source_key(portable: bool) -> str:
    """Digest of what decides a library, but for the CPU and the compiler."""
    key = hashlib.sha256("\0".join([torch.__version__, platform.machine()]).encode())
    key.update("\0".join(_flags(portable)).encode())
    for name in (*_UNITS, *_HEADERS):
        key.update((_HERE / name).read_bytes())
    return key.hexdigest()


def _flags(portable: bool) -> list[str]:
    flags = ["-O3", "-ffp-contract=fast", "-std=c++20", "-fPIC", "-pthread", "-w"]
    return [*flags, "-DSTEPGRAPH_PORTABLE"] if portable else flags


def _is_native(library: StoredLibrary) -> bool:
    """Whether the compiler optimised for a CPU like this one."""
    return set(library.manifest.built_for) == cpu_features()


def _build(folder: Path, *, portable: bool = False, march: str = "native") -> Path:
    if not have_compiler():
        raise KernelBuildError(
            "no C++ compiler found for the CPU kernels; install g++ (or name one in CXX), "
            "or use mode='eager'"
        )
    compiler = _find_compiler()
    cpu_option = "-mcpu" if platform.machine() in ("aarch64", "arm64") else "-march"
    flags = [f"{cpu_option}={march}", *_flags(portable)]
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull], "listing macros")
    used = features_of_macros(macros)
    if march == "native":
        # What the system does not list cannot be compared later.
        built_for = cpu_features()
        used = used & built_for or built_for
    else:
        built_for = used
    source = _source_key(portable)
    manifest = Manifest(source, tuple(sorted(used)), tuple(sorted(built_for)), 0, "")
    _announce(
        f"stepgraph: compiling the CPU kernels into {folder}, which takes some twenty seconds of "
        f"two cores; later starts find them ({_QUIET}=1 keeps this message away)"
    )
    began = time.perf_counter()
    try:
        with scratch_folder(folder) as scratch:
            code = _compile(compiler, flags, scratch)
            library = add_library(scratch, code, manifest, folder)
    except OSError as error:
        raise KernelBuildError(
            f"the CPU kernels cannot be written to {folder}: {error.strerror or error}"
        ) from error
    _announce(f"stepgraph: compiled the CPU kernels in {time.perf_counter() - began:.0f} s")
    return library.path


def _compile(compiler: str, flags: Sequence[str], scratch: Path) -> Path:
    """Compile and link all units; return the library, which lies in `scratch`."""
    torch_root = Path(torch.__file__).parent
    objects = [f"{scratch}/{Path(unit).stem}.o" for unit in _UNITS]
    commands = [
        [compiler, *flags, f"-I{torch_root}/include", "-c", str(_HERE / unit), "-o", output]
        for unit, output in zip(_UNITS, objects, strict=True)
    ]
    with (
        progress_bar("compiling the CPU kernels", shown=not os.environ.get(_QUIET)) as report,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        what = "compiling the CPU kernels"
        builds = [pool.submit(_run, command, what, scratch) for command in commands]
        for done, build in enumerate(as_completed(builds), start=1):
            build.result()
            report(done, len(builds))
    linked = f"{scratch}/cpu_ops.so"
    torch_libraries = [f"-L{torch_root}/lib", "-ltorch_cpu", "-lc10"]
    _run(
        [compiler, "-shared", "-pthread", *objects, "-o", linked, *torch_libraries],
        "linking the CPU kernels",
        scratch,
    )
    return Path(linked)


def _announce(message: str) -> None:
    """Log a message; print it on stderr if the log is not shown and the process is not quiet."""
    logger.info("%s", message.removeprefix("stepgraph: "))
    if not os.environ.get(_QUIET) and sys.stderr is not None and not _is_logged():
        print(message, file=sys.stderr, flush=True)


def _is_logged() -> bool:
    """Whether a handler receives the records of this module."""
    handlers = [*logging.getLogger("stepgraph").handlers, *logging.getLogger().handlers]
    shows = any(not isinstance(handler, logging.NullHandler) for handler in handlers)
    return shows and logger.isEnabledFor(logging.INFO)


@functools.cache
def load_cpu_ops() -> KernelLibrary:
    """Makes `torch.ops.stepgraph.*` run on CPU; builds the library first if need be. Idempotent.

    A library in `STEPGRAPH_KERNEL_DIR` that this CPU can run is taken as it is. One in the cache is
    taken if it was compiled for a CPU like this one, or if there is no compiler. Returns what was
    loaded, the same each time.

    Raises KernelBuildError as `build_cpu_ops`, and if the library cannot be loaded.
    """
    found, refused = _find()
    given = _given_folder()
    from_given = [library for library in found if given and library.path.is_relative_to(given)]
    chosen = from_given + [library for library in found if _is_native(library)]
    if not chosen and not have_compiler():
        chosen = found
    for library in chosen:
        try:
            torch.ops.load_library(library.path)
        except OSError as error:
            refused.append(f"{library.path} does not load: {error}")
            continue
        if given and library not in from_given:
            warn(f"{KERNEL_DIR} was passed over: {'; '.join(refused[:3])}")
        return KernelLibrary(library.path, built=False)
    if given:
        warn(f"{KERNEL_DIR} was passed over: {'; '.join(refused[:3])}")
    elif refused:
        logger.warning("no compiled CPU kernels are usable: %s", "; ".join(refused[:3]))
    path = build_cpu_ops()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise KernelBuildError(f"loading {path} failed; delete it to rebuild: {error}") from error
    return KernelLibrary(path, built=True)
