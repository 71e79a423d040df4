"""Files that a measurement writes: checked before it begins, and never seen half-written."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

from ..errors import StepgraphError

__all__ = ["OutputError", "check_output", "print_text", "same_file", "write_text"]


class OutputError(StepgraphError, OSError):
    """A file cannot be written."""


def check_output(path: Path) -> None:
    """Find out whether a file can be written, and leave everything as it is.

    Raises:
        OutputError: it cannot: says why.
    """
    target = _target(path)
    try:
        temporary = _temporary(target)
        temporary.open("x").close()
        temporary.unlink()
    except OSError as error:
        raise _error(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole: beside its place under another name, which then becomes its own.

    Whoever reads it meanwhile finds what was there before. A symbolic link stays one: the file that
    it leads to is replaced, and keeps its permissions.

    Raises:
        OutputError: it cannot be written; what was there before still is.
    """
    target = _target(path)
    temporary = _temporary(target)
    try:
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
            if target.exists():
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
        except BaseException:  # an interrupt as well
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _error(path, error) from error


def print_text(text: str) -> None:
    """Print to stdout; who stops reading, as `head` does, misses the rest and ends nothing."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail again when Python exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, which need not be there yet."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return False


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
        raise OutputError(f"cannot write {path}: {reason}")
    return target


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _error(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write {path}: {error.strerror or error}")
