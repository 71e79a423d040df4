"""Who imports whom: the packages, their files, and what an import leaves behind.

Read from the sources, so that an import inside a function counts too; then seen at work in a
process of its own.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "profiling": frozenset[str](),
    "cache": frozenset({"profiling"}),
    "graphs": frozenset({"profiling"}),
    "runtime": frozenset({"profiling", "cache", "graphs"}),
}
PACKAGES["stepgraph"] = frozenset(PACKAGES)
"""What each package may import, besides itself; `stepgraph` is what only holds the others."""
FACE = "runtime/package"
"""Where `stepgraph` itself lies."""

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES["stepgraph"]
    for path in (ROOT / package).rglob("*.py")
)
HOST_LOGIC = (
    *("profiling/", "cache/", "graphs/", "runtime/scheduling/", "runtime/speculation/"),
    FACE,
)
OF_TENSORS = {
    *("cache/arena.py", "cache/memory/device_memory.py"),
    *("graphs/buffers.py", "graphs/steps.py"),
}
WITHOUT_TORCH = [f for f in FILES if f.startswith(HOST_LOGIC) and f not in OF_TENSORS]
"""Readable without knowing a GPU, testable in microseconds."""


@dataclass(frozen=True)
class Import:
    target: str
    """A file of ours (`cache/blocks.py`), or the top-level name of somebody else's module."""
    ours: bool
    at_import: bool
    """Done when the file is imported: not inside a function, not for type checkers only."""


@cache
def imports(file: str) -> tuple[Import, ...]:
    """The imports of a file, as written in it."""
    found: list[Import] = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(a.name.split(".")[0], False, at_import) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                found.append(Import((node.module or "").split(".")[0], False, at_import))
            else:
                found.extend(Import(t, True, at_import) for t in resolve(file, node))
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            lazy = True
        for child in ast.iter_child_nodes(node):
            visit(child, at_import and not lazy)

    visit(ast.parse((ROOT / file).read_text(encoding="utf-8")), True)
    return tuple(found)


def resolve(file: str, node: ast.ImportFrom) -> Iterator[str]:
    """The files that a relative import loads: modules it names, or the package that has a name."""
    folder = Path(file).parents[node.level - 1]
    if folder == Path(FACE):
        folder = Path()
    base = folder.joinpath(*(node.module or "").split("."))
    for alias in node.names:
        candidates = (base / f"{alias.name}.py", base / alias.name / "__init__.py")
        if base == Path():
            candidates += (Path(FACE, "__init__.py"),)
        else:
            candidates += (base.with_suffix(".py"), base / "__init__.py")
        yield next(c.as_posix() for c in candidates if (ROOT / c).is_file())


def package_of(file: str) -> str:
    """The package that a file belongs to."""
    return "stepgraph" if Path(file).parent == Path(FACE) else file.split("/")[0]


def reached_at_import(file: str) -> dict[str, tuple[str, ...]]:
    """Everything that importing a file loads → the way there, in files of ours.

    The `__init__` of each package on the way is loaded too; that of the runtime is left out,
    because it offers the engine, which of course needs torch.
    """
    reached: dict[str, tuple[str, ...]] = {file: ()}
    queue = [file]
    for current in queue:
        way = (*reached[current], current)
        inits = [f"{parent.as_posix()}/__init__.py" for parent in Path(current).parents]
        inits = [init for init in inits if init in FILES and init != "runtime/__init__.py"]
        targets = [(i.target, i.ours) for i in imports(current) if i.at_import]
        for target, ours in targets + [(init, True) for init in inits]:
            if target not in reached:
                reached[target] = way
                if ours:
                    queue.append(target)
    return reached


def run(program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_nobody_imports_leftwards() -> None:
    for file in FILES:
        package = package_of(file)
        allowed = PACKAGES[package] | {package}
        for found in imports(file):
            if found.ours:
                assert package_of(found.target) in allowed, f"{file} imports {found.target}"
            else:
                assert found.target not in {"stepgraph", *PACKAGES}, (
                    f"{file} imports {found.target} by its name: use a relative import"
                )


FOLDERS = {
    "kernels": "",
    "sampling": "kernels",
    "models": "kernels",
    "loading": "kernels models",
    "scheduling": "speculation",
    "speculation": "",
    "distributed": "kernels",
    "execution": "kernels models sampling scheduling distributed",
    "structured": "kernels loading",
    "engine": "kernels models loading sampling scheduling execution distributed speculation"
    " structured",
    "tools": "kernels models loading execution engine distributed speculation",
}
"""The folders of the runtime that each of them may import, besides itself; files outside, none."""


def test_folders_of_the_runtime_import_no_higher_one() -> None:
    def folder_of(file: str) -> str:
        """The folder within the runtime; for a file outside of folders, its name."""
        return file.split("/")[1] if file.startswith("runtime/") else ".py"

    for file in FILES:
        folder = folder_of(file)
        if folder not in FOLDERS and not (file.startswith("runtime/") and folder.endswith(".py")):
            continue
        if folder != "__init__.py":
            allowed = {folder, *FOLDERS.get(folder, "").split()}
            targets = {folder_of(found.target) for found in imports(file) if found.ours}
            higher = {target for target in targets if not target.endswith(".py")} - allowed
            assert not higher, f"{file} imports {higher}"


def test_no_circles() -> None:
    graph = {file: {found.target for found in imports(file) if found.ours} for file in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(reversed(error.args[1])))


HTTP = "runtime/service/http/"
IMPORTED_LATE = {"runtime/service/metrics.py": {"prometheus_client"}} | {
    file: {"httptools", "msgspec", "starlette", "uvicorn", "uvloop"}
    for file in FILES
    if file.startswith(HTTP) and not file.endswith("__init__.py")
}
"""Files whose import may fail for want of an extra."""
RAY = "runtime/service/ray_app/"
IMPORTED_LATE |= {
    f"{RAY}{name}.py": {"msgspec", "ray", "starlette"} for name in ("prefix_router", "replica")
}
OF_PEERS = {
    "runtime/bench/gguf_writer.py": {"gguf", "numpy"},
    "runtime/bench/peer_runner.py": {
        *("llama_cpp", "numpy", "openvino", "openvino_genai", "optimum", "torch", "transformers"),
        "vllm",
    },
}
"""What a file imports in the environment of another runtime."""


def test_what_needs_an_extra_is_imported_late() -> None:
    for file in FILES:
        reached = reached_at_import(file)
        late = {f for f in IMPORTED_LATE if f in reached and f != file}
        if file.startswith((HTTP, RAY)):  # late itself
            late = {f for f in late if not f.startswith("runtime/service/")}
        assert not late, file


def test_every_foreign_module_is_declared() -> None:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        declared = tomllib.load(stream)
    project = declared["project"]
    build = {_name(line) for line in declared["build-system"]["requires"]}
    required = {_name(line) for line in project["dependencies"]}
    required.add("triton")  # a dependency of torch for CUDA; only `kernels/triton` imports it
    optional = {
        _name(line) for group in project["optional-dependencies"].values() for line in group
    }
    optional.add("pynvml")  # the module of nvidia-ml-py
    optional.add("opentelemetry")  # a module of opentelemetry-sdk
    for file in FILES:
        for found in imports(file):
            if found.ours or found.target in sys.stdlib_module_names:
                continue
            allowed = required | IMPORTED_LATE.get(file, set())
            if not found.at_import:
                allowed |= optional | OF_PEERS.get(file, set())
            if file == f"{FACE}/build_backend.py":
                allowed = build
            assert found.target in allowed, f"{file} imports {found.target}"


def _name(requirement: str) -> str:
    match = re.match(r"[\w-]+", requirement)
    assert match
    return match[0].replace("-", "_")


def test_host_logic_reaches_no_torch() -> None:
    for file in WITHOUT_TORCH:
        way = reached_at_import(file).get("torch")
        assert way is None, " → ".join((*way, "torch"))


def test_the_tuning_command_can_say_that_there_is_no_device() -> None:
    way = reached_at_import("runtime/tools/tune.py").get("triton")
    assert way is None, " → ".join((*way, "triton"))


BLOCK_TORCH = """
import importlib.util, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise AssertionError("torch was imported")

sys.meta_path.insert(0, NoTorch())
"""


def test_importing_the_runtime_leaves_the_process_alone() -> None:
    run(
        """
import gc, logging, os, signal, sys, threading
import psutil, torch

def process():
    return {
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "threads": threading.enumerate(),
        "children": psutil.Process().children(),
        "environment": dict(os.environ),
        "root": (logging.root.handlers[:], logging.root.level, logging.root.disabled),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
                  torch.initial_seed()),
    }

before = process()
import stepgraph.runtime
stepgraph.runtime.Engine, stepgraph.runtime.AsyncEngine
after = process()
for name in before:
    assert before[name] == after[name], (name, before[name], after[name])
assert not torch.cuda.is_initialized()

loggers = {n: l for n, l in logging.root.manager.loggerDict.items() if n.startswith("stepgraph")}
for name, logger in loggers.items():
    for handler in getattr(logger, "handlers", []):
        assert type(handler) is logging.NullHandler, (name, handler)
    assert getattr(logger, "level", 0) == logging.NOTSET, name
    assert getattr(logger, "propagate", True), name
assert [type(h) for h in logging.getLogger("stepgraph").handlers] == [logging.NullHandler]
assert "transformers" not in sys.modules
"""
    )
