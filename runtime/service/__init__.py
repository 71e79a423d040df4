"""Serving: the asynchronous engine, its admission control, and the HTTP service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["app"]

if TYPE_CHECKING:
    from .http.app import app
else:  # a visible __getattr__ would let type checkers accept any name

    def __getattr__(name: str) -> Any:
        """Load `app` when it is first used: it needs the extra `server`."""
        if name != "app":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from .http.app import app
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f'the HTTP service needs {error.name}: pip install "stepgraph[server]"',
                name=error.name,
            ) from error
        return app
