"""Other weights for a started engine, copied into the tensors that its steps were prepared with.

A prepared step contains the shapes of the model and numbers of its config (epsilons, rotations,
soft caps, windows). So a checkpoint can replace the weights only if its config says the same,
except for tokens that begin and end a text. Everything that can be checked without reading weights
is checked before the first tensor is overwritten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..bounded_repr import bounded_repr, bounded_text
from ..config import EngineConfig
from ..distributed.rank_group import RankGroup
from ..errors import ConfigError
from ..loading.opened_source import OpenedSource, find_source, open_source
from ..models.config import ModelConfig, config_json_name
from ..models.decoder import Decoder
from ..models.decoder_model import DecoderConfig, DecoderModel
from ..models.transformers.config import TransformersConfig
from ..models.transformers.decoder import TransformersDecoder
from ..models.transformers.loading import load_model, overwrite_decoder
from ..resolved_config import ResolvedConfig
from .engine_parts import EngineParts
from .rank_start import agree_on_weights

__all__ = ["check_replaceable", "open_replacement", "overwriting", "reload_rank"]

_REPLACEABLE = frozenset({"bos_token_id", "eos_token_ids"})
"""Fields of a config that no prepared step contains."""


@contextmanager
def open_replacement(
    source: str | Path, model: DecoderConfig, config: EngineConfig
) -> Iterator[OpenedSource]:
    """Open a model whose weights can replace those of a started engine.

    Args:
        source: see `Engine.from_pretrained`.
        model: the config of the engine's model.
        config: the configuration of the engine.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, unsupported or inconsistent.
        ConfigError: it differs from the engine's model in a field other than its weights.
    """
    native = isinstance(model, ModelConfig)
    found = find_source(
        source,
        tied=config.tie_word_embeddings,
        model_impl="native" if native else "transformers",
    )
    if isinstance(model, ModelConfig) and isinstance(found.config, ModelConfig):
        config_of_rank = dataclasses.replace(found.config, shard=model.shard)
        found = dataclasses.replace(found, config=config_of_rank)
    check_replaceable(found.name, model, found.config, config)
    with ExitStack() as open_files:
        opened = open_source(found, open_files)
        if config.tie_word_embeddings is None:
            opened.check_head()
        yield opened


def overwriting(
    model: DecoderModel, new: OpenedSource, config: ResolvedConfig
) -> Callable[[], None]:
    """Return the function that overwrites the weights of a model by those of `new`.

    transformers loads all of them before the first is overwritten.

    Raises:
        CheckpointError: transformers cannot load the weights.
    """
    if isinstance(model, TransformersDecoder):
        assert isinstance(new.config, TransformersConfig)
        assert new.reader is not None
        loaded = load_model(new.reader.directory, new.config, config.dtype)
        return partial(overwrite_decoder, model, loaded, new.config)
    assert isinstance(model, Decoder)
    assert isinstance(new.config, ModelConfig)
    return partial(_overwrite_native, model, new, new.config, config)


def reload_rank(parts: EngineParts, group: RankGroup, source: str) -> None:
    """Replace the weights of a rank above 0, as rank 0 does at the same time."""
    with open_replacement(source, parts.model.config, parts.config.user) as new:
        overwriting(parts.model, new, parts.config)()
    agree_on_weights(group, parts.model)


def _overwrite_native(
    model: Decoder, new: OpenedSource, replacing: ModelConfig, config: ResolvedConfig
) -> None:
    model.overwrite(new.weights(config.dtype, seed=config.seed, device=config.device))
    model.config = replacing


def check_replaceable(
    name: str, old: DecoderConfig, new: DecoderConfig, config: EngineConfig
) -> None:
    """Raise `ConfigError` for the first field that forbids to replace only the weights.

    Args:
        name: of the new model, for the message.
        old: the config of the engine's model.
        new: that of the model to take the weights of.
        config: the configuration of the engine.
    """
    ignored = set(_REPLACEABLE)
    if config.dtype != "auto":
        ignored.add("torch_dtype")
    if isinstance(old, TransformersConfig):
        assert isinstance(new, TransformersConfig)
        differences = _items_that_differ(old.constants(), new.constants())
    else:
        differences = _differences(old, new)
        if config.max_model_len is not None and config.max_model_len <= new.longest_context:
            ignored.add("max_position_embeddings")
    for field, before, after in differences:
        if field not in ignored:
            raise ConfigError(
                f"the weights of {bounded_text(name)} cannot replace those of this engine:"
                f" {config_json_name(field)} is {bounded_repr(after)}, and the steps were prepared"
                f" for {bounded_repr(before)}. Start a new engine for it"
            )


def _items_that_differ(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each item in which two dictionaries differ."""
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if before != after:
            yield name, before, after


def _differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each field in which two dataclasses differ."""
    for field in fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        if is_dataclass(before) and is_dataclass(after):
            yield from _differences(before, after, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, before, after
