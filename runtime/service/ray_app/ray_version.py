"""Checks the installed Ray before anything else is done."""

from __future__ import annotations

import importlib
from importlib import metadata

from ...errors import ConfigError

__all__ = ["check_ray"]

OLDEST, TOO_NEW = (2, 60), (2, 61)
"""Releases of Ray Serve whose interfaces of routers and autoscaling are those used here."""

_INSTALL = 'pip install "stepgraph[ray]"'
_MODULES = ("ray.serve", "starlette", "msgspec", "prometheus_client")
"""What the extra installs and the replicas import."""


def check_ray() -> None:
    """Raise `ConfigError` unless the extra `ray` is installed, with a supported version of Ray."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"replicas need Ray Serve, which is not installed: {_INSTALL}") from error
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not OLDEST <= release < TOO_NEW:
        raise ConfigError(
            f"Ray {version} is installed; supported are versions from {_text(OLDEST)} and below"
            f" {_text(TOO_NEW)}: {_INSTALL}"
        )
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"replicas need {name} ({error}): {_INSTALL}") from error


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
