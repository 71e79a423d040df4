"""Builds the plan of a model from its config; the only place that orders a layer's operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from ..kernels import Kernels
from ..kernels.ops.activation import Activate, ActivationName
from ..kernels.ops.layer_inputs import LayerInput, LayerInputs
from ..kernels.ops.layer_plan import LayerPlan, ModelPlan
from ..kernels.ops.linear import Linear, stored_bytes
from ..kernels.ops.norms import Norm
from ..kernels.ops.operation import Add, Multiply, Operation, Replace, Residual
from ..kernels.ops.parameter import Parameter, Source
from ..kernels.weights import INT4, MODEL
from .attention import attention
from .config import DecoderConfig, ModelConfig
from .layer_kinds import LayerKind, rope_kinds
from .layers.experts import MixtureNorms, experts, routed_and_shared
from .layers.mlp import mlp
from .layers.tensors import matrix, vector
from .sharding import check_ranks, shard_plan
from .transformers.config import TransformersConfig


@lru_cache(maxsize=8)  # thousands of experts have hundreds of thousands of tensors
def model_plan(config: ModelConfig) -> ModelPlan:
    """Return the plan of a model, or of its shard; layers of one kind share a plan.

    Raises:
        ConfigError: the model cannot be split over this number of ranks.
    """
    if config.shard is not None:
        return shard_plan(model_plan(config.whole), *config.shard)
    ropes = rope_kinds(config)
    kinds = [LayerKind.of(config, layer, ropes) for layer in range(config.num_layers)]
    layers = {kind: LayerPlan(tuple(_layer(config, kind))) for kind in dict.fromkeys(kinds)}
    embedding = matrix("embed_tokens", "model.embed_tokens", config.vocab_size, config.hidden_size)
    head = embedding
    if not config.tie_word_embeddings:
        head = matrix("lm_head", "lm_head", config.vocab_size, config.hidden_size)
    scale, altup = config.embedding_multiplier, config.altup
    if config.family.scaled_embeddings:
        scale = config.hidden_size**0.5
    return ModelPlan(
        embedding=embedding,
        embedding_scale=scale,
        layers=tuple(layers[kind] for kind in kinds),
        norm=norm(config, "norm", config.family.final_norm, name="final_norm"),
        head=Linear(name="head", weight=head),
        logit_softcap=config.final_logit_softcapping or 0.0,
        logit_scale=1.0 / config.logits_scaling,
        rope_kinds=len(ropes),
        rope_by_length=any(rope.scaling.by_length for rope in ropes),
        layer_inputs=_layer_inputs(config),
        before=None if altup is None else altup.before(config.hidden_size),
        after=None if altup is None else altup.after(config.hidden_size),
    )


def mtp_layers(config: ModelConfig) -> Iterator[tuple[str, LayerPlan]]:
    """Yield what the names of each layer of the first module for multi-token prediction begin with,
    and its plan; the family has such modules."""
    layout, plan, ropes = config.family.mtp, model_plan(config), rope_kinds(config)
    assert layout is not None, "only families with modules have drafters for them"
    for prefix, like in layout.layers.items():
        if isinstance(like, int):
            layer = range(config.num_layers)[like]
        else:
            found = [any(isinstance(op, like) for op in each.operations) for each in plan.layers]
            layer = max(index for index, has in enumerate(found) if has)
        kind = LayerKind.of(config, layer, ropes)
        if layout.dense and kind.feed_forward == "experts":
            kind = kind._replace(feed_forward="mlp")
        yield layout.first(prefix, config.num_layers), LayerPlan(tuple(_layer(config, kind)))


def plan_of(config: DecoderConfig) -> ModelPlan:
    """Return the plan of a model of a native family, or of transformers."""
    if isinstance(config, ModelConfig):
        return model_plan(config)
    assert isinstance(config, TransformersConfig)
    return config.plan


def shard_config(config: DecoderConfig, rank: int, ranks: int) -> DecoderConfig:
    """Return the config that one rank's plan is made from; `config` for a single rank.

    Raises:
        ConfigError: as `check_ranks`.
    """
    check_ranks(plan_of(config), ranks)
    if ranks == 1:
        return config
    assert isinstance(config, ModelConfig), "others were refused"
    return replace(config, shard=(rank, ranks))


# The operations of a layer.


def _layer(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    config = kind.of_model(config)
    family, altup = config.family, config.altup
    hidden, eps = config.hidden_size, config.rms_norm_eps
    own = (family.norms_of[mixer] for mixer in kind.mixers if mixer in family.norms_of)
    norms, scale = next(own, family.layer_norms), config.residual_multiplier
    feed_forward, mixers = list(_feed_forward(config, kind)), list(_mixers(config, kind))
    mixed_by = fed_by = scale
    if (deep := config.deep_norm) is not None:
        alpha, mixed_by = deep.linear_attn_alpha_factor, deep.linear_attn_beta_factor
        if "attention" in kind.mixers:
            alpha, mixed_by = deep.full_attn_alpha_factor, deep.full_attn_beta_factor
        mixers = list(_on_normed("normed", alpha, mixers))
        fed_by = deep.mlp_beta_factor
        feed_forward = list(_on_normed("mlp_normed", deep.mlp_alpha_factor, feed_forward))
    if altup is not None:
        yield from altup.predicted(hidden, eps)
    if mixers:
        if norms.input is not None:
            always = family.parallel_residual or altup is not None
            own_norm = norm(config, "input_norm", norms.input)
            yield _named(own_norm, "normed", mixers, always=always)
        yield from mixers
        if norms.attention_output is not None:
            yield norm(config, "attention_output_norm", norms.attention_output)
        added = Residual(name="residual", scale=mixed_by * config.attention_value_scale)
        yield _named(added, "attended", feed_forward, always=altup is not None)
    if altup is not None:
        yield from altup.laurel(hidden, eps)
    if kind.feed_forward is None:
        return
    if norms.mlp is not None:
        yield _named(norm(config, "mlp_norm", norms.mlp), "mlp_normed", feed_forward)
    yield from feed_forward
    if norms.mlp_output is not None:
        yield norm(config, "mlp_output_norm", norms.mlp_output)
    yield Residual(name="residual", scale=fed_by, writes="" if altup is None else "updated")
    layer_input = list(_layer_input(config))
    if altup is not None:
        yield from altup.corrected(hidden, eps, layer_input)
    elif layer_input:
        yield from (*layer_input, Residual(name="residual"))
    if family.layer_scalars:
        scalar = Parameter("scalar.weight", (Source("layer_scalar", (1,)),))
        yield Multiply(name="layer_scalar", weight=scalar)
        yield Replace(name="output")


def _on_normed(name: str, alpha: float, operations: Sequence[Operation]) -> Iterator[Operation]:
    """Operations on the normed hidden states `name`; these, times alpha, are the hidden states that
    their result is added to (DeepNorm)."""
    if alpha != 1.0:
        yield Multiply(name="residual_scale", factor=alpha)
    yield Replace(name="normed")
    first, *others = operations
    yield from (replace(first, reads=(name,)), *others)


def _named(
    op: Operation, name: str, later: Iterable[Operation], *, always: bool = False
) -> Operation:
    """Name the value of an operation if a later one reads it by name."""
    return replace(op, writes=name) if always or any(name in o.reads for o in later) else op


def norm(config: ModelConfig, ours: str, theirs: str, *, name: str = "") -> Norm:
    """A norm of hidden states; `name` is its name in profiles (default: `ours`)."""
    weight = vector(ours, theirs, config.hidden_size)
    offset = config.family.offset_norms
    centred = config.family.centred_norms
    own = name or ours
    return Norm(name=own, weight=weight, eps=config.rms_norm_eps, offset=offset, centred=centred)


def _feed_forward(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """The operations of the MLP or the experts of a layer."""
    family, hidden, moe = config.family, config.hidden_size, config.experts
    if kind.feed_forward is None:
        return
    traits = family.experts if kind.feed_forward == "experts" else None
    parallel = None if traits is None else traits.parallel_to_mlp
    if traits is None or parallel is not None:
        names, biased = (*family.gate_up, family.down), config.mlp_bias
        function = replace(activate(config, config.intermediate_size), sparsity=kind.sparsity)
        factors = config.multipliers.mlp_multipliers
        up, *rest = mlp(hidden, names, function, biased, factors=(factors[0], factors[1]))
        yield replace(up, reads=("normed",)) if family.parallel_residual else up
        yield from rest
    if traits is None:
        return
    assert moe is not None, "a layer with experts"
    if parallel is None:
        yield from routed_and_shared(moe, traits, hidden, lambda size: activate(config, size))
    else:
        function = activate(config, moe.moe_intermediate_size)
        routed = experts(moe, traits, hidden, function)
        yield from _parallel_mixture(config, routed, parallel)


def _mixers(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """The operations of the mixers of a layer, from the norm of its input to what is added."""
    hidden, eps = config.hidden_size, config.rms_norm_eps

    def operations(mixer: str) -> Iterator[Operation]:
        if mixer == "attention":
            return attention(config, kind)
        assert kind.mixer is not None, "`ModelConfig` has checked it"
        return kind.mixer.operations(hidden, eps)

    if len(kind.mixers) < 2:
        for mixer in kind.mixers:
            yield from operations(mixer)
        return
    for mixer in kind.mixers:
        first, *inner, last = operations(mixer)
        yield from (replace(first, reads=("normed",)), *inner, replace(last, writes=mixer))
    yield Add(name="add_mixers", reads=kind.mixers)


_ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def activate(config: ModelConfig, features: int) -> Activate:
    """The activation of an MLP, or of an expert, with this number of features."""
    function = _ACTIVATIONS[config.hidden_act]
    if not config.swiglu_limit:
        gated = function != "relu2"
        return Activate(name="activate", function=function, features=features, gated=gated)
    return Activate(
        name="activate",
        function=function,
        features=features,
        limit=config.swiglu_limit,
        alpha=config.swiglu_alpha,
        up_offset=1.0,
    )


# Gemma 4's mixtures of experts, whose output is added to an MLP's.


def _parallel_mixture(
    config: ModelConfig, routed: Operation, names: MixtureNorms
) -> Iterator[Operation]:
    """The mixture of a layer after its MLP; both read the hidden states after attention."""
    yield replace(norm(config, "dense_norm", names.mlp_output), writes="dense")
    scale = Parameter("router_norm.weight", (Source(names.router, (config.hidden_size,)),))
    of_router = Norm(name="router_norm", weight=scale, eps=config.rms_norm_eps)
    yield replace(of_router, reads=("attended",))
    factor = config.hidden_size**-0.5
    yield Multiply(name="router_scale", factor=factor, writes="router_input")
    inputs = norm(config, "experts_norm", names.input)
    yield replace(inputs, reads=("attended",), writes="experts_input")
    yield replace(routed, reads=("experts_input", "router_input"))
    yield replace(norm(config, "experts_output_norm", names.output), writes="mixture")
    yield Add(name="sum", reads=("dense", "mixture"))


# Per-layer embeddings.


def _layer_inputs(config: ModelConfig) -> LayerPlan | None:
    """The inputs of all layers that depend on the token; None: they have none."""
    hidden, size = config.hidden_size, config.hidden_size_per_layer_input
    if not size:
        return None
    features, tokens = config.num_layers * size, config.vocab_size_per_layer_input
    inputs = LayerInputs(
        name="layer_inputs",
        table=matrix("table", "embed_tokens_per_layer", tokens, features),
        projection=matrix("projection", "per_layer_model_projection", features, hidden),
        norm=vector("norm", "per_layer_projection_norm", size),
        eps=config.rms_norm_eps,
        vocab_size=config.vocab_size,
        writes="layer_inputs",
    )
    return LayerPlan((inputs, Replace(name="output")))


def _layer_input(config: ModelConfig) -> Iterator[Operation]:
    """The layer's input of the token, gated by hidden states and projected to them; none if models
    have no such inputs."""
    hidden, size = config.hidden_size, config.hidden_size_per_layer_input
    if not size:
        return
    yield LayerInput(
        name="layer_input",
        gate=matrix("layer_input.gate", "per_layer_input_gate", size, hidden),
        projection=matrix("layer_input.projection", "per_layer_projection", hidden, size),
        activate=activate(config, size),
    )
    yield norm(config, "layer_input_norm", "post_per_layer_input_norm")


# Maps the parameters of a model to the tensors of a Hugging Face checkpoint.


def fused_layout(config: ModelConfig) -> dict[str, Parameter]:
    """Return the parameters of the model by our name, in the order a forward pass needs them.

    Each says which tensors of a Hugging Face checkpoint make it, in which order, and their shapes.
    Models with tied embeddings have no `lm_head.weight`.
    """
    return {parameter.name: parameter for parameter in model_plan(config).parameters()}


_NEVER_INT4 = ("embed_tokens.weight", "layer_inputs.table.weight", "lm_head.weight")


def parameter_bytes(parameter: Parameter, kernels: Kernels, dtype: torch.dtype) -> int:
    """Return the bytes of a parameter as the kernels store it."""
    if not parameter.is_matrix:
        return parameter.elements * (parameter.dtype or dtype).itemsize
    if parameter.name in kernels.codes:
        return kernels.codes[parameter.name]
    if kernels.weights == INT4 and (kernels.codes or parameter.name in _NEVER_INT4):
        kernels = replace(kernels, weights=MODEL)
    rows, columns = parameter.shape
    return stored_bytes(kernels, rows, columns, dtype, parameter.matrices)
