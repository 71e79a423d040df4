"""What the engine must know of a drafter before it reads weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ....cache.spec import FullAttentionSpec, LatentSpec, LayerSpec, SlidingWindowSpec
from ...errors import ConfigError
from ...kernels import Kernels
from ...kernels.ops.layer_plan import LayerPlan, ModelPlan
from ...kernels.ops.parameter import Parameter
from ..config import ModelConfig
from ..layout import parameter_bytes

__all__ = ["MOST_DRAFTS", "DrafterConfig", "DrafterKind"]

DrafterKind = Literal["draft_model", "eagle3", "mtp", "dflash"]

MOST_DRAFTS = 15
"""Most drafts of a drafter that computes them one by one: as many as a step verifies."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A drafter that was found and fits its target: see `find_drafter`."""

    kind: DrafterKind
    name: str
    """The checkpoint as given by the user."""
    directory: Path | None
    """The checkpoint; None for a preset, whose weights are random."""
    model: ModelConfig
    """The config of its decoder layers."""
    plan: ModelPlan
    parameters: tuple[Parameter, ...]
    """Those of its own; what it shares with the target is not among them."""
    taps: tuple[int, ...]
    """See `Drafter.taps`."""
    most_drafts: int
    """See `Drafter.most_drafts`."""
    parts: object = None
    """Its parameters outside its layers, by kind: `Eagle3Parts`, `MtpParts` or `BlockParts`; None
    for a draft model."""

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Its layers, each of which has a cache."""
        return self.plan.layers

    def layer_spec(
        self, element_bytes: int, scale_bytes: int = 0, window: int | None = None
    ) -> LayerSpec:
        """Return what each of its layers stores per token.

        Args:
            element_bytes: of a stored element.
            scale_bytes: of the scale of a stored vector.
            window: of the layer group of the target whose block table it uses; its layers attend
                to no more tokens than that.

        Raises:
            ConfigError: its attention cannot have a window.
        """
        attend = self.layers[0].attend
        sizes = (attend.kv_heads, attend.head_dim, element_bytes, scale_bytes)
        if attend.shared_values:
            if window is not None:
                raise ConfigError(
                    f"the drafter {self.name} has latent attention over all tokens, but all layers"
                    f" of the model have windows of at most {window} tokens: use another drafter"
                )
            return LatentSpec(*sizes)
        return (
            FullAttentionSpec(*sizes)
            if window is None
            else SlidingWindowSpec(*sizes, window=window)
        )

    def weight_bytes(self, kernels: Kernels, dtype: torch.dtype) -> int:
        """Return the bytes of its own parameters as the kernels store them."""
        return sum(parameter_bytes(parameter, kernels, dtype) for parameter in self.parameters)
