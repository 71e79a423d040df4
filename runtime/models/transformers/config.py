"""The configuration of a model that transformers implements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...bounded_repr import bounded_repr
from ...errors import CheckpointError, ConfigError
from ...kernels.ops.layer_plan import ModelPlan
from ..families import read_optional
from .attention import IMPLEMENTATION, register
from .library import convertible_parameters, import_transformers, quiet, reason_of
from .plan import plan_of_probe
from .probe import Probe, probe_model
from .ropes import LengthLimit, freeze_rotations

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["TransformersConfig", "model_class_of", "read_transformers_config"]

_DTYPES = ("float32", "bfloat16", "float16")
_NOT_CONSTANT = ("_name_or_path", "transformers_version", "dtype", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """What the engine needs to know about a model of transformers.

    The fields of `ModelConfig` that it shares have the same meaning.
    """

    model_type: str
    architecture: str
    """Name of the `AutoModelForCausalLM` class."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    tie_word_embeddings: bool
    length_limit: LengthLimit | None
    """The longest sequence that it can run, if a rotation changes with the length."""
    probe: Probe
    """What a forward pass does."""
    plan: ModelPlan
    source: Any
    """The `PreTrainedConfig`."""

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence."""
        return self.max_position_embeddings

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
    model_class = _model_class(transformers, source, config)
    text = source.get_text_config(decoder=True)
    dtype = config.get("dtype", config.get("torch_dtype")) or text.dtype or "float32"
    torch_dtype = str(dtype).removeprefix("torch.")
    if torch_dtype not in _DTYPES:
        raise CheckpointError(
            f"dtype = {bounded_repr(torch_dtype)} is not supported; supported: {', '.join(_DTYPES)}"
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
    eos = [*_token_ids(config), *_token_ids(generation or {})] or _token_ids(vars(text))
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

    Raises:
        CheckpointError: the class cannot be built from this config.
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
    quantisation = config.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
        raise CheckpointError(
            "the checkpoint is quantized (quantization_config has quant_method = "
            f"{bounded_repr(method, 60)}); only checkpoints in "
            f"{', '.join(_DTYPES)} can be loaded: dequantize it with transformers first, or use"
            " EngineConfig(weight_dtype=...) on the original checkpoint",
            code="quantized",
        )
    if config.get("is_encoder_decoder"):
        raise CheckpointError(
            f"model_type {bounded_repr(model_type, 60)} is an encoder-decoder"
            " (is_encoder_decoder is set); only decoder-only models run here"
        )


def model_class_of(config: TransformersConfig) -> type[Any]:
    """Return the class of a model."""
    model_class: type[Any] = getattr(import_transformers(), config.architecture)
    return model_class


def _model_class(transformers: Any, source: Any, config: Mapping[str, Any]) -> type[Any]:
    """Return the causal language model of a config, if the checkpoint says it is one."""
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(source) not in mapping:
        raise CheckpointError(
            f"transformers has no AutoModelForCausalLM for model_type {source.model_type!r}"
        )
    model_class: type[Any] = mapping[type(source)]
    named = config.get("architectures")
    if isinstance(named, list) and named and model_class.__name__ not in named:
        raise CheckpointError(
            f"architectures = {bounded_repr(named, 100)}: the weights are not those of"
            f" {model_class.__name__}, the causal language model of {source.model_type!r}"
        )
    return model_class


def _token_ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [token for token in values if type(token) is int]
