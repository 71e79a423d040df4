"""The benchmark's JSON document: where it is written, and which modes it may have cases of."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ...profiling.atomic_write import write_file
from ..kernels import cpu_kernels_obstacle
from .compared import SCHEMA_VERSION
from .environment import describe_environment
from .options import MODES

__all__ = ["Way", "modes_of", "new_document", "ways_of", "write_json"]


def new_document(device: torch.device, bandwidth: float) -> dict[str, Any]:
    """Return a document without cases. `bandwidth` is that of the device, bytes per second."""
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": describe_environment(device, bandwidth),
        "cases": [],
    }


class Way(NamedTuple):
    """How the steps of an engine run, as flags name it."""

    mode: str
    kernels: str

    def __str__(self) -> str:
        return self.mode if self.kernels == "auto" else f"{self.mode} with {self.kernels} kernels"


def ways_of(options: argparse.Namespace, modes: Iterable[str]) -> list[Way]:
    """Return every combination of `modes` and the kernels on the command line, each once."""
    return list(dict.fromkeys(Way(mode, k) for mode in modes for k in options.kernels))


def modes_of(device: torch.device) -> tuple[str, ...]:
    """Return the modes that a device has."""
    if device.type != "cpu":
        return MODES
    return ("eager", "compile") if cpu_kernels_obstacle() is None else ("eager",)


def write_json(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write what there is so far where it was asked for.

    Raises:
        WriteError: it cannot be written.
    """
    if options.output_json is not None:
        write_file(options.output_json, json.dumps(document, indent=1) + "\n")
