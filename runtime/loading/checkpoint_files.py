"""Opens and parses the files of untrusted checkpoint directories within limits.

Only regular files are read. Anything else at their path is a `CheckpointError`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError, MemoryBudgetError


def has_file(path: Path) -> bool:
    """Return whether `path` is a regular file; False if it does not exist.

    Raises `CheckpointError` for anything else, such as a FIFO, which would block, or a broken link.
    """
    try:
        if path.is_file():
            return True
        if not path.is_symlink() and not path.exists():
            return False
    except OSError as error:
        raise CheckpointError(f"{_shown(path)} cannot be read: {error.strerror}") from error
    kind = "a directory" if path.is_dir() else "not a file, or a link to none"
    raise CheckpointError(f"{_shown(path)} is {kind}, where a file is expected")


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Read a file; raise `CheckpointError` if it is missing or longer than `most_bytes`."""
    if not has_file(path):
        raise CheckpointError(f"{_shown(path)} does not exist")
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{_shown(path)} cannot be read: {bounded_text(error)}") from error
    if len(content) > most_bytes:
        raise CheckpointError(f"{_shown(path)} is longer than {most_bytes} bytes")
    return content


def read_json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """Read a file that holds one JSON object of at most `most_bytes` bytes.

    Raises `CheckpointError`, which names the file, if it is missing, longer, not UTF-8, not JSON,
    nested too deeply, not an object, or if an object in it has a key twice.
    """
    raw = read_bytes(path, most_bytes)
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise CheckpointError(
            f"{_shown(path)} cannot be read as JSON: it is nested too deeply"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{_shown(path)} cannot be read as JSON: {bounded_text(error)}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{_shown(path)} must hold a JSON object")
    return content


def unmapped(path: Path, error: Exception) -> MemoryBudgetError:
    """Return the error for a file that the process may not map."""
    return MemoryBudgetError(
        f"{path} cannot be mapped into memory: {bounded_text(error)}. Raise the limit of address"
        " space (RLIMIT_AS, ulimit -v), which counts mapped files"
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {bounded_repr(twice)} occurs twice in one object")
    return content


def _shown(path: Path) -> str:
    return bounded_text(path, 500)


# Recognises models in other formats than the layout of Hugging Face by the names of their files,
# for errors that help.

_MOST_NAMES = 10_000
_SHOWN = 3
_SAVE = (
    "if you trust them, load the model with transformers and call model.save_pretrained(DIRECTORY)"
)
_QUANTISE = (
    "use the original checkpoint in safetensors; EngineConfig(weight_dtype='int8') quantises it"
    " while it is loaded"
)
_MERGE = "merge it into its model with peft: merge_and_unload(), then save_pretrained(DIRECTORY)"


class _Format(NamedTuple):
    """A format that is not read."""

    code: str
    what: str
    remedy: str = _QUANTISE

    def refusal(self, subject: object) -> CheckpointError:
        """Return the error for a directory or a file in this format."""
        return CheckpointError(
            f"{subject}: it holds {self.what}. This format is not read: {self.remedy}",
            code=self.code,
        )


_PICKLE = _Format("pickle", "weights in pickle files, which can run code", _SAVE)
_PEFT = _Format("peft", "a PEFT adapter; adapters are not applied", _MERGE)
_OF_FILES = {
    "adapter_config.json": _PEFT,
    "consolidated*.safetensors": _Format("mistral", "the original format of Mistral", _SAVE),
    "consolidated*.pth": _Format("meta", "the original format of Meta", _SAVE),
    **dict.fromkeys(("*.bin", "*.pt", "*.pth", "*.ckpt"), _PICKLE),
}
"""Names of files, and what they are; the first match counts."""


def no_checkpoint(path: Path) -> CheckpointError:
    """Return the error for a file, or for a directory without `config.json`."""
    subject = f"no checkpoint at {_shown(path)}"
    if path.is_dir() or not has_file(path):
        return _without(f"{subject}: it has no config.json", path, "no_config")
    return _without(f"{subject}: it is a file", path, "file")


def no_weights(directory: Path, expected: str) -> CheckpointError:
    """Return the error for a directory with `config.json` but without the weights expected."""
    return _without(f"{directory} has neither {expected}", directory, "no_weights")


def _without(subject: str, path: Path, code: str) -> CheckpointError:
    """Return the error for a file or directory; `code` if it is in no known format."""
    names = [path.name]
    if code != "file":
        names = []
        with suppress(OSError), os.scandir(path) as entries:
            names = sorted(entry.name for entry in islice(entries, _MOST_NAMES))
    for pattern, found in _OF_FILES.items():
        for name in names:
            if fnmatchcase(name.lower(), pattern):
                what = f"{bounded_text(name, 80)} ({found.what})"
                return found._replace(what=what).refusal(subject)
    held = ", ".join(bounded_text(each, 60) for each in names[:_SHOWN]) or "nothing"
    more = ", ..." if len(names) > _SHOWN else ""
    return CheckpointError(
        f"{subject}. It holds {held}{more}; a model is a GGUF file, or a directory with"
        " config.json, model.safetensors or its shards and their index, and tokenizer.json",
        code=code,
    )


def read_model_config(directory: Path) -> dict[str, Any]:
    """Return `config.json`, with quantised weights described as transformers describes them.

    `quantization_config` is also made from `compression_config` (older compressed-tensors),
    `quantization` (MLX) and `hf_quant_config.json` (older ModelOpt).

    Raises:
        CheckpointError: a file is damaged, or the directory holds an adapter.
    """
    config = read_json_object(directory / "config.json", CONFIG_BYTES)
    if has_file(directory / "adapter_config.json"):
        raise _PEFT.refusal(directory)
    settings = config.get("quantization_config")
    if settings is None and (text := config.get("text_config")) and isinstance(text, dict):
        settings = text.get("quantization_config")
    if settings is None and (compression := config.get("compression_config")) is not None:
        settings = _named("compressed-tensors", compression)
    mlx = config.get("quantization", settings)
    if isinstance(mlx, Mapping) and mlx.keys() & _MLX_KEYS == {"group_size"}:
        settings = _named("mlx", mlx)
    path = directory / "hf_quant_config.json"
    if settings is None and has_file(path):
        found = _named("modelopt", read_json_object(path, CONFIG_BYTES).get("quantization"))
        settings = found if found.get("quant_algo") is not None else None  # or of the cache alone
    return config if settings is None else config | {"quantization_config": settings}


def _named(method: str, settings: object) -> dict[str, Any]:
    return {**(settings if isinstance(settings, Mapping) else {}), "quant_method": method}


CONFIG_BYTES = 4 << 20
"""Most bytes of a `config.json` or `generation_config.json`; published ones have some KiB."""
_MLX_KEYS = {"group_size", "quant_method"}
