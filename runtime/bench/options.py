"""The flags of `stepgraph bench` and `stepgraph explain`: one table, and which of them combine.

Every error is one line: what was given, what is allowed, what to do.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...profiling.atomic_write import WriteError, check_writable
from ...profiling.command_line import CommandParser
from ...profiling.kernel_names import SUFFIX as KERNELS_SUFFIX
from ...profiling.trace import SUFFIX as TRACE_SUFFIX
from ..arguments import described_fields
from ..config import EngineConfig
from ..tools.arguments import flag_settings, flag_type, integer
from .console import PROGRAM
from .peer_runner import RUNTIMES
from .peers import peer_spec

__all__ = ["MODEL_FLAGS", "MODES", "add_flags", "kernels_path", "number"]
__all__ += ["parse_arguments", "trace_path"]

MODES = ("eager", "compile", "graph")
SCENARIOS = ("steady", "neighbours", "serve")
MODEL_FLAGS = ("model", "device", "dtype", "weight-dtype", "kv-dtype")

_DESCRIPTION = """\
Measure how fast a model decodes on this machine, and how far that is from its memory bandwidth.

%(prog)s                              the demo model, in the fastest mode of the device
%(prog)s --model preset:smollm2-135m --batch-size 1 8 --input-len 128 1024
%(prog)s --baseline compiled          compare with transformers, same weights
%(prog)s --compare old.json new.json  compare two files that --output-json wrote
%(prog)s --profile torch              a trace of some steps, for Perfetto
%(prog)s --profile nsys               print the commands of nsys (| sh runs them)
%(prog)s --speculate suffix:7         speculative decoding against plain decoding, in turns;
                                             its own flags: --speculate suffix --help
"""
_EPILOG = """\
scenarios:
  steady      decode steps of a whole batch
  neighbours  decode steps with busy processes on the same processors, also of other runtimes
  serve       requests arrive at random: latency, goodput and refusals against the rate

Results go to stdout, progress and warnings to stderr. Each combination of the lists is a separate
case or engine. Exit status: 0; 1 if something cannot be measured, has wrong tokens, or is above
--fail-above; 2 for a wrong command line or configuration; 130 after an interrupt, which keeps the
results measured so far. docs/benchmarking.md explains all columns.
"""
_PROFILE_STEPS = 16
"""A trace of 16 steps opens at once, and their mean hardly changes with more."""
_MAX_STEADY_SECONDS = 10.0
"""For the repetitions of a case in one mode, unless their number is given."""


def number(what: str, *, at_least: float = 0.0) -> Callable[[str], float]:
    """Return a flag type: a finite number that is positive and at least `at_least`."""

    def read(text: str) -> float:
        value = float(text)
        if not (0 < value < math.inf and value >= at_least):
            raise ValueError(value)
        return value

    return flag_type(read, what)


class Flag(NamedTuple):
    """A flag of the benchmark."""

    help: str
    defaults: Mapping[str, Any]
    """By scenario; the flag has no effect in others."""
    settings: Mapping[str, Any] = {}
    """Further arguments of `add_argument`."""


def _engines(default: Any = None, **others: Any) -> dict[str, Any]:
    """Return defaults of a flag of all scenarios."""
    return dict.fromkeys(SCENARIOS, default) | others


_LIST: dict[str, Any] = {"nargs": "+"}
_STEADY = {"steady": None}
_SERVE_MS = {"type": number("a positive number of milliseconds"), "metavar": "MS"}

_DESCRIBED = described_fields(EngineConfig)


def _field(
    name: str,
    default: Any = "auto",
    note: str | None = None,
    *,
    many: bool = True,
    scenarios: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Flag:
    """Return the flag of a field of `EngineConfig`, by default of all scenarios.

    Args:
        name: of the field, whose first sentence describes the flag.
        default: value without the flag.
        note: the default in words.
        many: whether the flag has a list of values, each of them another case.
        scenarios: defaults by scenario, if they differ.
        settings: instead of the field's.
    """
    text = _DESCRIBED[name].partition(". ")[0].removesuffix(".").replace("%", "%%")
    return Flag(
        f"{text} (default: {default if note is None else note})",
        _engines([default] if many and default is not None else default)
        if scenarios is None
        else scenarios,
        (_LIST if many else {}) | flag_settings(EngineConfig, name) | settings,
    )


FLAGS: dict[str, dict[str, Flag]] = {
    "model and engine": {
        "model": Flag(
            "checkpoint directory, hub id, preset:NAME (random weights) or demo (default: demo)",
            _engines(["demo"]),
            _LIST,
        ),
        "device": _field("device", "auto", many=False),
        "dtype": _field("dtype"),
        "weight-dtype": _field("weight_dtype"),
        "kv-dtype": _field("kv_dtype"),
        "mode": _field("mode", None, "the fastest of the device", choices=MODES),
        "kernels": _field("kernels"),
        "model-impl": _field("model_impl"),
        "prefill-chunk": _field("prefill_chunk", EngineConfig().prefill_chunk, many=False),
        "threads": _field(
            "threads",
            None,
            "a thread per core; serve: -1, all cores but one, which the event loop gets",
            many=False,
            scenarios=_engines(serve=-1),
        ),
        "tensor-parallel": _field(
            "tensor_parallel",
            None,
            "1; several numbers are measured in turn",
            scenarios={"steady": None},
        ),
    },
    "measurement": {
        "scenario": Flag(
            "scenario to measure, see below (default: steady)",
            _engines(),
            {"choices": SCENARIOS},
        ),
        "batch-size": Flag(
            "rows: requests that decode together (default: 1 8; serve 8)",
            _engines([1, 8], serve=[8]),
            _LIST | {"type": integer(1)},
        ),
        "input-len": Flag(
            "tokens per prompt (default: 128 1024; serve and neighbours 128)",
            _engines([128], steady=[128, 1024]),
            _LIST | {"type": integer(1)},
        ),
        "output-len": Flag(
            "output tokens per request (default: 64; serve 32)",
            {"steady": [64], "serve": [32]},
            _LIST | {"type": integer(2)},  # prefill samples the first token, a step the second
        ),
        "num-warmup": Flag(
            "warm-up runs per case, not counted (default: 1)",
            {"steady": 1, "neighbours": 1},
            {"type": integer(0)},
        ),
        "num-iters": Flag(
            "repetitions per case, interleaved with other modes; 5 or more for --compare (default:"
            " 3, fewer if they take over 10 s; neighbours: 6)",
            {"steady": 3, "neighbours": 6},
            {"type": integer(1)},
        ),
        "num-steps": Flag(
            "steps of each round of neighbours (default: 32)",
            {"neighbours": 32},
            {"type": integer(30)},  # enough to see a distribution
        ),
        "neighbours": Flag(
            "numbers of busy processes, for neighbours (default: 0 1 2)",
            {"neighbours": [0, 1, 2]},
            _LIST | {"type": integer(0, 256), "metavar": "PROCESSES"},
        ),
        "peer": Flag(
            f"other CPU runtimes for neighbours ({', '.join(RUNTIMES)}), each with the Python that"
            " has it installed",
            {"neighbours": None},
            _LIST | {"type": peer_spec, "metavar": "NAME[=PYTHON]"},
        ),
        "check": Flag(
            "after timing a case, score its tokens with the plain PyTorch reference on the same"
            " device; a token far below the reference's best one fails the case, and the exit"
            " status is 1 (default: on CUDA; --no-check: never)",
            _STEADY,
            {"action": argparse.BooleanOptionalAction},
        ),
        "baseline": Flag(
            "run the same cases, interleaved, with `generate` of transformers and a static cache,"
            " and report the speedup of a step and the share of equal tokens; compiled: also on a"
            " CPU, not only on CUDA (needs the extra `baseline`)",
            _STEADY,
            {"choices": ("transformers", "compiled")},
        ),
        "seed": _field("seed", 0, many=False),
    },
    "serve": {
        "max-itl-ms": Flag(
            "latency budgets of mixed steps, prefill and decode (default: none)",
            {"serve": None},
            _LIST | _SERVE_MS,
        ),
        "rates": Flag(
            "rates of arrivals, as fractions of the measured capacity (default: 0.2 0.5 0.7 1 1.5"
            " 2)",
            {"serve": [0.2, 0.5, 0.7, 1.0, 1.5, 2.0]},
            _LIST | {"type": number("a positive number"), "metavar": "FRACTION"},
        ),
        "duration": Flag(
            "seconds over which requests arrive, for each rate (default: 20)",
            {"serve": 20.0},
            {"type": number("a positive number of seconds"), "metavar": "SECONDS"},
        ),
        "slo-ttft": Flag(
            "objective for the first token, from the scheduled arrival, and deadline of requests"
            " (default: four times the p90 of the closed loop)",
            {"serve": None},
            _SERVE_MS,
        ),
        "slo-itl": Flag(
            "objective for every gap between tokens of a request (default: four times the p99 of"
            " the closed loop)",
            {"serve": None},
            _SERVE_MS,
        ),
    },
    "results": {
        "verbose": Flag(
            "also print the memory plan, the start of each engine and all columns",
            _engines(False),
            {"action": "store_true"},
        ),
        "output-json": Flag(
            "write all results to this file as JSON, after each case",
            _engines(),
            {"type": Path, "metavar": "FILE"},
        ),
        "compare": Flag(
            "compare two files of --output-json, case by case, without a measurement",
            _STEADY,
            {"type": Path, "nargs": 2, "metavar": ("OLD.json", "NEW.json")},
        ),
        "fail-above": Flag(
            "for --compare: exit with status 1 if a ratio new / old is above this, e.g. 1.05, or if"
            " no case matches",
            _STEADY,
            {
                "type": number("a ratio of at least 1, where 1 is as fast as before", at_least=1.0),
                "metavar": "RATIO",
            },
        ),
    },
    "profile": {
        "profile": Flag(
            "profile some decode steps of one case (by default one row after 1024 tokens): nsys"
            " prints the commands to run; torch writes a trace for Perfetto, and prints the time of"
            " each operation (default: none)",
            {"steady": "none"},
            {"choices": ("none", "nsys", "torch")},
        ),
        "profile-steps": Flag(
            "steps of the whole batch to profile, after a quarter of the run (default: 16)",
            {"steady": _PROFILE_STEPS},
            {"type": integer(1), "metavar": "STEPS"},
        ),
        "profile-output": Flag(
            "the profile is NAME.trace.json.gz (torch), or NAME.nsys-rep and NAME.sqlite with"
            " NAME.kernels.json (nsys); existing files are replaced (default: stepgraph-profile)",
            {"steady": Path("stepgraph-profile")},
            {"type": Path, "metavar": "NAME"},
        ),
        "graph-trace": Flag(
            "how nsys traces a captured step: graph, as a whole; node, every kernel, which changes"
            " its time (default: graph)",
            {"steady": "graph"},
            {"choices": ("graph", "node")},
        ),
    },
}
_ALL = {name: flag for flags in FLAGS.values() for name, flag in flags.items()}
_PROFILE_DEFAULTS = {"batch-size": [1], "input-len": [1024], "num-iters": 1}
"""Of steady with `--profile`."""
_ONE_VALUE = (
    *(*MODEL_FLAGS, "mode", "kernels", "model-impl", "tensor-parallel"),
    *("batch-size", "input-len", "output-len"),
)
"""Flags that have one value with `--profile`."""


def add_flags(parser: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add flags by name, with their defaults of steady; `changes` override their settings."""
    for name in names:
        flag = _ALL[name]
        default = {"help": flag.help, "default": flag.defaults["steady"]}
        parser.add_argument(f"--{name}", **default | dict(flag.settings) | changes)


def trace_path(options: argparse.Namespace) -> Path:
    """Return where torch's trace goes."""
    return Path(f"{options.profile_output}.trace{TRACE_SUFFIX}")


def kernels_path(options: argparse.Namespace) -> Path:
    """Return where the names of kernels go, next to the trace."""
    return Path(f"{options.profile_output}{KERNELS_SUFFIX}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked command line of the benchmark; exits with 2 and one line if it is wrong.

    Adds `command`, the whole command line, and `turn_seconds`: of the repetitions of a case in one
    mode, at most.

    Args:
        arguments: None: the arguments of the process.
    """
    parser = CommandParser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
    )
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, flag in flags.items():
            group.add_argument(f"--{name}", help=flag.help, **flag.settings)
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = vars(parser.parse_args(arguments))
    given = {name.replace("_", "-"): value for name, value in parsed.items()}
    try:
        return argparse.Namespace(**vars(_completed(given)), command=[*PROGRAM.split(), *arguments])
    except (ValueError, WriteError) as error:
        parser.error(str(error))


def _completed(given: dict[str, Any]) -> argparse.Namespace:
    """Check that flags combine and files can be written; add the defaults of the scenario.

    Raises:
        ValueError: flags do not combine.
        WriteError: a file cannot be written.
    """
    scenario, compared = given.get("scenario", "steady"), "compare" in given
    profiled = given.get("profile", "none") != "none"
    accepted = {name for name, flag in _ALL.items() if scenario in flag.defaults}
    what = f"--scenario {scenario}"
    if "fail-above" in given and not compared:
        raise ValueError("--fail-above has no effect without --compare")
    if compared:
        accepted, what = {"compare", "fail-above"}, "--compare"
    others = [f"--{name}" for name in given if name not in accepted]
    if others:
        raise ValueError(f"{', '.join(others)}: no effect together with {what}")
    unused = [name for name in given if name in FLAGS["profile"] and name != "profile"]
    if unused and not profiled:
        raise ValueError(f"--{unused[0]} has no effect without --profile")
    if "graph-trace" in given and given.get("profile") != "nsys":
        raise ValueError("--graph-trace has no effect without --profile nsys")
    options = argparse.Namespace(
        turn_seconds=math.inf if "num-iters" in given else _MAX_STEADY_SECONDS
    )
    for name, flag in _ALL.items():
        default = flag.defaults.get(scenario)
        if profiled:
            default = _PROFILE_DEFAULTS.get(name, default)
        value = given.get(name, default)
        if isinstance(value, list) and name != "compare":  # a repeated value is one case
            value = list(dict.fromkeys(value))
        setattr(options, name.replace("-", "_"), value)
    options.scenario, options.profile = scenario, given.get("profile", "none")
    if options.output_json is not None:
        check_writable(options.output_json)
    if profiled:
        _check_profile(options, given)
    return options


def _check_profile(options: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Check that the command line has one case, and fill in the steps and files of the profile."""
    if "baseline" in given:
        raise ValueError("--baseline cannot go with --profile: a profiled run is slower")
    for name in _ONE_VALUE:
        values = getattr(options, name.replace("-", "_"))
        if isinstance(values, list) and len(values) > 1:
            listed = " ".join(map(str, values))
            raise ValueError(
                f"a profile is of one case: --{name} has {len(values)} values ({listed})"
            )
    if options.num_iters != 1:
        raise ValueError(f"a profile is of one repetition: --num-iters is {options.num_iters}")
    steps = options.output_len[0] - 1
    first = steps // 4  # the first ones have cold caches
    options.profile_steps = range(first, min(first + options.profile_steps, steps))
    files = [trace_path(options)]
    if options.profile == "nsys":
        files = [Path(f"{options.profile_output}.{end}") for end in ("nsys-rep", "sqlite")]
    for path in (*files, kernels_path(options)):
        check_writable(path)
