"""Finds the checkpoint of a drafter and checks that it fits its target."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError, ConfigError
from ..models.config import ModelConfig
from ..models.decoder_model import DecoderConfig
from ..models.drafters.drafter_config import MOST_DRAFTS, DrafterConfig, DrafterKind
from ..models.plan import model_plan
from .checkpoint_files import has_file
from .loader import Source
from .opened_source import find_source, open_source

__all__ = ["find_drafter"]

_TOKENIZER = "tokenizer.json"


def find_drafter(
    path: str | Path,
    target: DecoderConfig,
    method: str | None = None,
    target_directory: Path | None = None,
) -> DrafterConfig:
    """Find a drafter, and check its config and the headers of its files.

    Args:
        path: a directory in the Hugging Face layout, a hub id, `demo` or `preset:NAME`, as the name
            of a model.
        target: the config of the model that it drafts for.
        method: the kind that it must be; None: any.
        target_directory: the checkpoint of the target. If both have a `tokenizer.json`, the files
            must have the same vocabulary.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged or of an unknown layout.
        ConfigError: it does not fit the target, or is of another kind than `method`.
    """
    kinds = get_args(DrafterKind)
    if method is not None and method not in kinds:
        raise ConfigError(f"unknown kind of drafter {bounded_repr(method)}: use {', '.join(kinds)}")
    return _draft_model(path, target, target_directory)


def _draft_model(
    path: str | Path, target: DecoderConfig, target_directory: Path | None
) -> DrafterConfig:
    found = find_source(path, tied=None, model_impl="native")
    model = found.native
    _check_vocabulary(found, model, target, target_directory)
    with ExitStack() as open_files:
        open_source(found, open_files, check_head=True)
    plan = model_plan(model)
    return DrafterConfig(
        kind="draft_model",
        name=bounded_text(found.name),
        directory=found.directory,
        model=model,
        plan=plan,
        parameters=tuple(plan.parameters()),
        taps=(),
        most_drafts=MOST_DRAFTS,
    )


def _check_vocabulary(
    found: Source, model: ModelConfig, target: DecoderConfig, target_directory: Path | None
) -> None:
    name = bounded_text(found.name)
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {name} has vocab_size = {model.vocab_size}, the model that it drafts"
            f" for {target.vocab_size}: use a draft model with the same tokenizer"
        )
    if found.directory is None or target_directory is None:
        return
    ours, theirs = found.directory / _TOKENIZER, target_directory / _TOKENIZER
    if not (has_file(ours) and has_file(theirs)):
        return
    differing = _differing_token(_vocabulary(ours), _vocabulary(theirs))
    if differing is not None:
        raise ConfigError(
            f"the draft model {name} has another tokenizer than the model that it drafts for:"
            f" {bounded_repr(differing)} has not the same id in {ours} and {theirs}. Use a draft"
            " model with the same tokenizer"
        )


def _vocabulary(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # `tokenizers` raises bare `Exception`
        raise CheckpointError(f"{path} is not a tokenizer: {bounded_text(error)}") from error
    return vocabulary


def _differing_token(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """Return a token that has not the same id in both, or None."""
    if ours == theirs:
        return None
    names = ours.keys() | theirs.keys()
    return min(name for name in names if ours.get(name) != theirs.get(name))
