"""Profiler scopes for the modules of a transformers model, in steps that are not compiled."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...operation_scopes import operation
from .plan import layer_prefixes
from .probe import Probe

__all__ = ["add_scopes"]


def add_scopes(model: nn.Module, probe: Probe) -> None:
    """Make each decoder layer, and each module in it with parameters of its own, a scope.

    A scope has the name of the module in its parent, such as `q_proj`.
    """
    for index, prefix in enumerate(layer_prefixes(probe.attention)):
        layer = model.get_submodule(prefix.removesuffix("."))
        for path, module in layer.named_modules():
            if path and any(True for _ in module.parameters(recurse=False)):
                _scope(layer.get_submodule(_stand_in(path)), _stand_in(path).rpartition(".")[2])
        _scope(layer, "layer", index)


def _stand_in(path: str) -> str:
    """Return the path of the module that a projection belongs to."""
    return path.removesuffix(".product.projection")


def _scope(module: Any, name: str, layer: int | None = None) -> None:
    forward = module.forward

    def scoped(*arguments: Any, **keywords: Any) -> Any:
        with operation(name, layer):
            return forward(*arguments, **keywords)

    module.forward = scoped
