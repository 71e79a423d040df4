"""Files that are written atomically, and a check beforehand whether they can be written.

The content goes to a temporary file in the same folder, which then replaces the target: a reader
finds the old content or the new one. A symbolic link stays one: the file that it leads to is
replaced, and keeps its permissions.
"""

import os
import shutil
import stat
from pathlib import Path

__all__ = ["WriteError", "check_writable", "write_file"]


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
    """Check that a file can be written, without changing it.

    Raises:
        WriteError: it cannot; says why.
    """
    try:
        temporary = _temporary(_target(path))
        temporary.open("x").close()
        temporary.unlink()
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error.strerror or str(error)) from error


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file; text as UTF-8, with the line ends that it has.

    Raises:
        WriteError: it cannot be written; its old content stays.
    """
    try:
        target = _target(path)
        temporary = _temporary(target)
        with temporary.open("xb") as file:
            try:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                if target.exists():
                    shutil.copymode(target, temporary)
                os.replace(temporary, target)
            except BaseException:  # an interrupt as well
                temporary.unlink(missing_ok=True)
                raise
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error.strerror or str(error)) from error


def _target(path: Path) -> Path:
    """Return the file that the path leads to, with all links resolved."""
    target = Path(os.path.realpath(path))
    reason = None
    try:
        mode = target.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not target.parent.is_dir():
            leads = f"it leads to {target}, and " if path.is_symlink() else ""
            reason = f"{leads}{target.parent if leads else path.parent} is not a directory"
    else:
        if stat.S_ISDIR(mode):
            reason = "it is a directory"
        elif stat.S_ISLNK(mode):  # a link that cannot be resolved
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
