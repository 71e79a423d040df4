"""Opens and parses the files of untrusted checkpoint directories within limits.

Only regular files are read. Anything else at their path (a directory, a FIFO that would block, a
loop of symbolic links, a file without read permission) is a `CheckpointError`.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError

__all__ = [
    "has_file",
    "is_directory",
    "mlx_weights",
    "no_checkpoint",
    "no_weights",
    "read_json_object",
    "refuse_other_formats",
]

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


# Recognises models in other formats than the layout of Hugging Face, for errors that help.
#
# Only names, the first bytes of files and small JSON files are read.

_MOST_NAMES = 10_000

_JSON_BYTES = 1 << 20

_SHOWN = 3

_SAFETENSORS = "use the original checkpoint in safetensors"

_CONVERT = (
    "If you trust them, convert them to safetensors: load the model with transformers and call"
    " model.save_pretrained(DIRECTORY)"
)


class _Format(NamedTuple):
    """A format that is not read."""

    code: str
    what: str
    """What it is, after "it holds"."""
    remedy: str


_GGUF = _Format(
    "gguf",
    "a model for llama.cpp (GGUF), which is not read",
    f"{_SAFETENSORS}, with weight_dtype='int8' for 8-bit weights, or run it with llama.cpp",
)

_PICKLE = _Format(
    "pickle",
    "weights in pickle files, which can run code when they are loaded, so they are refused",
    _CONVERT,
)

_OF_FILES: tuple[tuple[str, _Format], ...] = (
    ("*.gguf", _GGUF),
    ("*.ggml", _GGUF),
    (
        "model_index.json",
        _Format("diffusers", "a pipeline of diffusers, not a language model", "use diffusers"),
    ),
    (
        "config_sentence_transformers.json",
        _Format(
            "sentence-transformers",
            "an embedding model of sentence-transformers, which does not decode",
            "use sentence-transformers, or give a causal language model",
        ),
    ),
    ("*.onnx", _Format("onnx", "an export to ONNX, which is not read", _SAFETENSORS)),
    ("openvino_model.*", _Format("openvino", "an export to OpenVINO, not read", _SAFETENSORS)),
    ("*.engine", _Format("tensorrt", "an engine of TensorRT-LLM, not read", _SAFETENSORS)),
    ("tf_model.h5", _Format("tensorflow", "weights of TensorFlow, not read", _SAFETENSORS)),
    ("flax_model.msgpack", _Format("flax", "weights of Flax, not read", _SAFETENSORS)),
    (
        "*.distcp",
        _Format(
            "distcp",
            "a distributed checkpoint of a training run, which is not read",
            "save the model in safetensors with model.save_pretrained(DIRECTORY)",
        ),
    ),
    ("*.bin", _PICKLE),
    ("*.pt", _PICKLE),
    ("*.pth", _PICKLE),
    ("*.ckpt", _PICKLE),
    ("*.pkl", _PICKLE),
)

"""Names of files, and what they are; the first match counts."""


def no_checkpoint(path: Path) -> CheckpointError:
    """Return the error for a file, or for a directory without `config.json`."""
    if not path.is_dir():
        return _no_directory(path)
    names = _names(path)
    shown = bounded_text(path, 500)
    found = _original(path, names) or _of_names(names)
    if found is None and path.parent.name == "snapshots" and "gguf" in str(path).lower():
        found = _GGUF  # of a hub repository, only files in the layout were downloaded
    if "adapter_config.json" in names:
        found = _adapter(path)
    if found is not None:
        return _error(f"no checkpoint at {shown}: it has no config.json. It holds", found)
    if not names:
        return CheckpointError(
            f"no checkpoint at {shown}: it has no config.json, as the directory is empty. A model"
            " is a directory with config.json and safetensors files",
            code="empty",
        )
    inside = _checkpoints_inside(path)
    if inside:
        return CheckpointError(
            f"no checkpoint at {shown}: it has no config.json, but there are checkpoints inside:"
            f" give one of {', '.join(inside)}",
            code="parent",
        )
    few = ", ".join(bounded_text(each, 60) for each in names[:_SHOWN])
    return CheckpointError(
        f"no checkpoint at {shown}: it has no config.json. It holds"
        f" {few}{', ...' if len(names) > _SHOWN else ''}; a model is a directory with config.json"
        " and safetensors files",
        code="no_config",
    )


def no_weights(directory: Path, expected: str) -> CheckpointError:
    """Return the error for a directory with `config.json` but without the weights expected."""
    names = _names(directory)
    found = _of_names(names)
    safetensors = [each for each in names if each.endswith(".safetensors")]
    if safetensors:
        found = _Format(
            "other_names",
            f"{', '.join(bounded_text(each, 80) for each in safetensors[:_SHOWN])} instead",
            "save it with model.save_pretrained(DIRECTORY) of transformers, or download the files"
            " that are missing",
        )
        if any(fnmatchcase(each, "consolidated*.safetensors") for each in safetensors):
            found = _original(directory, names) or found
    if found is None:
        return CheckpointError(
            f"{directory} has neither {expected}: download the weights, too", code="no_weights"
        )
    return _error(f"{directory} has neither {expected}. It holds", found)


def refuse_other_formats(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse directories with `config.json` whose weights mean something else than they seem to.

    Raises:
        CheckpointError: an adapter, or weights in a quantised format that the config of a model
            does not name as transformers does.
    """
    if has_file(directory / "adapter_config.json"):
        adapter = _adapter(directory)
        raise _error(
            f"{directory}: besides config.json it holds",
            adapter._replace(
                remedy=f"{adapter.remedy}, or remove adapter_config.json to run the"
                " model without it"
            ),
        )
    found = (
        _embedding_model(directory, config)
        or _mlx(config)
        or _model_opt(directory, config)
        or _compressed(config)
    )
    if found is not None:
        raise _error(f"{directory} holds", found)


def mlx_weights(path: Path) -> CheckpointError:
    """Return the error for a file of quantised weights that MLX wrote."""
    return _error(f"{path} holds", _quantised("mlx", "for Apple MLX"))


def _no_directory(path: Path) -> CheckpointError:
    shown = bounded_text(path, 500)
    has_file(path)  # or raise: a FIFO would block
    with suppress(OSError), path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return _error(f"no checkpoint at {shown}: the file holds", _GGUF)
    if path.suffix == ".safetensors" or path.name == "config.json":
        return CheckpointError(
            f"no checkpoint at {shown}: it is a file. Give its directory, which must be a directory"
            " with config.json and safetensors files",
            code="file",
        )
    found = _of_names([path.name])
    if found is not None:
        return _error(f"no checkpoint at {shown}: it holds", found)
    return CheckpointError(
        f"no checkpoint at {shown}: it is a file, and must be a directory with config.json and"
        " safetensors files",
        code="file",
    )


def _names(directory: Path) -> list[str]:
    """Names in a directory, sorted; not all of a huge one."""
    with suppress(OSError), os.scandir(directory) as entries:
        found = sorted(entry.name for entry in islice(entries, _MOST_NAMES))
        if "onnx" in found and (directory / "onnx").is_dir():
            found.append("onnx/model.onnx")
        return found
    return []


def _of_names(names: list[str]) -> _Format | None:
    for pattern, found in _OF_FILES:
        for name in names:
            if fnmatchcase(name.lower(), pattern):
                return found._replace(what=f"{bounded_text(name, 80)}, {found.what}")
    return None


def _original(directory: Path, names: list[str]) -> _Format | None:
    """The formats that Mistral and Meta publish their weights in."""
    weights = [name for name in names if fnmatchcase(name, "consolidated*.*")]
    if "params.json" not in names or not weights:
        return None
    of_mistral = any(name.endswith(".safetensors") for name in weights)
    whose = "Mistral" if of_mistral else "Meta"
    return _Format(
        "mistral" if of_mistral else "meta",
        f"params.json and {bounded_text(weights[0], 60)}, the original format of {whose}, which is"
        " not read",
        "use the files of the same model in the format of transformers (config.json,"
        " model*.safetensors), or convert them with the script of transformers"
        f" (convert_{'mistral' if of_mistral else 'llama'}_weights_to_hf.py)",
    )


def _adapter(directory: Path) -> _Format:
    config: dict[str, Any] = {}
    with suppress(CheckpointError):
        config = read_json_object(directory / "adapter_config.json", _JSON_BYTES)
    base = config.get("base_model_name_or_path")
    of = f" of {bounded_repr(base, 200)}" if isinstance(base, str) and base else ""
    kind = config.get("peft_type")
    named = f" ({bounded_text(kind, 40)})" if isinstance(kind, str) else ""
    return _Format(
        "peft",
        f"a PEFT adapter{named}{of}; adapters are not applied",
        "merge it into its model with peft: merge_and_unload(), then save_pretrained(DIRECTORY)",
    )


def _quantised(code: str, by: str) -> _Format:
    return _Format(
        code,
        f"weights quantised {by}, which are not read",
        "use the original checkpoint; EngineConfig(weight_dtype='int8') quantises it while it is"
        " loaded",
    )


def _embedding_model(directory: Path, config: Mapping[str, Any]) -> _Format | None:
    path = directory / "config_sentence_transformers.json"
    if "ForCausalLM" in str(config.get("architectures")) or not has_file(path):
        return None
    return _of_names([path.name])


def _mlx(config: Mapping[str, Any]) -> _Format | None:
    """MLX writes the same settings under one or two keys, without the name of a method."""
    for key in ("quantization", "quantization_config"):
        settings = config.get(key)
        if not isinstance(settings, Mapping) or settings.get("quant_method") is not None:
            continue
        if {"bits", "group_size"} <= settings.keys():
            bits = bounded_repr(settings["bits"], 20)
            return _quantised("mlx", f"for Apple MLX ({key} in config.json: bits = {bits})")
    return None


def _model_opt(directory: Path, config: Mapping[str, Any]) -> _Format | None:
    path = directory / "hf_quant_config.json"
    if config.get("quantization_config") is not None or not has_file(path):
        return None
    settings = read_json_object(path, _JSON_BYTES).get("quantization")
    method = settings.get("quant_algo") if isinstance(settings, Mapping) else None
    if isinstance(settings, Mapping) and method is None:
        return None  # of the cache alone
    return _quantised(
        "modelopt",
        f"by NVIDIA ModelOpt (hf_quant_config.json: quant_algo = {bounded_repr(method, 40)})",
    )


def _compressed(config: Mapping[str, Any]) -> _Format | None:
    if config.get("compression_config") is None:
        return None
    return _quantised("compressed-tensors", "by compressed-tensors (compression_config)")


def _checkpoints_inside(directory: Path) -> list[str]:
    """Directories below, such as the snapshots of a hub cache, that have a `config.json`."""
    found: list[str] = []
    with suppress(OSError):
        for pattern in ("*/config.json", "snapshots/*/config.json"):
            for path in islice(directory.glob(pattern), _SHOWN):
                found.append(bounded_text(path.parent, 200))
    return sorted(found)


def _error(subject: str, found: _Format) -> CheckpointError:
    return CheckpointError(
        f"{subject} {found.what}. {found.remedy[0].upper()}{found.remedy[1:]}", code=found.code
    )
