"""Files that appear whole or not at all, and a look beforehand whether they can.

A file is written beside its place under another name, which then becomes its own: whoever reads it
meanwhile finds what was there before. A symbolic link stays one: the file that it leads to is
replaced, and keeps its permissions.
"""

import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

__all__ = ["WriteError", "check_writable", "write_file", "write_files"]


class WriteError(OSError):
    """A file cannot be written.

    Attributes:
        path: of the file, as it was given.
        reason: why.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot write {path}: {reason}")
        self.path = path
        self.reason = reason


def check_writable(path: Path) -> None:
    """Find out whether a file can be written, and leave everything as it is.

    Raises:
        WriteError: it cannot: says why.
    """
    target = _target(path)
    try:
        temporary = _temporary(target)
        temporary.open("x").close()
        temporary.unlink()
    except OSError as error:
        raise _error(path, error) from error


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole; text as UTF-8, with the line ends that it has.

    Raises:
        WriteError: it cannot be written; what was there before still is.
    """
    write_files([(path, content)])


def write_files(contents: Iterable[tuple[Path, str | bytes]]) -> None:
    """Write several files whole: none takes its place before all are written.

    Raises:
        WriteError: one cannot be written; what was there before still is.
    """
    moves: list[tuple[Path, Path, Path]] = []
    try:
        for path, content in contents:
            target = _target(path)
            temporary = _temporary(target)
            try:
                with temporary.open("xb") as file:
                    moves.append((path, temporary, target))
                    file.write(content.encode() if isinstance(content, str) else content)
                if target.exists():
                    shutil.copymode(target, temporary)
            except OSError as error:
                raise _error(path, error) from error
        for path, temporary, target in moves:
            try:
                os.replace(temporary, target)
            except OSError as error:
                raise _error(path, error) from error
    finally:  # after an interrupt as well
        for _, temporary, _ in moves:
            temporary.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """Return where the contents lie, behind all links."""
    target = Path(os.path.realpath(path))
    folder = target.parent
    reason = None
    try:
        mode = target.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            leads = f"it leads to {target}, and " if path.is_symlink() else ""
            shown = folder if leads else path.parent
            reason = f"{leads}{shown} is not a directory"
    except OSError as error:
        raise _error(path, error) from error
    else:
        if stat.S_ISDIR(mode):
            reason = "it is a directory"
        elif stat.S_ISLNK(mode):  # nothing is left to follow
            reason = "its symbolic links lead in a circle"
        elif not stat.S_ISREG(mode):
            reason = "it is no regular file"
        elif not os.access(target, os.W_OK):
            reason = "it is read-only"
    if reason is not None:
        raise WriteError(path, reason)
    return target


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _error(path: Path, error: OSError) -> WriteError:
    return WriteError(path, error.strerror or str(error))
