"""The flags of `stepgraph bench` and `stepgraph explain`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...profiling.atomic_write import WriteError
from ...profiling.command_line import CommandParser
from ..config import MAX_RANKS, MAX_SEED, EngineConfig
from .console import program_name
from .flag_types import file_path, integer, number, step_range
from .load.arrivals import ARRIVALS
from .runtimes.peer_runner import MODULES
from .runtimes.peers import SERVER_MODULES, peer_spec
from .validate_args import SCENARIO_FLAGS, validate_args

__all__ = ["MODES", "add_flags", "parse_arguments"]

MODES = ("eager", "compile", "graph")
MODEL_FLAGS = ("model", "device", "dtype", "weight-dtype", "kv-dtype")
ENGINE_FLAGS = ("mode", "kernels", "model-impl", "prefill-chunk")

_DESCRIPTION = """\
Measure how fast a model decodes on this machine, and how far that is from its memory bandwidth.

%(prog)s                                       the demo model, every mode of the device
%(prog)s --model preset:smollm2-135m --batch-size 1 8 --input-len 128 1024
%(prog)s --baseline transformers               compare with transformers, same weights
%(prog)s --output-json new.json --compare old.json --fail-above 1.05
%(prog)s --compare old.json new.json           compare two files without a measurement
%(prog)s --profile torch                       a trace of some steps, for Perfetto
%(prog)s --profile nsys                        print the nsys command; run it if nsys is installed
%(prog)s --speculate suffix:7                  speculative decoding against plain decoding, in
                                               turns; its own flags: --speculate suffix --help
"""
_EPILOG = """\
scenarios:
  steady        decode steps of a whole batch
  interference  decode steps while a long prompt arrives every 10 steps
  neighbours    decode steps with busy processes on the same processors, also of other runtimes
  serve         requests arrive at random: latency, goodput and refusals against the rate, of the
                AsyncEngine, of stepgraph serve and of servers of other runtimes
  host          host time of plan, launch and commit, with a model that computes nothing

The table goes to stdout (Markdown unless stdout is a terminal), progress to stderr. Each
combination of the lists is a separate case or engine. Exit status: 0; 1 if something cannot be
measured, has wrong tokens, or is above --fail-above; 2 for a wrong command line or configuration;
130 after an interrupt, which keeps the results measured so far. docs/benchmarking.md explains all
columns.
"""


def _flag(text: str, **settings: Any) -> dict[str, Any]:
    return {"help": text, **settings}


_DTYPE = {"nargs": "+", "default": ["auto"]}
_FLAGS = {
    "model": _flag(
        "checkpoint directory, hub id, preset:NAME (random weights) or demo (default: demo)",
        nargs="+",
        default=["demo"],
    ),
    "device": _flag("cpu, cuda, cuda:1 ... (default: auto)", default="auto"),
    "dtype": _flag(
        "dtype of weights and activations (default: auto, as stored)",
        choices=("auto", "float32", "bfloat16", "float16"),
        **_DTYPE,
    ),
    "weight-dtype": _flag(
        "dtype of the weights of linear layers (default: auto, as --dtype)",
        choices=("auto", "int8", "fp8"),
        **_DTYPE,
    ),
    "kv-dtype": _flag(
        "dtype of the cache (default: auto, as --dtype)", choices=("auto", "int8", "fp8"), **_DTYPE
    ),
    "mode": _flag(
        "execution mode of steps (default: steady: all modes of the device, interleaved; otherwise"
        " the fastest)",
        nargs="+",
        choices=MODES,
    ),
    "kernels": _flag(
        "native: C++ operators on a CPU, Triton kernels on CUDA; torch: plain PyTorch around the"
        " paged attention operation; auto: native, but torch with --mode eager (default: auto)",
        nargs="+",
        default=["auto"],
        choices=("auto", "native", "torch"),
    ),
    "model-impl": _flag(
        "native: layers of our model families; transformers: layers of the package transformers,"
        " compiled around our cache; auto: native if the family exists (default: auto)",
        nargs="+",
        default=["auto"],
        choices=("auto", "native", "transformers"),
    ),
    "prefill-chunk": _flag(
        "maximum prompt tokens per step (default: %(default)s)",
        type=integer(1),
        default=EngineConfig().prefill_chunk,
        metavar="TOKENS",
    ),
    "steps-per-launch": _flag(
        "decode steps per launch, for steady; the table shows the time of a launch divided by this"
        " number (default: %(default)s)",
        type=integer(1),
        default=EngineConfig().steps_per_launch,
        metavar="STEPS",
    ),
    "scenario": _flag(
        "scenario to measure, see below (default: steady)",
        default="steady",
        choices=tuple(SCENARIO_FLAGS),
    ),
    "batch-size": _flag(
        "rows: requests that decode together (default: 1 8; others 8; neighbours: 1"
        " row after 128 tokens and 8 after 1024)",
        nargs="+",
        type=integer(1),
    ),
    "input-len": _flag(
        "tokens per prompt (default: 128 1024; interference 1024)",
        nargs="+",
        type=integer(1),
    ),
    "output-len": _flag(
        "output tokens per request (default: 64; serve 32)",
        nargs="+",
        type=integer(2),  # prefill samples the first token, a decode step the second
    ),
    "num-warmup": _flag("warm-up runs per case, not counted (default: 1)", type=integer(0)),
    "num-iters": _flag(
        "repetitions per case, interleaved with other modes; 5 or more for --compare"
        " (default: 3, with steady fewer if they take over 10 s; neighbours: 6)",
        type=integer(1),
    ),
    "num-steps": _flag(
        "steps of interference (default: 200) and host (default: 400), and of"
        " neighbours in each round (default: 32)",
        type=integer(30),  # enough to see a distribution
    ),
    "max-itl-ms": _flag(
        "latency budgets of mixed steps (prefill and decode) for interference, which also runs"
        " without one, and serve (default: interference, eight times its decode step; serve, none)",
        nargs="+",
        type=number("a positive number of milliseconds"),
        metavar="MS",
    ),
    "neighbours": _flag(
        "numbers of busy processes, for neighbours (default: 0 1 2)",
        nargs="+",
        type=integer(0, 256),
        metavar="PROCESSES",
    ),
    "peer": _flag(
        f"other CPU runtimes for neighbours ({', '.join(MODULES)}) or serve"
        f" ({', '.join(SERVER_MODULES)}), each with the Python that has it installed (default: all"
        " runtimes of this Python)",
        nargs="+",
        type=peer_spec,
        metavar="NAME[=PYTHON]",
    ),
    "arrivals": _flag(
        "arrivals of serve: poisson, or burst, eight requests at once (default: poisson)",
        nargs="+",
        choices=ARRIVALS,
    ),
    "rates": _flag(
        "rates of serve, as fractions of the measured capacity of each service (default: 0.2 0.5"
        " 0.7 1 1.5 2)",
        nargs="+",
        type=number("a positive number"),
        metavar="FRACTION",
    ),
    "duration": _flag(
        "seconds over which requests arrive, for each rate of serve (default: 20)",
        type=number("a positive number of seconds"),
        metavar="SECONDS",
    ),
    "slo-ttft": _flag(
        "objective of serve for the first token, from the scheduled arrival; our services get it as"
        " deadline (default: four times the p90 of the closed loop of the engine)",
        type=number("a positive number of milliseconds"),
        metavar="MS",
    ),
    "slo-itl": _flag(
        "objective of serve for every gap between tokens of a request (default: four times the p99"
        " of the closed loop of the engine)",
        type=number("a positive number of milliseconds"),
        metavar="MS",
    ),
    "http": _flag(
        "whether serve also measures `stepgraph serve`, in child processes (default: yes)",
        action=argparse.BooleanOptionalAction,
    ),
    "threads": _flag(
        "threads of our engines in serve, as `EngineConfig.threads` (default: -1, all cores but"
        " one, which the event loop gets)",
        type=integer(-1024, 1024),
    ),
    "check": _flag(
        "after timing a case, score its tokens with the plain PyTorch reference on the same device;"
        " a token far below the reference's best one fails the case, and the exit status is 1"
        " (default: on CUDA; --no-check: never)",
        action=argparse.BooleanOptionalAction,
    ),
    "baseline": _flag(
        "run the same cases, interleaved, in transformers, and report the speedup of a step and the"
        " share of equal tokens: transformers, continuous batching and generate with a static"
        " cache; compiled, only the latter, compiled on a CPU, too (needs the extra `baseline`)",
        choices=("transformers", "compiled"),
    ),
    "compare": _flag(
        "OLD.json: compare this run of steady with the --output-json of an earlier one. OLD.json"
        " NEW.json: compare two files without a measurement",
        nargs="+",
        type=file_path,
        metavar="FILE",
    ),
    "fail-above": _flag(
        "for --compare: exit with status 1 if a ratio new / old is above this, e.g. 1.05, or if no"
        " case matches",
        type=number("a ratio of at least 1, where 1 is as fast as before", at_least=1.0),
        metavar="RATIO",
    ),
    "profile": _flag(
        "profile some decode steps of one case (by default one row after 1024 tokens in the"
        " fastest mode): nsys prints the command, and runs it if nsys is on the PATH; torch writes"
        " a trace for Perfetto, and prints the time of each operation (default: %(default)s)",
        default="none",
        choices=("none", "nsys", "torch"),
    ),
    "profile-steps": _flag(
        "steps A to B - 1 of the whole batch, counted from 0 (default: 16 steps, after a quarter"
        " of the run)",
        type=step_range,
        metavar="A:B",
    ),
    "profile-output": _flag(
        "the profile is NAME.trace.json.gz (torch), or NAME.nsys-rep and NAME.sqlite with"
        " NAME.kernels.json (nsys); existing files are replaced (default: stepgraph-profile)",
        metavar="NAME",
    ),
    "graph-trace": _flag(
        "how nsys traces a captured step: graph, as a whole; node, every kernel, which changes its"
        " time (default: graph)",
        choices=("graph", "node"),
    ),
    "output-json": _flag(
        "write all results to this file as JSON, after each case",
        type=file_path,
        metavar="FILE",
    ),
    "seed": _flag("seed of prompts and of preset weights", type=integer(0, MAX_SEED), default=0),
    "tensor-parallel": _flag(
        "ranks of the engine (docs/tensor-parallel.md), which share the cores of a CPU; several"
        " numbers are measured in turn",
        nargs="+",
        type=integer(1, MAX_RANKS),
        metavar="RANKS",
    ),
}
_GROUPS = {
    "model and engine": (*MODEL_FLAGS, *ENGINE_FLAGS, "steps-per-launch", "tensor-parallel"),
    "measurement": (
        *("scenario", "batch-size", "input-len", "output-len", "num-warmup", "num-iters"),
        *("num-steps", "max-itl-ms", "neighbours", "peer", "check", "baseline", "seed"),
    ),
    "serve": (*("arrivals", "rates", "duration", "slo-ttft", "slo-itl", "http", "threads"),),
    "results": ("output-json", "compare", "fail-above"),
    "profile": ("profile", "profile-steps", "profile-output", "graph-trace"),
}


def add_flags(parser: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add flags by name; `changes` override their settings."""
    for name in names:
        parser.add_argument(f"--{name}", **_FLAGS[name] | changes)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the validated command line of the benchmark; exits with 2 and one line if it is wrong.

    Args:
        arguments: None: the arguments of the process.
    """
    parser = CommandParser(
        prog=program_name(),
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
    )
    for title, names in _GROUPS.items():
        add_flags(parser.add_argument_group(title), *names)
    options = parser.parse_args(arguments)
    blank = argparse.Namespace(**dict.fromkeys(vars(options)))  # suppresses the defaults
    parsed = vars(parser.parse_args(arguments, blank))
    given = [name for name, value in parsed.items() if value is not None]
    try:
        validate_args(options, given)
    except (ValueError, WriteError) as error:
        parser.error(str(error))
    return options
