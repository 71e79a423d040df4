"""GGUF files of random bits, and of the tiny models."""

from __future__ import annotations

from typing import Any

import numpy as np
from stepgraph.runtime.kernels.weights.gguf import GGUFType

_HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (), "NVFP4": ()},
}
"""Where in a block of a type float16 numbers begin; others have one at byte 0."""

Array = np.ndarray[Any, Any]


def random_blocks(
    stored_as: GGUFType, rows: tuple[int, ...], blocks: int, seed: int = 0, scale: float = 1.0
) -> Array:
    """Random blocks uint8 `[*rows, blocks, B]`, whose float16 numbers are about `scale`."""
    rng = np.random.default_rng(seed)
    shape = (*rows, blocks)
    raw = rng.integers(0, 256, (*shape, stored_as.nbytes), dtype=np.uint8)
    for start in _HALVES.get(stored_as.name, (0,)):
        halves = (rng.uniform(0.5, 1.0, shape) * scale).astype(np.float16)
        raw[..., start : start + 2] = halves[..., None].view(np.uint8)
    if stored_as.name == "MXFP4":
        raw[..., 0] = 127 + np.log2(scale) - rng.integers(0, 3, shape)
    if stored_as.name == "NVFP4":
        raw[..., :4] &= 63  # without sign, and below 2
    return raw
