"""The flags of `stepgraph serve`: its own, and the fields of the configurations. No torch."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

from ....profiling.command_line import CommandParser
from ...config import EngineConfig
from ...errors import ConfigError
from ...tools.arguments import add_config_flags, flag_type, integer, parse_bytes
from ..service_config import ServiceConfig

__all__ = [
    *("API_KEY_VARIABLE", "ENGINE_DEFAULTS", "PROGRAM", "SERVICE_DEFAULTS"),
    *("in_flags", "make_parser"),
]

API_KEY_VARIABLE = "STEPGRAPH_API_KEY"
PROGRAM = "stepgraph serve"
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_SECONDS = 1e9
ENGINE_DEFAULTS: dict[str, Any] = {"freeze_gc": True}
SERVICE_DEFAULTS: dict[str, Any] = {"switch_interval": 1e-4}
"""Settings of the whole process, which belongs to this command."""
WITHOUT_FLAG = ("prompt_embeds",)
"""What HTTP requests cannot use."""

_DESCRIPTION = """\
Serve a model over HTTP with the API of OpenAI.

%(prog)s demo
%(prog)s path/to/checkpoint --dtype bfloat16 --port 8000 --threads -1
curl localhost:8000/v1/completions -d '{"prompt": "def main(", "max_tokens": 32}'
"""
_EPILOG = """\
SIGTERM and SIGINT complete the requests in progress for up to --drain-timeout seconds; a second
signal aborts them. Exit status: 0 after that; 143 and 130 if the signal arrives before the model is
loaded; 1 if the model cannot be loaded, the address cannot be used or the engine fails; 2 for a
wrong command line or configuration. See docs/serving.md
"""

_FLAGS = {
    field.name: f"--{field.name.replace('_', '-')}"
    for kind in (EngineConfig, ServiceConfig)
    for field in dataclasses.fields(kind)
    if "_" in field.name  # other names are also words
} | {
    **{"model_names": "--served-model-name", "api_keys": "--api-key"},
    **{"tool_parser": "--tool-parser", "reasoning_parser": "--reasoning-parser"},
}
_CALL = re.compile(r"(?:Engine|Service)Config\((\w+=[^()]*)\)")
_NAME = re.compile(
    rf"(?:(?:Engine|Service)Config\.|(?<![\w.'\"/-]))({'|'.join(_FLAGS)})"
    r"(?:=(True|False)\b(?: in (?:its|the) EngineConfig)?|(?![\w'\"/]))"
)


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        type=_non_empty,
        help="checkpoint directory, hub id, preset:NAME (random weights) or demo",
    )
    http = parser.add_argument_group("HTTP")
    http.add_argument(
        "--host",
        type=_non_empty,
        default="127.0.0.1",
        help="address to listen on, 0.0.0.0 for all (default: %(default)s)",
    )
    http.add_argument(
        "--port",
        type=integer(0, 65535),
        default=8000,
        metavar="N",
        help="TCP port, 0 for a free one (default: %(default)s)",
    )
    http.add_argument(
        "--uds", type=_non_empty, metavar="PATH", help="listen on a unix socket instead"
    )
    http.add_argument(
        "--api-key",
        nargs="+",
        type=_non_empty,
        metavar="KEY",
        help=f"keys that requests must present (default: {API_KEY_VARIABLE}; without it, none)",
    )
    http.add_argument(
        "--served-model-name",
        nargs="+",
        type=_non_empty,
        metavar="NAME",
        help="names that requests may give as model (default: MODEL as given here)",
    )
    http.add_argument(
        "--max-body-bytes",
        type=flag_type(parse_bytes, "a size such as 4MB"),
        default=4 << 20,
        metavar="SIZE",
        help="maximum size of the body of a request (default: 4MiB)",
    )
    http.add_argument(
        "--allow-origin",
        nargs="+",
        default=(),
        metavar="ORIGIN",
        help="origins whose web pages may call the service (CORS; default: none)",
    )
    http.add_argument(
        "--tool-parser",
        metavar="NAME",
        help="find tool calls in chats: hermes (also Qwen), llama3_json, or of an entry point",
    )
    http.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="separate reasoning from answers in chats: think, or of an entry point",
    )
    http.add_argument(
        "--vllm-metric-names",
        action="store_true",
        help="repeat metrics under vLLM's names, for its dashboards",
    )
    http.add_argument(
        "--trace",
        action="store_true",
        help="make OpenTelemetry spans; run the command with opentelemetry-instrument",
    )
    http.add_argument("--ssl-certfile", metavar="FILE", help="certificate, for TLS")
    http.add_argument("--ssl-keyfile", metavar="FILE", help="private key of the certificate")
    http.add_argument(
        "--drain-timeout",
        type=flag_type(_seconds, "a number of seconds, 0 to 10^9"),
        default=30.0,
        metavar="SECONDS",
        help="time for requests in progress after SIGTERM (default: %(default)g)",
    )
    log = parser.add_argument_group("log", "Lines on stderr.")
    log.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="least severe messages that are shown (default: %(default)s)",
    )
    log.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a line for each request (default: yes)",
    )
    add_config_flags(
        parser.add_argument_group("service", "Fields of ServiceConfig."),
        ServiceConfig,
        defaults=SERVICE_DEFAULTS,
    )
    add_config_flags(
        parser.add_argument_group("engine", "Fields of EngineConfig."),
        EngineConfig,
        defaults=ENGINE_DEFAULTS,
        without=WITHOUT_FLAG,
    )
    return parser


def _non_empty(text: str) -> str:
    """Refuse what an unset variable of a shell gives: an empty host would be every address."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError
    return seconds


def in_flags(error: Exception) -> str:
    """Return the message of an error with flags of `stepgraph serve` for fields of configurations.

    `max_num_seqs must be` becomes `--max-num-seqs must be`, `prefix_cache=False` becomes
    `--no-prefix-cache`.
    """
    message = _NAME.sub(_flag_of, _CALL.sub(r"\1", str(error)))
    if isinstance(error, ConfigError) and error.flag is not None and error.flag not in message:
        return f"{error.flag}: {message}"
    return message


def _flag_of(found: re.Match[str]) -> str:
    flag = _FLAGS[found[1]]
    return flag.replace("--", "--no-", 1) if found[2] == "False" else flag
