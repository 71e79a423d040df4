"""The command `stepgraph explain`: the memory plan and the predicted kernels of any model.

Only the configuration of a model is read, and the device need not exist.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from ...profiling import bandwidth
from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from ..resolved_config import resolve_device
from ..tools.memory_report import explain_memory
from ..tools.step_report import explain_step
from .flag_types import gigabytes_per_second, memory_size, positive_integer
from .model_flags import add_engine_flags, add_model_flags
from .outputs import print_error, print_text
from .program import REPORTED_ERRORS, status_of

__all__ = ["main", "run_explain_memory", "run_explain_step"]

_PROGRAM = "stepgraph explain"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = CommandParser(
        prog=_PROGRAM,
        description="Explain a model on a device, without loading the one or having the other.",
    )
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC", required=True)
    _add_memory(topics.add_parser("memory", help="the memory plan, term by term, and what fits"))
    _add_step(topics.add_parser("step", help="the kernels of a decode step on a GPU"))
    options = parser.parse_args(arguments)
    run = run_explain_memory if options.topic == "memory" else run_explain_step
    return run(options, f"{_PROGRAM} {options.topic}")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the bytes of each part of an engine, and the contexts that fit."
    add_model_flags(parser)
    add_engine_flags(parser, default_mode="auto, the fastest that the device has")
    parser.add_argument(
        "--batch-size",
        nargs=1,
        type=positive_integer,
        default=[8],
        metavar="ROWS",
        help="rows that decode (default: 8)",
    )
    parser.add_argument(
        "--device-memory",
        type=memory_size,
        metavar="SIZE",
        help="memory of a hypothetical device, as 80GB, 512MB or 40GiB (default: this machine)",
    )


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the bytes that each kernel of a decode step must move and the predicted time."
    )
    add_model_flags(parser)
    parser.add_argument(
        "--batch-size",
        nargs="+",
        type=positive_integer,
        default=[1],
        metavar="ROWS",
        help="rows that decode (default: 1)",
    )
    parser.add_argument(
        "--input-len",
        nargs="+",
        type=positive_integer,
        default=[1024],
        metavar="TOKENS",
        help="context of each row (default: 1024)",
    )
    parser.add_argument(
        "--bandwidth-gb-s",
        type=gigabytes_per_second,
        metavar="GB/S",
        help="memory bandwidth of the target GPU (default: measured on the CUDA device)",
    )


def run_explain_memory(options: argparse.Namespace, program: str) -> int:
    """Print the memory plan of every model, dtype, mode and kernels; return the exit status.

    What does not fit is an error on stderr where the plan would be; the others are printed anyway.
    """
    status, separator = 0, ""
    kinds = itertools.product(
        options.model,
        options.dtype,
        options.weight_dtype,
        options.kv_dtype,
        options.mode or ["auto"],
        options.kernels,
    )
    for model, dtype, weight_dtype, kv_dtype, mode, kernels in kinds:
        config = EngineConfig(
            device=options.device,
            dtype=dtype,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            mode=mode,
            kernels=kernels,
            max_num_seqs=max(options.batch_size),
            prefill_chunk=options.prefill_chunk,
        )
        try:
            text = explain_memory(model, config, options.device_memory)
        except REPORTED_ERRORS as error:
            print_error(error, model, program=program)
            status = max(status, status_of(error))
        else:
            print_text(separator + text)
            separator = "\n"
    return status


def run_explain_step(options: argparse.Namespace, program: str) -> int:
    """Print the kernels of a decode step for every point asked for; return the exit status.

    What cannot be told is an error on stderr in its place; the others are printed anyway.
    """
    if options.bandwidth_gb_s is not None:
        reads = 1e9 * options.bandwidth_gb_s
    else:
        try:
            device = resolve_device(options.device)
        except REPORTED_ERRORS as error:
            print_error(error, program=program)
            return status_of(error)
        if device.type != "cuda":
            print_error(
                f"the steps are those of a GPU, and the device is {str(device)!r}: give the"
                " GPU's --bandwidth-gb-s",
                program=program,
            )
            return 1
        reads = bandwidth.measure_read_bandwidth(device)
    status, separator = 0, ""
    points = itertools.product(
        options.model,
        options.dtype,
        options.weight_dtype,
        options.kv_dtype,
        options.input_len,
        options.batch_size,
    )
    for model, dtype, weight_dtype, kv_dtype, context, rows in points:
        config = EngineConfig(dtype=dtype, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
        try:
            text = explain_step(model, config, rows=rows, context=context, bandwidth=reads)
        except REPORTED_ERRORS as error:
            print_error(error, model, program=program)
            status = max(status, status_of(error))
        else:
            print_text(separator + text)
            separator = "\n"
    return status
