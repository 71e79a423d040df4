"""Compares the headers of a checkpoint with a model of transformers, before weights are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ...bounded_repr import bounded_text
from ...errors import CheckpointError
from .attention import IMPLEMENTATION
from .config import TransformersConfig, model_class_of
from .library import convertible_parameters, quiet, reason_of

__all__ = ["check_headers", "check_report"]

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SHOWN = 5
_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"


class Header(Protocol):
    """The header of a tensor in a checkpoint."""

    @property
    def dtype(self) -> str:
        """The safetensors name of the dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""


def check_headers(headers: Mapping[str, Header], config: TransformersConfig) -> None:
    """Load tensors without data, of the shapes in the headers, as transformers loads weights.

    Its renamings and conversions of old checkpoints apply. Tensors that reach no parameter, such
    as masks and other models in the same files, may have any dtype.

    Raises:
        CheckpointError: tensors are missing, of a wrong shape or of an unsupported dtype.
    """
    loadable = {name: header for name, header in headers.items() if header.dtype in _DTYPES}
    others = {name: header for name, header in headers.items() if header.dtype not in _DTYPES}
    try:
        check_report(_load(loadable, config), config.architecture)
    except CheckpointError:
        if others:
            _refuse_dtypes(loadable, others, config)
        raise


def _load(headers: Mapping[str, Header], config: TransformersConfig) -> dict[str, Any]:
    """Return the report of transformers on tensors without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            quiet(),
            convertible_parameters(),
            _synchronous_loading(),
        ):
            tensors = {
                name: torch.empty(header.shape, dtype=_DTYPES.get(header.dtype, torch.float32))
                for name, header in headers.items()
            }
            _, report = model_class_of(config).from_pretrained(
                None,
                config=config.source,
                state_dict=tensors,
                dtype=getattr(torch, config.torch_dtype),
                attn_implementation=IMPLEMENTATION,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # of any type, from any model
        raise CheckpointError(
            f"the tensors of the checkpoint do not fit {config.architecture}: {reason_of(error)}"
        ) from error
    found: dict[str, Any] = report
    return found


def _refuse_dtypes(
    loadable: Mapping[str, Header], others: Mapping[str, Header], config: TransformersConfig
) -> None:
    """Raise `CheckpointError` if parameters are missing without the others.

    transformers may rename and join tensors, so that the ones at fault are found by loading them.
    """
    missing = _missing(_load(loadable, config))
    supplied = missing - _missing(_load({**loadable, **others}, config))
    if not supplied:
        return
    ends = {".".join(name.split(".")[-2:]) for name in supplied}
    named = [name for name in others if ".".join(name.split(".")[-2:]) in ends] or list(others)
    more = f" (and {len(named) - 1} more)" if len(named) > 1 else ""
    raise CheckpointError(
        f"the tensor {bounded_text(named[0])} is {others[named[0]].dtype}{more}, supported:"
        f" {', '.join(sorted(_DTYPES))}"
    )


def _missing(report: Mapping[str, Any]) -> set[str]:
    """Return the parameters that got no values."""
    return {
        _shown(found)
        for key in ("missing_keys", "conversion_errors")
        for found in report.get(key) or ()
    }


def check_report(report: Mapping[str, Any], architecture: str) -> None:
    """Raise `CheckpointError` for parameters that transformers could not load."""
    for key, problem in (
        ("missing_keys", "missing"),
        ("mismatched_keys", "of another shape"),
        ("conversion_errors", "not convertible"),
        ("error_msgs", "not loaded"),
    ):
        names = sorted(map(_shown, report.get(key) or ()))
        if names:
            shown = ", ".join(bounded_text(name, 100) for name in names[:_SHOWN])
            rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise CheckpointError(
                f"the tensors of the checkpoint do not fit {architecture}, {problem}: {shown}{rest}"
            )


def _shown(found: object) -> str:
    """Show an item of a report: a name, or a name with the shapes of checkpoint and model."""
    match found:
        case (name, torch.Size() as stored, torch.Size() as wanted):
            return f"{name} {list(stored)} instead of {list(wanted)}"
    return str(found)


@contextmanager
def _synchronous_loading() -> Iterator[None]:
    """Keep transformers from using threads, in which tensors without data do not work."""
    before = os.environ.get(_SYNCHRONOUS)
    os.environ[_SYNCHRONOUS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SYNCHRONOUS]
        else:
            os.environ[_SYNCHRONOUS] = before
