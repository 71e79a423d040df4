"""Files that are written atomically, and a check beforehand whether they can be written.

The content goes to a temporary file in the same folder, which then replaces the target: a reader
finds the old content or the new one. A symbolic link stays one: the file that it leads to is
replaced, and keeps its permissions.
"""

import os
import shutil
from pathlib import Path


class WriteError(OSError):
    """A file cannot be written; the message names it and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot write {path}: {reason}")


def check_writable(path: Path) -> None:
    """Check that a file can be written, without changing it.

    Raises:
        WriteError: it cannot; says why.
    """
    write_file(path, None)


def write_file(path: Path, content: str | bytes | None) -> None:
    """Write a file; text as UTF-8, with the line ends that it has; None: only check.

    Raises:
        WriteError: it cannot be written; its old content stays.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    if target.is_dir():
        raise WriteError(path, "it is a directory")
    if not target.parent.is_dir():
        raise WriteError(path, f"{path.parent} is not a directory")
    if os.path.lexists(target) and not (target.is_file() and os.access(target, os.W_OK)):
        raise WriteError(path, "it is not a regular file, or is read-only")
    try:
        with temporary.open("xb") as file:
            try:
                if content is not None:
                    file.write(content.encode() if isinstance(content, str) else content)
                    file.flush()
                    if target.exists():
                        shutil.copymode(target, temporary)
                    os.replace(temporary, target)
            finally:  # after an interrupt as well
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(path, error.strerror or str(error)) from error
