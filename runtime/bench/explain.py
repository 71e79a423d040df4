"""The command `stepgraph explain`: the memory plan and the roofline of any model.

Only the configuration of a model is read, and the device may be hypothetical.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...profiling import bandwidth
from ...profiling.command_line import CommandParser, print_text
from ..config import EngineConfig
from ..errors import StepgraphError
from ..tools.arguments import BYTES, flag_type, parse_bytes
from .options import MODEL_FLAGS, REPORTED_ERRORS, add_flags, number, print_error

Explain = Callable[[str, EngineConfig], str]
"""Explains a model with its dtypes."""


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
    options = parser.parse_args(arguments)
    status, separator = 0, ""
    stored = (options.dtype, options.weight_dtype, options.kv_dtype)
    try:
        texts = options.explain(options)
        for model, dtype, weight_dtype, kv_dtype in itertools.product(options.model, *stored):
            config = EngineConfig(dtype=dtype, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
            for text in texts:
                try:
                    print_text(separator + text(model, config))
                    separator = "\n"
                except REPORTED_ERRORS as error:  # the other combinations are still printed
                    status = max(status, print_error(error, model, program=options.program))
    except REPORTED_ERRORS as error:
        return print_error(error, program=options.program)
    return status


def _explain_memory(options: argparse.Namespace) -> list[Explain]:
    """Return what prints the memory plan of every mode, kernels, model_impl and group."""
    from ..tools.memory_report import explain_memory  # needs torch

    def explain(model: str, config: EngineConfig, **point: Any) -> str:
        return explain_memory(model, dataclasses.replace(config, **point), options.device_memory)

    shared = {
        "device": options.device,
        "max_num_seqs": max(options.batch_size),
        "prefill_chunk": options.prefill_chunk,
    }
    modes, ranks = options.mode or ["auto"], options.tensor_parallel or [1]
    return [
        partial(
            explain, mode=mode, kernels=kernels, model_impl=layers, tensor_parallel=size, **shared
        )
        for mode, kernels, layers, size in itertools.product(
            modes, options.kernels, options.model_impl, ranks
        )
    ]


def _explain_step(options: argparse.Namespace) -> list[Explain]:
    """Return what prints the floor of a decode step, or of groups, for every point."""
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
    ranks = options.tensor_parallel or ()
    return [
        partial(explain_step, rows=rows, context=context, bandwidth=reads, ranks=ranks)
        for context, rows in itertools.product(options.input_len, options.batch_size)
    ]
