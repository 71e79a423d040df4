"""Finds checkpoints, checks their headers before reading weights, and yields fused weights.

Weights come from safetensors and GGUF files only; nothing here unpickles. `fused_layout` maps the
tensors of a checkpoint to fused ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError, ConfigError
from ..kernels import Kernels
from ..kernels.choice import Parts
from ..kernels.ops.parameter import Parameter
from ..kernels.ops.parameter import Source as TensorSource
from ..kernels.support import int4_kernels
from ..kernels.weights import INT4, MODEL, GroupedWeight, StoredRows
from ..kernels.weights.grouped import GroupedFormat
from ..models.config import DecoderConfig, ModelConfig
from ..models.plan import fused_layout, plan_of
from ..models.presets import preset
from ..progress import progress_bar
from ..sampling_params import NEUTRAL, SamplingDefaults
from .checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    TensorHeader,
    check_dtypes,
    check_tensors,
    check_tied_head,
    read_config,
    read_sampling_defaults,
)
from .checkpoint_files import no_checkpoint
from .gguf_checkpoint import GGUFReader, gguf_config
from .gguf_file import SUFFIX, GGUFFile, find_gguf, is_gguf, open_gguf
from .gguf_tokenizer import gguf_tokenizer
from .packaged_models import PACKAGED_MODELS, fetch_model
from .tokenizer import TextTokenizer, load_tokenizer

logger = logging.getLogger("stepgraph.runtime")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::([\w.-]+))?")
PRESET_PREFIX = "preset:"
_INITIAL_STD = 0.02
_NORMAL_POOL = 262_147
"""Most normal values drawn for a tensor; larger tensors repeat them. A prime, so that the rows of a
matrix begin at different values."""


@dataclass(frozen=True)
class Source:
    """A model that was found: see `resolve_source`."""

    name: str
    """The name as given by the user."""
    config: DecoderConfig
    directory: Path | None
    """The checkpoint, a directory or a GGUF file; None for a preset, whose weights are random."""
    file: GGUFFile | None = field(default=None, repr=False)
    """The GGUF file, which is parsed once."""

    @property
    def place(self) -> str:
        """What other processes of this machine open: an absolute path, or the name of a preset."""
        return self.name if self.directory is None else str(self.directory.absolute())

    @property
    def native(self) -> ModelConfig:
        """The config of a model of a native family; `ConfigError` for one of transformers."""
        if not isinstance(self.config, ModelConfig):
            raise ConfigError(
                f"{bounded_text(self.name)} (model_type"
                f" {bounded_repr(self.config.model_type, 60)}) is run by transformers: this works"
                " with native families only"
            )
        return self.config


def resolve_source(
    source: str | Path,
    *,
    config_only: bool = False,
    model_impl: str = "auto",
    tied: bool | None = None,
) -> Source:
    """Find a checkpoint and read its config.

    `source` is a directory in the Hugging Face layout, a GGUF file or a directory with one,
    `"demo"` (the model that ships with the package), `"preset:NAME"`, the name of one of
    `PACKAGED_MODELS`, or the id of a repository on the Hugging Face hub; with `:` and the name of a
    quantisation after it, a GGUF file there. Packaged models and those on the hub are read from the
    local cache if they are complete there, and downloaded otherwise. A `Path` is never a name or an
    id. With `config_only` only the config must exist and is downloaded. `model_impl` is the option
    of `EngineConfig`; `tied` replaces the model's `tie_word_embeddings` unless None. Raises
    `CheckpointError` if there is no such checkpoint, `ConfigError` for an unknown preset, or one
    that the options exclude.
    """
    check_source(source)
    file = None
    if isinstance(source, str) and source.startswith(PRESET_PREFIX):
        if model_impl == "transformers":
            raise ConfigError(
                f"{source} is a preset of a native family, model_impl='transformers' needs a"
                " checkpoint: give a directory or a hub id, or use model_impl='auto'"
            )
        config: DecoderConfig = preset(source.removeprefix(PRESET_PREFIX))
        directory = None
    else:
        directory = find_directory(source, config_only=config_only)
        if is_gguf(directory):
            if model_impl == "transformers":
                raise ConfigError(
                    f"{bounded_text(source)} is a GGUF file, which only native families read:"
                    " model_impl='transformers' needs a directory or a hub id"
                )
            file = open_gguf(directory)
            config = gguf_config(file)
        else:
            config = read_config(directory, model_impl)
    if tied not in (None, config.tie_word_embeddings):
        if not isinstance(config, ModelConfig):
            raise ConfigError(
                f"tie_word_embeddings={tied}, but the class of transformers has"
                f" {config.tie_word_embeddings}: change it in config.json, or leave it out",
                field="tie_word_embeddings",
            )
        config = dataclasses.replace(config, tie_word_embeddings=bool(tied))
    return Source(str(source), config, directory, file)


def check_source(source: object) -> None:
    """Raise `CheckpointError` for what cannot name a model."""
    if not isinstance(source, str | Path) or not str(source):
        raise CheckpointError(
            "a model is a directory, a GGUF file, a hub id, 'preset:NAME' or 'demo', not "
            + bounded_repr(source)
        )


def find_directory(source: str | Path, *, config_only: bool = False) -> Path:
    """Return the directory of a checkpoint, or its GGUF file; `source` as in `resolve_source`, but
    no preset.

    Raises `CheckpointError` if there is none.
    """
    if source == "demo":
        return Path(__file__).parents[1] / "demo"
    name = str(source)
    try:
        directory = Path(source).expanduser()
        if directory.is_dir():
            return directory if _has_weights(directory) else find_gguf(directory) or directory
        if is_gguf(directory):
            return find_gguf(directory) or directory
        exists = directory.exists() or directory.is_symlink()
    except (OSError, RuntimeError) as error:  # no permission, or no home directory
        raise CheckpointError(
            f"no checkpoint at {bounded_text(name)}: {bounded_text(error)}"
        ) from error
    if exists:
        raise no_checkpoint(directory)
    if source in PACKAGED_MODELS:
        return fetch_model(name)
    named = None if isinstance(source, Path) else _HUB_ID.fullmatch(source)
    if named is None:
        raise CheckpointError(
            f"no checkpoint at {bounded_text(directory, 500)}: it must be a directory with "
            f"config.json and {SINGLE_FILE} or {INDEX_FILE}, or a GGUF file"
        )
    repository, quantisation = named.groups()
    if quantisation is not None:
        return _hub_gguf(repository, quantisation)
    patterns = ["*.json", "*.jinja", "*.model", "*.safetensors"]
    if config_only:
        patterns = ["config.json", "generation_config.json"]

    def is_complete(cached: Path) -> bool:
        if not config_only and (cached / "config.json").is_file():
            CheckpointReader(cached).close()
        return (cached / "config.json").is_file()

    return _hub_snapshot(repository, patterns, is_complete)


def _has_weights(directory: Path) -> bool:
    return any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))


def _hub_gguf(repository: str, quantisation: str) -> Path:
    """Return the GGUF file of a hub repository with this quantisation in its name."""
    spellings = dict.fromkeys((quantisation, quantisation.upper(), quantisation.lower()))
    snapshot = _hub_snapshot(
        repository,
        [f"*{spelling}*{SUFFIX}" for spelling in spellings],
        lambda cached: find_gguf(cached, quantisation) is not None,
    )
    file = find_gguf(snapshot, quantisation)
    if file is None:
        raise CheckpointError(
            f"{bounded_repr(repository)} has no GGUF file of a model in"
            f" {bounded_repr(quantisation, 60)}: choose one that the repository lists"
        )
    return file


def _hub_snapshot(
    repository: str, patterns: list[str], is_complete: Callable[[Path], bool]
) -> Path:
    """Return the directory of a hub repository, from the local cache or downloaded.

    Args:
        repository: its id.
        patterns: of the names of files that are downloaded.
        is_complete: whether a cached directory has all that is needed; may raise
            `CheckpointError`.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{bounded_repr(repository)} is not a local directory, and the Hugging Face hub needs "
            'the package huggingface_hub: pip install "stepgraph[hub]"'
        ) from error
    try:
        cached = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
        if is_complete(cached):
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
    reader: CheckpointReader,
    config: ModelConfig,
    dtype: torch.dtype,
    codes: Container[str] = (),
    *,
    progress: bool = False,
) -> Iterator[tuple[str, Tensor | Parts]]:
    """Return an iterator over (our name, fused CPU tensor of `dtype`), in the layout's order.

    Of parameters in `codes` the parts are returned as the checkpoint stores them. Before it
    returns, `check_tensors` compares the checkpoint with the config. Tensors are made one at a time
    and share no memory with the files, so the model is never in memory twice. With `progress`, a
    bar is drawn on stderr if that is a terminal.
    """
    layout = check_tensors(reader, config)

    def read() -> Iterator[tuple[str, Tensor | Parts]]:
        total = sum(math.prod(fused.shape) for fused in layout.values())
        done = 0
        with progress_bar("loading weights", shown=progress) as report:
            for name, weight in read_parameters(reader, layout.values(), dtype, codes):
                report(done := done + math.prod(layout[name].shape), total)
                yield name, weight
                del weight  # before the next one is allocated

    return read()


def read_parameters(
    reader: CheckpointReader,
    parameters: Iterable[Parameter],
    dtype: torch.dtype,
    codes: Container[str] = (),
) -> Iterator[tuple[str, Tensor | Parts]]:
    """Yield (name, CPU tensor of `dtype`) of parameters whose tensors have been checked.

    Of those in `codes` yield the parts, in the dtype or as codes.
    """
    for parameter in parameters:
        if parameter.name in codes:
            yield parameter.name, _parts(reader, parameter, dtype)
            continue
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype or dtype)
        for source, part in parameter.parts(tensor):
            if source.name is None:
                part.zero_()
            else:
                part.copy_(reader.read(source))
        yield parameter.name, tensor
        del tensor, part  # before the next one is allocated


def _parts(
    reader: CheckpointReader, parameter: Parameter, dtype: torch.dtype, *, meta: bool = False
) -> Parts:
    """Return the parts of a parameter as the checkpoint stores them; on `meta` none is read."""
    parts: list[Tensor | GroupedWeight | StoredRows] = []
    for source in parameter.sources:
        if source.name is None:
            parts.append(torch.zeros(source.shape, dtype=dtype, device="meta" if meta else None))
            continue
        part = reader.stored(source, meta=True)
        if not meta and isinstance(part, GroupedWeight) and reader.reads_rows:
            parts.append(StoredRows(part, partial(_read_rows, reader, source)))
            continue
        if not meta:
            part = reader.stored(source)
        parts.append(part.to(dtype) if isinstance(part, Tensor) else part)
    return parts


def _is_stored(source: TensorSource, headers: Mapping[str, TensorHeader]) -> bool:
    """Whether a source is a whole tensor of a checkpoint, under its name and with its shape."""
    header = headers.get(source.name or "")
    return source.selection is None and header is not None and header.shape == source.shape


def _read_rows(
    reader: CheckpointReader, source: TensorSource, first: int, stop: int
) -> GroupedWeight:
    part = reader.stored(source.rows(first, stop))
    assert isinstance(part, GroupedWeight)
    return part


def _codes_bytes(kernels: Kernels, parts: Parts, matrices: int, dtype: torch.dtype) -> int | None:
    """Return the bytes of some stacked matrices of equal formats as codes; None: they cannot be."""
    each = len(parts) // matrices
    formats = [part.format if isinstance(part, GroupedWeight) else None for part in parts]
    equal = formats == formats[:each] * matrices
    size = kernels.parts_bytes(parts[:each], dtype) if equal else None
    return None if size is None else size * matrices


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    seed: int = 0,
    *,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (our name, tensor of `dtype` on `device`) for a model without a checkpoint.

    Norms are neutral, other weights are normal with standard deviation 0.02; parts without a source
    tensor are zero. A tensor depends on its name and the seed only, and a shard is a part
    of the tensor of the whole model. Tensors of more than 262 147 elements repeat their values, so
    that large models are made at the memory bandwidth of the device. The values are drawn on the
    CPU, and so are the same on every device. Tensors are made one at a time.
    """
    for name, fused in fused_layout(config).items():
        dtype_here = fused.dtype or dtype
        if name.endswith("norm.weight"):
            named = fused.sources[0].name is not None
            neutral = 1.0 if named and not config.family.offset_norms else 0.0
            yield name, torch.full(fused.shape, neutral, dtype=dtype_here, device=device)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        whole = fused.shape if fused.cut is None else fused.cut.whole
        pool = torch.empty(min(math.prod(whole), _NORMAL_POOL), dtype=torch.float32)
        pool = pool.normal_(0.0, _INITIAL_STD, generator=generator).to(dtype_here).to(device)
        tensor = torch.empty(whole, dtype=dtype_here, device=device)
        for part in tensor.view(-1).split(len(pool)):
            part.copy_(pool[: len(part)])
        if fused.cut is not None:
            tensor = fused.cut.part_of(tensor).view(fused.shape)
        for source, part in fused.parts(tensor):
            if source.name is None:
                part.zero_()
        yield name, tensor
        del tensor, part  # before the next one is allocated


# A model that was found, opened for reading: checked headers, tokenizer, weights.


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A checkpoint whose headers agree with its config, or a preset."""

    config: DecoderConfig
    tokenizer: TextTokenizer | None
    reader: CheckpointReader | None
    """Reads the weights; None for a preset, whose weights are random."""
    place: str
    """See `Source.place`."""
    generation: SamplingDefaults
    """The sampling defaults of its `generation_config.json`."""

    def defaults_for(self, generation_config: str) -> SamplingDefaults:
        """Return the sampling defaults of an engine; see `EngineConfig.generation_config`."""
        return self.generation if generation_config == "auto" else NEUTRAL

    def kept_codes(self, kernels: Kernels, dtype: torch.dtype) -> Kernels:
        """Return the kernels with the parameters of this checkpoint that they take as codes.

        A warning tells which formats are decoded. Raises `ConfigError` as `int4_kernels`.
        """
        if kernels.weights == INT4:
            return int4_kernels(kernels, plan_of(self.config), dtype)
        if self.reader is None:
            return kernels
        headers, formats = self.reader.headers(), self.reader.formats()
        native = isinstance(self.config, ModelConfig)
        if isinstance(self.config, ModelConfig):
            layout = check_tensors(self.reader, self.config)
        else:  # tensors that transformers does not rename or convert
            layout = {
                parameter.name: parameter
                for parameter in plan_of(self.config).parameters()
                if all(_is_stored(source, headers) for source in parameter.sources)
            }
        codes, decoded = {}, set[str]()
        forms: dict[GroupedFormat, None] = {}  # a set in the order of the layout, on all ranks
        for name, parameter in layout.items():
            stored = {headers[source].dtype for source in parameter.source_names}
            if parameter.is_matrix and not stored.isdisjoint(formats):
                parts = _parts(self.reader, parameter, dtype, meta=True)
                size = _codes_bytes(kernels, parts, parameter.matrices, dtype)
                if size is None or kernels.weights != MODEL:
                    decoded |= stored
                else:
                    codes[name] = size
                    forms |= {p.format: None for p in parts if isinstance(p, GroupedWeight)}
        place = f"kernels={kernels.name!r}"
        if not native:
            kept = (source for name in codes for source in layout[name].source_names)
            decoded |= (formats - Counter(headers[source].dtype for source in kept)).keys()
            place += " with layers of transformers"
        if decoded and kernels.weights == MODEL:
            logger.warning(
                "weights in %s are decoded while they are loaded, and take as much memory as if"
                " they were not quantised: %s does not multiply by their codes",
                *(", ".join(sorted(decoded)), place),
            )
        return dataclasses.replace(kernels, codes=codes, formats=tuple(forms))

    def for_transformers(
        self, dtype: torch.dtype, codes: Container[str] = ()
    ) -> Path | dict[str, Tensor]:
        """Return the directory; or all tensors, if some are stored as codes or under other names.

        Codes are decoded, except parameters in `codes`, which `weights` returns.
        """
        assert self.reader is not None, "presets are native"
        if not (self.reader.formats() or self.reader.names_text_part):
            return self.reader.directory
        kept = {name for p in self._parameters(codes) for name in p.source_names}
        return self.reader.decoded(dtype, kept)

    def _parameters(self, names: Container[str]) -> list[Parameter]:
        return [p for p in plan_of(self.config).parameters() if p.name in names]

    def check_head(self) -> None:
        """Read the head and the embedding that it is tied to, if both are stored.

        Raises `CheckpointError` if they differ.
        """
        native = isinstance(self.config, ModelConfig) and self.config.tie_word_embeddings
        if native and self.reader is not None:
            check_tied_head(self.reader)

    def weights(
        self,
        dtype: torch.dtype,
        kernels: Kernels | None = None,
        *,
        seed: int,
        device: torch.device,
        progress: bool = False,
    ) -> Iterator[tuple[str, Tensor | Parts]]:
        """Return the weights one by one, as `iter_weights`.

        `kernels` name the parameters that are kept as codes; None: none. `seed` and `device`
        are as in `random_weights`; stored weights are read to the CPU. Of a model of transformers,
        which loads its weights itself, only those parameters are returned.
        """
        codes: Container[str] = ()
        if kernels is not None and kernels.weights != INT4:
            codes = kernels.codes
        if not isinstance(self.config, ModelConfig):
            assert self.reader is not None, "presets are native"
            return read_parameters(self.reader, self._parameters(codes), dtype, codes)
        if self.reader is None:
            return random_weights(self.config, dtype, seed, device=device)
        return iter_weights(self.reader, self.config, dtype, codes, progress=progress)


def planned_codes(found: Source, kernels: Kernels, dtype: torch.dtype) -> Kernels:
    """Return `OpenedSource.kept_codes` of a model of which perhaps only the config is there."""
    with ExitStack() as open_files:
        place, reader = found.directory, None
        if found.file is not None or (place is not None and _has_weights(place)):
            reader = _open_reader(found, open_files)
        opened = OpenedSource(found.config, None, reader, found.place, NEUTRAL)
        return opened.kept_codes(kernels, dtype)


def _open_reader(found: Source, open_files: ExitStack) -> CheckpointReader | None:
    if found.directory is None:
        return None
    if found.file is not None:
        return open_files.enter_context(GGUFReader(found.file, found.native))
    return open_files.enter_context(CheckpointReader(found.directory))


def open_source(
    found: Source, open_files: ExitStack, chat_template: str | None = None
) -> OpenedSource:
    """Open the files of a model, which `open_files` closes, and check their headers.

    Raises `CheckpointError` if a file is damaged, or contradicts the config; `ConfigError` if the
    file `chat_template` cannot replace the model's templates.
    """
    reader = _open_reader(found, open_files)
    tokenizer, defaults = None, NEUTRAL
    if reader is not None:
        assert found.directory is not None
        if isinstance(found.config, ModelConfig):
            check_tensors(reader, found.config, log_unused=True)
        else:
            check_dtypes(reader, plan_of(found.config).parameters())
        ends = found.config.eos_token_ids
        if found.file is not None:
            tokenizer = gguf_tokenizer(found.file, eos_token_ids=ends)
        else:
            tokenizer = load_tokenizer(found.directory, eos_token_ids=ends)
        defaults = read_sampling_defaults(found.directory)
    if chat_template is not None:
        if tokenizer is None:
            raise ConfigError(
                f"chat_template needs a tokenizer, and {found.place} has none: leave it out",
                field="chat_template",
            )
        tokenizer = tokenizer.with_chat_template(chat_template)
    return OpenedSource(found.config, tokenizer, reader, found.place, defaults)
