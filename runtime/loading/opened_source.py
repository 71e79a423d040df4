"""A model that was found, opened for reading: checked headers, tokenizer, weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models.config import ModelConfig
from .checkpoint import CheckpointReader
from .loader import (
    Source,
    check_tensors,
    check_tied_head,
    iter_weights,
    random_weights,
    resolve_source,
)
from .tokenizer import TextTokenizer, load_tokenizer

__all__ = ["OpenedSource", "find_source", "open_source"]


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A checkpoint whose headers agree with its config, or a preset."""

    config: ModelConfig
    tokenizer: TextTokenizer | None
    reader: CheckpointReader | None
    """Reads the weights; None for a preset, whose weights are random."""

    def weights(
        self, dtype: torch.dtype, *, seed: int, progress: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights one by one, as `iter_weights`; `seed` is that of random ones."""
        if self.reader is None:
            return random_weights(self.config, dtype, seed)
        return iter_weights(self.reader, self.config, dtype, progress=progress)


def find_source(source: str | Path, *, tied: bool | None) -> Source:
    """Find a model and read its config; `tied` replaces its `tie_word_embeddings` unless None.

    Raises:
        CheckpointError, ConfigError: as `resolve_source`.
    """
    found = resolve_source(source)
    if tied is None:
        return found
    config = dataclasses.replace(found.config, tie_word_embeddings=tied)
    return dataclasses.replace(found, config=config)


def open_source(found: Source, open_files: ExitStack, *, check_head: bool) -> OpenedSource:
    """Open the files of a model, and check their headers.

    Args:
        found: the model.
        open_files: closes the files.
        check_head: refuse a stored head that differs from the embedding it is tied to.

    Raises:
        CheckpointError: a file is damaged, or contradicts the config.
    """
    reader = tokenizer = None
    if found.directory is not None:
        reader = open_files.enter_context(CheckpointReader(found.directory))
        check_tensors(reader, found.config)
        if found.config.tie_word_embeddings and check_head:
            check_tied_head(reader)
        tokenizer = load_tokenizer(found.directory, eos_token_ids=found.config.eos_token_ids)
    return OpenedSource(found.config, tokenizer, reader)
