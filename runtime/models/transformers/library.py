"""The optional package transformers, imported at its first use."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...bounded_repr import bounded_text
from ...errors import ConfigError

__all__ = ["convertible_parameters", "import_transformers", "quiet", "reason_of"]

LEAST_VERSION = (5, 17)
"""Of transformers; the oldest that is tested. pyproject.toml has the same."""
_one_at_a_time = threading.RLock()


def import_transformers(
    purpose: str = "model_impl='transformers'", extra: str = "transformers"
) -> Any:
    """Return the module `transformers`, which the extra `extra` of stepgraph installs.

    Raises `ConfigError`, which begins with `purpose`, if it is missing or too old.
    """
    least = ".".join(map(str, LEAST_VERSION))
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the package transformers, {least} or newer: "
            f'pip install "stepgraph[{extra}]" ({error})'
        ) from error
    found = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if found is None or tuple(map(int, found.groups())) < LEAST_VERSION:
        raise ConfigError(
            f"{purpose} needs transformers {least} or newer, {transformers.__version__} is"
            f' installed: pip install --upgrade "stepgraph[{extra}]"'
        )
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Build or load a model, one thread at a time, without progress bars and warnings.

    While it does, transformers changes settings of the process: its loggers, the default dtype and
    functions of torch. Also suppresses torch's report of operations that fail on tensors without
    data: errors say what failed.
    """
    theirs = import_transformers().utils.logging
    with _one_at_a_time:
        level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
        fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
        disabled, fake_tensors.disabled = fake_tensors.disabled, True
        theirs.set_verbosity_error()
        theirs.disable_progress_bar()
        try:
            yield
        finally:
            fake_tensors.disabled = disabled
            theirs.set_verbosity(level)
            if bars:
                theirs.enable_progress_bar()


@contextmanager
def convertible_parameters() -> Iterator[None]:
    """Let modules convert parameters without data, as some do while they are built.

    `Module.to` swaps the contents of fake tensors in place, which fails for most of them. Within
    `quiet`, whose lock covers this change of torch, it sets new parameters.
    """
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import

    convert: Any = nn.Module._apply

    def replace(module: nn.Module, function: Any, recurse: bool = True) -> Any:
        if not any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
            return convert(module, function, recurse)
        for child in module.children() if recurse else ():
            replace(child, function)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                converted = function(parameter.detach())
                module._parameters[name] = nn.Parameter(converted, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    nn.Module._apply = replace  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


def reason_of(error: BaseException) -> str:
    """Describe what transformers or torch raised, with the innermost error that caused it."""
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    found = f"{type(error).__name__}: {bounded_text(error, 300)}"
    if inner is error:
        return found
    return f"{found} (because of {type(inner).__name__}: {bounded_text(inner, 300)})"
