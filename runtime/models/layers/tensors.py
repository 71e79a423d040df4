"""Operations of a layer from the names of their tensors in a checkpoint.

Names of parameters are ours; names of sources are as in a Hugging Face checkpoint, in a layer
relative to the layer. Matrices with the same input (q, k, v and gate, up) are stacked into one
product.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TypeAlias

import torch

from ...kernels.ops.causal_conv import CausalConv
from ...kernels.ops.linear import Linear
from ...kernels.ops.parameter import Parameter, Selection, Shape, Source


def matrix(ours: str, theirs: str, rows: int, columns: int) -> Parameter:
    """The weight `[rows, columns]` of one tensor of the checkpoint."""
    return Parameter(f"{ours}.weight", (Source(f"{theirs}.weight", (rows, columns)),))


def vector(ours: str, theirs: str, size: int) -> Parameter:
    """A vector of the checkpoint."""
    return Parameter(f"{ours}.weight", (Source(f"{theirs}.weight", (size,)),))


def in_float32(ours: str, theirs: str, *stored: int, shape: Shape | None = None) -> Parameter:
    """A tensor that is kept in float32, of the full name `theirs`; `shape`, if not as stored."""
    source, exact = Source(theirs, stored), shape is None and len(stored) > 1
    return Parameter(f"{ours}.weight", (source,), shape, dtype=torch.float32, exact=exact)


Part: TypeAlias = tuple[str | None, int, Selection | None]
"""A linear layer of the checkpoint (None: zeros), its rows, and which of them; None: all."""


def linear(
    ours: str,
    parts: Mapping[str, int] | Sequence[Part],
    columns: int,
    biased: Container[str] | bool = (),
    *,
    split: tuple[int, ...] = (),
    unit: int = 1,
    part: int | None = None,
    factors: Sequence[tuple[int, float]] = (),
) -> Linear:
    """A linear layer of `parts` (source -> rows, or `Part`s), of which those in `biased` have a
    bias; True: all.

    `factors` are as `Linear.factors`; the layer has none if all are 1.
    """
    if isinstance(parts, Mapping):
        parts = [(source, rows, None) for source, rows in parts.items()]
    weight = tuple(
        Source(None if source is None else f"{source}.weight", (n, columns), rows)
        for source, n, rows in parts
    )
    if isinstance(biased, bool):
        biased = {source for source, _, _ in parts if source is not None} if biased else ()
    bias = None
    if any(source in biased for source, _, _ in parts):
        sources = tuple(
            Source(f"{source}.bias" if source in biased else None, (n,), rows)
            for source, n, rows in parts
        )
        bias = Parameter(f"{ours}.bias", sources)
    return Linear(
        name=f"{ours.rpartition('.')[2]}_linear",
        weight=Parameter(f"{ours}.weight", weight),
        bias=bias,
        split=split,
        unit=unit,
        part=part,
        factors=tuple(factors) if any(by != 1.0 for _, by in factors) else (),
    )


def convolution(
    ours: str, theirs: str, features: int, taps: int, *, biased: bool = False, gated: bool = False
) -> CausalConv:
    """A convolution of each feature over the last `taps` tokens; one without gates has a SiLU."""
    weight = Source(f"{theirs}.weight", (features, 1, taps))
    bias = Parameter(f"{ours}.bias", (Source(f"{theirs}.bias", (features,)),))
    return CausalConv(
        name="convolution",
        weight=Parameter(f"{ours}.weight", (weight,)),
        bias=bias if biased else None,
        gated=gated,
        silu=not gated,
    )
