"""Compiled libraries on disk: which ones may be loaded, and how new ones get there.

A library is a folder with two files: the code, and a manifest that says what it was made from, what
it needs and its digest. The folder is renamed into place when both are on the disk, so whatever a
reader finds is whole, or was damaged later and is refused by size and digest: loading half a file
ends the interpreter.

Loading a library runs its code, so nothing is loaded that another user could have written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..bounded_repr import bounded_text
from ..errors import KernelBuildError
from .result_check import warn

__all__ = [
    "KERNEL_DIR",
    "Manifest",
    "StoredLibrary",
    "add_library",
    "cache_directory",
    "find_libraries",
    "folder_for_builds",
    "scratch_folder",
]

KERNEL_DIR = "STEPGRAPH_KERNEL_DIR"
"""The environment variable that names a folder of libraries which were built beforehand."""

_CODE, _MANIFEST = "cpu_ops.so", "manifest.json"
_MOST_MANIFEST_BYTES = 1 << 16
_SCRATCH, _TEMPORARY, _LOCK = "build-", "stepgraph-kernels-", "lock"
_SECONDS_UNTIL_LOCKED = 3600.0
"""A scratch folder without a lock is older than this only if its build was killed."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a library was made from and what it needs."""

    source: str
    """Digest of sources, flags and torch's version."""
    features: tuple[str, ...]
    """Instruction sets that the code uses (`cpu_features`)."""
    built_for: tuple[str, ...]
    """Instruction sets of the CPU that the compiler optimised for."""
    size: int
    """Bytes of the code."""
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredLibrary:
    """A library that was checked and may be loaded."""

    path: Path
    manifest: Manifest


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
) -> tuple[list[StoredLibrary], list[str]]:
    """Return the libraries in `folder` that may be loaded here, those that use most features first.

    Args:
        folder: what `add_library` wrote to.
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
            manifest = _checked_manifest(path, source)
        except ValueError as error:
            refused.append(f"{path} is damaged or foreign: {bounded_text(error)}")
            continue
        if missing := set(manifest.features) - set(features):
            refused.append(f"{path} needs a CPU with {', '.join(sorted(missing))}")
        else:
            found.append(StoredLibrary(path / _CODE, manifest))
    found.sort(key=lambda library: len(library.manifest.features), reverse=True)
    return found, refused


def _checked_manifest(path: Path, source: str) -> Manifest:
    """Read the manifest of a library and compare it with the code.

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
        for field in ("features", "built_for"):
            document[field] = tuple(map(str, document[field]))
        manifest = Manifest(**document)
        code = (path / _CODE).read_bytes()
    except (OSError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{_MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    if manifest.source != source:
        raise ValueError("it was made from other sources")
    if (len(code), hashlib.sha256(code).hexdigest()) != (manifest.size, manifest.sha256):
        raise ValueError(f"{_CODE} is not what its manifest says ({len(code)} bytes)")
    return manifest


def _untrusted(folder: Path) -> str | None:
    """Return why code in `folder` must not be run, or cannot be; None where it may."""
    try:
        status, parent = folder.stat(), folder.resolve().parent.stat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is no folder"
        if (reason := _writable_by_others(status)) is not None:
            return f"{folder} {reason}"
        if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
            return f"{folder.parent} can be written to by every user: chmod o-w {folder.parent}"
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return f"{folder} is on a file system that is mounted noexec"
    except (OSError, ValueError) as error:
        return f"{bounded_text(folder)} cannot be read: {bounded_text(error)}"
    return None


def _writable_by_others(status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by other users: chmod go-w makes it private"
    return None


def folder_for_builds() -> Path:
    """Return where a process may build libraries: the cache, or a temporary folder with a warning.

    Raises:
        KernelBuildError: neither can be written to, or code in neither can be run.
    """
    folder = _users_cache()
    obstacle = "the user has no home directory" if folder is None else _made(folder)
    if folder is not None and obstacle is None:
        return folder
    advice = (
        f"set XDG_CACHE_HOME to a folder of this user's own, or {KERNEL_DIR} to a built library"
    )
    temporary = _temporary_folder()
    if (second := _untrusted(temporary)) is not None:
        raise KernelBuildError(f"no place for compiled kernels: {obstacle}, and {second}; {advice}")
    warn(
        f"{obstacle}. The compiled kernels of this process are kept in {temporary}, and the next "
        f"one builds them again: {advice}"
    )
    return temporary


def _made(folder: Path) -> str | None:
    """Make a private folder; return why libraries cannot be kept in it, None where they can."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return _untrusted(folder)
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}"


@functools.cache
def _temporary_folder() -> Path:
    """Return a private folder that lasts as long as the process."""
    import atexit

    try:
        parent = Path(tempfile.gettempdir())
        _clear_leftovers(parent, _TEMPORARY, unlocked_after=math.inf)  # may be of any program
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
        lock = _lock(folder)
    except OSError as error:
        raise KernelBuildError(
            f"no place for compiled kernels, and no temporary folder either: {error.strerror}; set "
            f"XDG_CACHE_HOME or TMPDIR to a folder of this user's own, or {KERNEL_DIR} to a built "
            "library"
        ) from error
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork has this function too
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder for one build in `parent`, removed at the end; leftovers of killed builds go too."""
    _clear_leftovers(parent, _SCRATCH, unlocked_after=_SECONDS_UNTIL_LOCKED)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=parent) as scratch:
        lock = _lock(Path(scratch))
        try:
            yield Path(scratch)
        finally:
            os.close(lock)


def _lock(folder: Path) -> int:
    """Hold a folder as long as the descriptor is open; the system lets go of it for the killed."""
    import fcntl  # not on every system

    descriptor = os.open(folder / "unlocked", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks, where leftovers stay
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "unlocked").rename(folder / _LOCK)  # never there without being locked
    return descriptor


def _clear_leftovers(parent: Path, prefix: str, unlocked_after: float) -> None:
    """Remove the folders of processes that were killed: those whose lock is free.

    A folder without a lock goes if it is older than `unlocked_after` seconds.
    """
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            age = time.time() - status.st_mtime
            if mine and _is_abandoned(path, without_lock=age > unlocked_after):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(folder: Path, *, without_lock: bool) -> bool:
    import fcntl

    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return without_lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def add_library(scratch: Path, code: Path, manifest: Manifest, folder: Path) -> StoredLibrary:
    """Move a library into `folder`, whole or not at all, in the place of one of the same name.

    Args:
        scratch: a folder on the same file system.
        code: the shared library, anywhere.
        manifest: its description; size and digest are taken from the code.
        folder: where it goes.
    """
    content = code.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    manifest = dataclasses.replace(manifest, size=len(content), sha256=digest)
    built = hashlib.sha256("\0".join((*manifest.features, "", *manifest.built_for)).encode())
    final = folder / f"cpu_ops-{manifest.source[:24]}-{built.hexdigest()[:12]}"
    whole = scratch / "whole"
    whole.mkdir()
    _write(whole / _CODE, content, 0o755)
    text = json.dumps(dataclasses.asdict(manifest), indent=1)
    _write(whole / _MANIFEST, text.encode(), 0o644)
    whole.chmod(0o755)
    _sync_folder(whole)
    for attempt in range(3):
        try:
            whole.rename(final)
            break
        except OSError:  # one is there: an equal one of another process, or a damaged one
            if attempt == 2:
                raise
            with contextlib.suppress(ValueError):
                return StoredLibrary(final / _CODE, _checked_manifest(final, manifest.source))
            final.rename(scratch / f"damaged-{attempt}")
    _sync_folder(folder)
    return StoredLibrary(final / _CODE, manifest)


def _write(path: Path, content: bytes, mode: int) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)  # whatever the umask is
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
