"""The configuration of a model that transformers implements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...bounded_repr import bounded_repr
from ...errors import CheckpointError, ConfigError
from ...kernels.ops.attention import Attend
from ...kernels.ops.layer_plan import LayerPlan, ModelPlan
from ...kernels.ops.linear import Linear
from ...kernels.ops.norms import Norm
from ...kernels.ops.operation import Opaque
from ...kernels.ops.parameter import Parameter, Shape, Source
from ..config import DTYPES, DecoderConfig, Dtype, check_quantisation, token_ids
from ..config_keys import read_optional
from ..families import is_wrapper
from .attention import (
    IMPLEMENTATION,
    convertible_parameters,
    import_transformers,
    quiet,
    reason_of,
    register,
)
from .probe import AttentionCall, LinearUse, Probe, probe_model

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

# The plan of a transformers model, from the record of its forward pass.
#
# The plan lists the attention and the linear layers of each decoder layer. Everything else of a
# layer is one `Opaque` operation.


class LinearGroup(NamedTuple):
    """Linear layers with the same input, computed as one product."""

    layer: int | None
    """The decoder layer they belong to; None: the head."""
    members: tuple[LinearUse, ...]
    operation: Linear
    """The product, as an operation of a plan."""

    @property
    def name(self) -> str:
        """Path of the first one."""
        return self.members[0].module


def _product(uses: Sequence[LinearUse]) -> Linear:
    name = uses[0].module
    weights = (_weight(use) for use in uses)
    biases = (Source(f"{u.module}.bias" if u.bias else None, (u.out_features,)) for u in uses)
    has_bias = any(use.bias for use in uses)
    return Linear(
        name=name.rpartition(".")[2],
        weight=Parameter(f"{name}.weight", tuple(weights)),
        bias=Parameter(f"{name}.bias", tuple(biases)) if has_bias else None,
    )


@dataclass(frozen=True)
class Transposed:
    """The rows of a matrix that a checkpoint has as columns."""

    def shape(self, stored: Shape) -> Shape:
        return stored[::-1]

    def read(self, stored: Tensor) -> Tensor:
        return stored.T


def _weight(use: LinearUse) -> Source:
    name, shape = f"{use.module}.weight", (use.out_features, use.in_features)
    return Source(name, shape[::-1], Transposed()) if use.transposed else Source(name, shape)


def linear_groups(probe: Probe) -> tuple[LinearGroup, ...]:
    """Return the linear layers to replace, those with the same input together, in call order.

    These are the ones of decoder layers, and the head.
    """
    groups: dict[tuple[int | None, int], list[LinearUse]] = {}
    for use in probe.linears:
        layer = _layer_of(use.module, probe.layers)
        is_head = use == probe.linears[-1] and use.out_features == probe.vocab_size
        if layer is not None or is_head:
            groups.setdefault((layer, use.input), []).append(use)
    return tuple(
        LinearGroup(layer, tuple(uses), _product(uses)) for (layer, _), uses in groups.items()
    )


def plan_of_probe(model: Any, probe: Probe) -> ModelPlan:
    """Return the plan of a model, whose parameters may be without data.

    All parameters are in it, once each. Those that are not replaced belong to the `Opaque`
    operation of their layer, or outside of layers to the final norm.
    """
    groups = linear_groups(probe)
    replaced = {f"{use.module}.{leaf}" for g in groups for use in g.members for leaf in _LEAVES}
    replaced |= {call.sinks for call in probe.attention if call.sinks is not None}
    embedding = _embedding(model, probe)
    others: dict[int | None, list[Source]] = {}
    for name, parameter in model.named_parameters():
        if name not in replaced and name != embedding.name:
            layer = _layer_of(name, probe.layers)
            others.setdefault(layer, []).append(Source(name, tuple(parameter.shape)))
    layers = [
        LayerPlan(
            (
                *(group.operation for group in groups if group.layer == index),
                _attend(call),
                Opaque(
                    name="other_modules",
                    held=_flat("other_modules", others.get(index, ())),
                    activation_bytes=probe.activation_bytes,
                ),
            )
        )
        for index, call in enumerate(probe.attention)
    ]
    head = next((group.operation for group in groups if group.layer is None), None)
    if head is None or (probe.tied and probe.packed_embedding):
        head = Linear(name="head", weight=embedding, bias=None if head is None else head.bias)
    return ModelPlan(
        embedding=embedding,
        embedding_scale=1.0,
        layers=tuple(layers),
        norm=Norm(name="final_norm", weight=_flat("other_modules", others.get(None, ())), eps=0.0),
        head=head,
        logit_softcap=0.0,
        logit_scale=1.0,
        rope_kinds=1,
        full_names=True,
    )


_LEAVES = ("weight", "bias")


def _embedding(model: Any, probe: Probe) -> Parameter:
    """The input embeddings; not a matrix where they are not packed."""
    name = f"{probe.embedding}.weight"
    shape = tuple(model.get_submodule(probe.embedding).weight.shape)
    viewed_as = None if probe.packed_embedding else (*shape, 1)
    return Parameter(name, (Source(name, shape),), viewed_as=viewed_as)


def _attend(call: AttentionCall) -> Attend:
    """An attention call; the shorter of a key and a value is padded."""
    dim = max(call.key_dim, call.value_dim)
    sinks = None
    if call.sinks is not None:
        sinks = Parameter(call.sinks, (Source(call.sinks, (call.heads,)),))
    return Attend(
        name="attention",
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_dim=dim,
        value_dim=dim,
        scale=call.scale,
        window=call.mask.window,
        chunk=call.mask.chunk,
        softcap=call.softcap,
        sinks=sinks,
    )


def _flat(name: str, sources: Sequence[Source]) -> Parameter:
    """Parameters as one vector: they are stored unchanged."""
    flat = tuple(Source(s.name, (math.prod(s.shape),)) for s in sources)
    return Parameter(name, flat or (Source(None, (0,)),))


def _layer_of(name: str, prefixes: Sequence[str]) -> int | None:
    return next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), None)


# Rotations whose frequencies transformers changes with the length of the longest sequence.
#
# Such a change would depend on the batch. Up to some length the frequencies are those that the
# module was built with, so they are kept, and longer sequences are refused.

_FROZEN = "default"
"""A rope type that `transformers.modeling_rope_utils.dynamic_rope_update` does not change."""


class LengthLimit(NamedTuple):
    """The longest sequence for which a rotation has the frequencies it was built with."""

    tokens: int
    rope_type: str
    """Name in `config.json`."""


def freeze_rotations(model: nn.Module) -> LengthLimit | None:
    """Keep the frequencies of all rotations; return the smallest limit that follows from it."""
    limits = []
    for module in model.modules():
        types: Any = getattr(module, "rope_type", None)
        by_layer = types if isinstance(types, dict) else {None: types}
        for layer_type, kind in by_layer.items():
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            config: Any = module.config
            parameters = config.rope_parameters
            own = parameters if layer_type is None else parameters[layer_type]
            first = own.get("original_max_position_embeddings") or config.max_position_embeddings
            limits.append(LengthLimit(int(first), kind))
            by_layer[layer_type] = _FROZEN
        if not isinstance(types, dict) and types is not None:
            module.rope_type = by_layer[None]
    return min(limits, default=None)


_NOT_CONSTANT = ("_name_or_path", "transformers_version", "dtype", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(DecoderConfig):
    """What the engine needs to know about a model of transformers."""

    architecture: str
    """Name of the `AutoModelForCausalLM` class."""
    length_limit: LengthLimit | None
    """The longest sequence that it can run, if a rotation changes with the length."""
    probe: Probe
    """What a forward pass does."""
    plan: ModelPlan
    source: Any
    """The `PreTrainedConfig`."""

    def constants(self) -> dict[str, Any]:
        """Return the config as `config.json` has it, without names and versions.

        With `torch_dtype` as resolved, and with the tokens of the model.
        """
        found = {k: v for k, v in self.source.to_dict().items() if k not in _NOT_CONSTANT}
        return found | {
            "architectures": [self.architecture],
            "torch_dtype": self.torch_dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": self.eos_token_ids,
        }

    def check_length(self, max_model_len: int) -> None:
        """Raise `ConfigError` for sequences whose rotations would depend on the batch."""
        limit = self.length_limit
        if limit is not None and max_model_len > limit.tokens:
            raise ConfigError(
                f"max_model_len={max_model_len}, but transformers changes the frequencies of"
                f" rope_type {limit.rope_type!r} for sequences of more than {limit.tokens} tokens:"
                f" set EngineConfig(max_model_len={limit.tokens}) or lower",
                field="max_model_len",
            )


def read_transformers_config(
    directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> TransformersConfig:
    """Read the config of a checkpoint and probe its model, which gets no memory.

    Args:
        directory: of the checkpoint.
        config: its `config.json`.
        generation: its `generation_config.json`, with more end-of-sequence tokens.

    Raises:
        CheckpointError: transformers has no causal language model for it, or it cannot run here.
        ConfigError: the package transformers is missing.
    """
    transformers = import_transformers()
    register()
    _refuse(config)
    try:
        with quiet():
            source = transformers.AutoConfig.from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # of any type, from a file that may hold anything
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot read it: {reason_of(error)}"
        ) from error
    for part in (source, source.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):  # codes are decoded before transformers sees them
            del part.quantization_config
    source, model_class = _decoder_of(transformers, source, config)
    text = source.get_text_config(decoder=True)
    dtype = config.get("dtype", config.get("torch_dtype")) or text.dtype or "float32"
    torch_dtype = cast("Dtype", str(dtype).removeprefix("torch."))
    if torch_dtype not in DTYPES:
        raise CheckpointError(
            f"dtype = {bounded_repr(torch_dtype)} is not supported; supported: {', '.join(DTYPES)}"
        )
    model, fake = fake_model(model_class, source, torch_dtype)
    limit = freeze_rotations(model)
    probe = probe_model(model, fake, model_class.__name__)
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None:
        positions = getattr(text, "max_target_positions", None)
    if type(positions) is not int or positions < 1:
        raise CheckpointError(
            f"max_position_embeddings = {bounded_repr(positions)} must be a positive integer"
        )
    eos = token_ids(config) + token_ids(generation or {}) or token_ids(vars(text))
    return TransformersConfig(
        model_type=source.model_type,
        architecture=model_class.__name__,
        vocab_size=probe.vocab_size,
        hidden_size=probe.hidden_size,
        num_layers=len(probe.attention),
        max_position_embeddings=positions,
        bos_token_id=read_optional(config, "bos_token_id", int),
        eos_token_ids=tuple(i for i in dict.fromkeys(eos) if 0 <= i < probe.vocab_size),
        torch_dtype=torch_dtype,
        tie_word_embeddings=probe.tied,
        length_limit=limit,
        probe=probe,
        plan=plan_of_probe(model, probe),
        source=source,
    )


def fake_model(model_class: type[Any], source: Any, dtype: str) -> tuple[Any, FakeTensorMode]:
    """Return a model whose tensors have no data, and the mode that operations on it need.

    Raises `CheckpointError` if the class cannot be built from this config.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import
    from transformers.initialization import no_init_weights

    fake = FakeTensorMode()
    try:
        with fake, quiet(), convertible_parameters():
            with no_init_weights():  # some initialisations read values
                model = model_class._from_config(
                    source, dtype=getattr(torch, dtype), attn_implementation=IMPLEMENTATION
                )
            model.tie_weights()
    except Exception as error:  # of any type, from any model
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise CheckpointError(
                f"{model_class.__name__} of transformers cannot run here: it has attention classes"
                " of its own; use transformers itself for this model"
            ) from error
        raise CheckpointError(
            f"{model_class.__name__} of transformers cannot be built from this config:"
            f" {reason_of(error)}"
        ) from error
    return model.eval(), fake


def _refuse(config: Mapping[str, Any]) -> None:
    """Refuse configs that are not of a plain decoder, by their own words."""
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        remote = config.get("auto_map")
        why = (
            "; its own code (auto_map) is never run: use an engine that runs remote code"
            if remote
            else ""
        )
        raise CheckpointError(f"transformers has no model_type {bounded_repr(model_type, 60)}{why}")
    check_quantisation(config)
    if config.get("is_encoder_decoder"):
        raise CheckpointError(
            f"model_type {bounded_repr(model_type, 60)} is an encoder-decoder"
            " (is_encoder_decoder is set); only decoder-only models run here"
        )


def model_class_of(config: TransformersConfig) -> type[Any]:
    """Return the class of a model."""
    model_class: type[Any] = getattr(import_transformers(), config.architecture)
    return model_class


def _decoder_of(transformers: Any, source: Any, config: Mapping[str, Any]) -> tuple[Any, type[Any]]:
    """Return a config and its causal language model, if the checkpoint says it is one.

    Of a model of images and text they are of the decoder of text, if that has a class of its own.
    """
    auto = transformers.models.auto.modeling_auto
    mapping = auto.MODEL_FOR_CAUSAL_LM_MAPPING
    text = source.get_text_config(decoder=True)
    if is_wrapper(config):
        # Some decoders are listed only as models of images and text, such as Mistral 4.
        for classes in (mapping, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
            if type(text) in classes:
                text.tie_word_embeddings = source.tie_word_embeddings
                return text, classes[type(text)]
    if type(source) not in mapping:
        raise CheckpointError(
            f"transformers has no AutoModelForCausalLM for model_type {source.model_type!r}"
        )
    model_class: type[Any] = mapping[type(source)]
    named = config.get("architectures")
    if isinstance(named, list) and named and model_class.__name__ not in named:
        raise CheckpointError(
            f"architectures = {bounded_repr(named, 100)}: the weights do not belong to"
            f" {model_class.__name__}, the causal language model of {source.model_type!r}"
        )
    return source, model_class
