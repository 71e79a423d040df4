"""The flags of `stepgraph bench` and `stepgraph explain`: one table, and which of them combine.

Every error is one line: what was given, what is allowed, what to do.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...profiling.atomic_write import WriteError, check_writable
from ...profiling.attribution import SUFFIX as KERNELS_SUFFIX
from ...profiling.attribution import NamesFileError
from ...profiling.command_line import CommandParser
from ...profiling.ranges import NvtxMissingError
from ...profiling.trace import SUFFIX as TRACE_SUFFIX
from ...profiling.trace import TraceError
from ..arguments import described_fields
from ..config import EngineConfig
from ..errors import ConfigError, MemoryBudgetError, StepgraphError, StepPreparationError
from ..tools.arguments import MODEL_HELP, flag_settings, flag_type, integer
from .peer_runner import RUNTIMES
from .peers import PeerSpec, peer_spec

PROGRAM = "stepgraph bench"
"""What usage and errors begin with."""
REPORTED_ERRORS = (
    *(StepgraphError, MemoryBudgetError, StepPreparationError),
    *(NamesFileError, NvtxMissingError, TraceError, WriteError),
)
"""Errors that a command prints as one line; any other is a defect and keeps its traceback."""
MODES = ("eager", "compile", "graph")
MODEL_FLAGS = ("model", "device", "dtype", "weight-dtype", "activation-dtype", "kv-dtype")

_DESCRIPTION = """\
Measure how fast a model decodes on this machine, and how far that is from its memory bandwidth.

%(prog)s                              the demo model, in the fastest mode of the device
%(prog)s --model preset:smollm2-135m --batch-size 1 8 --input-len 128 1024
%(prog)s --baseline compiled          compare with transformers, same weights
%(prog)s --compare old.json new.json  compare two files that --output-json wrote
%(prog)s --html report.html           a report with plots, for a browser
%(prog)s --profile torch              a trace of some steps, for Perfetto
%(prog)s --profile nsys               print the commands of nsys (| sh runs them)
%(prog)s --speculate suffix:7         speculative decoding against plain decoding, in turns;
                                             its own flags: --speculate suffix --help
"""
_EPILOG = """\
scenarios:
  steady      decode steps of a whole batch
  serve       requests arrive at random: latency, goodput and refusals against the rate

Results go to stdout, progress and warnings to stderr. Each combination of the lists is a separate
case or engine. Exit status: 0; 1 if something cannot be measured, has wrong tokens, or is above
--fail-above; 2 for a wrong command line or configuration; 130 after an interrupt, which keeps the
results measured so far. docs/benchmarking.md explains all columns.
"""
_MAX_STEADY_SECONDS = 10.0
"""For the repetitions of a case in one mode, unless their number is given."""


def print_error(error: object, name: str | None = None, *, program: str = PROGRAM) -> int:
    """Print an error to stderr: its details first, its message as the last line.

    Return the exit status: 2, as argparse, for a wrong configuration.

    Args:
        error: the error, or its message.
        name: what cannot be measured, such as a model.
        program: that the line begins with.
    """
    message, *details = str(error).splitlines() or [type(error).__name__]
    about = "" if name is None else f"{name}: "
    print(*details, f"{program}: error: {about}{message}", sep="\n", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def number(what: str, *, at_least: float = 0.0) -> Callable[[str], float]:
    """Return a flag type: a finite number that is positive and at least `at_least`."""

    def read(text: str) -> float:
        value = float(text)
        if not (0 < value < math.inf and value >= at_least):
            raise ValueError(value)
        return value

    return flag_type(read, what)


_UNUSED: Final = object()


class Flag(NamedTuple):
    """A flag of the benchmark."""

    help: str
    steady: Any = None
    """The default in this scenario, or `_UNUSED`: the flag is refused there."""
    serve: Any = None
    settings: Mapping[str, Any] = {}
    """Further arguments of `add_argument`."""


_LIST: dict[str, Any] = {"nargs": "+"}
_SERVE_MS = {"type": number("a positive number of milliseconds"), "metavar": "MS"}
_DESCRIBED = described_fields(EngineConfig)


def _field(
    name: str, default: Any = "auto", note: str | None = None, *, many: bool = True, **changes: Any
) -> Flag:
    """Return the flag of a field of `EngineConfig`, whose first sentence describes it.

    Args:
        name: of the field.
        default: value without the flag.
        note: the default in words.
        many: whether the flag has a list of values, each of them another case.
        changes: of the fields of the `Flag`.
    """
    text = _DESCRIBED[name].partition(". ")[0].removesuffix(".").replace("%", "%%")
    value = [default] if many and default is not None else default
    settings = (_LIST if many else {}) | flag_settings(EngineConfig, name)
    flag = Flag(f"{text} (default: {note or default})", value, value, settings)
    return flag._replace(**changes)


FLAGS: dict[str, dict[str, Flag]] = {
    "model and engine": {
        "model": Flag(
            f"{MODEL_HELP} (default: demo)",
            *(["demo"], ["demo"], _LIST),
        ),
        "device": _field("device", many=False),
        "dtype": _field("dtype"),
        "weight-dtype": _field("weight_dtype"),
        "activation-dtype": _field("activation_dtype"),
        "kv-dtype": _field("kv_dtype"),
        "mode": _field(
            "mode", None, "the fastest of the device", settings=_LIST | {"choices": MODES}
        ),
        "kernels": _field("kernels"),
        "model-impl": _field("model_impl"),
        "prefill-chunk": _field("prefill_chunk", EngineConfig().prefill_chunk, many=False),
        "threads": _field(
            "threads",
            None,
            "a thread per core; serve: -1, all cores but one, which the event loop gets",
            many=False,
            serve=-1,
        ),
        "tensor-parallel": _field(
            "tensor_parallel", None, "1; several numbers are measured in turn", serve=_UNUSED
        ),
    },
    "measurement": {
        "scenario": Flag(
            "scenario to measure, see below (default: steady)",
            *("steady", "serve", {"choices": ("steady", "serve")}),
        ),
        "batch-size": Flag(
            "rows: requests that decode together (default: 1 8; serve 8)",
            *([1, 8], [8], _LIST | {"type": integer(1)}),
        ),
        "input-len": Flag(
            "tokens per prompt (default: 128 1024; serve 128)",
            *([128, 1024], [128], _LIST | {"type": integer(1)}),
        ),
        "output-len": Flag(
            "output tokens per request (default: 64; serve 32)",
            # Prefill samples the first token, a step the second.
            *([64], [32], _LIST | {"type": integer(2)}),
        ),
        "num-warmup": Flag(
            "warm-up runs per case, not counted (default: 1)", 1, _UNUSED, {"type": integer(0)}
        ),
        "num-iters": Flag(
            "repetitions per case, interleaved with other modes and runtimes; 5 or more for"
            " --compare (default: 3, fewer if they take over 10 s)",
            *(3, _UNUSED, {"type": integer(1)}),
        ),
        "neighbours": Flag(
            "numbers of busy processes on the same processors (default: 0)",
            *([0], _UNUSED, _LIST | {"type": integer(0, 256), "metavar": "PROCESSES"}),
        ),
        "peer": Flag(
            f"run the same cases, interleaved, with other runtimes ({', '.join(RUNTIMES)}), each in"
            " the Python that has it installed, and report the speedup of a step",
            *((), _UNUSED, _LIST | {"type": peer_spec, "metavar": "NAME[=PYTHON]"}),
        ),
        "check": Flag(
            "after timing a case, score its tokens with the plain PyTorch reference on the same"
            " device; a token far below the reference's best one fails the case, and the exit"
            " status is 1 (default: on CUDA; --no-check: never)",
            *(None, _UNUSED, {"action": argparse.BooleanOptionalAction}),
        ),
        "baseline": Flag(
            "--peer transformers: `generate` with a static cache, and the share of equal tokens;"
            " compiled: also on a CPU, not only on CUDA (needs the extra `baseline`)",
            *(None, _UNUSED, {"choices": ("transformers", "compiled")}),
        ),
        "seed": _field("seed", 0, many=False),
    },
    "serve": {
        "max-itl-ms": Flag(
            "latency budgets of mixed steps, prefill and decode (default: none)",
            *(_UNUSED, None, _LIST | _SERVE_MS),
        ),
        "rates": Flag(
            "rates of arrivals, as fractions of the measured capacity (default: 0.2 0.5 0.7 1 1.5"
            " 2)",
            _UNUSED,
            [0.2, 0.5, 0.7, 1.0, 1.5, 2.0],
            _LIST | {"type": number("a positive number"), "metavar": "FRACTION"},
        ),
        "duration": Flag(
            "seconds over which requests arrive, for each rate (default: 20)",
            *(_UNUSED, 20.0),
            {"type": number("a positive number of seconds"), "metavar": "SECONDS"},
        ),
        "slo-ttft": Flag(
            "objective for the first token, from the scheduled arrival, and deadline of requests"
            " (default: four times the p90 of the closed loop)",
            *(_UNUSED, None, _SERVE_MS),
        ),
        "slo-itl": Flag(
            "objective for every gap between tokens of a request (default: four times the p99 of"
            " the closed loop)",
            *(_UNUSED, None, _SERVE_MS),
        ),
    },
    "results": {
        "verbose": Flag(
            "also print the memory plan, the start of each engine and all columns",
            *(False, False, {"action": "store_true"}),
        ),
        "output-json": Flag(
            "write all results to this file as JSON, after each case",
            settings={"type": Path, "metavar": "FILE"},
        ),
        "html": Flag(
            "write a report with plots to this file, one HTML page; if its name ends in .svg, the"
            " plots of the first case as an image",
            settings={"type": Path, "metavar": "FILE"},
        ),
        "from-json": Flag(
            "for --html: report the results in this file of --output-json, without a measurement",
            settings={"type": Path, "metavar": "FILE"},
        ),
        "compare": Flag(
            "compare two files of --output-json, case by case, without a measurement",
            serve=_UNUSED,
            settings={"type": Path, "nargs": 2, "metavar": ("OLD.json", "NEW.json")},
        ),
        "fail-above": Flag(
            "for --compare: exit with status 1 if a ratio new / old is above this, e.g. 1.05, or if"
            " no case matches",
            serve=_UNUSED,
            settings={
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
            *("none", _UNUSED, {"choices": ("none", "nsys", "torch")}),
        ),
        "profile-steps": Flag(
            "steps of the whole batch to profile, after a quarter of the run (default: 16)",
            # A trace of 16 steps opens at once, and their mean hardly changes with more.
            *(16, _UNUSED, {"type": integer(1), "metavar": "STEPS"}),
        ),
        "profile-output": Flag(
            "the profile is NAME.trace.json.gz (torch), or NAME.nsys-rep and NAME.sqlite with"
            " NAME.kernels.json (nsys); existing files are replaced (default: stepgraph-profile)",
            *(Path("stepgraph-profile"), _UNUSED, {"type": Path, "metavar": "NAME"}),
        ),
        "graph-trace": Flag(
            "how nsys traces a captured step: graph, as a whole; node, every kernel, which changes"
            " its time (default: graph)",
            *("graph", _UNUSED, {"choices": ("graph", "node")}),
        ),
    },
}
_ALL = {name: flag for flags in FLAGS.values() for name, flag in flags.items()}
_PROFILE_DEFAULTS = {"batch-size": [1], "input-len": [1024], "num-iters": 1}
"""Of steady with `--profile`."""


def add_flags(parser: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add flags by name, with their defaults of steady; `changes` override their settings."""
    for name in names:
        flag = _ALL[name]
        default = {"help": flag.help, "default": flag.steady}
        parser.add_argument(f"--{name}", **default | dict(flag.settings) | changes)


def engine_configs(
    options: argparse.Namespace, modes: Sequence[str], ranks: Sequence[int] | None, **shared: Any
) -> Iterator[tuple[str, list[EngineConfig]]]:
    """Yield each model with its dtypes, and a configuration for each mode, kernels and so on.

    `ranks` are sizes of groups, one rank if None; `shared` are fields of all configurations. Raises
    ConfigError for a value that is out of range.
    """
    points = list(itertools.product(modes, options.kernels, options.model_impl, ranks or [1]))
    of_point = ("mode", "kernels", "model_impl", "tensor_parallel")
    of_model = ("dtype", "weight_dtype", "activation_dtype", "kv_dtype")
    for model, *stored in itertools.product(options.model, *(vars(options)[n] for n in of_model)):
        shared |= zip(of_model, stored, strict=True)
        yield model, [EngineConfig(**dict(zip(of_point, p, strict=True)), **shared) for p in points]


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
    defaults = {name: getattr(flag, scenario) for name, flag in _ALL.items()}
    accepted = {name for name, default in defaults.items() if default is not _UNUSED}
    what = f"--scenario {scenario}"
    if "fail-above" in given and not compared:
        raise ValueError("--fail-above has no effect without --compare")
    if "from-json" in given and "html" not in given:
        raise ValueError("--from-json has no effect without --html")
    if "html" in given and scenario != "steady":
        raise ValueError(
            f"--html draws the steps of --scenario steady, and {what} has none: use --output-json"
        )
    if compared:
        accepted, what = {"compare", "fail-above"}, "--compare"
    elif "from-json" in given:
        accepted, what = {"from-json", "html"}, "--from-json"
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
    for name, default in (defaults | (_PROFILE_DEFAULTS if profiled else {})).items():
        value = given.get(name, default)
        if isinstance(value, list) and name != "compare":  # a repeated value is one case
            value = list(dict.fromkeys(value))
        setattr(options, name.replace("-", "_"), None if value is _UNUSED else value)
    options.profile = given.get("profile", "none")
    if scenario == "steady" and options.baseline is not None:
        options.peer = [*options.peer, PeerSpec("transformers", sys.executable)]
    for path in filter(None, (options.output_json, options.html)):
        check_writable(path)
    if profiled:
        _check_profile(options, given)
    return options


def _check_profile(options: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Check that the command line has one case, and add the steps and the files of its profile."""
    if options.peer:
        other = "baseline" if "baseline" in given else "peer"
        raise ValueError(f"--{other} cannot go with --profile: a profiled run is slower")
    for name, values in vars(options).items():
        if isinstance(values, list) and len(values) > 1:
            listed = f"--{name.replace('_', '-')} has {len(values)} values"
            raise ValueError(f"a profile is of one case: {listed} ({' '.join(map(str, values))})")
    if options.num_iters != 1:
        raise ValueError(f"a profile is of one repetition: --num-iters is {options.num_iters}")
    steps = options.output_len[0] - 1
    first = steps // 4  # the first ones have cold caches
    options.profile_steps = range(first, min(first + options.profile_steps, steps))
    name = options.profile_output
    options.trace_path = Path(f"{name}.trace{TRACE_SUFFIX}")
    options.kernels_path = Path(f"{name}{KERNELS_SUFFIX}")
    of_nsys = [Path(f"{name}.{end}") for end in ("nsys-rep", "sqlite")]
    files = of_nsys if options.profile == "nsys" else [options.trace_path]
    for path in (*files, options.kernels_path):
        check_writable(path)
