"""The command `stepgraph`; `python -m stepgraph` is the same.

Its subcommands load torch when they have checked their arguments.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import __version__
from .profiling.command_line import INTERRUPTED, CommandParser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: the subcommand and its arguments; None: the process's own.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    flags = list(itertools.takewhile(lambda argument: argument.startswith("-"), arguments))
    rest = len(flags) + 1
    command = _parser().parse_args(arguments[:rest]).command
    _, run = COMMANDS[command]
    try:
        return run(arguments[rest:])
    except KeyboardInterrupt:
        print(f"stepgraph {command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _bench(arguments: Sequence[str]) -> int:
    from .runtime.bench import cli

    return cli.main(arguments)


def _chat(arguments: Sequence[str]) -> int:
    from .runtime.tools import chat

    return chat.main(arguments)


def _run(arguments: Sequence[str]) -> int:
    from .runtime.tools import chat

    return chat.run(arguments)


def _serve(arguments: Sequence[str]) -> int:
    from .runtime.service.http import command

    def serve(*options: Any) -> int:
        try:
            from .runtime.service.http import server
        except ModuleNotFoundError as error:
            needed = f'{error.name}: pip install "stepgraph[server]"'
            print(f"stepgraph serve: error: the HTTP service needs {needed}", file=sys.stderr)
            return 1
        return server.serve(*options)

    return command.run(arguments, serve)


def _explain(arguments: Sequence[str]) -> int:
    from .runtime.bench import explain

    return explain.main(arguments)


def _report(arguments: Sequence[str]) -> int:
    from .profiling import report

    return report.main(arguments)


def _build_kernels(arguments: Sequence[str]) -> int:
    from .runtime.tools import build_kernels

    return build_kernels.main(arguments)


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "chat": ("chat with a model in the terminal, or line by line over pipes", _chat),
    "run": ("print the answer to one prompt", _run),
    "bench": ("measure decode steps, or run another scenario", _bench),
    "serve": ("serve a model over HTTP: a page, and the APIs of OpenAI and others", _serve),
    "explain": ("predict the memory or the decode step of a model without loading it", _explain),
    "report": ("report where each step of an nsys profile spent its time", _report),
    "build-kernels": (
        "compile the C++ kernels ahead of time, for container images",
        _build_kernels,
    ),
}
"""Name → description and main function; the functions import what they run."""


def _parser() -> CommandParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {description}" for name, (description, _) in COMMANDS.items()]
    parser = CommandParser(
        prog="stepgraph",
        usage="stepgraph [--help] [--version] COMMAND ...",
        description="\n".join(["Low-latency decoding in PyTorch.", "", "commands:", *lines]),
        epilog="stepgraph COMMAND --help lists the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"stepgraph {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
