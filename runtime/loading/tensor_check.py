"""Compares the tensors of a checkpoint with what the config of its model needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping

import torch

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError
from ..models.config import ModelConfig
from ..models.layout import Parameter, fused_layout
from . import mxfp4
from .checkpoint import CheckpointReader, Shape, TensorHeader

__all__ = ["check_layout", "check_tensors", "check_tied_head", "log_unused"]

_LOGGER = logging.getLogger(__name__)
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,9})\.")
_EXPERT_NAME = re.compile(r"(.*\.experts)\.(\d+)\..*")
_MODULE_NAME = re.compile(r".*?\.(?=\d)|.*\.")
"""What the name of a tensor begins with: the list that its layer is in, or else its module."""
_LOADABLE_DTYPES = frozenset({"F32", "BF16", "F16", mxfp4.DTYPE})
_PROBLEMS_SHOWN = 10
_EXPERTS_SHOWN = 8
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ELEMENTS_COMPARED = 1 << 24
"""Elements of two tensors compared at a time, which bounds their copies in float32."""


def check_tensors(reader: CheckpointReader, config: ModelConfig) -> dict[str, Parameter]:
    """Compare the headers of a checkpoint with its config; return the layout that both agree on.

    Raises one `CheckpointError` for all missing and unexpected tensors, wrong shapes and
    unsupported dtypes. Only weights in the modules of the decoder can be unexpected: buffers, such
    as masks, and other models in the same files, such as a vision encoder, are not read. A config
    with more layers than the files is refused before anything is allocated per layer.
    """
    headers = reader.headers()
    held = {match[1] for match in map(_LAYER_NAME.match, headers) if match is not None}
    if config.num_layers > len(held):
        raise CheckpointError(
            f"the tensors in {reader.directory} do not fit its config.json: num_hidden_layers = "
            f"{config.num_layers}, but there are tensors of {len(held)} layers"
        )
    whole = _stored_layout(config.whole, headers)
    modules = frozenset(
        match[0]
        for parameter in whole.values()
        for source in parameter.sources
        if source.name is not None and (match := _MODULE_NAME.match(source.name)) is not None
    )
    check_layout(
        reader,
        whole,
        lambda name: _is_unused(name, config) or not _is_weight(name, headers[name], modules),
    )
    return whole if config.shard is None else _stored_layout(config, headers)


def log_unused(reader: CheckpointReader, config: ModelConfig) -> None:
    """Log the tensors of a checked checkpoint that are not of its decoder, in one record."""
    expected = {
        source.name
        for parameter in _stored_layout(config.whole, reader.headers()).values()
        for source in parameter.sources
    }
    names = [name for name in reader.headers().keys() - expected if not _is_unused(name, config)]
    if names:
        shown = ", ".join(bounded_text(name, 100) for name in sorted(names)[:_PROBLEMS_SHOWN])
        more = ", ..." if len(names) > _PROBLEMS_SHOWN else ""
        _LOGGER.warning(
            "%d tensors in %s are not used, as %s has no parameters for them: %s%s",
            *(len(names), reader.directory, config.family.architecture, shown, more),
        )


def check_layout(
    reader: CheckpointReader, layout: Mapping[str, Parameter], is_unused: Callable[[str], bool]
) -> None:
    """Compare the headers of a checkpoint with a layout; names that are unused may be there, too.

    Raises:
        CheckpointError: for all missing and unexpected tensors, wrong shapes and dtypes.
    """
    problems = _contradictions(reader.headers(), layout, is_unused)
    if problems:
        rest = len(problems) - _PROBLEMS_SHOWN
        shown = problems[:_PROBLEMS_SHOWN] + ([f"... and {rest} more"] if rest > 0 else [])
        raise CheckpointError(
            f"the tensors in {reader.directory} do not fit its config.json:\n  "
            + "\n  ".join(shown)
        )


def _stored_layout(
    config: ModelConfig, headers: Mapping[str, TensorHeader]
) -> dict[str, Parameter]:
    """Return the layout of the model, or of its shard, as these tensors store it."""
    return {name: p.stored_in(headers) for name, p in fused_layout(config).items()}


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
    headers: Mapping[str, TensorHeader],
    layout: Mapping[str, Parameter],
    is_unused: Callable[[str], bool],
) -> list[str]:
    """Return a line for each tensor of a checkpoint that does not match the layout."""
    expected = {
        source.name: source.shape
        for fused in layout.values()
        for source in fused.sources
        if source.name is not None
    }
    absent = {name: shape for name, shape in expected.items() if name not in headers}
    problems = list(_missing(absent))
    for name, shape in expected.items():
        header = headers.get(name)
        if header is None:
            continue
        if header.shape != shape:
            problems.append(f"shape: {name} expected {list(shape)}, found {_shown(header.shape)}")
        elif header.dtype not in _LOADABLE_DTYPES:
            supported = ", ".join(sorted(_LOADABLE_DTYPES))
            problems.append(
                f"dtype: {name} in {header.file.name} is {header.dtype}, supported: {supported}"
            )
    for name in sorted(headers.keys() - expected.keys()):
        if not is_unused(name):
            problems.append(f"unexpected: {bounded_text(name)} {_shown(headers[name].shape)}")
    return problems


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


def _is_weight(name: str, header: TensorHeader, modules: frozenset[str]) -> bool:
    """Whether a tensor is one that a decoder with weights in these modules might need."""
    module = _MODULE_NAME.match(name)
    return header.dtype in _LOADABLE_DTYPES and module is not None and module[0] in modules


def _is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a tensor without a place in the layout is left out on purpose."""
    # Frequencies are computed from the config; with tied embeddings the head is a copy.
    if name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == _HEAD):
        return True
    mtp = config.family.mtp
    return mtp is not None and mtp.holds(name, config.num_layers)


def _shown(shape: Shape) -> str:
    return bounded_repr(list(shape), 80)
