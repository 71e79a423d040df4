"""Reads a checkpoint directory: its config and the tensors of its safetensors files.

Any problem with a file is a `CheckpointError` that names it. Nothing here unpickles.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError, ConfigError, MemoryBudgetError
from ..models.config import ModelConfig
from ..models.decoder_model import DecoderConfig
from ..models.families import Json, family_of
from ..models.layout import Source
from ..models.transformers.config import read_transformers_config
from . import mxfp4
from .checkpoint_files import has_file, read_json_object
from .generation_config import GENERATION_FILE
from .other_formats import mlx_weights, no_checkpoint, no_weights, refuse_other_formats

__all__ = [
    "CONFIG_BYTES",
    "INDEX_FILE",
    "SINGLE_FILE",
    "CheckpointReader",
    "Shape",
    "TensorHeader",
    "read_config",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LFS_MAGIC = b"version https://git-lfs"
CONFIG_BYTES = 4 << 20
"""Most bytes of a `config.json`; published ones have some KiB."""
_INDEX_BYTES = 128 << 20
_FILES_SHOWN = 5

Shape = tuple[int, ...]


class TensorHeader(NamedTuple):
    """The header of a tensor, without its data."""

    dtype: str
    """The safetensors name of the dtype, for example `BF16`, or `MXFP4`."""
    shape: Shape
    file: Path


def read_config(directory: Path, model_impl: str = "auto") -> DecoderConfig:
    """Read `config.json`, and `generation_config.json` for more end-of-sequence tokens.

    Args:
        directory: of the checkpoint.
        model_impl: as `EngineConfig.model_impl`.

    Raises:
        CheckpointError: a file is missing, damaged or of an unsupported model; it names the file.
        ConfigError: the package transformers is needed and missing.
    """
    path = directory / "config.json"
    if not has_file(path):
        raise no_checkpoint(directory)
    generation_path = directory / GENERATION_FILE
    generation = None
    if has_file(generation_path):
        generation = read_json_object(generation_path, CONFIG_BYTES)
    config = read_json_object(path, CONFIG_BYTES)
    refuse_other_formats(directory, config)
    try:
        if model_impl == "transformers":
            return read_transformers_config(directory, config, generation)
        try:
            family_of(config)
        except CheckpointError as error:
            if model_impl == "native":
                raise CheckpointError(
                    f"{error}. model_impl='transformers' runs other models, with transformers",
                    code=error.code,
                ) from error
            return _without_family(directory, config, generation, error)
        return ModelConfig.from_hf(config, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}", code=error.code) from error


def _without_family(
    directory: Path, config: Json, generation: Json | None, native: CheckpointError
) -> DecoderConfig:
    """Read the config of a model without native family; `native` says that there is none."""
    try:
        return read_transformers_config(directory, config, generation)
    except (CheckpointError, ConfigError) as error:
        code = error.code if isinstance(error, CheckpointError) else None
        raise CheckpointError(
            f"{native}. As a model of transformers: {error}", code=code
        ) from error


class CheckpointReader:
    """The tensors of a checkpoint directory: one safetensors file, or shards with an index.

    Opening reads the headers of all files and checks them against the index; data is read by
    `tensor`. Files stay mapped into memory until `close()`, or the end of a `with`. Raises
    `CheckpointError`, which names the file, for one that is missing, truncated or corrupt, and
    `MemoryBudgetError` if the process may not map as much (`RLIMIT_AS`).
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._headers: dict[str, TensorHeader] = {}
        self._paths: dict[str, Path] = {}
        self._files: dict[Path, Any] = {}
        index = _weight_files(directory)
        try:
            for path in sorted(set(index.values())) or [directory / SINGLE_FILE]:
                self._open(path, index)
            for name, path in index.items():
                if name not in self._headers:
                    raise CheckpointError(
                        f"{path} does not hold {bounded_text(name)}, which the index expects"
                    )
            self._join_mxfp4()
        except (CheckpointError, MemoryBudgetError):
            self.close()
            raise

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files. May be called again."""
        self._files.clear()
        self._stack.close()

    def headers(self) -> Mapping[str, TensorHeader]:
        """Return the dtype, shape and file of every tensor, by its name in the checkpoint.

        Blocks and scales of mxfp4 are one tensor, with the name of the blocks.
        """
        return self._headers

    def read(self, source: Source) -> torch.Tensor:
        """Return the rows of a source; they may share the mapped file's memory.

        Of mxfp4 tensors only these rows are decoded.
        """
        assert source.name is not None, "zeros have no tensor"
        if self._headers[source.name].dtype != mxfp4.DTYPE:
            return source.read(self.tensor(source.name))
        scales = mxfp4.scales_name(source.name)
        assert scales is not None, "the header of a pair"
        return mxfp4.read(source.selection, self.tensor(source.name), self.tensor(scales))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor; it may share the mapped file's memory, so copy it to keep it."""
        path = self._paths[name]
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: {name} cannot be read: {bounded_text(error)}"
            ) from error
        return tensor

    def _join_mxfp4(self) -> None:
        """Replace the headers of blocks and scales by those of what they decode to."""
        for name, blocks in list(self._headers.items()):
            scales_name = mxfp4.scales_name(name)
            if scales_name is None or scales_name not in self._headers:
                continue
            scales = self._headers[scales_name]
            shape = mxfp4.decoded_shape(blocks[:2], scales[:2])
            if shape is not None:
                self._headers[name] = TensorHeader(mxfp4.DTYPE, shape, blocks.file)
                del self._headers[scales_name]

    def _open(self, path: Path, index: Mapping[str, Path]) -> None:
        has_file(path)  # or raise: the library would block on a FIFO
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._files[path] = file
            for name in file.keys():  # noqa: SIM118  a safetensors file cannot be iterated
                if index.get(name, path) != path:
                    continue  # the index names another shard for it
                view = file.get_slice(name)
                self._paths[name] = path
                header = TensorHeader(str(view.get_dtype()), tuple(view.get_shape()), path)
                if header.dtype == "U32" and (file.metadata() or {}).get("format") == "mlx":
                    raise mlx_weights(path)
                self._headers[name] = header
        except (OSError, MemoryError, SafetensorError) as error:
            if isinstance(error, MemoryError) or f"os error {errno.ENOMEM}" in str(error):
                raise MemoryBudgetError(
                    f"{path} cannot be mapped into memory: {bounded_text(error)}. Raise the limit "
                    "of address space (RLIMIT_AS, ulimit -v), which counts mapped files"
                ) from error
            raise CheckpointError(
                f"{path} is truncated or no safetensors file: {bounded_text(error)}"
                f"{_lfs_hint(path)}"
            ) from error


def _lfs_hint(path: Path) -> str:
    """Return what to do about a Git LFS pointer in the place of the data."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS_MAGIC)) == _LFS_MAGIC:
            return "; it is a Git LFS pointer, fetch the file itself with `git lfs pull`"
    return ""


def _weight_files(directory: Path) -> dict[str, Path]:
    """Return the index (name → shard) of a sharded checkpoint, empty for a single file."""
    if has_file(directory / SINGLE_FILE):
        return {}
    index_path = directory / INDEX_FILE
    if not has_file(index_path):
        raise no_weights(directory, f"{SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_json_object(index_path, _INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or not _is_file_name(file):
            raise CheckpointError(
                f"{index_path} names {bounded_repr(file)}, which is not a file in its directory"
            )
    missing = sorted(file for file in set(weight_map.values()) if not has_file(directory / file))
    if missing:
        raise CheckpointError(f"{directory} lacks shards named by the index: {_first_of(missing)}")
    return {name: directory / file for name, file in weight_map.items()}


def _is_file_name(name: str) -> bool:
    """Return whether a name stays within its directory."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


def _first_of(names: Iterable[str]) -> str:
    shown = [bounded_text(name, 100) for name in names]
    rest = len(shown) - _FILES_SHOWN
    return ", ".join(shown[:_FILES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
