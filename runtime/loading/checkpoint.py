"""Reads a checkpoint directory: its config and the tensors of its safetensors files.

Any problem with a file is a `CheckpointError` that names it. Nothing here unpickles.
"""

from __future__ import annotations

import errno
import logging
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError, ConfigError, MemoryBudgetError, RequestError
from ..kernels.ops.parameter import Parameter, Source
from ..kernels.weights import CheckpointFormat, GroupedWeight, Header, checkpoint_formats
from ..models.config import DecoderConfig, ModelConfig
from ..models.families import FAMILIES, family_of, is_wrapper, text_part
from ..models.plan import fused_layout
from ..models.transformers.config import read_transformers_config
from ..sampling_params import NEUTRAL, SamplingDefaults, SamplingParams
from .checkpoint_files import (
    CONFIG_BYTES,
    has_file,
    no_checkpoint,
    no_weights,
    read_json_object,
    read_model_config,
    unmapped,
)

# Reads the sampling defaults of a model from its `generation_config.json`.

logger = logging.getLogger("stepgraph.runtime")
GENERATION_FILE = "generation_config.json"
_KEYS = {key: key for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_KEYS["max_new_tokens"] = "max_tokens"
"""Keys of the file, and the fields of `SamplingParams` that they set."""


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """Return the defaults of a checkpoint directory; neutral ones without the file.

    `do_sample: false` is temperature 0. Values that `SamplingParams` would refuse are left out,
    with one warning.
    """
    path = directory / GENERATION_FILE
    found: dict[str, Any] = {}
    refused: list[str] = []
    try:
        config = read_json_object(path, CONFIG_BYTES) if has_file(path) else {}
    except CheckpointError as error:
        logger.warning("%s: its sampling defaults are not used", error)
        return NEUTRAL
    for key, field in _KEYS.items():
        value = config.get(key)
        if value is None:
            continue
        try:
            found[field] = getattr(SamplingParams(**{field: value}), field)
        except RequestError:
            refused.append(f"{key} = {bounded_repr(value)}")
    do_sample = config.get("do_sample")
    if do_sample is False:
        found["temperature"] = 0.0
    elif not isinstance(do_sample, bool | None):
        refused.append(f"do_sample = {bounded_repr(do_sample)}")
    if refused:
        logger.warning("%s: ignored, since they are not valid: %s", path, ", ".join(refused))
    return SamplingDefaults(**found)


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LFS_MAGIC = b"version https://git-lfs"
_INDEX_BYTES = 128 << 20
Shape = tuple[int, ...]
_LOADABLE_DTYPES = frozenset({"F32", "BF16", "F16"})
_CODE_DTYPES = _LOADABLE_DTYPES | {"F8_E4M3", "F8_E8M0", "I64", "I32", "I8", "U8", "U32"}
"""Of tensors that formats consist of."""


class TensorHeader(NamedTuple):
    """The header of a tensor, without its data."""

    dtype: str
    """The safetensors name of the dtype, for example `BF16`, or the name of a format."""
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
    whole = read_model_config(directory)
    config = text_part(whole)
    try:
        if model_impl == "transformers":
            return read_transformers_config(directory, whole, generation)
        try:
            family_of(config)
        except CheckpointError as native:
            if model_impl == "native":
                raise CheckpointError(
                    f"{native}. model_impl='transformers' runs other models, with transformers",
                    code=native.code,
                ) from native
            try:
                return read_transformers_config(directory, whole, generation)
            except (CheckpointError, ConfigError) as error:
                code = error.code if isinstance(error, CheckpointError) else None
                raise CheckpointError(
                    f"{native}. As a model of transformers: {error}", code=code
                ) from error
        return ModelConfig.from_hf(config, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}", code=error.code) from error


_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
"""What names of tensors of a text part begin with in files of wrappers, and without the wrapper."""


def _without_wrapper(name: str) -> str:
    """Return the name of a tensor of a text part without the wrapper."""
    found = (theirs for theirs in _TEXT_PREFIXES if name.startswith(theirs))
    theirs = next(found, "")
    return _TEXT_PREFIXES.get(theirs, "") + name.removeprefix(theirs)


def _formats(settings: object) -> tuple[CheckpointFormat, ...]:
    """Return the formats of a `quantization_config`; none if it is of another kind, which is
    refused when the config is read. Without one, weights may be in the formats of ModelOpt."""
    settings = {"quant_method": "modelopt"} if settings is None else settings
    try:
        return checkpoint_formats(settings if isinstance(settings, Mapping) else {})
    except ValueError:
        return ()


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Raise `CheckpointError` for what torch and formats raise for contents of another form."""
    try:
        yield
    except (ValueError, ArithmeticError, LookupError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {bounded_text(error)}") from error


class CheckpointReader:
    """The tensors of a checkpoint directory: one safetensors file, or shards with an index.

    Opening reads the headers of all files and checks them against the index; data is read by
    `tensor`. Files stay mapped into memory until `close()`, or the end of a `with`. Raises
    `CheckpointError`, which names the file, for one that is missing, truncated or corrupt, and
    `MemoryBudgetError` if the process may not map as much (`RLIMIT_AS`).
    """

    reads_rows = False
    """Whether some rows of a weight that is stored as codes are read without the others."""
    described_by = "config.json"
    """What has the config of the model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._headers: dict[str, TensorHeader] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        """The file of a tensor, and its name there."""
        self.names_text_part = False
        """Whether tensors of text have other names in the files, as parts of a wrapper."""
        self._files: dict[Path, Any] = {}
        self._quantised: dict[str, Callable[..., GroupedWeight]] = {}
        """Reads the rows of a source, by the name of a weight that is stored as codes."""
        self._formats = Counter[str]()
        index = _weight_files(directory)
        try:
            for path in sorted(set(index.values())) or [directory / SINGLE_FILE]:
                self._open(path, index)
            for name, path in index.items():
                if name not in self._places:
                    raise CheckpointError(
                        f"{path} does not hold {bounded_text(name)}, which the index expects"
                    )
            if has_file(directory / "config.json"):
                config = read_model_config(directory)
                if is_wrapper(config):
                    self._rename(_without_wrapper)
                    self.names_text_part = any(name != n for name, (_, n) in self._places.items())
                family = FAMILIES.get(str(text_part(config).get("model_type")))
                for theirs, ours in {} if family is None else family.renamed.items():
                    self._rename(lambda name: name.replace(theirs, ours))  # noqa: B023
                for found in _formats(config.get("quantization_config")):
                    self._join(found)
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
        self._quantised.clear()
        self._stack.close()

    def headers(self) -> Mapping[str, TensorHeader]:
        """Return the dtype, shape and file of every tensor, by its name in the checkpoint.

        A weight that a format stores as several tensors is one.
        """
        return self._headers

    def formats(self) -> Counter[str]:
        """Return the number of weights that are stored as codes, by format."""
        return self._formats

    def read(self, source: Source) -> Tensor:
        """Return the rows of a source; they may share the mapped file's memory.

        Of a weight that is stored as codes only these rows are decoded.
        """
        found = self.stored(source)
        return found.decode() if isinstance(found, GroupedWeight) else found

    def stored(self, source: Source, *, meta: bool = False) -> Tensor | GroupedWeight:
        """Return the rows of a source as the checkpoint stores them.

        Args:
            source: with a name; zeros have no tensor.
            meta: whether to return tensors on the device `meta`, without reading any.
        """
        assert source.name is not None, "zeros have no tensor"
        if source.name in self._quantised:
            return self._quantised[source.name](source, meta=meta)
        if meta:
            return torch.empty(source.part_shape, device="meta")
        return source.read(self.tensor(source.name))

    def _read_codes(
        self, stored: CheckpointFormat, names: Mapping[str, str], source: Source, *, meta: bool
    ) -> GroupedWeight:
        """Return rows of a weight, of tensors with these names by what they end with."""
        assert source.name is not None
        tensors = {suffix: self.tensor(name) for suffix, name in names.items()}
        if meta:
            tensors = {s: torch.empty_like(t, device="meta") for s, t in tensors.items()}
        with reading(self._headers[source.name].file, source.name):
            return stored.read(tensors, self._headers[source.name].shape, source.selection)

    def decoded(self, dtype: torch.dtype, without: Container[str] = ()) -> dict[str, Tensor]:
        """Return all tensors, weights that are stored as codes in this dtype.

        In the place of those `without` are tensors of one NaN, which take no memory.
        """
        nan = torch.tensor(torch.nan, dtype=dtype)
        return {
            name: nan.expand(header.shape)
            if name in without
            else self.read(Source(name, header.shape)).to(dtype)
            if name in self._quantised
            else self.tensor(name)
            for name, header in self._headers.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; it may share the mapped file's memory, so copy it to keep it."""
        path, stored = self._places[name]
        with reading(path, name):
            tensor: Tensor = self._files[path].get_tensor(stored)
            return tensor

    def _rename(self, new: Callable[[str], str]) -> None:
        """Give the tensors other names than in the files."""
        self._headers = {new(name): header for name, header in self._headers.items()}
        self._places = {new(name): place for name, place in self._places.items()}

    def _join(self, stored: CheckpointFormat) -> None:
        """Replace the headers of the tensors of each weight in a format by one of the weight."""
        first = stored.suffixes[0]
        for prefix in [n.removesuffix(first) for n in self._headers if n.endswith(first)]:
            suffixes = [s for s in stored.optional if prefix + s in self._headers]
            names = {suffix: prefix + suffix for suffix in (*stored.suffixes, *suffixes)}
            if not self._headers.keys() >= set(names.values()):
                continue
            headers = {s: Header(*self._headers[name][:2]) for s, name in names.items()}
            if not _CODE_DTYPES.issuperset(header.dtype for header in headers.values()):
                continue
            file = self._headers[names[first]].file
            with reading(file, prefix):
                shape = stored.shape(prefix, headers, lambda suffix: self.tensor(prefix + suffix))  # noqa: B023
            if shape is None:
                continue
            for suffix in (*names, *stored.ignored):
                self._headers.pop(prefix + suffix, None)
            weight = prefix + stored.weight_suffix
            self._headers[weight] = TensorHeader(stored.name, shape, file)
            self._quantised[weight] = partial(self._read_codes, stored, names)
            self._formats[stored.name] += 1

    def _open(self, path: Path, index: Mapping[str, Path]) -> None:
        has_file(path)  # or raise: the library would block on a FIFO
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._files[path] = file
            for name in file.keys():  # noqa: SIM118  a safetensors file cannot be iterated
                if index.get(name, path) != path:
                    continue  # the index names another shard for it
                view = file.get_slice(name)
                self._places[name] = path, name
                header = TensorHeader(str(view.get_dtype()), tuple(view.get_shape()), path)
                self._headers[name] = header
        except (OSError, MemoryError, SafetensorError) as error:
            if isinstance(error, MemoryError) or f"os error {errno.ENOMEM}" in str(error):
                raise unmapped(path, error) from error
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
        is_name = isinstance(file, str) and Path(file).name == file and file not in ("", "..")
        if not is_name or "\0" in file:
            raise CheckpointError(
                f"{index_path} names {bounded_repr(file)}, which is not a file in its directory"
            )
    missing = sorted(file for file in set(weight_map.values()) if not has_file(directory / file))
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} shards named by the index:"
            f" {bounded_text(', '.join(missing), 500)}"
        )
    return {name: directory / file for name, file in weight_map.items()}


# Compares the tensors of a checkpoint with what the config of its model needs.

_LOGGER = logging.getLogger(__name__)
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,9})\.")
_KEYS_OF_LAYER = re.compile(_LAYER_NAME.pattern + r"self_attn\.[kv]_(proj|norm)\.")
_EXPERT_NAME = re.compile(r"(.*\.experts)\.(\d+)\..*")
_MODULE_NAME = re.compile(r".*?\.(?=\d)|.*\.")
"""What the name of a tensor begins with: the list that its layer is in, or else its module."""
_PROBLEMS_SHOWN = 10
_EXPERTS_SHOWN = 8
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS_COMPARED = 1024
"""Rows of two tensors compared at a time, which bounds their copies in float32."""


def check_tensors(
    reader: CheckpointReader, config: ModelConfig, *, log_unused: bool = False
) -> dict[str, Parameter]:
    """Compare the headers of a checkpoint with its config; return the layout that both agree on.

    Raises one `CheckpointError` for all missing and unexpected tensors, wrong shapes and
    unsupported dtypes. Only weights in the modules of the decoder can be unexpected: buffers, such
    as masks, and other models in the same files, such as a vision encoder, are not read; with
    `log_unused` their names are logged, in one record. A config with more layers than the files is
    refused before anything is allocated per layer.
    """
    headers = reader.headers()
    held = {match[1] for match in map(_LAYER_NAME.match, headers) if match is not None}
    if config.num_layers > len(held):
        raise CheckpointError(
            f"the tensors in {reader.directory} do not fit its {reader.described_by}:"
            f" num_hidden_layers = {config.num_layers}, but there are tensors of {len(held)} layers"
        )
    whole = _stored_layout(config.whole, headers)
    expected = _sources(whole)
    modules = {match[0] for match in map(_MODULE_NAME.match, expected) if match is not None}

    loadable = _LOADABLE_DTYPES | reader.formats().keys()

    def is_other(name: str) -> bool:
        """Whether a decoder with weights in these modules needs no such tensor."""
        module = _MODULE_NAME.match(name)
        is_weight = headers[name].dtype in loadable
        return not is_weight or module is None or module[0] not in modules

    check_layout(reader, whole, lambda name: _is_unused(name, config) or is_other(name))
    names = [name for name in headers.keys() - expected.keys() if not _is_unused(name, config)]
    if names and log_unused:
        shown = bounded_text(", ".join(sorted(names)), 1000)
        _LOGGER.warning(
            "%d tensors in %s are not used, as %s has no parameters for them: %s",
            *(len(names), reader.directory, config.family.architecture, shown),
        )
    return whole if config.shard is None else _stored_layout(config, headers)


def check_dtypes(reader: CheckpointReader, parameters: Iterable[Parameter]) -> None:
    """Raise `CheckpointError` for the first tensor of a parameter whose dtype is not supported."""
    loadable = _LOADABLE_DTYPES | reader.formats().keys()
    for name in (source.name for parameter in parameters for source in parameter.sources):
        header = reader.headers().get(name or "")
        if header is not None and header.dtype not in loadable:
            raise CheckpointError(
                f"{name} in {header.file} is {header.dtype}, supported: "
                + ", ".join(sorted(loadable))
            )


def check_layout(
    reader: CheckpointReader, layout: Mapping[str, Parameter], is_unused: Callable[[str], bool]
) -> None:
    """Compare the headers of a checkpoint with a layout; names that are unused may be there, too.

    Raises `CheckpointError` for all missing and unexpected tensors, wrong shapes and dtypes.
    """
    headers, expected = reader.headers(), _sources(layout)
    loadable = _LOADABLE_DTYPES | reader.formats().keys()
    problems = list(_missing({n: shape for n, shape in expected.items() if n not in headers}))
    for name in filter(headers.__contains__, expected):
        header = headers[name]
        if header.shape != expected[name]:
            found = _shown_shape(header.shape)
            problems.append(f"shape: {name} expected {list(expected[name])}, found {found}")
        elif header.dtype not in loadable:
            supported = ", ".join(sorted(loadable))
            problems.append(
                f"dtype: {name} in {header.file.name} is {header.dtype}, supported: {supported}"
            )
    for name in sorted(headers.keys() - expected.keys()):
        if not is_unused(name):
            problems.append(f"unexpected: {bounded_text(name)} {_shown_shape(headers[name].shape)}")
    if problems:
        rest = len(problems) - _PROBLEMS_SHOWN
        shown = problems[:_PROBLEMS_SHOWN] + ([f"... and {rest} more"] if rest > 0 else [])
        raise CheckpointError(
            f"the tensors in {reader.directory} do not fit its {reader.described_by}:\n  "
            + "\n  ".join(shown)
        )


def _stored_layout(
    config: ModelConfig, headers: Mapping[str, TensorHeader]
) -> dict[str, Parameter]:
    """Return the layout of the model, or of its shard, as these tensors store it."""
    shapes = {name: header.shape for name, header in headers.items()}
    return {name: p.stored_in(shapes) for name, p in fused_layout(config).items()}


def _sources(layout: Mapping[str, Parameter]) -> dict[str, Shape]:
    """Return the shapes of the tensors that a layout is read from, by name."""
    sources = (source for parameter in layout.values() for source in parameter.sources)
    return {source.name: source.shape for source in sources if source.name is not None}


def check_tied_head(reader: CheckpointReader) -> None:
    """Refuse a checkpoint with a head that differs from the embedding its config ties it to.

    transformers uses such a head, other loaders drop it: only the user can know which one the model
    was trained with. Raises `CheckpointError` if `lm_head.weight` is stored and is not equal to the
    embedding.
    """
    headers = reader.headers()
    head, embedding = headers.get(_HEAD), headers.get(_EMBEDDING)
    if head is None or embedding is None:
        return
    pieces = (
        reader.read(Source(name, header.shape)).split(_ROWS_COMPARED)
        for name, header in ((_HEAD, head), (_EMBEDDING, embedding))
    )
    equal = head.shape == embedding.shape and all(
        torch.equal(ours.float(), theirs.float()) for ours, theirs in zip(*pieces, strict=True)
    )
    if not equal:
        raise CheckpointError(
            f"{head.file}: {_HEAD} differs from {_EMBEDDING}, though config.json says that they are"
            " tied (tie_word_embeddings). EngineConfig(tie_word_embeddings=False) uses the stored"
            " head, as transformers does; EngineConfig(tie_word_embeddings=True) ignores it"
        )


def _missing(absent: Mapping[str, Shape]) -> Iterator[str]:
    """Yield a line for each missing tensor, but one for all experts of a layer."""
    experts: dict[str, dict[str, None]] = {}
    for name, shape in absent.items():
        if (match := _EXPERT_NAME.fullmatch(name)) is not None:
            experts.setdefault(match[1], {})[match[2]] = None
        else:
            yield f"missing: {name} {list(shape)}"
    for module, numbers in experts.items():
        shown, rest = list(numbers)[:_EXPERTS_SHOWN], len(numbers) - _EXPERTS_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        yield f"missing: tensors of experts {', '.join(shown)}{more} in {module}"


_UNUSED = (
    *("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale", ".output_scale"),
    *(".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"),
)
"""Ends of the names of tensors that no layout has: frequencies, scales of 8-bit caches, and decays
of lightning attention."""


def _is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a tensor without a place in the layout is left out on purpose."""
    # Frequencies are computed from the config; with tied embeddings the head is a copy.
    if name.endswith(_UNUSED) or (config.tie_word_embeddings and name == _HEAD):
        return True
    # Layers that read another one's keys and values may have been trained with their own.
    shared = _KEYS_OF_LAYER.match(name)
    if shared is not None and int(shared[1]) in config.kv_shared_layers:
        return True
    mtp = config.family.mtp
    return mtp is not None and mtp.holds(name, config.num_layers)


def _shown_shape(shape: Shape) -> str:
    return bounded_repr(list(shape), 80)
