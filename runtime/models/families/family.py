"""What a decoder family is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..config_keys import Json, read_count, read_field
from ..layers import ATTENTION_TYPES
from ..layers.experts import ExpertTraits
from .mtp import MtpLayout

CONFIG_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}
"""Field of `ModelConfig` -> its key in `config.json`, where they differ."""


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The norms of a layer, by their names in a checkpoint; None: the layer has no such norm."""

    input: str | None = "input_layernorm"
    """Of the hidden states, before attention."""
    attention_output: str | None = None
    """Of the output of attention, before the residual addition."""
    mlp: str | None = "post_attention_layernorm"
    """Of the hidden states, before the MLP."""
    mlp_output: str | None = None
    """Of the output of the MLP, before the residual addition."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The traits of all models of one `model_type`."""

    architecture: str
    """The class name that checkpoints give."""
    defaults: Json = field(default_factory=dict)
    """Optional keys of `config.json`, with the defaults of transformers. Keys that only some
    families have, such as `attn_logit_softcapping`, are read where they are listed: see `reads`."""
    fixed: Json = field(default_factory=dict)
    """Keys of `config.json` that transformers does not read, with the values it assumes."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Field of `ModelConfig`, `ExpertsConfig` or a mixer -> its key in `config.json`, where other
    families have another one."""
    prepare: Callable[[Json], Json] = lambda config: config
    """Returns a config with the keys that transformers derives from others. Raises
    `CheckpointError` for variants of the architecture that are not supported."""
    only: Json = field(default_factory=dict)
    """Keys of `config.json` with the one value that is supported; absent and null are that too."""
    layer_types: Callable[[Json, range], Sequence[str]] | None = None
    """Returns the names in `layer_types` of a range of layers, if the config does not list it.
    None: layers slide as keys say that the family reads, see `implied_types`."""
    lists_layer_types: bool = False
    """Whether `layer_types` of the config decides."""
    layer_kinds: Mapping[str, str] = field(
        default_factory=lambda: {kind: kind for kind in ATTENTION_TYPES}
    )
    """Name in `layer_types` -> its type, one of `LAYER_TYPES`."""
    separate_layers: bool = False
    """A layer has mixers, or an MLP or experts, but not both."""
    is_unrotated: Callable[[Json, int], bool] = lambda config, layer: False
    """Whether queries and keys of a layer are not rotated; the config lists `layer_types`."""
    layer_norms: LayerNorms = field(default_factory=LayerNorms)
    norms_of: Mapping[str, LayerNorms] = field(default_factory=dict)
    """The norms of layers with a mixer, where they differ from `layer_norms`."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Names in a checkpoint of the projections of queries, keys and values; one if fused."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Names in a checkpoint of the projections of the MLP to gate and up; one if fused."""
    down: str = "mlp.down_proj"
    output: str = "self_attn.o_proj"
    """Name in a checkpoint of the output projection of attention."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    """Names in a checkpoint of the norms of queries and keys, in the module of attention."""
    final_norm: str = "model.norm"
    num_layers: Callable[[Json], int | None] = lambda config: None
    """Returns the number of layers of a config without `num_hidden_layers`; else None."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Part of the name of a tensor in some checkpoints -> what it is here."""
    output_bias: bool = True
    """Whether the output projection of attention has a bias if q, k and v have one."""
    qk_norm: Literal["none", "each_head", "all_heads", "unweighted"] = "none"
    """What is normed of queries and keys before they are rotated: each head of a token by itself,
    or all its heads together; or each head without weight, in layers with rotation only. A config
    without `use_qk_norm` norms nothing, in families that read the key."""
    parallel_residual: bool = False
    """Attention and MLP read the same norm of the layer's input, and both are added to it."""
    centred_norms: bool = False
    """Norms subtract the mean, and multiply by their weight in float32."""
    value_norms: bool = False
    """Values are normed, each head by itself and without weight."""
    layer_scalars: bool = False
    """The output of each layer is multiplied by a number of its own (Gemma 4)."""
    offset_norms: bool = False
    """Norms multiply by one plus their weight, in float32, and round afterwards."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    recomputes_long: bool = False
    """A sequence that outgrows the first context of a `longrope` is recomputed with the
    parameters of long sequences."""
    attention_sinks: Mapping[str, str] = field(default_factory=dict)
    """Layers in which each head has an attention sink, a softmax logit without a value (gpt-oss),
    with the name of the tensor."""
    chunked: bool = False
    """Tokens of sliding layers attend only to their own chunk, of `sliding_window` positions."""
    latent: bool = False
    """Multi-head latent attention."""
    gated_attention: bool = False
    """Attention is multiplied by a sigmoid of a gate, whose rows follow the queries of each head in
    their projection."""
    mixer: Json = field(default_factory=dict)
    """Fields of the `Mixer` that are not keys of `config.json`, such as names of tensors."""
    experts: ExpertTraits | None = None
    """The traits of mixtures of experts, if layers can have them."""
    mtp: MtpLayout | None = None
    """Modules for multi-token prediction that checkpoints may hold, which only drafters read."""
    rope_interleaved: bool = False
    """Whether rotated pairs are neighbours; of latent attention `LatentConfig` says it."""

    def reads(self, key: str) -> bool:
        """Whether a key of `config.json` that only some families have applies to this one."""
        return key in self.defaults or key in self.fixed

    def implied_types(self, config: Json, layers: range) -> Sequence[str]:
        """Return what `layer_types` of a config that does not list it would name."""
        if self.layer_types is not None:
            return self.layer_types(config, layers)
        return [ATTENTION_TYPES[self._slides(config, layer)] for layer in layers]

    def _slides(self, config: Json, layer: int) -> bool:
        if self.reads("sliding_window_pattern"):  # the last layer of each pattern has none
            return (layer + 1) % read_count(config, "sliding_window_pattern") != 0
        if not self.reads("sliding_window") or config.get("sliding_window") is None:
            return False
        if self.reads("use_sliding_window") and not read_field(config, "use_sliding_window", bool):
            return False
        first = "max_window_layers"
        return not self.reads(first) or layer >= read_field(config, first, int)

    def key(self, field: str) -> str:
        """Return the key of `config.json` for a field; see `keys`."""
        return self.keys.get(field) or CONFIG_KEYS.get(field, field)

    @property
    def two_ropes(self) -> bool:
        """Whether sliding layers have rotary parameters of their own."""
        return self.reads("rope_local_base_freq")
