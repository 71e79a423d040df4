"""Finds checkpoints, checks their headers before reading weights, and yields fused weights.

Weights come from safetensors files only; nothing here unpickles. `fused_layout` maps the tensors of
a checkpoint to fused ones.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError
from ..models.config import ModelConfig
from ..models.layout import Parameter, fused_layout
from ..models.presets import preset
from .checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    Shape,
    TensorHeader,
    read_config,
)
from .checkpoint_files import is_directory

__all__ = [
    "CheckpointReader",
    "Parameter",
    "Source",
    "TensorHeader",
    "check_tensors",
    "check_tied_head",
    "fused_layout",
    "iter_weights",
    "random_weights",
    "read_config",
    "resolve_source",
]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")
_PRESET_PREFIX = "preset:"
_LOADABLE_DTYPES = frozenset({"F32", "BF16", "F16"})
_PROBLEMS_SHOWN = 10
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ELEMENTS_COMPARED = 1 << 24
"""Elements of two tensors compared at a time, which bounds their copies in float32."""
_INITIAL_STD = 0.02
_NORMAL_POOL = 262_147
"""Most normal values drawn for a tensor; larger tensors repeat them. A prime, so that the rows of a
matrix begin at different values."""


@dataclass(frozen=True)
class Source:
    """A model that was found: see `resolve_source`."""

    name: str
    """The name as given by the user."""
    config: ModelConfig
    directory: Path | None
    """The checkpoint; None for a preset, whose weights are random."""


def resolve_source(source: str | Path, *, config_only: bool = False) -> Source:
    """Find a checkpoint and read its config.

    `source` is a directory in the Hugging Face layout, `"demo"` (the model that ships with the
    package), `"preset:NAME"`, or the id of a repository on the Hugging Face hub, which is read from
    the local cache if it is complete there and downloaded otherwise. A `Path` is always a
    directory. With `config_only` only the config must exist and is downloaded. Raises
    `CheckpointError` if there is no such checkpoint, `ConfigError` for an unknown preset.
    """
    if not isinstance(source, str | Path) or not str(source):
        raise CheckpointError(
            f"a model is a directory, a hub id, 'preset:NAME' or 'demo', not {bounded_repr(source)}"
        )
    name = str(source)
    if isinstance(source, str) and source.startswith(_PRESET_PREFIX):
        return Source(name, preset(source.removeprefix(_PRESET_PREFIX)), None)
    if source == "demo":
        directory = Path(__file__).parents[1] / "demo"
    else:
        try:
            directory = Path(source).expanduser()
        except RuntimeError as error:
            raise CheckpointError(
                f"no checkpoint at {bounded_text(name)}: the home directory is unknown ({error})"
            ) from error
        if not is_directory(directory):
            if isinstance(source, Path) or directory.exists() or not _HUB_ID.fullmatch(source):
                raise CheckpointError(
                    f"no checkpoint at {bounded_text(directory, 500)}: it must be a directory with "
                    f"config.json and {SINGLE_FILE} or {INDEX_FILE}"
                )
            directory = _hub_snapshot(source, config_only=config_only)
    return Source(name, read_config(directory), directory)


def _hub_snapshot(repository: str, *, config_only: bool) -> Path:
    """Return the directory of a hub repository, from the local cache or downloaded."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{bounded_repr(repository)} is not a local directory, and the Hugging Face hub needs "
            'the package huggingface_hub: pip install "stepgraph[hub]"'
        ) from error
    patterns = ["*.json", "*.jinja", "*.safetensors"]
    if config_only:
        patterns = ["config.json", "generation_config.json"]
    try:
        cached = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
        if (cached / "config.json").is_file():
            if not config_only:
                CheckpointReader(cached).close()
            return cached
    except (OSError, ValueError, CheckpointError):
        pass  # not in the cache, or incomplete: download
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # the type depends on the HTTP library
        raise CheckpointError(
            f"{bounded_repr(repository)} is neither a local directory nor complete in the local "
            f"Hugging Face cache, and it could not be downloaded: {bounded_text(error)}"
        ) from error


def iter_weights(
    reader: CheckpointReader, config: ModelConfig, dtype: torch.dtype, *, progress: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over (our name, fused CPU tensor of `dtype`), in the layout's order.

    Before it returns, `check_tensors` compares the checkpoint with the config. Tensors are made one
    at a time and share no memory with the files, so the model is never in memory twice. With
    `progress`, a bar is drawn on stderr if that is a terminal.
    """
    layout = check_tensors(reader, config)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        total = sum(math.prod(fused.shape) for fused in layout.values())
        with _progress_bar(total, shown=progress) as advance:
            for name, fused in layout.items():
                tensor = torch.empty(fused.shape, dtype=dtype)
                for source, part in fused.parts(tensor):
                    if source is None:
                        part.zero_()
                    else:
                        part.copy_(reader.tensor(source))
                advance(tensor.numel())
                yield name, tensor
                del tensor, part  # before the next one is allocated

    return read()


def check_tensors(reader: CheckpointReader, config: ModelConfig) -> dict[str, Parameter]:
    """Compare the headers of a checkpoint with its config; return the layout that both agree on.

    Raises one `CheckpointError` for all missing and unexpected tensors, wrong shapes and
    unsupported dtypes. A config with more layers than the files is refused before anything is
    allocated per layer.
    """
    headers = reader.headers()
    held = {match[1] for match in map(_LAYER_NAME.match, headers) if match is not None}
    if config.num_layers > len(held):
        raise CheckpointError(
            f"the tensors in {reader.directory} do not fit its config.json: num_hidden_layers = "
            f"{config.num_layers}, but there are tensors of {len(held)} layers"
        )
    layout = fused_layout(config)
    problems = _contradictions(headers, layout, tied=config.tie_word_embeddings)
    if problems:
        rest = len(problems) - _PROBLEMS_SHOWN
        shown = problems[:_PROBLEMS_SHOWN] + ([f"... and {rest} more"] if rest > 0 else [])
        raise CheckpointError(
            f"the tensors in {reader.directory} do not fit its config.json:\n  "
            + "\n  ".join(shown)
        )
    return layout


def check_tied_head(reader: CheckpointReader) -> None:
    """Refuse a checkpoint with a head that differs from the embedding its config ties it to.

    transformers uses such a head, other loaders drop it: only the user can know which one the model
    was trained with.

    Raises:
        CheckpointError: `lm_head.weight` is stored and is not equal to the embedding.
    """
    headers = reader.headers()
    head, embedding = headers.get(_HEAD), headers.get(_EMBEDDING)
    if head is None or embedding is None:
        return
    equal = head.shape == embedding.shape
    if equal:
        stored, embeddings = reader.tensor(_HEAD), reader.tensor(_EMBEDDING)
        rows = max(1, _ELEMENTS_COMPARED // max(1, head.shape[-1]))
        equal = all(
            torch.equal(ours.float(), theirs.float())
            for ours, theirs in zip(stored.split(rows), embeddings.split(rows), strict=True)
        )
    if not equal:
        raise CheckpointError(
            f"{head.file}: {_HEAD} differs from {_EMBEDDING}, though config.json says that they are"
            " tied (tie_word_embeddings). EngineConfig(tie_word_embeddings=False) uses the stored"
            " head, as transformers does; EngineConfig(tie_word_embeddings=True) ignores it"
        )


def _contradictions(
    headers: Mapping[str, TensorHeader], layout: Mapping[str, Parameter], *, tied: bool
) -> list[str]:
    """Return a line for each tensor of a checkpoint that does not match the layout."""
    expected = {
        source: shape
        for fused in layout.values()
        for source, shape in zip(fused.sources, fused.source_shapes, strict=True)
        if source is not None
    }
    problems = []
    for name, shape in expected.items():
        header = headers.get(name)
        if header is None:
            problems.append(f"missing: {name} {list(shape)}")
        elif header.shape != shape:
            problems.append(f"shape: {name} expected {list(shape)}, found {_shown(header.shape)}")
        elif header.dtype not in _LOADABLE_DTYPES:
            supported = ", ".join(sorted(_LOADABLE_DTYPES))
            problems.append(
                f"dtype: {name} in {header.file.name} is {header.dtype}, supported: {supported}"
            )
    for name in sorted(headers.keys() - expected.keys()):
        # Frequencies are computed from the config; with tied embeddings the head is a copy.
        harmless = name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
        if not harmless:
            problems.append(f"unexpected: {bounded_text(name)} {_shown(headers[name].shape)}")
    return problems


def _shown(shape: Shape) -> str:
    return bounded_repr(list(shape), 80)


@contextmanager
def _progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield the function that advances a bar on stderr by a number of weights."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console  # slow to import
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading weights", total=total)
        yield lambda weights: bar.advance(task, weights)


def random_weights(
    config: ModelConfig, dtype: torch.dtype, seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (our name, CPU tensor of `dtype`) for a model without a checkpoint.

    Norms are neutral, other weights are normal with standard deviation 0.02; parts without a source
    tensor are zero. A tensor depends on its name and the seed only. Tensors of more than 262 147
    elements repeat their values, so that large models are made at memory bandwidth.
    """
    for name, fused in fused_layout(config).items():
        if name.endswith("norm.weight"):
            neutral = 0.0 if config.family.offset_norms else 1.0
            yield name, torch.full(fused.shape, neutral, dtype=dtype)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        flat = torch.empty(math.prod(fused.shape), dtype=dtype)
        pool = torch.empty(min(flat.numel(), _NORMAL_POOL), dtype=torch.float32)
        pool = pool.normal_(0.0, _INITIAL_STD, generator=generator).to(dtype)
        for part in torch.split(flat, _NORMAL_POOL):
            part.copy_(pool[: part.numel()])
        tensor = flat.view(fused.shape)
        for source, part in fused.parts(tensor):
            if source is None:
                part.zero_()
        yield name, tensor
        del flat, tensor, part  # before the next one is allocated
