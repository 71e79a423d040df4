"""What the layers of Llama 4 derive from its config.

Most layers rotate queries and keys and attend within chunks; the others do neither, attend to all
previous tokens, and scale queries by their position.
"""

from __future__ import annotations

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError
from .family import Json, read_field, read_optional

__all__ = ["is_unrotated", "prepare"]

_CHUNKED = "chunked_attention"


def prepare(config: Json) -> Json:
    """Return the config with `no_rope_layers`, and with chunks as windows of sliding layers.

    Raises:
        CheckpointError: the keys that describe layers contradict each other.
    """
    layers = read_field(config, "num_hidden_layers", int)
    every = read_field(config, "no_rope_layer_interval", int)
    if every < 1:
        raise CheckpointError(f"no_rope_layer_interval = {every} must be at least 1")
    # In spite of its name, 1 marks a layer with rotation.
    rotated = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    listed = isinstance(rotated, list) and len(rotated) >= layers
    if not listed or not all(kind in (0, 1) for kind in rotated):
        raise CheckpointError(
            f"no_rope_layers must list 0 or 1 for each of num_hidden_layers = {layers} layers, not "
            + bounded_repr(rotated)
        )
    types = config.get("layer_types")
    if types is None:
        types = [_CHUNKED if rotated[i] else "full_attention" for i in range(layers)]
    known = (_CHUNKED, "full_attention")
    if not isinstance(types, list) or not all(kind in known for kind in types):
        raise CheckpointError(
            f"layer_types must be a list of {', '.join(map(repr, known))}, not "
            + bounded_repr(types)
        )
    chunk = read_optional(config, "attention_chunk_size", int)
    if _CHUNKED in types and (chunk is None or chunk < 1):
        raise CheckpointError(
            f"attention_chunk_size = {chunk} must be at least 1: layer_types has {_CHUNKED!r}"
        )
    return {
        **config,
        "no_rope_layers": rotated,
        "layer_types": ["sliding_attention" if t == _CHUNKED else t for t in types],
        "sliding_window": chunk,
    }


def is_unrotated(config: Json, layer: int) -> bool:
    """Whether a layer has no rotation, in a config that `prepare` returned."""
    return not config["no_rope_layers"][layer]
