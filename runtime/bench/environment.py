"""What a benchmark was run on, as far as it can be read."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from ...profiling.device_state import DeviceMonitor
from ..engine.engine import Engine
from ..kernels import resolve_threads
from .program import shown_command_line

__all__ = [
    "describe_budget",
    "describe_engine",
    "describe_environment",
    "dtype_names",
    "num_cpus",
    "num_threads",
]


def num_cpus() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_threads() -> int:
    """Return how many threads an engine computes with on a CPU."""
    return resolve_threads(None)


def describe_environment(device: torch.device, bandwidth: float) -> dict[str, Any]:
    """Return the `environment` of the benchmark's JSON; None for what this machine does not tell.

    Args:
        device: what is measured.
        bandwidth: its measured read bandwidth, bytes per second.
    """
    frequency = psutil.cpu_freq()
    return {
        "device": _device_name(device),
        **_driver_and_clocks(device),
        "cpu": _cpu_name(),
        "cpu_mhz": None if frequency is None else round(frequency.current),
        "threads": num_threads(),
        "bandwidth_gb_s": bandwidth / 1e9,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": _commit(),
        "command": shlex.join(shown_command_line()),
    }


def dtype_names(engine: Engine) -> dict[str, str]:
    """Return what the model computes in, and how weights and cache are stored, for the JSON."""
    config = engine.config
    dtype = str(config.dtype).removeprefix("torch.")
    return {
        "dtype": dtype,
        "weight_dtype": dtype if config.weights == "model" else config.weights,
        "kv_dtype": dtype if config.storage == "model" else config.storage,
    }


def describe_engine(engine: Engine, model: str) -> dict[str, Any]:
    """Return what the entries of scenarios begin with."""
    return {
        "model": model,
        **dtype_names(engine),
        "mode": engine.config.mode,
        "kernels": engine.config.kernels,
        "device": str(engine.config.device),
        "prefill_chunk": engine.config.user.prefill_chunk,
        "fallbacks": engine.stats()["fallbacks"],
    }


def describe_budget(engine: Engine, max_itl_ms: float | None) -> dict[str, Any]:
    """Return what the entries of scenarios say whose steps may have a time budget."""
    return {"max_itl_ms": max_itl_ms, "step_budget": engine.stats()["step_budget"]}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _driver_and_clocks(device: torch.device) -> dict[str, Any]:
    """Return the driver and the highest clocks, through NVML; the driver alone without it."""
    monitor = DeviceMonitor.of(device)
    if monitor is not None:
        return monitor.describe()
    driver = None
    if device.type == "cuda":
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    # A line for each device: they share the driver.
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


def _commit() -> str | None:
    """Return the commit of the checkout that the code runs from, or None if it is none."""
    return _output("git", "describe", "--always", "--dirty", "--abbrev=12")


def _output(*command: str) -> str | None:
    """Return what a command prints, or None where it is missing or fails."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
