"""A model that was found, opened for reading: checked headers, tokenizer, weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigError
from ..models.config import ModelConfig
from ..models.decoder_model import DecoderConfig
from ..models.transformers.config import TransformersConfig
from ..models.transformers.loading import check_headers
from ..sampling_params import NEUTRAL, SamplingDefaults
from .checkpoint import CheckpointReader
from .generation_config import read_sampling_defaults
from .loader import (
    Source,
    check_tensors,
    check_tied_head,
    iter_weights,
    random_weights,
    resolve_source,
)
from .tensor_check import log_unused
from .tokenizer import TextTokenizer, load_tokenizer

__all__ = ["OpenedSource", "find_source", "open_source"]


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

    def check_head(self) -> None:
        """Read the head and the embedding that it is tied to, if both are stored.

        Raises:
            CheckpointError: they differ.
        """
        native = isinstance(self.config, ModelConfig) and self.config.tie_word_embeddings
        if native and self.reader is not None:
            check_tied_head(self.reader)

    def weights(
        self, dtype: torch.dtype, *, seed: int, device: torch.device, progress: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights one by one, as `iter_weights`.

        `seed` and `device` are as in `random_weights`; stored weights are read to the CPU.
        transformers loads the weights of its models itself.
        """
        assert isinstance(self.config, ModelConfig), "transformers loads its models"
        if self.reader is None:
            return random_weights(self.config, dtype, seed, device=device)
        return iter_weights(self.reader, self.config, dtype, progress=progress)


def find_source(source: str | Path, *, tied: bool | None, model_impl: str = "auto") -> Source:
    """Find a model and read its config; `tied` replaces its `tie_word_embeddings` unless None.

    `model_impl` is that of `EngineConfig`.

    Raises:
        CheckpointError, ConfigError: as `resolve_source`.
    """
    found = resolve_source(source, model_impl=model_impl)
    if tied is None or tied == found.config.tie_word_embeddings:
        return found
    if not isinstance(found.config, ModelConfig):
        raise ConfigError(
            f"tie_word_embeddings={tied}, but the class of transformers has"
            f" {found.config.tie_word_embeddings}: change it in config.json, or leave it out",
            field="tie_word_embeddings",
        )
    config = dataclasses.replace(found.config, tie_word_embeddings=tied)
    return dataclasses.replace(found, config=config)


def open_source(found: Source, open_files: ExitStack) -> OpenedSource:
    """Open the files of a model, which `open_files` closes, and check their headers.

    Raises:
        CheckpointError: a file is damaged, or contradicts the config.
    """
    reader = tokenizer = None
    defaults = NEUTRAL
    if found.directory is not None:
        reader = open_files.enter_context(CheckpointReader(found.directory))
        if isinstance(found.config, ModelConfig):
            check_tensors(reader, found.config)
            log_unused(reader, found.config)
        else:
            assert isinstance(found.config, TransformersConfig)
            check_headers(reader.headers(), found.config)
        tokenizer = load_tokenizer(found.directory, eos_token_ids=found.config.eos_token_ids)
        defaults = read_sampling_defaults(found.directory)
    return OpenedSource(found.config, tokenizer, reader, found.place, defaults)
