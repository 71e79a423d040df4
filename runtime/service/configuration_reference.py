"""Generates docs/configuration.md from the fields and docstrings of the configuration classes.

python -m stepgraph.runtime.service.configuration_reference docs/configuration.md
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from pathlib import Path

from ...profiling.atomic_write import write_file
from ..arguments import Allowed, allowed_values, described_fields
from ..config import EngineConfig, Speculation
from ..sampling_params import SamplingParams
from .service_config import ServiceConfig

CONFIGURED: tuple[type, ...] = (EngineConfig, Speculation, SamplingParams, ServiceConfig)
_WIDTH = 110
_PREAMBLE = """\
<!-- python -m stepgraph.runtime.service.configuration_reference docs/configuration.md -->

# Configuration

The fields of `EngineConfig` (an engine), `Speculation` (its `speculation`), `SamplingParams` (a
request) and `ServiceConfig` (an `AsyncEngine`). All are frozen dataclasses with keyword arguments.
The constructor raises an error for a value of the wrong type or outside its range.
"""


def reference() -> str:
    """Return the page: every field with its type, default and description."""
    return "\n".join([_PREAMBLE, *(_section(configured) for configured in CONFIGURED)])


def _section(configured: type) -> str:
    texts, allowed = described_fields(configured), allowed_values(configured)
    entries = [f"## {configured.__name__}\n"]
    for field in dataclasses.fields(configured):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        kind = _kind(allowed[field.name]) if field.name in allowed else f"`{field.type}`"
        entry = f"- `{field.name}` ({kind}; default `{default!r}`): {texts[field.name]}"
        entries.append(textwrap.fill(entry, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(entries) + "\n"


def _kind(allowed: Allowed) -> str:
    """Return the type and the range of a field, such as "`int | None`, 1 to 64"."""
    names = [repr(choice) for choice in allowed.choices] or [allowed.kind.__name__]
    if allowed.entry is not None:
        kinds = [part.kind.__name__ for part in (allowed.key, allowed.entry) if part is not None]
        kinds += ["..."] * (allowed.kind is tuple)
        names[0] += f"[{', '.join(kinds)}]"
    limits = allowed.limits
    return f"`{' | '.join([*names, *['None'] * allowed.optional])}`{limits and ', '}{limits}"


if __name__ == "__main__":
    write_file(Path(sys.argv[1]), reference())
