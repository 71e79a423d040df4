"""How results of kernels are compared with plain torch, and how failures are reported.

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

logger = logging.getLogger("stepgraph.runtime")

_EPSILONS = 4
"""Roundings of the dtype that results may differ by: both versions round several times."""
_FLOAT32_TOLERANCE = 1e-4
"""Sums of thousands of products in another order."""
_TF32_TOLERANCE = 5e-3
_STORAGE_TOLERANCE = {"model": 0.0, "int8": 0.05, "fp8": 0.15}
"""A stored number may be rounded to a neighbour: 1/127 of a vector's maximum, or 1/8 of itself."""

_ERROR_LENGTH = 300


DEPENDENT_LAUNCH = "dependent launch"
"""The name of the fallback to launches without it."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """A native operation that plain torch replaces, or dependent launch that is switched off."""

    name: str
    """A field of `triton.stack.Operations`; `C++ decoder stack`, `C++ attention`, `C++
    sampler` or `Triton sampler`; `DEPENDENT_LAUNCH`; or, without a native version for the model,
    `decoder layers`, `attention` or another operation of its plan."""
    shape: str
    """The shapes that it failed with first."""
    error: str
    """What the compiler or the device reported, or how the results differ."""


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

    Integers must be equal, and NaN must be where NaN is expected. Other elements may differ by
    `limit * (|expected| + r)`, r being the root mean square of `expected`: where large terms
    cancel, a sum is as inexact as its terms.
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


def relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """Return ||found - expected|| / ||expected||, a float64 scalar; NaN if an element is NaN."""
    reference = expected.double()
    error: Tensor = (found.double() - reference).norm() / reference.norm()
    return error


def warn_of_fallbacks(fallbacks: Sequence[Fallback]) -> None:
    """Warn once of each fallback, with name, shape and error."""
    for fallback in fallbacks:
        if fallback.name == DEPENDENT_LAUNCH:
            warn(
                f"dependent launch fails its self-test ({fallback.shape}): {fallback.error}."
                " Kernels are launched without it, which is slower"
            )
        else:
            warn(
                f"the native {fallback.name} fails its self-test ({fallback.shape}):"
                f" {fallback.error}. Plain PyTorch takes its place, which is slower"
            )


def warn(message: str) -> None:
    """Issue a RuntimeWarning, and log the message."""
    logger.warning("%s", message)
    warnings.warn(message, RuntimeWarning, stacklevel=2)
