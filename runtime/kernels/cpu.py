"""Builds and loads the CPU kernels: C++ next to this file, compiled once for each machine.

The library lies in the user's cache (`TORCHINDUCTOR_CACHE_DIR`, else `XDG_CACHE_HOME`, else
`~/.cache`), named after everything that decides its contents: sources, flags, torch, and the
macros the compiler predefines, which tell its version and the instruction set it would use.
"""

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import KernelBuildError

logger = logging.getLogger("stepgraph.runtime")

_HERE = Path(__file__).parent
# Those that take longest to compile come first.
_UNITS = (
    "cpu_ops.cpp",
    "cpu_attention_int8.cpp",
    "cpu_attention.cpp",
    "cpu_attention_fp8.cpp",
    "cpu_linear.cpp",
    "cpu_sampling.cpp",
    "cpu_stack.cpp",
    "cpu_pool.cpp",
)
_HEADERS = (
    "cpu_kernels.h",
    "cpu_vec.h",
    "cpu_int8.h",
    "cpu_exp.h",
    "cpu_storage.h",
    "cpu_attention_plan.h",
    "cpu_attention_math.h",
    "cpu_attention_worker.h",
    "cpu_attention.h",
    "cpu_sampling.h",
    "cpu_sampling_ops.h",
    "cpu_checks.h",
    "cpu_elementwise_ops.h",
    "cpu_embedding_ops.h",
    "cpu_linear.h",
    "cpu_phases.h",
    "cpu_pool.h",
    "cpu_stack.h",
    "cpu_stack_math.h",
    "cpu_stack_ops.h",
)
_TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """The kernels that this process runs."""

    path: Path
    built: bool
    """By this process; otherwise it was found in the cache."""


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


def _run(command: Sequence[str], purpose: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).splitlines()[-_TAIL_LINES:])
        raise KernelBuildError(
            f"{purpose} failed with status {result.returncode}; the command was\n"
            f"{' '.join(command)}\nand ended with\n{tail}"
        )
    return result.stdout


def cache_directory() -> Path:
    """Return where this machine keeps what is built or tuned once; it need not exist."""
    if inductor := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(inductor) / "stepgraph"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepgraph"


def build_cpu_ops(portable: bool = False) -> Path:
    """Path of the compiled library, built (in half a minute) if the cache does not hold it yet.

    `portable` leaves out every instruction the compiler is not asked for by plain C++. Processes
    may build at the same time: each builds on its own and moves its file into place.

    Raises KernelBuildError if there is no compiler, or if it fails.
    """
    return _build(portable).path


def _build(portable: bool) -> KernelLibrary:
    if not have_compiler():
        raise KernelBuildError(
            "no C++ compiler found for the CPU kernels; install g++ (or name one in CXX), "
            "or use mode='eager'"
        )
    compiler = _find_compiler()
    torch_root = Path(torch.__file__).parent
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = ["-O3", native, "-ffp-contract=fast", "-std=c++20", "-fPIC", "-pthread", "-w"]
    flags += ["-DSTEPGRAPH_PORTABLE"] if portable else []
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull], "asking the compiler")
    key = hashlib.sha256("\0".join([torch.__version__, *flags, macros]).encode())
    for name in (*_UNITS, *_HEADERS):
        key.update((_HERE / name).read_bytes())
    library = cache_directory() / f"cpu_ops-{key.hexdigest()[:32]}.so"
    if library.exists():
        return KernelLibrary(library, built=False)

    logger.info("building the CPU kernels, once for this machine: %s", library)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [f"{scratch}/{Path(unit).stem}.o" for unit in _UNITS]
        commands = [
            [compiler, *flags, f"-I{torch_root}/include", "-c", str(_HERE / unit), "-o", output]
            for unit, output in zip(_UNITS, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda command: _run(command, "compiling the CPU kernels"), commands))
        linked = f"{scratch}/{library.name}"
        torch_libraries = [f"-L{torch_root}/lib", "-ltorch_cpu", "-lc10"]
        _run(
            [compiler, "-shared", "-pthread", *objects, "-o", linked, *torch_libraries],
            "linking the CPU kernels",
        )
        os.replace(linked, library)
    return KernelLibrary(library, built=True)


@functools.cache
def load_cpu_ops() -> KernelLibrary:
    """Makes `torch.ops.stepgraph.*` run on CPU; builds the library first if need be. Idempotent.

    Returns what was loaded, the same each time.

    Raises KernelBuildError as `build_cpu_ops`, and if the library cannot be loaded.
    """
    library = _build(portable=False)
    try:
        torch.ops.load_library(library.path)
    except OSError as error:
        raise KernelBuildError(
            f"loading {library.path} failed; delete it to rebuild: {error}"
        ) from error
    return library
