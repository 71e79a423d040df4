"""What self-tests of kernels have in common: how results are compared, and what is reported.

At start an engine runs each native operation that its model uses and compares it with plain torch.
With `kernels="auto"` an operation that fails is replaced by its plain version, which is a
`Fallback`; with `kernels="native"` the engine does not start.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KernelSelfTestError

__all__ = [
    "Fallback",
    "brief",
    "disagreement",
    "require_usable_device",
    "tolerance",
    "warn_of_fallbacks",
]

logger = logging.getLogger("stepgraph.runtime")

_EPSILONS = 4
"""Roundings of the dtype that results may differ by: both versions round several times."""
_FLOAT32_TOLERANCE = 1e-4
"""Sums of thousands of products in another order."""
_TF32_TOLERANCE = 5e-3
_STORAGE_TOLERANCE = {"model": 0.0, "int8": 0.05, "fp8": 0.15}
"""A stored number may be rounded to a neighbour: 1/127 of a vector's maximum, or 1/8 of itself."""

_ERROR_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Fallback:
    """A native operation that plain torch replaces."""

    name: str
    """The operation: a field of `gpu.operations.Operations`, or `cpu operators`, or `dependent
    launch`."""
    shape: str
    """The shapes that it failed with first."""
    error: str
    """What the compiler or the device reported, or how far the results were apart."""


def tolerance(dtype: torch.dtype, storage: str = "model") -> float:
    """Return the largest difference of two versions, as `disagreement` takes it.

    Args:
        dtype: of activations.
        storage: how the cache stores vectors.
    """
    if dtype != torch.float32:
        own = _EPSILONS * torch.finfo(dtype).eps
    elif torch.get_float32_matmul_precision() == "highest":
        own = _FLOAT32_TOLERANCE
    else:
        own = _TF32_TOLERANCE
    return max(own, _STORAGE_TOLERANCE[storage])


def disagreement(found: Tensor, expected: Tensor, limit: float) -> str | None:
    """Return how two results differ, or None where they agree. Waits for the device.

    Integers must be equal, and NaN must stand where NaN is expected. Other elements may differ by
    `limit * (|expected| + r)` with r the root mean square of what is expected: sums of numbers of
    that size are as inexact where they cancel.
    """
    if found.shape != expected.shape:
        return f"the shape is {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if not expected.dtype.is_floating_point:
        wrong = int((found != expected).sum())
        return f"{wrong} of {expected.numel()} elements differ" if wrong else None
    x, y = found.float(), expected.float()
    unknown = y.isnan()
    size = y.nan_to_num(0.0).square().mean().sqrt()
    # Not `difference > allowed`, which NaN passes.
    within = ((x - y).abs() <= limit * (y.abs() + size)) | (x == y) | (unknown & x.isnan())
    wrong, invalid = (int(n) for n in torch.stack(((~within).sum(), (x.isnan() & ~unknown).sum())))
    if not wrong:
        return None
    if invalid:
        return f"{invalid} of {y.numel()} elements are NaN"
    largest = float((x - y).abs().nan_to_num(0.0).max())
    return (
        f"{wrong} of {y.numel()} elements differ by more than {limit:.2g} of their size,"
        f" the largest difference is {largest:.3g}"
    )


def require_usable_device(
    what: str, device: torch.device, failure: Exception, remedy: str = "kernels='torch'"
) -> None:
    """Raise KernelSelfTestError where the failure of a native operation made a device unusable.

    Also where torch can no longer free memory: after a capture that the driver has ended.
    """
    try:
        torch.ones(1, device=device).item()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    except RuntimeError:
        raise KernelSelfTestError(
            f"the native {what} left the device {device} unusable for this process:"
            f" {brief(failure)}. Start the process again with {remedy}"
        ) from failure


def brief(failure: Exception) -> str:
    """Return class and message of an exception, on one line."""
    message = " ".join(f"{type(failure).__name__}: {failure}".split())
    return message if len(message) <= _ERROR_LENGTH else message[:_ERROR_LENGTH] + "..."


def warn_of_fallbacks(fallbacks: Sequence[Fallback]) -> None:
    """Warn once of each, with name, shape and error, and write it to the log."""
    for fallback in fallbacks:
        message = (
            f"the native {fallback.name} fails its self-test ({fallback.shape}):"
            f" {fallback.error}. Plain PyTorch takes its place, which is slower"
        )
        logger.warning("%s", message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
