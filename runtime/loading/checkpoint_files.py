"""Opens and parses the files of untrusted checkpoint directories within limits.

Only regular files are read. Anything else at their path (a directory, a FIFO that would block, a
loop of symbolic links, a file without read permission) is a `CheckpointError`.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError

__all__ = ["has_file", "is_directory", "read_json_object"]

_EFFECTIVE_IDS = os.access in os.supports_effective_ids


def is_directory(path: Path) -> bool:
    """Return whether `path` is a directory that can be searched; False if it does not exist.

    Raises `CheckpointError` if the operating system does not tell, for instance because a parent
    directory may not be searched.
    """
    mode = _mode(path)
    if mode is None or not stat.S_ISDIR(mode):
        return False
    if not os.access(path, os.X_OK, effective_ids=_EFFECTIVE_IDS):
        raise CheckpointError(f"{_shown(path)} may not be searched by this user: check its mode")
    return True


def has_file(path: Path) -> bool:
    """Return whether `path` is a regular file; False if it does not exist.

    Raises `CheckpointError` for anything else, and for a file without read permission.
    """
    mode = _mode(path)
    if mode is None:
        return False
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, socket or FIFO"
        raise CheckpointError(f"{_shown(path)} is {kind}, where a file is expected")
    if not os.access(path, os.R_OK, effective_ids=_EFFECTIVE_IDS):
        raise CheckpointError(f"{_shown(path)} may not be read by this user: check its mode")
    return True


def read_json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """Read a file that holds one JSON object of at most `most_bytes` bytes.

    Raises `CheckpointError`, which names the file, if it is missing, longer, not UTF-8, not JSON,
    nested too deeply, not an object, or if an object in it has a key twice.
    """
    if not has_file(path):
        raise CheckpointError(f"{_shown(path)} does not exist")
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise CheckpointError(f"{_shown(path)} is longer than {most_bytes} bytes")
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise CheckpointError(
            f"{_shown(path)} cannot be read as JSON: it is nested too deeply"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{_shown(path)} cannot be read as JSON: {bounded_text(error)}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{_shown(path)} must hold a JSON object")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {bounded_repr(twice)} occurs twice in one object")
    return content


def _mode(path: Path) -> int | None:
    """Return the mode of the file at `path`, following links; None if it does not exist."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise CheckpointError(
                f"{_shown(path)} is a symbolic link to something that does not exist"
            ) from None
        return None
    except (OSError, ValueError) as error:  # a loop of links, no permission, a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{_shown(path)} cannot be read: {bounded_text(reason)}") from error


def _shown(path: Path) -> str:
    return bounded_text(path, 500)
