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
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

INTERRUPTED = 130
"""Exit status after SIGINT: 128 + 2, as in a shell."""


CONFIG_FLAG = "--config"
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
        prefix: str | None = None,
        other_variables: Collection[str] = (),
        **settings: Any,
    ) -> None:
        """Make a parser.

        Args:
            config_file: whether `--config FILE` names a TOML file with values of flags.
            prefix: begins the environment variables that have values of flags, such as
                `STEPGRAPH_`; None: the environment is not read. Variables replace values of the
                file, and the command line replaces both.
            other_variables: known variables with this prefix; others are warned about.
            settings: arguments of `ArgumentParser`.
        """
        super().__init__(**{"allow_abbrev": False, **settings})
        self._prefix = prefix
        self._other_variables = other_variables
        self._reads_config = config_file
        if config_file:
            text = "TOML file whose keys are flags, such as max-num-seqs = 8"
            if prefix is not None:
                example = f"{prefix}MAX_NUM_SEQS"
                text += f"; variables such as {example}, and flags given here, replace its values"
            self.add_argument(CONFIG_FLAG, metavar="FILE", help=text)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line, with defaults of the environment and the configuration file."""
        if self._reads_config:
            self._read_settings(sys.argv[1:] if args is None else args)
        options = super().parse_args(args, namespace)
        if self._reads_config:
            del options.config  # it has been read
        return options

    def _read_settings(self, arguments: Sequence[str]) -> None:
        """Make the values of the configuration file and of the environment the defaults."""
        flags = {
            next(iter(action.option_strings), action.dest).lstrip("-"): action
            for action in self._actions
            if action.dest not in ("help", "config")
        }
        given = self._variables(flags)
        before = CommandParser(prog=self.prog, add_help=False)
        before.add_argument(CONFIG_FLAG, default=given.pop("config", (None,))[0])
        file = before.parse_known_args(arguments)[0].config
        if file is not None:
            written = {
                key.replace("_", "-"): (value, f"{file}: {key}")
                for key, value in self._read_file(file).items()
            }
            given = {**written, **given}
        for name, (value, place) in given.items():
            if (action := flags.get(name)) is None:
                (nearest,) = difflib.get_close_matches(name, flags, 1, 0)
                self.error(f"{place} is not a flag of this command; the nearest is {nearest}")
            try:
                self.set_defaults(**{action.dest: _converted(action, value)})
            except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
                self.error(f"{place}: {error}")
            action.required = False

    def _read_file(self, path: str) -> dict[str, Any]:
        try:
            with open(path, "rb") as file:
                return tomllib.load(file)
        except OSError as error:
            self.error(f"{CONFIG_FLAG} {path} cannot be read: {error.strerror or error}")
        except ValueError as error:  # also of UTF-8
            self.error(f"{CONFIG_FLAG} {path} is not valid TOML: {error}")

    def _variables(self, flags: Mapping[str, argparse.Action]) -> dict[str, tuple[Any, str]]:
        """Return values and variables by flag, and warn about unknown variables.

        An empty variable counts as unset. Lists are separated by spaces.
        """
        found, unknown, prefix = dict[str, tuple[Any, str]](), [], self._prefix
        if prefix is None:
            return found
        in_pod = f"{prefix}SERVICE_HOST" in os.environ
        for variable, text in os.environ.items():
            rest = variable.removeprefix(prefix)
            if rest == variable or not text or (in_pod and _OF_KUBERNETES.match(rest)):
                continue
            name = rest.lower().replace("_", "-")
            if name in flags or name == "config":
                is_list = name in flags and flags[name].nargs not in _SINGLE
                found[name] = text.split() if is_list else text, variable
            elif variable not in self._other_variables:
                unknown.append(variable)
        if unknown:
            names = ", ".join(sorted(unknown))
            print(f"{self.prog}: warning: unknown variables: {names}", file=sys.stderr)
        return found

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
    if not values or (isinstance(value, list) and not is_list):
        raise ValueError(f"it must be {'a list of values' if is_list else 'one value'}")
    read: Any = action.type or str
    converted = [read(each if isinstance(each, str) else str(each)) for each in values]
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
