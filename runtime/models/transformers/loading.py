"""Loads the weights of a checkpoint with transformers and makes the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ....cache.arena import Storage
from ....cache.spec import LayerGroup
from ...errors import CheckpointError
from ...kernels import Kernels
from .attention import IMPLEMENTATION, register
from .config import TransformersConfig, model_class_of
from .decoder import TransformersDecoder
from .headers import check_report
from .library import quiet, reason_of
from .self_check import check_against_transformers

__all__ = ["load_decoder", "load_model", "overwrite_decoder"]


def load_decoder(
    directory: Path,
    config: TransformersConfig,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[LayerGroup],
    storage: Storage = "model",
) -> TransformersDecoder:
    """Load a checkpoint, from safetensors files only, and check the decoder.

    Raises:
        CheckpointError: transformers cannot load it, parameters are missing or cannot be
            quantised, or its logits are not those of transformers.
    """
    model = load_model(directory, config, dtype)
    decoder = TransformersDecoder(config, model, kernels, dtype, device, groups, storage)
    check_against_transformers(decoder)
    return decoder


def overwrite_decoder(decoder: TransformersDecoder, model: Any, config: TransformersConfig) -> None:
    """Give a decoder the weights of a model that `load_model` returned, and check it.

    Args:
        decoder: whose config has the constants of `config`.
        model: with other weights.
        config: of `model`.

    Raises:
        CheckpointError: a weight to quantise holds NaN or infinity, or the logits of the decoder
            are not those of transformers. Some weights are overwritten.
    """
    decoder.overwrite(model)
    decoder.config = config
    check_against_transformers(decoder)


def load_model(directory: Path, config: TransformersConfig, dtype: torch.dtype) -> Any:
    """Return the model with its weights on the CPU.

    Raises:
        CheckpointError: transformers cannot load it, or parameters are missing.
    """
    register()
    try:
        with quiet():
            model, report = model_class_of(config).from_pretrained(
                directory,
                config=config.source,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # of any type, from any model
        raise CheckpointError(
            f"transformers cannot load {directory}: {reason_of(error)}"
        ) from error
    check_report(report, config.architecture)
    return model
