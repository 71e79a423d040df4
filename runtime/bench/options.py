"""The benchmark's command line: its flags, read and checked before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from .compared import COMPARED
from .flag_types import (
    at_least_two,
    file_path,
    gigabytes_per_second,
    memory_size,
    milliseconds,
    natural_number,
    number_of_neighbours,
    number_of_steps,
    positive_integer,
    ratio,
    seed,
)
from .flags_together import FLAGS_OF_SCENARIO, check_files, check_together, fill_in_defaults
from .model_flags import MODES, add_engine_flags, add_model_flags
from .peer_runner import MODULES
from .peers import peer_spec
from .profile_options import add_profile_flags, check_profile
from .program import program_name

__all__ = ["MODES", "parse_arguments"]

_EPILOG = """\
The table goes to stdout (Markdown where that is no terminal), progress to stderr. Each combination
of the lists is a case, or an engine of its own. Exit status: 0; 1 if something cannot be measured
or is above --fail-above; 2 for a wrong command line or configuration; 130 after an interrupt, which
keeps what was measured. What is in the numbers: docs/benchmarking.md
"""


def parse_arguments(
    arguments: Sequence[str] | None = None, description: str | None = None
) -> argparse.Namespace:
    """Return the checked command line; exits with one clear line if it is wrong.

    Args:
        arguments: None: those of the process.
        description: what `--help` begins with.
    """
    parser = _parser(description)
    options = parser.parse_args(arguments)
    blank = argparse.Namespace(**dict.fromkeys(vars(options)))  # keeps defaults out
    given = [
        name
        for name, value in vars(parser.parse_args(arguments, blank)).items()
        if value is not None
    ]
    check_together(parser, options, given)
    fill_in_defaults(options)
    check_files(parser, options)
    check_profile(parser, options, given)
    return options


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=program_name(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
    )
    add_model_flags(parser)
    add_engine_flags(
        parser,
        default_mode="every mode that the device has, taking turns; with other scenarios the"
        " fastest",
    )
    parser.add_argument(
        "--steps-per-launch",
        type=positive_integer,
        default=EngineConfig().steps_per_launch,
        metavar="STEPS",
        help="decode steps that one launch runs, for steady; a step of the table is then a launch"
        " divided by them (default: %(default)s)",
    )
    parser.add_argument(
        "--scenario",
        default="steady",
        choices=tuple(FLAGS_OF_SCENARIO),
        help="steady: decode steps of a whole batch; cache: what the bookkeeping of blocks costs,"
        " for pools of 1,000 and of 1,000,000 blocks (no model runs); host: what plan, launch and"
        " commit cost around a model that does nothing; interference: rows decode while a long"
        " prompt comes every 10 steps; churn: requests come and leave at random; start: an engine"
        " with a bucket for each batch size is started twice, at first with nothing built or"
        " compiled before; kernels: each kernel of a decode step on CUDA beside what is predicted;"
        " prefix: prompts that begin alike, with and without a prefix cache; memory: what an engine"
        " takes, what a full cache costs a step, and what too few blocks cost; neighbours: decode"
        " steps with other processes busy on the same processors, beside other runtimes"
        " (default: steady)",
    )
    parser.add_argument(
        "--batch-size",
        nargs="+",
        type=positive_integer,
        help="rows that decode (default: 1 8; start 1 2 4 8; others 8; neighbours: 1 row after 128"
        " tokens and 8 after 1024)",
    )
    parser.add_argument(
        "--input-len",
        nargs="+",
        type=positive_integer,
        help="tokens of a prompt (default: 128 1024; interference 1024; prefix 512; memory 128 512"
        " 1024; churn 256 at most)",
    )
    parser.add_argument(
        "--output-len",
        nargs="+",
        type=at_least_two,
        help="tokens that a request decodes (default: 64; prefix 32; memory 128, where blocks are"
        " scarce; churn 32 on average)",
    )
    parser.add_argument(
        "--num-warmup", type=natural_number, help="runs of a case that are not counted (default: 1)"
    )
    parser.add_argument(
        "--num-iters",
        type=positive_integer,
        help="runs of a case that are counted, and take turns with other modes; 5 or more for"
        " --compare (default: 3, with steady fewer where they take over 10 s; neighbours: 6)",
    )
    parser.add_argument(
        "--num-steps",
        type=number_of_steps,
        help="steps of interference (default: 200), churn and host (default: 400), of memory"
        " behind each prompt length (default: 100), and of neighbours in each round (default: 32)",
    )
    parser.add_argument(
        "--max-itl-ms",
        nargs="+",
        type=milliseconds,
        metavar="MS",
        help="time budgets of a step that prefills beside rows that decode; interference runs"
        " without one first (default: then with eight times its decode step; churn: none)",
    )
    parser.add_argument(
        "--neighbours",
        nargs="+",
        type=number_of_neighbours,
        metavar="PROCESSES",
        help="busy processes beside which neighbours measures (default: 0 1 2)",
    )
    parser.add_argument(
        "--peer",
        nargs="+",
        type=peer_spec,
        metavar="NAME[=PYTHON]",
        help=f"runtimes that neighbours measures in turn on the CPU ({', '.join(MODULES)}), each"
        " with the Python that has it (default: this Python, and all that it has)",
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="after a case is timed, score its prompts and tokens again with the plain PyTorch"
        " reference on the device; a case with a token that the reference would not have sampled"
        " fails, and the exit status is 1 (default: on CUDA; --no-check: never)",
    )
    parser.add_argument(
        "--baseline",
        choices=("transformers",),
        help="run the same cases in turn with transformers (continuous batching, and generate with"
        " a static cache), and say how many times faster a step is and which share of the tokens"
        " is equal (needs the extra `baseline`)",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        type=file_path,
        metavar="FILE",
        help="OLD.json: an earlier --output-json of the same scenario; its times and those of this"
        f" run are set against each other ({', '.join(COMPARED)}). OLD.json NEW.json: compare the"
        " two, and measure nothing",
    )
    parser.add_argument(
        "--fail-above",
        type=ratio,
        metavar="RATIO",
        help="for --compare: exit with 1 if a ratio new / old is above this, as 1.05, or if no"
        " case is in both",
    )
    add_profile_flags(parser)
    parser.add_argument(
        "--output-json",
        type=file_path,
        metavar="FILE",
        help="write all results here, after each case (docs/benchmark.schema.json)",
    )
    parser.add_argument("--output-md", type=file_path, metavar="FILE", help="write the table here")
    parser.add_argument(
        "--plot",
        type=file_path,
        metavar="FILE",
        help="draw the gaps between tokens over time, their histogram, and the roofline or where"
        " the time of a step goes, as .png, .svg or .pdf (needs the extra `plot`)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of prompts and presets")
    parser.add_argument(
        "--explain-memory",
        action="store_true",
        help="print what each model would take and what fits in each mode (default: auto), and"
        " measure nothing; rows are the largest --batch-size",
    )
    parser.add_argument(
        "--device-memory",
        type=memory_size,
        metavar="SIZE",
        help="for --explain-memory: of a card that need not be there, as 80GB, 512MB or 40GiB"
        " (default: this machine)",
    )
    parser.add_argument(
        "--explain-step",
        action="store_true",
        help="print what each kernel of a decode step on a GPU must move and how long that takes,"
        " for each --batch-size and --input-len, and run nothing",
    )
    parser.add_argument(
        "--bandwidth-gb-s",
        type=gigabytes_per_second,
        metavar="GB/S",
        help="for --explain-step: what a card reads that need not be there (default: as measured"
        " on the CUDA device)",
    )
    return parser
