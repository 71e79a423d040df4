"""The supported decoder families.

A family is data: the traits of its layers, and the defaults of transformers for absent keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from ..arguments import Range, check_fields
from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError, ConfigError
from ..kernels.ops.attention import Attend
from ..kernels.ops.experts import Experts, Routing, Scores
from ..kernels.ops.operation import Operation

# Ranges of the numbers that describe a model: wide enough for any real one, and finite.

MOST_SIZE = 2**31 - 1

Size = Annotated[int, Range(1, MOST_SIZE)]
"""Of dimensions and positions: a product of two fits 64 bits."""

Number = Annotated[float, Range(1e-18, 1e18)]
"""Of scales and caps: float32 holds their squares."""


# How checkpoints store modules for multi-token prediction (MTP), and what such a module computes.
#
# A module is one decoder layer, or a few, on the hidden state of a token and the embedding of the
# next one:
#
#     layers(fuse(norm(embedding) | norm(hidden state)))   then a norm, and the head of the model
#
# Which hidden state it was trained with is not in a checkpoint: the notes below say where it is
# from.


@dataclass(frozen=True, kw_only=True)
class MtpLayout:
    """The modules of a family.

    Names are as in a checkpoint, without `modules`; in them {} is the number of the module.
    """

    modules: str
    """What the names of all modules begin with."""
    after_last: bool = False
    """Whether modules are numbered from the number of the model's layers on, and not from 0."""
    layers: Mapping[str, int | type[Operation]]
    """What the names of a layer begin with -> the layer of the model that it equals in kind: its
    number (-1: the last one), or the last one with an operation of this type."""
    dense: bool = False
    """Whether the layer has an MLP where the model's layer has experts."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer of the model -> their names in the layer of a module."""
    embedding_norm: str
    hidden_norm: str
    fuse: str
    """The projection of both, joined, to the input of the layer."""
    norm: str
    """Of the output of the layer, before the head; empty: the norm of the model."""
    hidden_first: bool = False
    """Whether the hidden state precedes the embedding in the input of `fuse`."""
    normed: bool
    """Whether hidden states are taken after the norm before the head: those of the model, and those
    of the module itself when it continues its own draft; otherwise before it."""
    copies: tuple[str, ...] = ()
    """Tensors that repeat tensors of the model."""

    def first(self, name: str, num_layers: int) -> str:
        """Return a name of the layout in the first module of a model with this many layers."""
        return self.modules + name.format(num_layers if self.after_last else 0)

    def is_first(self, tensor: str, num_layers: int) -> bool:
        """Whether a tensor is one of the first module's own."""
        names = (self.embedding_norm, self.hidden_norm, self.fuse, *filter(None, [self.norm]))
        begins = [*self.layers, *(f"{name}." for name in names)]
        return tensor.startswith(
            tuple(self.first(name, num_layers) for name in begins)
        ) and tensor not in [self.first(name, num_layers) for name in self.copies]

    def holds(self, name: str, num_layers: int) -> bool:
        """Whether a tensor belongs to a module of a model with this many layers."""
        if not name.startswith(self.modules):
            return False
        number = re.match(r"(\d{1,9})\.", name.removeprefix(self.modules))
        return not self.after_last or (number is not None and int(number[1]) >= num_layers)


DEEPSEEK_MTP = MtpLayout(
    modules="model.layers.",
    after_last=True,
    layers={"{}.": -1},
    embedding_norm="{}.enorm",
    hidden_norm="{}.hnorm",
    fuse="{}.eh_proj",
    norm="{}.shared_head.norm",
    normed=True,
    copies=("{}.embed_tokens.weight", "{}.shared_head.head.weight"),
)

"""DeepSeek-V3 (arXiv 2412.19437, section 2.2), GLM-4.5 to 4.7 and GLM-4.7-Flash (`MtpModel` of
transformers 5.24; vLLM's `glm4_moe_mtp.py` and `glm4_moe_lite_mtp.py`). Further drafts are accepted
more often if the output is normed: vLLM #45895, ROCm/ATOM #1764."""

HY_V3_MTP = replace(
    DEEPSEEK_MTP,
    norm="{}.final_layernorm",
    copies=("{}.embed_tokens.weight", "{}.shared_head.weight", "{}.shared_head.head.weight"),
)

"""Hy3 (vLLM's `hy_v3_mtp.py`, which uses the head of the model too)."""

MIMO_MTP = MtpLayout(
    modules="model.mtp_layers.",
    layers={"{}.": 0},
    embedding_norm="{}.token_layernorm",
    hidden_norm="{}.hidden_layernorm",
    fuse="{}.input_proj",
    norm="{}.final_layernorm",
    hidden_first=True,
    normed=False,
)

"""MiMo-7B (arXiv 2505.07608). Its authors' code takes the model's state before the norm (vLLM
#17433); the state of further drafts, which the authors do not compute, is taken there too."""

MIMO_V2_MTP = MtpLayout(
    modules="model.mtp.layers.",
    layers={"{}.": 1},
    dense=True,
    renamed={"post_attention_layernorm.weight": "pre_mlp_layernorm.weight"},
    embedding_norm="{}.enorm",
    hidden_norm="{}.hnorm",
    fuse="{}.eh_proj",
    norm="{}.final_layernorm",
    normed=True,
)

"""MiMo-V2-Flash (vLLM's `mimo_v2_mtp.py`, SGLang's `mimo_v2_flash_nextn.py`): a layer with a
window, as the second layer of the model has, and an MLP."""

ERNIE_MTP = MtpLayout(
    modules="model.mtp_",
    layers={"block.{}.": 0},
    dense=True,
    embedding_norm="emb_norm.{}",
    hidden_norm="hidden_norm.{}",
    fuse="linear_proj.{}",
    norm="",
    normed=False,
)

"""ERNIE 4.5. Its authors' code (`Ernie4_5_MoeModel` of PaddleFormers) takes the state before the
norm, and norms the output of a module as that of the model. vLLM's `ernie_mtp.py` takes the normed
state and norms no output."""

QWEN3_NEXT_MTP = MtpLayout(
    modules="mtp.",
    layers={"layers.{}.": Attend},
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    fuse="fc",
    norm="norm",
    normed=True,
)

"""Qwen3-Next and Qwen3.5 (vLLM's `qwen3_next_mtp.py` and `qwen3_5_mtp.py`)."""

NEMOTRON_H_MTP = MtpLayout(
    modules="mtp.",
    layers={"layers.0.": Attend, "layers.1.": Experts},
    embedding_norm="layers.0.enorm",
    hidden_norm="layers.0.hnorm",
    fuse="layers.0.eh_proj",
    norm="layers.1.final_layernorm",
    normed=True,
)

"""Nemotron 3 with the `mtp_hybrid_override_pattern` *E: a layer with attention, then one with
experts (vLLM's `nemotron_h_mtp.py`)."""


# The dimensions and the routing of a mixture of experts.

GroupScore = Literal["max", "top_2_sum"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP (Shazeer et al. 2017). Raises `ConfigError`."""

    num_experts: Annotated[int, Range(1, 2048)]
    """Experts that the router chooses from."""
    num_experts_per_tok: Size
    """Experts that it chooses for a token."""
    moe_intermediate_size: Size
    """Width of an expert."""
    n_shared_experts: Annotated[int, Range(0, 2048)] = 0
    """Experts that every token uses in addition."""
    shared_expert_intermediate_size: Annotated[int, Range(0, MOST_SIZE)] = 0
    """Width of an MLP that every token uses too, perhaps times a gate of the token; 0: there is
    none."""
    moe_latent_size: Size | None = None
    """Features of the latent space in which experts compute, between projections from and to the
    hidden states (Nemotron 3 Super); None: they read the hidden states."""
    scores: Scores = "softmax"
    """As `Routing.scores`."""
    norm_topk_prob: bool = False
    """Whether the scores of a token's experts are divided by their sum."""
    routed_scaling_factor: Number = 1.0
    """Factor of the scores."""
    n_group: Size = 1
    """Groups of consecutive experts."""
    topk_group: Size = 1
    """Groups that a token chooses from."""
    group_score: GroupScore = "max"
    """As `Routing.group_score`."""
    use_expert_bias: bool = True
    """Whether the choice of experts is corrected, in families with a correction."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an MLP."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.num_experts % self.n_group:
            raise ConfigError(
                f"num_experts = {self.num_experts} must be a multiple of n_group = {self.n_group}"
            )
        if self.topk_group > self.n_group:
            raise ConfigError(
                f"topk_group = {self.topk_group} must be at most n_group = {self.n_group}"
            )
        size = self.num_experts // self.n_group
        if self.num_experts_per_tok > self.topk_group * size:
            raise ConfigError(
                f"num_experts_per_tok = {self.num_experts_per_tok} must be at most "
                f"{self.topk_group * size}, the experts of topk_group = {self.topk_group} groups "
                f"of num_experts = {self.num_experts}"
            )
        if self.group_score == "top_2_sum" and size < 2:
            raise ConfigError(
                f"n_group = {self.n_group} must leave at least 2 of num_experts = "
                f"{self.num_experts} to a group, whose score is the sum of its two largest"
            )

    @property
    def routing(self) -> Routing:
        """How a token chooses its experts."""
        return Routing(
            top_k=self.num_experts_per_tok,
            scores=self.scores,
            normalised=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            top_groups=self.topk_group,
            group_score=self.group_score,
        )


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The tensors of a mixture in a checkpoint, with names relative to the layer.

    In names of the tensors of one expert, {} is its number. Other tensors are stacked by expert:
    `[experts, 2F, D]` and `[experts, D, F]`, gate before up.
    """

    router: str = "mlp.gate"
    gate_up: tuple[str, ...] = ("mlp.experts.gate_up_proj",)
    """Names of gate and up; one if they are one tensor."""
    down: str = "mlp.experts.down_proj"
    transposed: bool = False
    """Whether stacked tensors are `[experts, D, 2F]` and `[experts, F, D]`."""
    interleaved: bool = False
    """Whether rows of gate and up alternate."""

    @property
    def is_stacked(self) -> bool:
        """Whether all experts are one tensor."""
        return "{}" not in self.down

    @staticmethod
    def of_tensors(
        mlp: str, router: str = "gate", names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    ) -> ExpertLayout:
        """Return the layout of a mixture `mlp` with tensors of each expert: gate, up and down."""
        *gate_up, down = (f"{mlp}.experts.{{}}.{name}.weight" for name in names)
        return ExpertLayout(router=f"{mlp}.{router}", gate_up=tuple(gate_up), down=down)


@dataclass(frozen=True, kw_only=True)
class MixtureNorms:
    """Norms and scales of a mixture in parallel with an MLP (Gemma 4), by their names in a
    checkpoint."""

    mlp_output: str = "post_feedforward_layernorm_1"
    router: str = "router.scale"
    """Of the input of the router, whose dot products are divided by the root of the hidden size."""
    input: str = "pre_feedforward_layernorm_2"
    output: str = "post_feedforward_layernorm_2"
    expert_scales: str = "router.per_expert_scale"
    """Factor of the score of each expert."""


@dataclass(frozen=True, kw_only=True)
class ExpertTraits:
    """The traits of the mixtures of a family."""

    scores: Scores = "softmax"
    group_score: GroupScore = "max"
    dense_layers: Callable[[Mapping[str, Any], int], tuple[int, ...]] = lambda config, layers: ()
    """Returns which of a number of layers have an MLP. Raises `CheckpointError`."""
    layouts: tuple[ExpertLayout, ...]
    """Layouts of checkpoints; published ones have the first."""
    optional: bool = False
    """Whether a config without experts has an MLP in every layer."""
    shared: str = ""
    """Name of the MLP that all tokens use; empty: there is none."""
    shared_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of its projections; the last one is its output."""
    shared_gate: str = ""
    """Name of the projection to the gate of that MLP; empty: it has no gate."""
    router_bias: bool = False
    """The router has a bias."""
    biases: bool = False
    """Experts have biases: stacked tensors with the suffix `_bias`."""
    correction: str = ""
    """Name of the correction of scores for the choice of experts; empty: there is none."""
    correction_rows: bool = False
    """The correction is stored as a matrix with one row (ERNIE 4.5)."""
    latent: tuple[str, str] = ("", "")
    """Names of the projections to and from the latent space of `moe_latent_size`."""
    exact: bool = False
    """Experts keep the model's dtype: no kernel has experts without gate."""
    scaled_inputs: bool = False
    """Scores multiply the input of an expert, not its output (Llama 4)."""
    parallel_to_mlp: MixtureNorms | None = None
    """The tensors of mixtures whose output is added to an MLP's; None: they replace MLPs."""


@dataclass(frozen=True, kw_only=True)
class DeltaRuleLayout:
    """The tensors of a layer with the delta rule in a checkpoint, and what differs by family.

    Names are relative to the module. A projection with two names has low rank: the first one has
    as many outputs as a head has elements.
    """

    module: str = "linear_attn"
    qkv: tuple[str, ...] = ("in_proj_qkv",)
    """Projections to queries, keys and values; one if fused."""
    gate: tuple[str, ...] = ("in_proj_z",)
    """Projection to the gate of the output."""
    decay: tuple[str, ...] = ("in_proj_a",)
    """Projection to what the decays are made of; of low rank for a decay of each key channel."""
    beta: str = "in_proj_b"
    by_key_head: bool = False
    """Whether `qkv` is one tensor with `gate`, and `beta` with `decay`, that have queries, keys,
    values and gate, or beta and decay, of one key head after the other (Qwen3-Next)."""
    norm: str = "norm"
    output: str = "out_proj"
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    norm_eps: float | None = None
    """Epsilon of the norm of the output; None: the model's."""
    norm_in_float32: bool = False
    """As `GatedNorm.in_float32`."""


# What a decoder family is, and readers for the keys of its `config.json`.

Mixer = Literal["attention", "conv", "delta_rule", "mamba1", "mamba2", "lightning"]
"""What mixes the tokens of a sequence in a layer."""

LayerType = Literal[
    "full_attention",
    "sliding_attention",
    "conv",
    "delta_rule",
    "mamba1",
    "mamba2",
    "mamba2_attention",
    "lightning",
    "mlp",
    "experts",
]

ATTENTION_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")

MIXERS: Mapping[LayerType, tuple[Mixer, ...]] = {
    **dict.fromkeys(ATTENTION_TYPES, ("attention",)),
    "conv": ("conv",),
    "delta_rule": ("delta_rule",),
    "mamba1": ("mamba1",),
    "mamba2": ("mamba2",),
    "mamba2_attention": ("mamba2", "attention"),
    "lightning": ("lightning",),
    "mlp": (),
    "experts": (),
}
"""The mixers of a layer. Several read the same norm, and their outputs are added."""

Json = Mapping[str, Any]

MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)

"""Of Granite; keys of `config.json` and fields of `ModelConfig`."""

DEEP_NORM_FACTORS = tuple(
    f"{name}_{factor}_factor"
    for name in ("full_attn", "linear_attn", "mlp")
    for factor in ("alpha", "beta")
)
"""Of MiniMax-01; keys of `config.json` and fields of `DeepNormConfig`."""

CONFIG_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}
"""Field of `ModelConfig` -> its key in `config.json`, where they differ."""

T = TypeVar("T")

_MOST_INT = 2**63 - 1


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
    """Field of `ModelConfig`, `ExpertsConfig` or the config of a mixer -> its key in `config.json`,
    where other families have another one."""
    prepare: Callable[[Json], Json] = lambda config: config
    """Returns a config with the keys that transformers derives from others. Raises
    `CheckpointError` for variants of the architecture that are not supported."""
    is_sliding: Callable[[Json, int], bool] | None = None
    """Whether a layer has a sliding window, if the config does not list `layer_types`; None: as
    keys say that the family reads, see `slides`."""
    lists_layer_types: bool = False
    """Whether `layer_types` of the config decides."""
    layer_kinds: Mapping[str, LayerType] = field(
        default_factory=lambda: {kind: kind for kind in ATTENTION_TYPES}
    )
    """Name in `layer_types` -> `LayerType`."""
    separate_layers: bool = False
    """A layer has mixers, or an MLP or experts, but not both."""
    is_unrotated: Callable[[Json, int], bool] = lambda config, layer: False
    """Whether queries and keys of a layer are not rotated; the config lists `layer_types`."""
    layer_norms: LayerNorms = field(default_factory=LayerNorms)
    norms_of: Mapping[Mixer, LayerNorms] = field(default_factory=dict)
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
    attention_sinks: Mapping[LayerType, str] = field(default_factory=dict)
    """Layers in which each head has an attention sink, a softmax logit without a value (gpt-oss),
    with the name of the tensor."""
    chunked: bool = False
    """Tokens of sliding layers attend only to their own chunk, of `sliding_window` positions."""
    latent: bool = False
    """Multi-head latent attention."""
    gated_attention: bool = False
    """Attention is multiplied by a sigmoid of a gate, whose rows follow the queries of each head in
    their projection."""
    delta_rule: DeltaRuleLayout | None = None
    """Of layers with the delta rule, if there can be any."""
    mamba: str = "mamba"
    """Name in a checkpoint of the module of a Mamba layer."""
    experts: ExpertTraits | None = None
    """The traits of mixtures of experts, if layers can have them."""
    mtp: MtpLayout | None = None
    """Modules for multi-token prediction that checkpoints may hold, which only drafters read."""
    rope_interleaved: bool = False
    """Whether rotated pairs are neighbours; of latent attention `LatentConfig` says it."""

    def reads(self, key: str) -> bool:
        """Whether a key of `config.json` that only some families have applies to this one."""
        return key in self.defaults or key in self.fixed

    def slides(self, config: Json, layer: int) -> bool:
        """Whether a layer has a sliding window, if the config does not list `layer_types`."""
        if self.is_sliding is not None:
            return self.is_sliding(config, layer)
        if self.reads("sliding_window_pattern"):  # the last layer of each pattern has none
            return (layer + 1) % read_count(config, "sliding_window_pattern") != 0
        if not self.reads("sliding_window") or config.get("sliding_window") is None:
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


def read_optional(config: Json, name: str, kind: type[T]) -> T | None:
    """Return a field checked for its type, None if it is absent or null.

    Integers must fit 64 bits, floating-point numbers must be finite.
    """
    value = config.get(name)
    if value is None:
        return None
    if kind is float and type(value) is int and abs(value) <= _MOST_INT:
        value = float(value)
    if type(value) is not kind:  # not isinstance: to Python, true is an int
        raise CheckpointError(f"{name} must be of type {kind.__name__}, not {bounded_repr(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{name} = {value} must be a finite number")
    if isinstance(value, int) and abs(value) > _MOST_INT:
        raise CheckpointError(f"{name} = {bounded_repr(value)} does not fit 64 bits")
    return value


def read_field(config: Json, name: str, kind: type[T], default: T | None = None) -> T:
    """Return a field checked for its type; absent and null mean the default, if there is one."""
    value = read_optional(config, name, kind)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no {name}")
    return value


def read_count(config: Json, name: str, default: int | None = None) -> int:
    """As `read_field`, for an integer of at least 1."""
    count = read_field(config, name, int, default)
    if count < 1:
        raise CheckpointError(f"{name} = {count} must be at least 1")
    return count


# Decoder families without experts whose configs need more than a few traits.


def _is_unrotated(config: Json, layer: int) -> bool:
    """SmolLM3 and Llama 4: `no_rope_layers` has a 1 for each layer that is rotated."""
    listed = config.get("no_rope_layers") or None
    if listed is None:
        return (layer + 1) % read_count(config, "no_rope_layer_interval") == 0
    num_layers = read_field(config, "num_hidden_layers", int)
    if isinstance(listed, list) and len(listed) < num_layers:
        raise CheckpointError(
            f"no_rope_layers lists {len(listed)} layers, num_hidden_layers = {num_layers}"
        )
    if not isinstance(listed, list) or listed[layer] not in (0, 1):
        raise CheckpointError(
            "no_rope_layers must be a list with a 1 for each layer that is rotated and a 0 for "
            f"each other, not {bounded_repr(listed)}"
        )
    return not listed[layer]


def _unrotated_layers_slide(config: Json, layer: int) -> bool:
    windowed = read_field(config, "use_sliding_window", bool, False)
    return windowed and config.get("sliding_window") is not None and _is_unrotated(config, layer)


def _with_longrope(config: Json) -> Json:
    """Phi-3: ropes of types `su` and `yarn` are `longrope`; others do not exist."""
    changed = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if not isinstance(rope, Mapping):
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ("default", "longrope", "su", "yarn"):
            raise CheckpointError(
                f"rope type {bounded_repr(kind)} is not one of Phi3ForCausalLM: it has 'default' "
                "and 'longrope'"
            )
        changed[name] = {**rope, "rope_type": "default" if kind == "default" else "longrope"}
    return changed


def _granite_hybrid(config: Json) -> Json:
    """Granite 4: all layers are Mamba layers if the config lists none."""
    types = config.get("layer_types")
    if types is None:
        types = config.get("layers_block_type")
    if types is None:
        types = ["mamba"] * read_field(config, "num_hidden_layers", int)
    read_optional(config, "position_embedding_type", str)
    return _mamba2({**config, "layer_types": types})


def _bamba(config: Json) -> Json:
    """Bamba: layers with attention by number."""
    attending = _layers(config, "attn_layer_indices")
    layers = range(read_field(config, "num_hidden_layers", int))
    types = ["full_attention" if i in attending else "mamba" for i in layers]
    return _mamba2({**config, "layer_types": types})


def _falcon_h1(config: Json) -> Json:
    """Falcon-H1: every layer has both mixers, and factors follow linear layers."""
    factor = read_field(config, "lm_head_multiplier", float)
    if not factor > 0.0:
        raise CheckpointError(f"lm_head_multiplier = {factor} must be positive")
    for bias, name in (("attention_bias", "attention_in"), ("mamba_proj_bias", "ssm_in")):
        by = read_field(config, f"{name}_multiplier", float)
        if by != 1.0 and read_field(config, bias, bool, False):
            raise CheckpointError(f"{bias} is not supported with {name}_multiplier = {by}")
    if read_field(config, "mlp_bias", bool, False) and config["mlp_multipliers"][0] != 1.0:
        raise CheckpointError("mlp_bias is not supported with mlp_multipliers")
    types = ["hybrid"] * read_field(config, "num_hidden_layers", int)
    return _mamba2({**config, "layer_types": types, "logits_scaling": 1.0 / factor})


_NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron_types(config: Json) -> list[Any]:
    """Nemotron-H: the types of its layers, which a list or a letter for each names."""
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is None and isinstance(pattern := config.get("hybrid_override_pattern"), str):
        if unknown := {*pattern} - {*_NEMOTRON_KINDS}:
            raise CheckpointError(
                f"hybrid_override_pattern has {', '.join(sorted(map(repr, unknown)))}; it may have"
                f" {', '.join(map(repr, _NEMOTRON_KINDS))}"
            )
        listed = [_NEMOTRON_KINDS[letter] for letter in pattern]
    if not isinstance(listed, list):
        raise CheckpointError(
            "the config must have layers_block_type or hybrid_override_pattern, not"
            f" {bounded_repr(listed)}"
        )
    return listed


def _nemotron_h(config: Json) -> Json:
    """Nemotron-H: its layers, and sizes of Mamba-2 layers under names of their own."""
    act = read_field(config, "mamba_hidden_act", str, "silu")
    for key, found, allowed in (
        ("mamba_hidden_act", act, "silu"),
        ("mlp_hidden_act", config["mlp_hidden_act"], "relu2"),
    ):
        if found != allowed:
            raise CheckpointError(f"{key} = {bounded_repr(found)} must be {allowed!r}")
    types = _nemotron_types(config)
    return {**config, "layer_types": types, **_time_steps(config, "time_step_limit")}


def _mamba2(config: Json) -> Json:
    """Mamba-2: the sizes of heads, and the limits of time steps."""
    act = read_field(config, "hidden_act", str, "silu")
    if act != "silu":
        raise CheckpointError(f"hidden_act = {bounded_repr(act)} must be 'silu' in Mamba layers")
    heads, head = read_count(config, "mamba_n_heads"), config.get("mamba_d_head")
    inner, named = read_optional(config, "mamba_d_ssm", int), "mamba_d_ssm"
    if inner is None:
        inner = read_count(config, "mamba_expand") * read_count(config, "hidden_size")
        named = "mamba_expand * hidden_size"
    if inner % heads or head not in (None, "auto", inner // heads):
        raise CheckpointError(
            f"{named} = {inner} must be mamba_n_heads = {heads} times mamba_d_head = "
            + bounded_repr(head)
        )
    return {**config, "mamba_d_head": inner // heads, **_time_steps(config, "time_step_limit")}


def _jamba(config: Json) -> Json:
    """Jamba: layers with attention by period, and a rank of time steps that may be derived."""
    act = read_field(config, "hidden_act", str, "silu")
    if act != "silu":
        raise CheckpointError(f"hidden_act = {bounded_repr(act)} must be 'silu' in Mamba layers")
    attends = _periodic(config, "attn_layer")
    layers = range(read_field(config, "num_hidden_layers", int))
    types = ["full_attention" if i in attends else "mamba" for i in layers]
    rank = config["mamba_dt_rank"]
    if rank == "auto":
        rank = -(-read_count(config, "hidden_size") // 16)
    return {**config, "layer_types": types, "mamba_dt_rank": rank}


def _periodic(config: Json, name: str) -> range:
    """Return the layers of one kind: one in each period, at an offset."""
    period = read_count(config, f"{name}_period")
    offset = read_field(config, f"{name}_offset", int)
    if not 0 <= offset < period:
        raise CheckpointError(
            f"{name}_offset = {offset} must be at least 0 and below {name}_period = {period}"
        )
    return range(offset, read_field(config, "num_hidden_layers", int), period)


def _time_steps(config: Json, key: str) -> Json:
    """Return the limits of time steps, of which the largest may be infinite."""
    limits = config.get(key)
    if limits is None:
        return {}
    if isinstance(limits, list):  # transformers writes numbers that JSON lacks as objects
        limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    if (
        not isinstance(limits, list)
        or [type(limit) in (int, float) for limit in limits] != [True, True]
        or not 0 <= limits[0] < limits[1]
    ):
        raise CheckpointError(
            f"{key} must be the least and the largest time step, not {bounded_repr(limits)}"
        )
    return {"least_time_step": float(limits[0]), "largest_time_step": min(limits[1], 1e18)}


def _with_lfm2_names(config: Json) -> Json:
    """LFM2: layers by number, and a width of the MLP that is rounded."""
    attending = _layers(config, "full_attn_idxs")
    types = config.get("layer_types")
    if types is None:
        layers = range(read_field(config, "num_hidden_layers", int))
        if config.get("full_attn_idxs") is None:
            attending = frozenset(layers)
        types = ["full_attention" if i in attending else "conv" for i in layers]
    renamed = config.get("block_ff_dim") is not None
    width = read_field(config, "block_ff_dim" if renamed else "intermediate_size", int)
    if read_field(config, "block_auto_adjust_ff_dim", bool):
        multiple = read_count(config, "block_multiple_of")
        factor = read_optional(config, "block_ffn_dim_multiplier", float)
        width = int(2 * width / 3)
        if factor is not None:
            width = multiple * -(-int(factor * width) // multiple)
    tied = read_optional(config, "tie_embedding", bool)
    return {
        **config,
        "layer_types": types,
        "intermediate_size": width,
        **({} if tied is None else {"tie_word_embeddings": tied}),
    }


_LLAMA_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def _with_logits_scaling(config: Json) -> Json:
    """Cohere 2: the divisor of logits is the inverse of a factor."""
    factor = read_field(config, "logit_scale", float)
    if not factor > 0.0:
        raise CheckpointError(f"logit_scale = {factor} must be positive")
    return {**config, "logits_scaling": 1.0 / factor}


_OLMO: dict[str, Any] = {"eos_token_id": 50279, "rms_norm_eps": 1e-5}

_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    defaults=_OLMO,
    layer_norms=LayerNorms(
        input=None,
        attention_output="post_attention_layernorm",
        mlp=None,
        mlp_output="post_feedforward_layernorm",
    ),
    qk_norm="all_heads",
)

_GRANITE: dict[str, Any] = {
    **_LLAMA_TOKENS,
    **dict.fromkeys(MULTIPLIERS, 1.0),
}

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_d_head": None,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "least_time_step": 0.0,
    "largest_time_step": 1e18,
}

_MAMBA2_KINDS: Mapping[str, LayerType] = {
    **dict.fromkeys(("attention", "full_attention"), "full_attention"),
    **dict.fromkeys(("mamba", "linear_attention"), "mamba2"),
}

_BAMBA = Family(
    architecture="BambaForCausalLM",
    defaults={
        **_LLAMA_TOKENS,
        **_MAMBA2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
    },
    fixed={"partial_rotary_factor": 0.5},
    keys={"mamba_output_bias": "mamba_proj_bias"},
    prepare=_bamba,
    lists_layer_types=True,
    layer_kinds=_MAMBA2_KINDS,
    layer_norms=LayerNorms(mlp="pre_ff_layernorm"),
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    final_norm="model.final_layernorm",
)

_GLM_END = [151329, 151336, 151338]

_GLM_FAMILY = Family(
    architecture="GlmForCausalLM",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "eos_token_id": _GLM_END,
    },
    # Without end-of-text tokens, it gets the published models' tokens.
    prepare=lambda config: (
        {**config, "eos_token_id": _GLM_END} if config["eos_token_id"] is None else config
    ),
    gate_up=("mlp.gate_up_proj",),
    output_bias=False,
    rope_interleaved=True,
)

# The mixtures of experts of the supported families, as transformers computes them.


def _qwen3_dense(config: Json, layers: int) -> tuple[int, ...]:
    step = read_count(config, "decoder_sparse_step", 1)
    listed = _layers(config, "mlp_only_layers")
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)


def _llama4_dense(config: Json, layers: int) -> tuple[int, ...]:
    if config.get("moe_layers") is not None:
        mixtures = _layers(config, "moe_layers")
        return tuple(i for i in range(layers) if i not in mixtures)
    step = read_count(config, "interleave_moe_layer_step", 1)
    return tuple(i for i in range(layers) if (i + 1) % step)


def _deepseek_dense(config: Json, layers: int) -> tuple[int, ...]:
    if (every := read_field(config, "moe_layer_freq", int, 1)) != 1:
        raise CheckpointError(
            f"moe_layer_freq = {every} is not supported; every layer after the first "
            "first_k_dense_replace ones must be a mixture of experts (moe_layer_freq = 1)"
        )
    first = read_field(config, "first_k_dense_replace", int, 0)
    return tuple(range(max(0, min(first, layers))))


def _listed_dense(config: Json, layers: int) -> tuple[int, ...]:
    """GLM-4.7-Flash, Hy3: `mlp_layer_types` lists `dense` and `sparse`; default: the first layer
    is dense."""
    listed = config.get("mlp_layer_types")
    if listed is None:
        return (0,)
    if not isinstance(listed, list) or len(listed) != layers or {*listed} - {"dense", "sparse"}:
        raise CheckpointError(
            f"mlp_layer_types must list 'dense' or 'sparse' for each of {layers} layers "
            f"(num_hidden_layers), not {bounded_repr(listed)}"
        )
    return tuple(i for i, kind in enumerate(listed) if kind == "dense")


def _ernie_dense(config: Json, layers: int) -> tuple[int, ...]:
    step = read_count(config, "moe_layer_interval")
    first = read_field(config, "moe_layer_start_index", int)
    last = read_field(config, "moe_layer_end_index", int)
    sparse = range(first, layers if last == -1 else last + 1)
    return tuple(i for i in range(layers) if i not in sparse or (i + 1) % step)


def _without_biases(config: Json) -> Json:
    """ERNIE 4.5: refuse biases, which the output projection of the model would have as well."""
    if read_field(config, "use_bias", bool):
        raise CheckpointError(
            "use_bias is set; only models without biases (use_bias = false) are supported for "
            "Ernie4_5_MoeForCausalLM"
        )
    return config


def _with_rotary_dim(config: Json) -> Json:
    """MiniMax M2: `rotary_dim` elements of a head are rotated."""
    rotated = read_optional(config, "rotary_dim", int)
    if rotated is None or config.get("partial_rotary_factor") is not None:
        return config
    return {**config, "partial_rotary_factor": rotated / read_count(config, "head_dim")}


def _minimax(config: Json) -> Json:
    """MiniMax-01: every second layer has lightning attention, which decays slower in later ones."""
    act = read_field(config, "hidden_act", str, "silu")
    if act != "silu":
        raise CheckpointError(f"hidden_act = {bounded_repr(act)} must be 'silu'")
    if (window := config.get("sliding_window")) is not None:
        raise CheckpointError(f"sliding_window = {bounded_repr(window)} is not supported")
    count = read_field(config, "num_hidden_layers", int)
    types = config.get("layer_types")
    if types is None:
        types = ["linear_attention" if i % 2 else "full_attention" for i in range(count)]
    slopes = [1 - layer / (count - 1 + 1e-5) + 1e-5 for layer in range(count)]
    return {**config, "layer_types": types, "layer_slopes": slopes}


def _with_mimo_layers(config: Json) -> Json:
    """MiMo-V2-Flash: every sixth layer and the first one have full attention, the others a window
    and twice the key/value heads."""
    types: Any = config.get("layer_types")
    if types is None:
        layers = range(read_field(config, "num_hidden_layers", int))
        types = [ATTENTION_TYPES[layer > 0 and (layer + 1) % 6 != 0] for layer in layers]
    heads, kv_heads = (
        read_count(config, name) for name in ("num_attention_heads", "num_key_value_heads")
    )
    listed = types if isinstance(types, list) else []
    before = read_optional(config, "sliding_window_size", int)
    return {
        **config,
        "layer_types": types,
        "layer_heads": [(heads, kv_heads << (kind == "sliding_attention")) for kind in listed],
        "sliding_window": config["sliding_window"] if before is None else before + 1,
        "routed_scaling_factor": read_field(config, "routed_scaling_factor", float, 1.0),
    }


def _jamba_mixtures(config: Json) -> range:
    """Jamba: the layers with experts, none if there is a single expert."""
    mixtures = _periodic(config, "expert_layer")
    return mixtures if read_count(config, "num_experts") > 1 else range(0)


def _layers(config: Json, name: str) -> frozenset[int]:
    value = config.get(name)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise CheckpointError(f"{name} must be a list of layers, not {bounded_repr(value)}")
    return frozenset(value)


_BY_EXPERT = ExpertLayout.of_tensors("mlp")

_STACKED = ExpertLayout()

_LOCAL_EXPERTS = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}

MIXTRAL = ExpertTraits(
    layouts=(
        ExpertLayout.of_tensors("block_sparse_moe", names=("w1", "w3", "w2")),
        _STACKED,
    ),
)

QWEN3_MOE = ExpertTraits(
    dense_layers=_qwen3_dense,
    optional=True,
    layouts=(_BY_EXPERT, _STACKED, ExpertLayout(transposed=True)),
)

GPT_OSS = ExpertTraits(
    scores="softmax_chosen",
    layouts=(
        ExpertLayout(
            router="mlp.router",
            gate_up=("mlp.experts.gate_up_proj_blocks",),
            down="mlp.experts.down_proj_blocks",
            interleaved=True,
        ),
        ExpertLayout(router="mlp.router", transposed=True, interleaved=True),
        ExpertLayout.of_tensors("mlp", "router"),  # of GGUF files
    ),
    router_bias=True,
    biases=True,
)

DEEPSEEK_V2 = ExpertTraits(
    dense_layers=_deepseek_dense,
    optional=True,
    layouts=(_BY_EXPERT, _STACKED),
    shared="mlp.shared_experts",
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    scores="sigmoid",
    group_score="top_2_sum",
    correction="mlp.gate.e_score_correction_bias",
)

QWEN3_NEXT = replace(QWEN3_MOE, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")


def _kimi_dense(config: Json, layers: int) -> tuple[int, ...]:
    if config.get("mlp_layer_types") is not None:
        return _listed_dense(config, layers)
    return tuple(range(max(0, min(read_field(config, "first_k_dense_replace", int, 1), layers))))


KIMI_LINEAR = replace(
    DEEPSEEK_V3,
    dense_layers=_kimi_dense,
    layouts=(ExpertLayout.of_tensors("mlp", names=("w1", "w3", "w2")), _STACKED),
)

LFM2_MOE = ExpertTraits(
    scores="sigmoid",
    dense_layers=lambda config, layers: tuple(
        range(min(read_field(config, "num_dense_layers", int), layers))
    ),
    layouts=(
        ExpertLayout.of_tensors("feed_forward", names=("w1", "w3", "w2")),
        ExpertLayout(
            router="feed_forward.gate",
            gate_up=("feed_forward.experts.gate_up_proj",),
            down="feed_forward.experts.down_proj",
        ),
    ),
    correction="feed_forward.expert_bias",
)

HY_V3 = ExpertTraits(
    scores="sigmoid",
    dense_layers=_listed_dense,
    layouts=(ExpertLayout.of_tensors("mlp", "router.gate"),),
    shared="mlp.shared_mlp",
    correction="mlp.expert_bias",
)

ERNIE4_5 = ExpertTraits(
    dense_layers=_ernie_dense,
    layouts=(_BY_EXPERT, _STACKED),
    shared="mlp.shared_experts",
    correction="mlp.moe_statics.e_score_correction_bias",
    correction_rows=True,
)

MINIMAX_M2 = ExpertTraits(
    scores="sigmoid",
    layouts=MIXTRAL.layouts,
    correction="block_sparse_moe.e_score_correction_bias",
)

GRANITE_MOE = ExpertTraits(
    scores="softmax_chosen",
    optional=True,
    layouts=(
        ExpertLayout(
            router="block_sparse_moe.router.layer",
            gate_up=("block_sparse_moe.input_linear.weight",),
            down="block_sparse_moe.output_linear.weight",
        ),
        ExpertLayout(
            router="block_sparse_moe.router",
            gate_up=("block_sparse_moe.experts.gate_up_proj",),
            down="block_sparse_moe.experts.down_proj",
        ),
    ),
    shared="shared_mlp",
    shared_names=("input_linear", "output_linear"),
)

NEMOTRON_H = ExpertTraits(
    scores="sigmoid",
    group_score="top_2_sum",
    dense_layers=lambda config, layers: tuple(
        layer for layer, kind in enumerate(config["layer_types"][:layers]) if kind != "moe"
    ),
    layouts=(
        ExpertLayout.of_tensors("mixer", names=("up_proj", "down_proj")),
        ExpertLayout(
            router="mixer.gate",
            gate_up=("mixer.experts.up_proj",),
            down="mixer.experts.down_proj",
        ),
    ),
    shared="mixer.shared_experts",
    shared_names=("up_proj", "down_proj"),
    correction="mixer.gate.e_score_correction_bias",
    latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    exact=True,
)

JAMBA = ExpertTraits(
    dense_layers=lambda config, layers: tuple(
        layer for layer in range(layers) if layer not in _jamba_mixtures(config)
    ),
    layouts=(
        ExpertLayout.of_tensors("feed_forward", "router"),
        ExpertLayout(
            router="feed_forward.router",
            gate_up=("feed_forward.experts.gate_up_proj",),
            down="feed_forward.experts.down_proj",
        ),
    ),
)

LLAMA4 = ExpertTraits(
    scores="sigmoid",
    dense_layers=_llama4_dense,
    layouts=(
        ExpertLayout(
            router="feed_forward.router",
            gate_up=("feed_forward.experts.gate_up_proj",),
            down="feed_forward.experts.down_proj",
            transposed=True,
        ),
        ExpertLayout.of_tensors("feed_forward", "router"),  # of GGUF files
    ),
    shared="feed_forward.shared_expert",
    scaled_inputs=True,
)


_GEMMA: dict[str, Any] = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
}

_GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    defaults=_GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    fixed={"sliding_window_pattern": 2},
    lists_layer_types=True,
    keys={"hidden_act": "hidden_activation"},
    offset_norms=True,
    layer_norms=LayerNorms(
        attention_output="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        mlp_output="post_feedforward_layernorm",
    ),
    scaled_embeddings=True,
)

_QWEN: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    defaults=_QWEN | {"num_key_value_heads": 32},
    fixed={"attention_bias": True},
    lists_layer_types=True,
    output_bias=False,
)

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _with_gpt_oss_rope(config: Json) -> Json:
    if config.get("rope_parameters") is not None or config.get("rope_scaling"):
        return config
    return {**config, "rope_parameters": _GPT_OSS_ROPE}


_DELTA_RULE: dict[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_LINEAR_KINDS: Mapping[str, LayerType] = {
    "full_attention": "full_attention",
    "linear_attention": "delta_rule",
}


def _with_interval(config: Json) -> Json:
    """Qwen3-Next: without `layer_types`, the last of each `full_attention_interval` layers has
    attention."""
    if config.get("layer_types") is not None:
        return config
    interval = read_count(config, "full_attention_interval", 4)
    layers = range(read_field(config, "num_hidden_layers", int))
    types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    return {**config, "layer_types": types}


_QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    defaults=_DELTA_RULE
    | {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    prepare=_with_interval,
    lists_layer_types=True,
    layer_kinds=_LINEAR_KINDS,
    qk_norm="each_head",
    offset_norms=True,
    gated_attention=True,
    delta_rule=DeltaRuleLayout(
        qkv=("in_proj_qkvz",), gate=(), decay=(), beta="in_proj_ba", by_key_head=True
    ),
    experts=QWEN3_NEXT,
    mtp=QWEN3_NEXT_MTP,
)


def _with_kimi_names(config: Json) -> Json:
    """Kimi Linear: layers and sizes in an object of their own, and other names of keys."""
    renamed = {
        ours: config[theirs]
        for theirs, ours in (
            *(
                ("model_max_length", "max_position_embeddings"),
                ("moe_renormalize", "norm_topk_prob"),
            ),
            *(("num_expert_group", "n_group"), ("num_experts_per_token", "num_experts_per_tok")),
            *(("num_shared_experts", "n_shared_experts"),),
        )
        if config.get(theirs) is not None
    }
    config = {**config, **renamed}
    inner = config.get("linear_attn_config") or {}
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"linear_attn_config must be an object, not {bounded_repr(inner)}")
    heads = read_count(inner, "num_heads", read_field(config, "linear_num_heads", int))
    size = read_count(inner, "head_dim", read_field(config, "linear_head_dim", int))
    taps = read_field(config, "linear_conv_kernel_dim", int)
    types, layers = config.get("layer_types"), range(read_field(config, "num_hidden_layers", int))
    if types is None:
        attending = {i for i in layers if i and i % 4 == 0}
        if {"full_attn_layers", "kda_layers"} <= inner.keys():
            attending = {layer - 1 for layer in _layers(inner, "full_attn_layers")}
            listed = attending | {layer - 1 for layer in _layers(inner, "kda_layers")}
            if listed != {*layers}:
                raise CheckpointError(
                    f"full_attn_layers and kda_layers must list the layers 1 to {len(layers)}"
                    f" (num_hidden_layers), not {bounded_repr(sorted(i + 1 for i in listed))}"
                )
        types = ["full_attention" if i in attending else "linear_attention" for i in layers]
    return {
        **config,
        "layer_types": types,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": read_count(inner, "short_conv_kernel_size", taps),
    }


def _with_olmo_sizes(config: Json) -> Json:
    """OLMo Hybrid: sizes of the delta rule, and layers, that follow from others."""
    heads = read_count(config, "num_attention_heads")
    key_heads = read_count(config, "linear_num_key_heads", heads)
    key = int(0.75 * read_field(config, "hidden_size", int) / key_heads)
    key = read_count(config, "linear_key_head_dim", key)
    types, layers = config.get("layer_types"), range(read_count(config, "num_hidden_layers"))
    if types is None:
        types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in layers]
        if "full_attention" not in types:
            types[-1] = "full_attention"
    return {
        **config,
        "layer_types": types,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": read_count(config, "linear_num_value_heads", heads),
        "linear_key_head_dim": key,
        "linear_value_head_dim": read_count(config, "linear_value_head_dim", 2 * key),
    }


def _has_no_base(config: Json, layer: int) -> bool:
    """OLMo Hybrid: a base that is null switches rotary positions off."""
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else config
    return "rope_theta" in rope and rope["rope_theta"] is None


_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_LFM2_DEFAULTS: dict[str, Any] = {
    **_LLAMA_TOKENS,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}

_LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    defaults=_LFM2_DEFAULTS,
    fixed={"attention_bias": False, "mlp_bias": False},
    keys={"rms_norm_eps": "norm_eps", "conv_taps": "conv_L_cache"},
    prepare=_with_lfm2_names,
    lists_layer_types=True,
    layer_kinds={"full_attention": "full_attention", "conv": "conv"},
    layer_norms=LayerNorms(input="operator_norm", mlp="ffn_norm"),
    output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    qk_norm="each_head",
    qk_norm_names=("q_layernorm", "k_layernorm"),
    final_norm="model.embedding_norm",
)


# Gemma 3n and Gemma 4: layers with embeddings of their own, and layers that share keys and values.


def _count(config: Json, name: str) -> int:
    value = read_field(config, name, int, 0)
    if value < 0:
        raise CheckpointError(f"{name} = {value} must be at least 0")
    return value


def _with_shared_layers(config: Json, full_every: int) -> dict[str, Any]:
    """Return the config with the layers that share keys and values, and the type of each layer."""
    layers = read_field(config, "num_hidden_layers", int)
    shared = _count(config, "num_kv_shared_layers")
    types = config.get("layer_types")
    if types is None:
        types = [ATTENTION_TYPES[(layer + 1) % full_every != 0] for layer in range(layers)]
    if shared >= layers:
        raise CheckpointError(
            f"num_kv_shared_layers = {shared} of num_hidden_layers = {layers}: no layer has keys"
            " and values; a drafter that reads another model's is not a model"
        )
    shared_layers = list(range(layers - shared, layers))
    return {**config, "layer_types": types, "kv_shared_layers": shared_layers}


def _with_gemma4_layers(config: Json) -> Json:
    """Gemma 4: heads and widths of layers, and rotations of whole heads."""
    found = _with_shared_layers(config, full_every=6)
    types, layers = found["layer_types"], read_field(config, "num_hidden_layers", int)
    if isinstance(types, list) and types:
        found["layer_types"] = types = [*types[:-1], "full_attention"]
    own = config.get("per_layer_config")
    if own is None:
        full: dict[str, Any] = {"head_dim": read_count(config, "global_head_dim", 512)}
        kv_heads = config.get("num_global_key_value_heads")
        if kv_heads is not None and read_field(config, "attention_k_eq_v", bool, False):
            full["num_key_value_heads"] = kv_heads
        own = {str(i): full for i, kind in enumerate(types) if kind == "full_attention"}
    if not isinstance(own, Mapping) or not all(isinstance(v, Mapping) for v in own.values()):
        raise CheckpointError(f"per_layer_config must be of objects, not {bounded_repr(own)}")
    of_layers = [{**config, **own.get(str(layer), {})} for layer in range(layers)]
    heads = read_count(config, "num_attention_heads")
    width = read_count(config, "intermediate_size")
    wide = 2 if read_field(config, "use_double_wide_mlp", bool, False) else 1
    found |= {
        "layer_heads": [(heads, read_count(c, "num_key_value_heads")) for c in of_layers],
        "layer_head_dims": [read_count(c, "head_dim") for c in of_layers],
        "layer_widths": [
            width * (wide if i in found["kv_shared_layers"] else 1) for i in range(layers)
        ],
    }
    if not read_field(config, "enable_moe_block", bool, False):
        found["num_experts"] = None
    ropes = config.get("rope_parameters")
    if ropes is None:
        full_rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        ropes = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": full_rope}
    if isinstance(ropes, Mapping):  # other types of ropes do not read the factor
        ropes = {
            name: {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
            if isinstance(rope, Mapping) and rope.get("rope_type") in (None, "default")
            else rope
            for name, rope in ropes.items()
        }
    return {**found, "rope_parameters": ropes}


def _with_gemma3n_layers(config: Json) -> Json:
    """Gemma 3n: widths and sparsity of layers."""
    found = _with_shared_layers(config, full_every=5)
    layers = read_field(config, "num_hidden_layers", int)
    width, sparsity = config.get("intermediate_size"), config.get("activation_sparsity_pattern")
    widths = width if isinstance(width, list) else [width] * layers
    if not all(type(size) is int for size in widths):
        raise CheckpointError(f"intermediate_size must be of integers, not {bounded_repr(width)}")
    if sparsity is None:
        sparse = 10 if layers > 10 else 0
        sparsity = [0.95] * sparse + [0.0] * (layers - sparse)
    if not isinstance(sparsity, list) or not all(type(s) in (int, float) for s in sparsity):
        raise CheckpointError(
            f"activation_sparsity_pattern must be a list of numbers, not {bounded_repr(sparsity)}"
        )
    return {
        **found,
        "intermediate_size": max(widths, default=0),
        "layer_widths": widths,
        "layer_sparsity": [float(share) for share in sparsity],
    }


_GEMMA3N: dict[str, Any] = {
    **{key: value for key, value in _GEMMA.items() if key != "query_pre_attn_scalar"},
    **{"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    **{"num_kv_shared_layers": 0, "kv_shared_layers": [], "layer_widths": []},
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
    "sliding_window": 512,
}

GEMMA4_EXPERTS = ExpertTraits(
    optional=True,
    layouts=(
        ExpertLayout(
            router="router.proj", gate_up=("experts.gate_up_proj",), down="experts.down_proj"
        ),
        ExpertLayout(
            router="router.proj",
            gate_up=("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
            down="experts.{}.down_proj.weight",
        ),
    ),
    parallel_to_mlp=MixtureNorms(),
)

_GEMMA4 = replace(
    _GEMMA2,
    architecture="Gemma4ForCausalLM",
    defaults=_GEMMA3N
    | {
        "layer_heads": [],
        "layer_head_dims": [],
        "attention_k_eq_v": False,
        "partial_rotary_factor": 1.0,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    fixed={"attention_multiplier": 1.0, "norm_topk_prob": True},
    keys={
        **{"hidden_act": "hidden_activation", "keys_as_values": "attention_k_eq_v"},
        **{"layer_input_size": "hidden_size_per_layer_input"},
        **{"layer_input_vocab": "vocab_size_per_layer_input"},
        "num_experts_per_tok": "top_k_experts",
    },
    prepare=_with_gemma4_layers,
    offset_norms=False,
    qk_norm="each_head",
    value_norms=True,
    layer_scalars=True,
    experts=GEMMA4_EXPERTS,
)

_GEMMA3N_FAMILY = replace(
    _GEMMA2,
    architecture="Gemma3nForCausalLM",
    defaults=_GEMMA3N
    | {
        **{"num_key_value_heads": 2, "num_kv_shared_layers": 15, "final_logit_softcapping": 30.0},
        **{"layer_sparsity": [], "altup_num_inputs": 4, "altup_active_idx": 0},
        **{"altup_correct_scale": True, "laurel_rank": 64},
    },
    fixed={"attention_multiplier": 1.0},
    keys={
        "hidden_act": "hidden_activation",
        **{"layer_input_size": "hidden_size_per_layer_input"},
        **{"layer_input_vocab": "vocab_size_per_layer_input"},
        **{"num_streams": "altup_num_inputs", "active": "altup_active_idx"},
        "scaled": "altup_correct_scale",
    },
    prepare=_with_gemma3n_layers,
    offset_norms=False,
    qk_norm="each_head",
    value_norms=True,
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={**_LLAMA_TOKENS, "mlp_bias": False},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={**_LLAMA_TOKENS, "num_key_value_heads": 8, "sliding_window": 4096},
        fixed={"attention_bias": False},
    ),
    "qwen2": _QWEN2,
    "mimo": replace(_QWEN2, architecture="MiMoForCausalLM", mtp=MIMO_MTP),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=_QWEN | {"num_key_value_heads": 32, "head_dim": 128},
        lists_layer_types=True,
        qk_norm="each_head",
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA
        | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        fixed={},
        qk_norm="each_head",
    ),
    "gemma3n_text": _GEMMA3N_FAMILY,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        architecture="Gemma4UnifiedForCausalLM",
        defaults={**_GEMMA4.defaults, "hidden_size_per_layer_input": 0, "sliding_window": 1024},
        experts=None,
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        defaults=_DEEPSEEK
        | {
            **_LLAMA_TOKENS,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "mlp_bias": False,
        },
        latent=True,
        keys={"num_experts": "n_routed_experts"},
        experts=DEEPSEEK_V2,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        defaults=_DEEPSEEK
        | {
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "rope_interleave": True,
        },
        latent=True,
        keys={"num_experts": "n_routed_experts"},
        experts=DEEPSEEK_V3,
        mtp=DEEPSEEK_MTP,
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        output_bias=False,
        qk_norm="each_head",
        keys={"num_experts": "n_routed_experts"},
        experts=DEEPSEEK_V3,
        mtp=DEEPSEEK_MTP,
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM",
        defaults={
            "bos_token_id": 0,
            "eos_token_id": 1,
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-5,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "rope_interleave": True,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        latent=True,
        keys={"num_experts": "n_routed_experts"},
        experts=replace(DEEPSEEK_V3, dense_layers=_listed_dense),
        mtp=DEEPSEEK_MTP,
    ),
    "mimo_v2_flash": Family(
        architecture="MiMoV2FlashForCausalLM",
        defaults={
            "bos_token_id": 1,
            "num_key_value_heads": 4,
            "layer_heads": None,
            "head_dim": 192,
            "v_head_dim": 128,
            "attention_value_scale": 0.707,
            "rms_norm_eps": 1e-5,
            "sliding_window": 129,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        # Of `rope_parameters`, if there are any; published configs have the same ones elsewhere.
        fixed={"rope_theta": 5e6, "rope_local_base_freq": 1e4, "partial_rotary_factor": 0.334},
        prepare=_with_mimo_layers,
        lists_layer_types=True,
        output_bias=False,
        keys={"num_experts": "n_routed_experts", "value_dim": "v_head_dim"},
        attention_sinks={"sliding_attention": "self_attn.attention_sink_bias"},
        experts=replace(DEEPSEEK_V3, dense_layers=_listed_dense, shared=""),
        mtp=MIMO_V2_MTP,
    ),
    "ernie4_5_moe": Family(
        architecture="Ernie4_5_MoeForCausalLM",
        defaults={
            **_LLAMA_TOKENS,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 5e5,
            "use_bias": False,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        fixed={"attention_bias": False, "norm_topk_prob": True},
        keys={
            "num_experts": "moe_num_experts",
            "n_shared_experts": "moe_num_shared_experts",
            "num_experts_per_tok": "moe_k",
        },
        prepare=_without_biases,
        rope_interleaved=True,
        experts=ERNIE4_5,
        mtp=ERNIE_MTP,
    ),
    "hy_v3": Family(
        architecture="HYV3ForCausalLM",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "mlp_bias": False,
            "num_experts": 192,
            "num_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
        },
        fixed={"norm_topk_prob": True},
        qk_norm="each_head",
        keys={
            "n_shared_experts": "num_shared_experts",
            "routed_scaling_factor": "router_scaling_factor",
        },
        experts=HY_V3,
        mtp=HY_V3_MTP,
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        defaults={
            "bos_token_id": 200034,
            "eos_token_id": 200020,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "partial_rotary_factor": 1.0,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        fixed={"attention_bias": False, "norm_topk_prob": True},
        qk_norm="all_heads",
        keys=_LOCAL_EXPERTS,
        prepare=_with_rotary_dim,
        experts=MINIMAX_M2,
    ),
    "minimax": Family(
        architecture="MiniMaxForCausalLM",
        defaults={
            **_LLAMA_TOKENS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_slopes": [],
            **dict.fromkeys(DEEP_NORM_FACTORS, 1.0),
        },
        fixed={"attention_bias": False, "norm_topk_prob": True},
        keys=_LOCAL_EXPERTS,
        prepare=_minimax,
        lists_layer_types=True,
        layer_kinds={"full_attention": "full_attention", "linear_attention": "lightning"},
        experts=MIXTRAL,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults={
            **_LLAMA_TOKENS,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        fixed={"attention_bias": False, "norm_topk_prob": True},
        keys=_LOCAL_EXPERTS,
        experts=MIXTRAL,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        qk_norm="each_head",
        experts=QWEN3_MOE,
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        fixed={"hidden_act": "silu", "sliding_window_pattern": 2},
        prepare=_with_gpt_oss_rope,
        lists_layer_types=True,
        attention_sinks=dict.fromkeys(ATTENTION_TYPES, "self_attn.sinks"),
        keys=_LOCAL_EXPERTS,
        experts=GPT_OSS,
    ),
    "llama4_text": Family(
        architecture="Llama4ForCausalLM",
        defaults={
            **_LLAMA_TOKENS,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        fixed={"n_shared_experts": 1},
        keys={
            **_LOCAL_EXPERTS,
            "intermediate_size": "intermediate_size_mlp",
            "sliding_window": "attention_chunk_size",
        },
        # Rotated layers attend within chunks, the others to all previous tokens.
        is_sliding=lambda config, layer: not _is_unrotated(config, layer),
        lists_layer_types=True,
        layer_kinds={"chunked_attention": "sliding_attention", "full_attention": "full_attention"},
        is_unrotated=_is_unrotated,
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        qk_norm="unweighted",
        chunked=True,
        rope_interleaved=True,
        experts=LLAMA4,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults={
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "mlp_bias": False,
        },
        is_sliding=_unrotated_layers_slide,
        lists_layer_types=True,
        is_unrotated=_is_unrotated,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        fixed={"attention_bias": False},
        prepare=_with_longrope,
        qkv=("self_attn.qkv_proj",),
        gate_up=("mlp.gate_up_proj",),
        recomputes_long=True,
    ),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        defaults={
            "bos_token_id": 5,
            "eos_token_id": 255001,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
        fixed={"logits_scaling": 1.0},
        keys={"rms_norm_eps": "layer_norm_eps"},
        prepare=_with_logits_scaling,
        lists_layer_types=True,
        is_unrotated=lambda config, layer: config["layer_types"][layer] == "full_attention",
        layer_norms=LayerNorms(mlp=None),
        rope_interleaved=True,
        centred_norms=True,
        parallel_residual=True,
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        architecture="Lfm2MoeForCausalLM",
        defaults=_LFM2_DEFAULTS
        | {
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        fixed={**_LFM2.fixed, "block_auto_adjust_ff_dim": False},
        experts=LFM2_MOE,
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        defaults=_OLMO | {"rope_theta": 5e5, "sliding_window": 4096},
        fixed={"rope_local_base_freq": 5e5, "sliding_window_pattern": 4},
        lists_layer_types=True,
    ),
    "olmo_hybrid": replace(
        _OLMO2,
        architecture="OlmoHybridForCausalLM",
        defaults=_DELTA_RULE
        | dict.fromkeys(_DELTA_RULE.keys() - {"linear_conv_kernel_dim"})
        | {"eos_token_id": 100257, "linear_allow_neg_eigval": True},
        fixed={"mlp_bias": False},
        prepare=_with_olmo_sizes,
        lists_layer_types=True,
        layer_kinds=_LINEAR_KINDS,
        is_unrotated=_has_no_base,
        norms_of={"delta_rule": LayerNorms()},
        renamed={
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        },
        delta_rule=DeltaRuleLayout(
            qkv=("q_proj", "k_proj", "v_proj"),
            gate=("g_proj",),
            decay=("a_proj",),
            beta="b_proj",
            norm="o_norm",
            output="o_proj",
            norm_eps=1e-5,
        ),
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(
        _QWEN3_NEXT,
        architecture="Qwen3_5ForCausalLM",
        defaults=_DELTA_RULE
        | {"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
        delta_rule=DeltaRuleLayout(),
        experts=None,
    ),
    "qwen3_5_moe_text": replace(
        _QWEN3_NEXT,
        architecture="Qwen3_5MoeForCausalLM",
        # All layers have experts, and none an MLP of this intermediate_size.
        defaults={**_QWEN3_NEXT.defaults, "num_experts_per_tok": 8, "intermediate_size": 512},
        fixed={"norm_topk_prob": True},
        delta_rule=DeltaRuleLayout(),
        experts=replace(QWEN3_NEXT, dense_layers=lambda config, layers: (), optional=False),
    ),
    "kimi_linear": Family(
        architecture="KimiLinearForCausalLM",
        defaults=_DEEPSEEK
        | _DELTA_RULE
        | {
            "bos_token_id": 163584,
            "eos_token_id": 163586,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 1048576,
        },
        prepare=_with_kimi_names,
        lists_layer_types=True,
        layer_kinds=_LINEAR_KINDS,
        is_unrotated=lambda config, layer: True,
        latent=True,
        renamed={".block_sparse_moe.": ".mlp.", ".forget_gate.": "."},
        delta_rule=DeltaRuleLayout(
            module="self_attn",
            qkv=("q_proj", "k_proj", "v_proj"),
            gate=("g_a_proj", "g_b_proj"),
            decay=("f_a_proj", "f_b_proj"),
            beta="b_proj",
            norm="o_norm",
            output="o_proj",
            gate_activation="sigmoid",
            norm_in_float32=True,
        ),
        experts=KIMI_LINEAR,
    ),
    "granite": Family(architecture="GraniteForCausalLM", defaults=_GRANITE | {"mlp_bias": False}),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybridForCausalLM",
        defaults=_GRANITE
        | _MAMBA2
        | {
            "intermediate_size": 11008,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        },
        keys={
            "intermediate_size": "shared_intermediate_size",
            "moe_intermediate_size": "intermediate_size",
            "num_experts": "num_local_experts",
            "shared_expert_intermediate_size": "shared_intermediate_size",
            "mamba_output_bias": "mamba_proj_bias",
        },
        prepare=_granite_hybrid,
        lists_layer_types=True,
        layer_kinds=_MAMBA2_KINDS,
        experts=GRANITE_MOE,
        is_unrotated=lambda config, layer: config.get("position_embedding_type") != "rope",
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
    ),
    "bamba": _BAMBA,
    "jamba": Family(
        architecture="JambaForCausalLM",
        defaults={
            **_LLAMA_TOKENS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        fixed={"attention_bias": False, "norm_topk_prob": False},
        keys={"moe_intermediate_size": "intermediate_size"},
        prepare=_jamba,
        lists_layer_types=True,
        layer_kinds={"full_attention": "full_attention", "mamba": "mamba1"},
        is_unrotated=lambda config, layer: True,
        layer_norms=LayerNorms(mlp="pre_ff_layernorm"),
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="model.final_layernorm",
        experts=JAMBA,
    ),
    "nemotron_h": Family(
        architecture="NemotronHForCausalLM",
        defaults={
            **_LLAMA_TOKENS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "mlp_bias": False,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "least_time_step": 0.0,
            "largest_time_step": 1e18,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
        },
        fixed={"attention_bias": False},
        keys={
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "mlp_hidden_act",
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_proj_bias": "use_bias",
            "mamba_output_bias": "use_bias",
        },
        num_layers=lambda config: len(_nemotron_types(config)),
        prepare=_nemotron_h,
        lists_layer_types=True,
        layer_kinds={**_MAMBA2_KINDS, "moe": "experts", "mlp": "mlp"},
        separate_layers=True,
        is_unrotated=lambda config, layer: True,
        renamed={"backbone.": "model.", "model.embeddings.": "model.embed_tokens."},
        layer_norms=LayerNorms(input="norm", mlp="norm"),
        mamba="mixer",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        final_norm="model.norm_f",
        experts=NEMOTRON_H,
    ),
    "falcon_h1": replace(
        _BAMBA,
        architecture="FalconH1ForCausalLM",
        defaults={
            **_BAMBA.defaults,
            **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier"), 1.0),
            **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
            **dict.fromkeys(("key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
            "ssm_multipliers": [1.0] * 5,
            "mlp_multipliers": [1.0] * 2,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "projectors_bias": False,
        },
        fixed={"logits_scaling": 1.0},
        keys={"mamba_output_bias": "projectors_bias"},
        prepare=_falcon_h1,
        layer_kinds={"hybrid": "mamba2_attention"},
    ),
    "glm": _GLM_FAMILY,
    "glm4": replace(
        _GLM_FAMILY,
        architecture="Glm4ForCausalLM",
        layer_norms=LayerNorms(
            attention_output="post_self_attn_layernorm",
            mlp="post_attention_layernorm",
            mlp_output="post_mlp_layernorm",
        ),
    ),
}

"""By `model_type`. As in transformers, `attn_logit_softcapping` is ignored for Gemma 3, attention
biases are ignored for Mistral, and only the logits of the Gemmas are capped."""


# Models of images and text, of which the text is decoded.

_WRAPPERS = frozenset(
    {
        *("aya_vision", "cohere2_vision", "gemma3", "gemma3n", "gemma4", "gemma4_unified"),
        "idefics3",
        *("internvl", "kimi_k25", "kimi_vl", "lfm2_vl", "llama4", "llava", "llava_next"),
        *("llava_onevision", "minimax_m3_vl", "mistral3", "mistral_large4", "muse_glimmer"),
        *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        *("smolvlm", "step3p7"),
    }
)
"""Model types whose `text_config` describes a decoder that does not differ in prompts of text."""
_SAME_TEXT = {
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""The families of decoders with model types of their own. The positions of a text are the same in
the three dimensions of rotations of images (M-RoPE), so these are plain rotations."""


_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
_DEFAULT_SIZES: Mapping[str, Json] = {
    model_type: dict(zip(_SIZE_KEYS, sizes, strict=True))
    for model_type, sizes in (
        ("gemma3_text", (262208, 2304, 9216, 26, 8, 4, 256, 131072)),
        ("llama", (32000, 4096, 11008, 32, 32, None, None, 2048)),
        ("mistral", (32000, 4096, 14336, 32, 32, 8, None, 131072)),
    )
}
"""Defaults of transformers, which the `text_config` of Gemma 3 and of LLaVA leaves out."""


def is_wrapper(config: Json) -> bool:
    """Whether a `config.json` is of a model of images and text."""
    return str(config.get("model_type")) in _WRAPPERS


def text_part(config: Json) -> Json:
    """Return the config of the decoder of text that a `config.json` describes: itself, if it is of
    a model of text.

    What the outer object says of all of the model counts first, such as tied embeddings.
    """
    inner, outer_type = config.get("text_config"), config.get("model_type")
    wrapped = is_wrapper(config)
    if not wrapped and str(outer_type) not in _SAME_TEXT:
        return config
    inner = inner if wrapped and isinstance(inner, Mapping) else {}
    sizes = _DEFAULT_SIZES.get(str(inner.get("model_type")), {})
    text = {**sizes, **config, **inner}
    text |= {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    text["model_type"] = _SAME_TEXT.get(str(text.get("model_type")), text.get("model_type"))
    if (family := FAMILIES.get(text["model_type"])) is not None:
        text["architectures"] = [family.architecture]
    if inner.get("model_type") == "qwen3_vl_moe_text":
        text["norm_topk_prob"] = True
        text.setdefault("num_experts", inner.get("num_local_experts"))  # as transformers writes it
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := text.get(name), Mapping):
            text[name] = {k: "default" if v == "mrope" else v for k, v in rope.items()}
    return text


_OF_THE_WHOLE = (
    *("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config"),
    *("bos_token_id", "eos_token_id"),
)


_UNSUPPORTED = {
    "index_topk": "sparse attention",
    "index_topk_blocks": "sparse attention",
    "indexer_budget": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "hc_mult": "hyper-connections",
    "hc_count": "hyper-connections",
}
"""Keys that configure what no operation computes: attention to tokens or blocks that an indexer
chooses (DeepSeek V3.2, arXiv 2512.02556), and several residual streams (arXiv 2409.19606)."""


def _unsupported_features(config: Json) -> str:
    """Return which features of `_UNSUPPORTED` a `config.json` or its `text_config` asks for."""
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, Mapping) else {})
    keys = {f: key for key, f in _UNSUPPORTED.items() if any(part.get(key) for part in parts)}
    return " and ".join(f"{feature} ({key})" for feature, key in keys.items())


def family_of(config: Json) -> tuple[str, Family]:
    """Return the model type of a `config.json` and its family. Raises `CheckpointError`."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    supported = None if family is None else family.architecture
    architectures = config.get("architectures")
    # Checkpoints name the class they were saved from; a bare config has only the model type.
    named = architectures if isinstance(architectures, list) and architectures else [supported]
    if family is None or supported not in named:
        found = ", ".join(bounded_text(name, 60) for name in named[:3] if name) or "(unnamed)"
        if features := _unsupported_features(config):
            why = f": it has {features}, which no layer of stepgraph computes"
        else:
            why = "; supported: " + ", ".join(family.architecture for family in FAMILIES.values())
        raise CheckpointError(
            f"architecture {found} (model_type {bounded_repr(model_type, 60)}) is not supported"
            + why
        )
    return str(model_type), family
