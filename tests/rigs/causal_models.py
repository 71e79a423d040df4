"""A small random model of every causal-LM class of transformers, built by rule.

A configuration class lists its fields, and equal names mean equal things (`causal_sizes`). Layers
are added until every type of layer of the default configuration occurs, and weights are drawn so
that logits differ and each part of a model changes them.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .causal_sizes import EXCEPTIONS, HEADS, SIZES, UNBUILDABLE, VOCAB_SIZE

MODEL_TYPES: dict[str, str] = {
    model_type: names if isinstance(names, str) else names[0]
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
}
"""The class of each model type."""

FIRST_TOKEN, LAST_TOKEN = 5, 80
"""Of prompts: the ids outside have meanings, such as padding or images."""

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
LAYER_TYPES = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")
SET_WITHOUT_DEFAULT = ("num_key_value_heads",)
"""Fields that are None by default and get a size."""
MOST_LAYERS = 9
ENOUGH_DISTINCT = 6
MOST_PARAMETERS = 15_000_000
SCALES = ((0.3, 1.5), (0.3, 3.0), (0.03, 1.5), (0.03, 3.0), (0.03, 6.0))
"""Standard deviations of embeddings, and of what a matrix makes of inputs of order one."""


class UnbuildableError(RuntimeError):
    """No small model of a class can be built; the message says why."""


def small_config(model_type: str, changes: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """Return a small configuration whose layers are of every type of the default one.

    Args:
        model_type: a key of `MODEL_TYPES`.
        changes: fields that differ; a `NESTED.NAME` is one of a configuration within, and the value
            of `NESTED` its model type.

    Raises:
        UnbuildableError: there is none.
    """
    if model_type in UNBUILDABLE:
        raise UnbuildableError(UNBUILDABLE[model_type])
    given = EXCEPTIONS.get(model_type, {}) | dict(changes or {})
    config_class = CONFIG_MAPPING[model_type]
    try:
        types = _layer_types(config_class())
    except ValueError:  # some have no valid default
        types = set()
    layers = SIZES["num_hidden_layers"]
    while True:
        config = config_class(**_arguments(config_class, given, layers))
        if layers == MOST_LAYERS or types <= _layer_types(config):
            return config
        layers += 1


def _arguments(config_class: Any, given: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the arguments of a configuration class."""
    arguments: dict[str, Any] = {}
    fields = dataclasses.fields(config_class)
    for field in fields:
        name, default = field.name, field.default
        if name in given or (default is None and name not in SET_WITHOUT_DEFAULT):
            continue
        if name == "is_decoder":
            arguments[name] = True
        elif name in LAYER_COUNTS:
            arguments[name] = layers
        elif name in SIZES and not isinstance(default, (bool, str, list, dict)):
            arguments[name] = SIZES[name]
        elif name.endswith("_token_id") and isinstance(default, int):
            arguments[name] = VOCAB_SIZE - 1
    if "num_key_value_heads" in arguments and any(f.name == "kv_lora_rank" for f in fields):
        arguments["num_key_value_heads"] = HEADS  # each head has its part of the latent vector
    nested = _nested_classes(config_class)
    for name, nested_class in nested.items():
        prefix = f"{name}."
        if isinstance(model_type := given.get(name), str):
            nested_class = CONFIG_MAPPING[model_type]
        inner = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
        arguments[name] = nested_class(**_arguments(nested_class, inner, layers))
    own = {k: v for k, v in given.items() if "." not in k and (k not in nested or v is None)}
    return arguments | own


def _nested_classes(config_class: Any) -> dict[str, Any]:
    """Return the classes of the configurations within one, by field."""
    given = getattr(config_class, "sub_configs_defaults", None) or config_class.sub_configs or {}
    found = {}
    for name, nested in given.items():
        model_type = getattr(nested, "model_type", None)
        if not dataclasses.is_dataclass(nested):
            nested = getattr(nested, "config_class", nested)
        found[name] = nested if dataclasses.is_dataclass(nested) else CONFIG_MAPPING[model_type]
    return found


def _layer_types(config: PretrainedConfig) -> set[tuple[str, str]]:
    """Return the types of layers of a configuration and of those within it."""
    found = set()
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            found |= _layer_types(value)
        elif name in LAYER_TYPES and isinstance(value, (list, tuple)):
            found |= {(name, str(kind)) for kind in value}
    return found


@dataclasses.dataclass(frozen=True)
class CausalModel:
    """A checkpoint, and the model that transformers loads from it, in float32."""

    directory: Path
    reference: PreTrainedModel

    def prompts(self, *lengths: int, seed: int = 1) -> list[list[int]]:
        """Return random prompts of the given lengths."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randint(FIRST_TOKEN, LAST_TOKEN, (n,), generator=generator).tolist()
            for n in lengths
        ]

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Return the tokens that `generate` with a cache appends to a prompt."""
        output = self.reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits after every token of one forward pass, float32 `[T, V]`.

        With the positions that `generate` passes: models of RoBERTa count from another number
        without them.
        """
        ids = torch.tensor([token_ids])
        given = {"position_ids": torch.arange(len(token_ids))[None]}
        if "position_ids" not in inspect.signature(self.reference.forward).parameters:
            given = {}
        return self.reference(ids, use_cache=False, **given).logits[0]


def save_small_model(
    model_type: str,
    directory: Path,
    changes: Mapping[str, Any] | None = None,
    seed: int = 0,
    auto_class: Any = AutoModelForCausalLM,
) -> CausalModel:
    """Save a small random model; see `small_config` and `build`.

    The reference is the decoder of text where that runs alone only (Llama 4).

    Raises:
        UnbuildableError: there is none.
    """
    model = build(small_config(model_type, changes), seed, auto_class)
    model.generation_config = GenerationConfig()
    model.save_pretrained(directory)
    loaded = auto_class.from_pretrained(directory, dtype=torch.float32)
    return CausalModel(directory, _decoder(loaded.eval()))


def _decoder(model: Any) -> PreTrainedModel:
    """Return the causal language model within a model of images and text, or the whole."""
    inner = getattr(model, "language_model", None)
    return inner if isinstance(inner, GenerationMixin) else model


def build(
    config: PretrainedConfig, seed: int = 0, auto_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Return the model of a configuration with random weights, in float32 on the CPU.

    `auto_class` is `AutoModelForCausalLM`, or `AutoModelForImageTextToText` for the class with
    encoders.
    """
    with torch.device("meta"):
        empty = auto_class.from_config(copy.deepcopy(config))
    if (count := sum(p.numel() for p in empty.parameters())) > MOST_PARAMETERS:
        raise UnbuildableError(f"{count} parameters: sizes without a rule")
    torch.manual_seed(seed)
    model = auto_class.from_config(config, dtype=torch.float32).eval()
    found = []
    for scales in SCALES:
        randomize(model, seed, *scales)
        found.append(_distinct(_decoder(model)))
        if found[-1] >= ENOUGH_DISTINCT:
            return model
    randomize(model, seed, *SCALES[found.index(max(found))])
    return model


@torch.no_grad()
def _distinct(model: PreTrainedModel) -> int:
    """Return the number of distinct ones among 16 greedy tokens."""
    ids = torch.arange(FIRST_TOKEN, LAST_TOKEN, 3)[None]
    prompt_len = ids.shape[1]
    for _ in range(16):
        following = model(ids, use_cache=False).logits[0, -1, :VOCAB_SIZE].argmax()
        ids = torch.cat((ids, following[None, None]), dim=1)
    return len({*ids[0, prompt_len:].tolist()})


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int, embedding: float, gain: float) -> None:
    """Draw weights for which tokens vary and each parameter matters.

    Matrices are scaled by the number of their inputs, so that what a layer adds is of order one,
    and embeddings are small, since a model with tied ones would repeat its last token. Parameters
    that are initialised to a constant or a ramp (norms, sinks, decays) get noise instead.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = model.get_input_embeddings().weight
    others = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for tensor in _tensors(model):
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor is tokens:
            tensor.copy_(embedding * noise)
        elif id(tensor) in others:  # of positions, mostly
            tensor.copy_(3 * embedding * noise)
        elif tensor.dim() >= 2 and abs(tensor.mean()) < 0.3 * tensor.std():
            tensor.copy_(gain * noise / tensor.shape[-1] ** 0.5)
        else:
            tensor.add_(0.2 * noise)


def _tensors(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Return parameters once each, and the buffers of a checkpoint that correct router scores."""
    yield from model.parameters()
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name.endswith("_bias") and name in saved:
            yield buffer
