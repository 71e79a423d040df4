"""The build backend: setuptools', with editable installs that type checkers can read.

In the repository the packages stand at the root, installed they stand in `stepgraph`. For an
editable install of such a layout setuptools writes an import hook, which type checkers do not run.
This backend adds a directory of links with the installed layout, and a .pth file that names it.
Import system and type checkers find the packages there; the hook remains for when it is deleted.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import tomllib
import warnings
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the other hooks

LINKS = Path("build", "editable")
"""The directory of links, relative to the root of the repository."""


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel of an editable install (PEP 660); return its file name."""
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    try:
        links = link_packages(Path.cwd())
    except OSError as error:
        warnings.warn(f"type checkers will not find stepgraph: cannot link: {error}", stacklevel=2)
    else:
        _add_file(Path(wheel_directory, name), "stepgraph-editable.pth", f"{links}\n".encode())
    return name


def link_packages(root: Path) -> Path:
    """Lay the packages of a repository out as they are installed, by links; return the directory.

    Args:
        root: of the repository, absolute.

    Raises:
        OSError: the file system has no links, or `build` cannot be written.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    folders: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    package = root / LINKS / "stepgraph"
    if package.exists():
        shutil.rmtree(package)  # links are not followed
    package.mkdir(parents=True)
    files = (root / folders["stepgraph"]).glob("*.*")
    packages = (root / folder for name, folder in folders.items() if name.count(".") == 1)
    for target in (*files, *packages):
        (package / target.name).symlink_to(target)
    return package.parent


def _add_file(wheel: Path, name: str, content: bytes) -> None:
    """Add a file to a wheel and to the list of its files (RECORD)."""
    with zipfile.ZipFile(wheel) as archive:
        files = {old: archive.read(old) for old in archive.namelist()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    (record,) = (old for old in files if old.endswith(".dist-info/RECORD"))
    files[record] = f"{name},sha256={digest},{len(content)}\n".encode() + files[record]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in {name: content, **files}.items():
            archive.writestr(file, data)
