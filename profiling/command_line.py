"""The argument parser of all commands, their output and tables, and the status of an interrupt."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

INTERRUPTED = 130
"""Exit status after SIGINT: 128 + 2, as in a shell."""


VARIABLE_PREFIX = "STEPGRAPH_"
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_SINGLE = (None, 0, "?")
"""`nargs` of flags that take no list."""
_OF_KUBERNETES = re.compile(r"(SERVICE|PORT)(_|$)")
"""Variables that a pod has for a Service, after the name of the Service."""

MAX_MESSAGE = 400
"""Characters of a usage error, which may quote arguments of any length."""


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose usage errors are one line, without abbreviated flags.

    An abbreviation changes its meaning when a flag is added.
    """

    def __init__(
        self,
        *,
        config_file: bool = False,
        other_variables: Collection[str] | None = None,
        **settings: Any,
    ) -> None:
        """Make a parser.

        Args:
            config_file: whether `--config FILE` names a TOML file whose keys are flags.
            other_variables: reads variables `STEPGRAPH_...` of flags too, which replace values of
                the file. Unknown ones are warned about, except these names without the prefix.
            settings: arguments of `ArgumentParser`.
        """
        super().__init__(**{"allow_abbrev": False, **settings})
        self._reads_config, self._other_variables = config_file, other_variables
        if config_file:
            text = "TOML file whose keys are flags, such as max-num-seqs = 8"
            if other_variables is not None:
                text += f"; variables such as {VARIABLE_PREFIX}MAX_NUM_SEQS, then flags replace it"
            self.add_argument("--config", metavar="FILE", help=text)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line, with defaults of the configuration file and the environment."""
        if not self._reads_config:
            return super().parse_args(args, namespace)
        flags = {
            next(iter(action.option_strings), action.dest).lstrip("-"): action
            for action in self._actions
            if action.dest not in ("help", "config")
        }
        for name, value, place in self._settings(flags, sys.argv[1:] if args is None else args):
            if (action := flags.get(name)) is None:
                (nearest,) = difflib.get_close_matches(name.lower(), flags, 1, 0)
                self.error(f"{place} is not a flag of this command; the nearest is {nearest}")
            try:
                self.set_defaults(**{action.dest: _converted(action, value)})
            except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
                self.error(f"{place}: {error}")
            action.required = False
        options = super().parse_args(args, namespace)
        del options.config  # it has been read
        return options

    def _settings(
        self, flags: Mapping[str, argparse.Action], arguments: Sequence[str]
    ) -> Iterator[tuple[str, Any, str]]:
        """Yield (flag, value, place) of the configuration file, then of the environment.

        An empty variable counts as unset. Lists in variables are separated by spaces.
        """
        variables = {}
        if self._other_variables is not None:
            variables = {
                name.removeprefix(VARIABLE_PREFIX): text
                for name, text in os.environ.items()
                if name.startswith(VARIABLE_PREFIX) and text
            }
        before = CommandParser(prog=self.prog, add_help=False)
        before.add_argument("--config", default=variables.pop("CONFIG", None))
        if (path := before.parse_known_args(arguments)[0].config) is not None:
            try:
                with open(path, encoding="utf-8-sig") as file:
                    written = tomllib.loads(file.read())
            except (OSError, ValueError, RecursionError) as error:
                self.error(f"--config {path} cannot be read: {error}")
            for key, value in written.items():
                yield key.replace("_", "-"), value, f"{path}: {key}"
        unknown, in_pod = [], "SERVICE_HOST" in variables
        for variable, text in variables.items():
            name = variable.lower().replace("_", "-")
            if in_pod and _OF_KUBERNETES.match(variable):
                continue
            if name in flags:
                value = text if flags[name].nargs in _SINGLE else text.split()
                yield name, value, VARIABLE_PREFIX + variable
            elif variable not in (self._other_variables or ()):
                unknown.append(VARIABLE_PREFIX + variable)
        if unknown:
            names = ", ".join(sorted(unknown))
            print(f"{self.prog}: warning: unknown variables: {names}", file=sys.stderr)

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, which `--help` prints; exit with 2."""
        line = " ".join(message.split())
        if len(line) > MAX_MESSAGE:
            line = f"{line[:MAX_MESSAGE]} ..."
        self.exit(2, f"{self.prog}: error: {line}\n")


def _converted(action: argparse.Action, value: Any) -> Any:
    """Return a value of a file or a variable as the action reads it from the command line.

    Raises `TypeError`, `ValueError` or `ArgumentTypeError` for what its flag refuses.
    """
    if action.nargs == 0:
        value = _BOOLEANS.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise ValueError("it must be true or false")
        return value
    is_list = action.nargs not in _SINGLE
    if isinstance(value, dict):
        pairs = [f"{key}={number}" for key, number in value.items()]
        value = pairs if is_list else json.dumps(value)
    values = value if isinstance(value, list) else [value]
    is_nested = any(isinstance(each, list | dict) for each in values)
    if not values or is_nested or (isinstance(value, list) and not is_list):
        raise ValueError(f"it must be {'a list of values' if is_list else 'one value'}")
    read: Any = action.type or str
    texts = [str(each) for each in values]
    if any("\0" in text for text in texts):  # which arguments and variables cannot have
        raise ValueError("it has a NUL character")
    converted = [read(text) for text in texts]
    for each in converted:
        if action.choices is not None and each not in action.choices:
            raise ValueError(f"{each!r} is not one of {', '.join(map(str, action.choices))}")
    return converted if is_list else converted[0]


def print_text(text: str) -> None:
    """Print to stdout. A closed pipe (`| head`) is not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack µ, or a path's bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Drop the rest of the output to a closed pipe, which would fail again when Python exits."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def aligned(head: Sequence[str], cells: Sequence[Sequence[str]], text_columns: int) -> list[str]:
    """Return the lines of a table in Markdown that reads as plain text too.

    The first `text_columns` are aligned to the left. A cell is one line, whatever is in it.
    """
    escaped = [[" ".join(cell.replace("|", "\\|").splitlines()) for cell in row] for row in cells]
    # Not all readers of Markdown take a rule of less than three characters.
    widths = [max(3, *map(len, column)) for column in zip(head, *escaped, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < text_columns else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return [line(row) for row in (head, rule, *escaped)]
