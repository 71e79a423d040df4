"""Wheel, sdist and editable install: what they contain, run and show to a type checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("runtime", "graphs", "cache", "profiling")
SHIPPED = {".py", ".typed", ".cpp", ".h", ".json", ".safetensors"}
SHIPPED |= {".html", ".js", ".css", ".svg"}

pytest.importorskip("setuptools", minversion="77")
pytest.importorskip("pip")


def install(folder: Path, wheel: Path, *, shared: bool) -> tuple[Path, Path]:
    """Make a virtual environment with stepgraph; return its programs and its packages.

    `shared`: it has the packages of the environment that runs the tests, too.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    programs = folder / "bin"
    command = [sys.executable, "-m", "pip", "--python", programs / "python", "install"]
    checked([*command, "--quiet", "--no-deps", "--no-index", wheel], cwd=folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    if shared:
        (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    return programs, packages


def checked(command: list[str | Path], cwd: Path, **environment: str) -> str:
    """Run a command outside of the checkout's own PYTHONPATH; return its stdout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(hook: str, source: Path, output: Path) -> Path:
    """Call a hook of the build backend as installers do; return the file it made."""
    backend = str(source / "runtime" / "package")
    program = f"import build_backend; print(build_backend.{hook}({str(output)!r}))"
    told = checked([sys.executable, "-c", program], cwd=source, PYTHONPATH=backend)
    return output / told.splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what an installation needs, without anything built."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    return copy


def installed_names() -> set[str]:
    """What a wheel has to contain: every file of the packages but documentation."""
    names = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.*"):
            if path.suffix in SHIPPED:
                name = f"stepgraph/{path.relative_to(ROOT).as_posix()}"
                names.add(name.replace("stepgraph/runtime/package/", "stepgraph/"))
    return names


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    with tarfile.open(build("build_sdist", checkout, folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return build("build_wheel", source, folder)


def test_a_wheel_from_the_sdist_is_whole(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if Path(name).suffix in SHIPPED}
    assert shipped == installed_names()


@pytest.mark.slow
def test_the_wheel_runs_the_benchmark(wheel: Path, tmp_path: Path) -> None:
    programs, packages = install(tmp_path / "venv", wheel, shared=True)
    program = "import stepgraph; print(stepgraph.__version__, stepgraph.Engine, stepgraph.__file__)"
    version, *_, file = checked([programs / "python", "-c", program], cwd=tmp_path).split()
    assert Path(file).is_relative_to(packages)
    stepgraph = programs / "stepgraph"
    assert checked([stepgraph, "--version"], cwd=tmp_path) == f"stepgraph {version}\n"
    case = "--mode eager --batch-size 1 --input-len 8 --output-len 3 --num-warmup 0 --num-iters 1"
    table = checked([stepgraph, "bench", "--device", "cpu", *case.split()], cwd=tmp_path)
    assert "|     1 |     8 |" in table


USER = """
import stepgraph
from stepgraph import Engine, EngineConfig, SamplingParams

config = EngineConfig(max_num_seqs="many")
engine = Engine.from_pretrained("demo", config)
text: int = engine.generate(["a"], SamplingParams(max_tokens=1))[0].text
stepgraph.Engines
"""


@pytest.mark.slow
def test_an_editable_install_has_types_and_new_files(checkout: Path, tmp_path: Path) -> None:
    wheel = build("build_editable", checkout, tmp_path)
    programs, _ = install(tmp_path / "venv", wheel, shared=False)
    python = programs / "python"
    (checkout / "graphs" / "written_later.py").write_text("VALUE = 7\n")
    program = "from stepgraph.graphs.written_later import VALUE; print(VALUE)"
    assert checked([python, "-c", program], cwd=tmp_path) == "7\n"

    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    mypy = [sys.executable, "-m", "mypy", "--python-executable", python, "--strict", "user.py"]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [line.split("[")[-1] for line in done.stdout.splitlines()]
    assert errors[:-1] == ["arg-type]", "assignment]", "attr-defined]"], done.stdout + done.stderr

    shutil.rmtree(checkout / "build")  # as `make clean` does
    assert checked([python, "-c", program], cwd=tmp_path) == "7\n"
