"""What an engine would be, found out before anything is measured."""

from __future__ import annotations

from ..config import EngineConfig
from ..errors import ConfigError
from ..loading.loader import resolve_source
from ..resolved_config import ResolvedConfig

__all__ = ["resolve_engine"]


def resolve_engine(model: str, config: EngineConfig) -> ResolvedConfig:
    """Return the choices for a model, of which only the configuration is read.

    Raises:
        CheckpointError: there is no such model.
        ConfigError: it cannot run like that: names the model and says why.
    """
    source = resolve_source(model, config_only=True).config
    try:
        return ResolvedConfig.resolve(config, source)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from error
