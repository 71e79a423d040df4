"""Recognises the attention masks that transformers creates.

Models create masks with functions of `transformers.masking_utils`, which pass a mask function of
two positions to a registered interface. While a model is probed, ours returns a tensor that
carries a description of this function. When the model runs, no masks are created: the paged
attention derives them from positions.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch

__all__ = ["MASK_FORM", "MaskForm", "mask_form", "probe_mask"]

MASK_FORM = "stepgraph_mask_form"
"""Attribute of a mask tensor that `probe_mask` made."""


class MaskForm(NamedTuple):
    """Which earlier tokens a token attends to."""

    window: int = 0
    """The last so many, itself included; 0: all."""
    chunk: int = 0
    """Those of its own chunk of so many positions; 0: all."""
    unknown: str | None = None
    """Name of a mask function that is not one of these."""


def probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    **unused: object,
) -> torch.Tensor:
    """Return an empty mask with the attribute `MASK_FORM`; the interface of transformers."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool)
    setattr(mask, MASK_FORM, mask_form(mask_function))
    return mask


def mask_form(function: Callable[..., Any] | None) -> MaskForm:
    """Describe a mask function, as `create_causal_mask` and its siblings make them."""
    from transformers import masking_utils as known

    if function is None or function is known.causal_mask_function:
        return MaskForm()
    inner = _cells(function)
    if _code(function) is _code(known.or_masks(known.causal_mask_function)):
        blocks = _code(known.blockwise_overlay(torch.zeros(1)))
        parts = [part for part in inner["mask_functions"] if _code(part) is not blocks]
        if len(parts) == 1:  # a text has no blocks of images or sound
            return mask_form(parts[0])
    if _code(function) is _code(known.and_masks(known.causal_mask_function)):
        forms = [mask_form(part) for part in inner["mask_functions"]]
        unknown = next((form.unknown for form in forms if form.unknown is not None), None)
        windows = [form.window for form in forms if form.window]
        chunks = [form.chunk for form in forms if form.chunk]
        causal = known.causal_mask_function in inner["mask_functions"]
        if unknown is None and (not causal or len(windows) > 1 or len(chunks) > 1):
            unknown = _name(function)
        return MaskForm(next(iter(windows), 0), next(iter(chunks), 0), unknown)
    if _code(function) is _code(known.sliding_window_overlay(1)):
        return MaskForm(window=int(inner["sliding_window"]))
    if _code(function) is _code(known.chunked_overlay(1, torch.zeros(1))):
        return MaskForm(chunk=int(inner["chunk_size"]))
    return MaskForm(unknown=_name(function))


def _code(function: Callable[..., Any]) -> CodeType | None:
    return getattr(function, "__code__", None)


def _name(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "")
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables that a function takes from the scope that made it."""
    code, cells = _code(function), getattr(function, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
