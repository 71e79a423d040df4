"""The command `stepgraph explain`: the memory plan and the predicted kernels of any model.

Only the configuration of a model is read, and the device may be hypothetical.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Sequence

from ...profiling import bandwidth
from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from .console import REPORTED_ERRORS, exit_status, print_error, print_text
from .options import MODEL_FLAGS, add_flags

__all__ = ["main", "run_explain_memory", "run_explain_step"]

_PROGRAM = "stepgraph explain"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = CommandParser(
        prog=_PROGRAM,
        description="Predict the memory or the decode step of a model without loading it. The"
        " device may be hypothetical.",
    )
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC", required=True)
    memory = topics.add_parser("memory", help="the memory plan, term by term, and what fits")
    memory.description = "Print the memory plan of an engine, term by term, and what fits."
    add_flags(memory, *MODEL_FLAGS, "model-impl", "kernels", "prefill-chunk")
    add_flags(memory, "mode", help="execution mode of steps (default: the fastest for the device)")
    memory_size = "memory of a hypothetical device, e.g. 80GB or 40GiB (default: this machine)"
    add_flags(memory, "device-memory", help=memory_size)
    rows = "decoding rows (default: {})"
    add_flags(memory, "batch-size", nargs=1, default=[8], metavar="ROWS", help=rows.format(8))
    ranks = "numbers of devices that share the model: print the plan of one of them (default: 1)"
    add_flags(memory, "tensor-parallel", help=ranks)
    step = topics.add_parser("step", help="the kernels of a decode step on a GPU")
    step.description = (
        "Print the bytes that each kernel of a decode step on a GPU reads and writes, and its"
        " predicted time."
    )
    add_flags(step, *MODEL_FLAGS)
    reads = "memory bandwidth of the target GPU (default: measured on the CUDA device)"
    add_flags(step, "bandwidth-gb-s", help=reads)
    add_flags(step, "batch-size", default=[1], metavar="ROWS", help=rows.format(1))
    context = "context of each row (default: 1024)"
    add_flags(step, "input-len", default=[1024], metavar="TOKENS", help=context)
    groups = "numbers of GPUs that share the model: print their bytes, collectives and speed-up"
    add_flags(step, "tensor-parallel", help=groups)
    add_flags(step, "link-gb-s", "link-latency-us")
    options = parser.parse_args(arguments)
    run = run_explain_memory if options.topic == "memory" else run_explain_step
    return run(options, f"{_PROGRAM} {options.topic}")


def run_explain_memory(options: argparse.Namespace, program: str) -> int:
    """Print the memory plan of every model, dtype, mode, kernels, model_impl and group."""
    from ..tools.memory_report import explain_memory  # needs torch

    def explain(
        model: str, config: EngineConfig, mode: str, kernels: str, model_impl: str, ranks: int
    ) -> str:
        config = dataclasses.replace(
            config,
            device=options.device,
            mode=mode,
            model_impl=model_impl,
            kernels=kernels,
            max_num_seqs=max(options.batch_size),
            prefill_chunk=options.prefill_chunk,
            tensor_parallel=ranks,
        )
        return explain_memory(model, config, options.device_memory)

    lists = options.mode or ["auto"], options.kernels, options.model_impl
    return _explain_all(options, program, explain, *lists, options.tensor_parallel or [1])


def run_explain_step(options: argparse.Namespace, program: str) -> int:
    """Print the kernels of a decode step, or groups of GPUs, for every point; return the status."""
    from ..resolved_config import resolve_device  # these need torch
    from ..tools.step_costs import NVLINK_4, Link, explain_step

    if options.bandwidth_gb_s is not None:
        reads = 1e9 * options.bandwidth_gb_s
    else:
        try:
            device = resolve_device(options.device)
        except REPORTED_ERRORS as error:
            print_error(error, program=program)
            return exit_status(error)
        if device.type != "cuda":
            message = f"decode steps are predicted for a GPU, and the device is {str(device)!r}:"
            print_error(f"{message} give the GPU's --bandwidth-gb-s", program=program)
            return 1
        reads = bandwidth.measure_read_bandwidth(device)

    link_bandwidth, latency = options.link_gb_s, options.link_latency_us
    link = Link(
        NVLINK_4.bytes_per_s if link_bandwidth is None else 1e9 * link_bandwidth,
        NVLINK_4.latency_s if latency is None else 1e-6 * latency,
    )

    def explain(model: str, config: EngineConfig, context: int, rows: int) -> str:
        return explain_step(
            model,
            config,
            ranks=options.tensor_parallel or (),
            rows=rows,
            context=context,
            bandwidth=reads,
            link=link,
        )

    return _explain_all(options, program, explain, options.input_len, options.batch_size)


def _explain_all(
    options: argparse.Namespace, program: str, explain: Callable[..., str], *lists: Sequence[object]
) -> int:
    """Print the explanation of each combination of models, dtypes and `lists`.

    A combination that fails prints an error on stderr; the others are still printed.
    """
    status, separator = 0, ""
    stored = (options.dtype, options.weight_dtype, options.kv_dtype)
    for model, dtype, weight_dtype, kv_dtype, *point in itertools.product(
        options.model, *stored, *lists
    ):
        config = EngineConfig(dtype=dtype, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
        try:
            text = explain(model, config, *point)
        except REPORTED_ERRORS as error:
            print_error(error, model, program=program)
            status = max(status, exit_status(error))
        else:
            print_text(separator + text)
            separator = "\n"
    return status
