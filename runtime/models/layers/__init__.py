"""The kinds of layers: what describes them in a config, and the operations that they make.

A mixer is a file here, its name in `MIXERS`, and the families that have it.
"""

from __future__ import annotations

from collections.abc import Mapping

from .delta_rule import GatedDeltaRule
from .dimensions import Mixer
from .lightning import Lightning
from .mamba import Mamba1, Mamba2
from .short_convolution import ShortConvolution

MIXERS: Mapping[str, type[Mixer]] = {
    "conv": ShortConvolution,
    "delta_rule": GatedDeltaRule,
    "mamba1": Mamba1,
    "mamba2": Mamba2,
    "lightning": Lightning,
}
"""What mixes the tokens of a layer, besides attention; a model has one kind."""

ATTENTION_TYPES = ("full_attention", "sliding_attention")

LAYER_TYPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ATTENTION_TYPES, ("attention",)),
    **{name: (name,) for name in MIXERS},
    "mamba2_attention": ("mamba2", "attention"),
    "mlp": (),
    "experts": (),
}
"""Type of a layer -> its mixers. Several read the same norm, and their outputs are added."""
