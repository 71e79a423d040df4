"""Other weights for a started engine, copied into the tensors that its steps were prepared with.

A prepared step contains the shapes of the model and numbers of its config (epsilons, rotations,
soft caps, windows). So a checkpoint can replace the weights only if its config says the same,
except for tokens that begin and end a text. Everything that can be checked without reading weights
is checked before the first tensor is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ..bounded_repr import bounded_repr, bounded_text
from ..config import EngineConfig
from ..errors import ConfigError
from ..loading.opened_source import OpenedSource, find_source, open_source
from ..models.config import ModelConfig, config_json_name

__all__ = ["check_replaceable", "open_replacement"]

_REPLACEABLE = frozenset({"bos_token_id", "eos_token_ids"})
"""Fields of a `ModelConfig` that no prepared step contains."""


@contextmanager
def open_replacement(
    source: str | Path, model: ModelConfig, config: EngineConfig
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
    found = find_source(source, tied=config.tie_word_embeddings)
    check_replaceable(found.name, model, found.config, config)
    with ExitStack() as open_files:
        yield open_source(found, open_files, check_head=config.tie_word_embeddings is None)


def check_replaceable(name: str, old: ModelConfig, new: ModelConfig, config: EngineConfig) -> None:
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
    if config.max_model_len is not None and config.max_model_len <= new.max_position_embeddings:
        ignored.add("max_position_embeddings")
    for field, before, after in _differences(old, new):
        if field not in ignored:
            raise ConfigError(
                f"the weights of {bounded_text(name)} cannot replace those of this engine:"
                f" {config_json_name(field)} is {bounded_repr(after)}, and the steps were prepared"
                f" for {bounded_repr(before)}. Start a new engine for it"
            )


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
