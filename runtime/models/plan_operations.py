"""Operations of a layer from the names of their tensors in a checkpoint.

Names of parameters are ours; names of sources are those of a Hugging Face checkpoint, in a layer
relative to the layer.
"""

from __future__ import annotations

from collections.abc import Callable

from ..kernels.ops.layer_operations import Linear, Norm
from ..kernels.ops.parameter import Parameter, Source
from .config import ModelConfig

__all__ = ["linear", "matrix", "no_part", "norm", "vector"]


def matrix(ours: str, theirs: str, rows: int, columns: int) -> Parameter:
    """The weight `[rows, columns]` of one tensor of the checkpoint."""
    return Parameter(f"{ours}.weight", (Source(f"{theirs}.weight", (rows, columns)),))


def vector(ours: str, theirs: str, size: int) -> Parameter:
    """A vector of the checkpoint."""
    return Parameter(f"{ours}.weight", (Source(f"{theirs}.weight", (size,)),))


def norm(config: ModelConfig, ours: str, theirs: str, *, name: str = "") -> Norm:
    """A norm of hidden states; `name` is its name in profiles (default: `ours`)."""
    weight = vector(ours, theirs, config.hidden_size)
    offset = config.family.offset_norms
    return Norm(name=name or ours, weight=weight, eps=config.rms_norm_eps, offset=offset)


def no_part(part: str) -> bool:
    """`biased` of a linear layer without biases."""
    return False


def linear(
    ours: str,
    parts: dict[str, int],
    columns: int,
    biased: Callable[[str], bool] = no_part,
    *,
    split: tuple[int, ...] = (),
    unit: int = 1,
    part: int | None = None,
) -> Linear:
    """A linear layer of `parts` (source -> rows); `biased` selects the parts with a bias."""
    weight = Parameter(
        f"{ours}.weight",
        tuple(Source(f"{source}.weight", (n, columns)) for source, n in parts.items()),
    )
    bias = None
    if any(map(biased, parts)):
        sources = tuple(
            Source(f"{source}.bias" if biased(source) else None, (n,))
            for source, n in parts.items()
        )
        bias = Parameter(f"{ours}.bias", sources)
    name = f"{ours.rpartition('.')[2]}_linear"
    return Linear(name=name, weight=weight, bias=bias, split=split, unit=unit, part=part)
