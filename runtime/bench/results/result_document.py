"""The benchmark's JSON document: the environment, what entries begin with, and where it goes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from ....profiling.atomic_write import write_file
from ....profiling.device_state import DeviceMonitor
from ...engine.engine import Engine
from ...kernels import resolve_threads
from ..console import shown_command_line
from .result_comparison import SCHEMA_VERSION

__all__ = [
    "describe_engine",
    "describe_environment",
    "dtype_names",
    "new_document",
    "num_cpus",
    "num_threads",
    "write_json",
]


_COMMIT = "STEPGRAPH_COMMIT"
"""The environment variable that names the commit, for a tree without a repository."""
_DESCRIBE = ("git", "describe", "--always", "--dirty", "--abbrev=12")


def new_document(device: torch.device, bandwidth: float) -> dict[str, Any]:
    """Return a document without cases. `bandwidth` is that of the device, in bytes per second."""
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": describe_environment(device, bandwidth),
        "cases": [],
    }


def write_json(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the document as it is now to `--output-json`, if that was given.

    Raises:
        WriteError: it cannot be written.
    """
    if options.output_json is not None:
        write_file(options.output_json, json.dumps(document, indent=1) + "\n")


def num_cpus() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_threads() -> int:
    """Return how many threads an engine computes with on a CPU."""
    return resolve_threads(None)


def describe_environment(device: torch.device, bandwidth: float) -> dict[str, Any]:
    """Return the `environment` of the JSON; None for values that this machine does not provide.

    Args:
        device: what is measured.
        bandwidth: its measured read bandwidth, in bytes per second.
    """
    frequency = psutil.cpu_freq()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        **_driver_and_clocks(device),
        "cpu": _cpu_name(),
        "cpu_mhz": None if frequency is None else round(frequency.current),
        "threads": num_threads(),
        "bandwidth_gb_s": bandwidth / 1e9,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": os.environ.get(_COMMIT) or _output(*_DESCRIBE),
        "command": shlex.join(shown_command_line()),
    }


def dtype_names(engine: Engine) -> dict[str, str]:
    """Return the dtypes of the model, its linear weights and its cache, for the JSON."""
    config = engine.config
    dtype = str(config.dtype).removeprefix("torch.")
    return {
        "dtype": dtype,
        "weight_dtype": dtype if config.weights == "model" else config.weights,
        "kv_dtype": dtype if config.storage == "model" else config.storage,
    }


def describe_engine(engine: Engine, model: str) -> dict[str, Any]:
    """Return the fields that entries of all engines begin with."""
    return {
        "model": model,
        **dtype_names(engine),
        "mode": engine.config.mode,
        "kernels": engine.config.kernels,
        "model_impl": engine.config.model_impl,
        "tensor_parallel": engine.config.user.tensor_parallel,
        "device": str(engine.config.device),
        "prefill_chunk": engine.config.user.prefill_chunk,
        "fallbacks": engine.stats()["fallbacks"],
    }


def _driver_and_clocks(device: torch.device) -> dict[str, Any]:
    """Return the driver and the maximum clocks through NVML; without NVML only the driver."""
    monitor = DeviceMonitor.of(device)
    if monitor is not None:
        return monitor.describe()
    driver = None
    if device.type == "cuda":
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    # One line per device; all have the same driver.
    return {
        "driver": driver.partition("\n")[0] if driver else None,
        "max_sm_mhz": None,
        "max_memory_mhz": None,
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return f"{names[0]}, {len(names)} processors" if names else platform.machine()


def _output(*command: str) -> str | None:
    """Return the output of a command run in this folder; None if it is missing or fails."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
