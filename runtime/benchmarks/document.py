"""The benchmark's JSON document: where it is written, and which modes it may have cases of."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from ...profiling.whole_files import write_file
from ..kernels import have_compiler
from .compared import SCHEMA_VERSION
from .environment import describe_environment
from .options import MODES

__all__ = ["modes_of", "new_document", "write_json"]


def new_document(device: torch.device, bandwidth: float) -> dict[str, Any]:
    """Return a document without cases. `bandwidth` is that of the device, bytes per second."""
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": describe_environment(device, bandwidth),
        "cases": [],
    }


def modes_of(device: torch.device) -> tuple[str, ...]:
    """Return the modes that a device has."""
    if device.type != "cpu":
        return MODES
    return ("eager", "compile") if have_compiler() else ("eager",)


def write_json(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write what there is so far where it was asked for.

    Raises:
        WriteError: it cannot be written.
    """
    if options.output_json is not None:
        write_file(options.output_json, json.dumps(document, indent=1) + "\n")
