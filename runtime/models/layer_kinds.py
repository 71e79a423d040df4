"""The kinds of layers of a model: layers of one kind share a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from .config import ModelConfig
from .layers.dimensions import Mixer
from .rope import Rope


class LayerKind(NamedTuple):
    """What the layers of a model can differ in."""

    window: int | None
    """Tokens that a token attends to; None: all previous tokens."""
    rope: Rope
    rope_kind: int
    """Index into the model's rotations."""
    mixers: tuple[str, ...]
    mixer: Mixer | None
    """Its mixer other than attention; None: it has none."""
    feed_forward: Literal["mlp", "experts"] | None
    """What it has after its mixers; None: nothing."""
    heads: tuple[int, int] | None = None
    """Its query and key/value heads; None: the model's."""
    head_dim: int | None = None
    """Elements of its heads; None: the model's."""
    width: int | None = None
    """Width of its MLP; None: the model's."""
    sparsity: float = 0.0
    """`Activate.sparsity` of its MLP."""
    kv_source: int | None = None
    """The layer whose keys and values it reads; None: its own."""

    @staticmethod
    def of(config: ModelConfig, layer: int, ropes: list[Rope]) -> LayerKind:
        """Return the kind of a layer; `ropes` are the `rope_kinds` of the model."""

        def own(values: tuple[Any, ...]) -> Any:
            return values[layer] if values else None

        rope, mixers, mixer = config.rope(layer), config.mixers(layer), None
        if config.mixer is not None and {*mixers} - {"attention"}:
            mixer = config.mixer.of_layers([layer])
        return LayerKind(
            window=config.window(layer),
            rope=rope,
            rope_kind=ropes.index(rope),
            mixers=mixers,
            mixer=mixer,
            feed_forward=config.feed_forward(layer),
            heads=own(config.layer_heads),
            head_dim=own(config.layer_head_dims),
            width=own(config.layer_widths),
            sparsity=own(config.layer_sparsity) or 0.0,
            kv_source=config.kv_source(layer),
        )

    def of_model(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a model that has only layers of this kind."""
        if self.heads is not None:
            heads, kv_heads = self.heads
            config = replace(config, num_heads=heads, num_kv_heads=kv_heads, layer_heads=())
        if self.head_dim is not None:
            config = replace(config, head_dim=self.head_dim)
        return config if self.width is None else replace(config, intermediate_size=self.width)


def rope_kinds(config: ModelConfig) -> list[Rope]:
    """Return the distinct rotations of the layers, indexed by `Rotate.kind`."""
    return list(dict.fromkeys(config.rope(layer) for layer in range(config.num_layers)))
