"""The command `stepgraph explain`: the memory plan and the roofline of any model.

Only the configuration of a model is read, and the device may be hypothetical.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ...profiling import bandwidth
from ...profiling.command_line import CommandParser, print_text
from ..errors import StepgraphError
from ..tools.arguments import BYTES, flag_type, parse_bytes
from .options import (
    MODEL_FLAGS,
    REPORTED_ERRORS,
    add_flags,
    engine_configs,
    number,
    print_error,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = CommandParser(
        prog="stepgraph explain",
        description="Predict the memory or the decode step of a model without loading it. The"
        " device may be hypothetical.",
    )
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC", required=True)
    memory = topics.add_parser("memory", help="the memory plan, term by term, and what fits")
    memory.description = "Print the memory plan of an engine, term by term, and what fits."
    add_flags(memory, *MODEL_FLAGS, "model-impl", "kernels", "prefill-chunk")
    add_flags(memory, "mode", help="execution mode of steps (default: the fastest for the device)")
    memory.add_argument(
        "--device-memory",
        type=flag_type(parse_bytes, BYTES),
        metavar="SIZE",
        help="memory of a hypothetical device, e.g. 80GB or 40GiB (default: this machine)",
    )
    rows = "decoding rows (default: {})"
    add_flags(memory, "batch-size", nargs=1, default=[8], metavar="ROWS", help=rows.format(8))
    ranks = "numbers of devices that share the model: print the plan of one of them (default: 1)"
    add_flags(memory, "tensor-parallel", help=ranks)
    step = topics.add_parser("step", help="the roofline of a decode step on a GPU")
    step.description = (
        "Print the bytes that each operation of a decode step on a GPU must read, and the time that"
        " takes at least."
    )
    add_flags(step, *MODEL_FLAGS)
    step.add_argument(
        "--bandwidth-gb-s",
        type=number("a positive number of gigabytes per second"),
        metavar="GB/S",
        help="memory bandwidth of the target GPU (default: measured on the CUDA device)",
    )
    add_flags(step, "batch-size", default=[1], metavar="ROWS", help=rows.format(1))
    context = "context of each row (default: 1024)"
    add_flags(step, "input-len", default=[1024], metavar="TOKENS", help=context)
    groups = "numbers of GPUs that share the model: print the floors of their steps"
    add_flags(step, "tensor-parallel", help=groups)
    memory.set_defaults(explain=_explain_memory, program=memory.prog)
    step.set_defaults(explain=_explain_step, program=step.prog)
    step.set_defaults(kernels=["auto"], model_impl=["auto"])
    options = parser.parse_args(arguments)
    status, separator = 0, ""
    try:
        for model, text in options.explain(options):
            try:
                print_text(separator + text())
                separator = "\n"
            except REPORTED_ERRORS as error:  # the other combinations are still printed
                status = max(status, print_error(error, model, program=options.program))
    except REPORTED_ERRORS as error:
        return print_error(error, program=options.program)
    return status


def _explain_memory(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each model, and what explains it in every mode, with every kernels and so on."""
    from ..tools.memory_report import explain_memory  # needs torch

    shared = {
        "device": options.device,
        "max_num_seqs": max(options.batch_size),
        "prefill_chunk": options.prefill_chunk,
    }
    modes = options.mode or ["auto"]
    for model, configs in engine_configs(options, modes, options.tensor_parallel, **shared):
        for config in configs:
            yield model, partial(explain_memory, model, config, options.device_memory)


def _explain_step(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each model, and what explains a decode step of every size."""
    from ..models.resolved_config import resolve_device  # these need torch
    from ..tools.step_costs import explain_step

    if options.bandwidth_gb_s is not None:
        reads = 1e9 * options.bandwidth_gb_s
    else:
        device = resolve_device(options.device)
        if device.type != "cuda":
            raise StepgraphError(
                f"this is the roofline of a GPU, and the device is {str(device)!r}: give the GPU's"
                " --bandwidth-gb-s"
            )
        reads = bandwidth.measure_read_bandwidth(device)
    step = partial(explain_step, bandwidth=reads, ranks=options.tensor_parallel or ())
    for model, (config,) in engine_configs(options, ["auto"], None):
        for context, rows in itertools.product(options.input_len, options.batch_size):
            yield model, partial(step, model, config, rows=rows, context=context)
