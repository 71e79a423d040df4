"""Generates docs/configuration.md from the docstrings of the configuration classes.

python -m stepgraph.runtime.service.configuration_reference docs/configuration.md
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ...profiling.atomic_write import WriteError, write_file
from ..config import EngineConfig
from ..sampling_params import SamplingParams
from ..speculation.config import Speculation
from .service_config import ServiceConfig

__all__ = ["described_fields", "reference"]

CONFIGURED: tuple[type, ...] = (EngineConfig, Speculation, SamplingParams, ServiceConfig)
_WIDTH = 110
_PREAMBLE = """\
<!-- python -m stepgraph.runtime.service.configuration_reference docs/configuration.md -->

# Configuration

The fields of `EngineConfig` (an engine), `Speculation` (its `speculation`), `SamplingParams` (a
request) and `ServiceConfig` (an `AsyncEngine`). All are frozen dataclasses with keyword arguments;
`help(EngineConfig)` prints the same text. The constructor raises an error for a value of the wrong
type or outside its range.
"""


def described_fields(configured: type) -> dict[str, str]:
    """Return the description of each field from the Attributes section of a class's docstring.

    Raises:
        ValueError: the section does not list each field once, in the order of the class.
    """
    _, _, rest = inspect.getdoc(configured).partition("\nAttributes:\n")  # type: ignore[union-attr]
    section = textwrap.dedent(re.split(r"^(?=\S)", rest, maxsplit=1, flags=re.MULTILINE)[0])
    entries = re.findall(r"^(\w+): (.*(?:\n[ \n].*)*)", section, flags=re.MULTILINE)
    names = [field.name for field in dataclasses.fields(configured)]
    described = [name for name, _ in entries]
    if described != names:
        wrong = sorted({*names} ^ {*described}) or ["the order"]
        raise ValueError(
            f"the section Attributes of {configured.__name__}'s docstring and its fields differ in"
            f" {', '.join(wrong)}: describe each field there, in the order of the class"
        )
    return {name: " ".join(text.split()) for name, text in entries}


def reference() -> str:
    """Return the page: every field with its type, default and description."""
    return "\n".join([_PREAMBLE, *(_section(configured) for configured in CONFIGURED)])


def _section(configured: type) -> str:
    texts = described_fields(configured)
    entries = [f"## {configured.__name__}\n"]
    for field in dataclasses.fields(configured):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        entry = f"- `{field.name}` (`{field.type}`, default `{default!r}`): {texts[field.name]}"
        entries.append(textwrap.fill(entry, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(entries) + "\n"


def _main(arguments: Sequence[str]) -> int:
    """Write the page to the given path; return the exit status."""
    try:
        (path,) = map(Path, arguments)
        write_file(path, reference())
    except (ValueError, WriteError) as error:
        print(f"stepgraph.runtime.service.configuration_reference: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
