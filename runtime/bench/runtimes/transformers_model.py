"""A model in transformers with the weights of our engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...loading.loader import random_weights
from ...models.config import ModelConfig
from ...models.layout import fused_layout
from .transformers_config import BaselineError, hf_config, import_transformers

__all__ = ["load_model"]


def load_model(
    config: ModelConfig,
    directory: Path | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Any:
    """Return the checkpoint in `directory`; without one, the random weights of this seed.

    Only one tensor of ours is in memory at a time.

    Raises:
        BaselineError: transformers is missing, too old, or cannot load the model.
    """
    transformers = import_transformers()
    try:
        if directory is not None:
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        else:
            model = _empty_model(transformers, hf_config(config), dtype, device)
            _fill(model, config, dtype, seed)
    except BaselineError:
        raise
    except Exception as error:  # whatever a file, a configuration or an allocation raises
        reason = str(error).partition("\n")[0]
        raise BaselineError(f"transformers cannot load the model: {reason}") from error
    if config.attn_logit_softcapping is not None and model.config._attn_implementation == "sdpa":
        # transformers 5.17 selects it for Gemma 2 although it ignores the soft cap.
        model.set_attn_implementation("eager")
    model = model.to(device).eval()
    # Our side ignores the checkpoint's generation settings (penalties, stop tokens) as well.
    model.generation_config = transformers.GenerationConfig()
    return model


def _empty_model(transformers: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model of these shapes, its weights tied but not initialised."""
    from transformers.initialization import no_init_weights

    with device, no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


@torch.no_grad()
def _fill(model: Any, config: ModelConfig, dtype: torch.dtype, seed: int) -> None:
    """Copy our random weights into a model, tensor by tensor."""
    parameters = dict(model.named_parameters())  # those that are tied once
    layout = fused_layout(config)
    for name, tensor in random_weights(config, dtype, seed):
        for source, part in layout[name].parts(tensor):
            if source is None:
                continue  # zeros that transformers leaves out
            parameter = parameters.pop(source, None)
            if parameter is None or parameter.shape != part.shape:
                raise BaselineError(
                    f"the model in transformers has no {source} of shape {list(part.shape)}"
                )
            parameter.copy_(part)
    if parameters:
        raise BaselineError(
            f"the model in transformers has weights that ours has not: {', '.join(parameters)}"
        )
