"""A model in transformers with the weights of our engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...loading.loader import random_weights
from ...models.config import ModelConfig
from ...models.decoder_model import DecoderConfig
from ...models.layout import fused_layout
from .transformers_config import BaselineError, hf_config, import_transformers
from .transformers_experts import fit_experts

__all__ = ["load_model"]


def load_model(
    config: DecoderConfig,
    directory: Path | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Any:
    """Return the checkpoint in `directory`; without one, the random weights of this seed.

    `config` is that of the checkpoint; random weights need one of a native family.

    Only one tensor of ours is in memory at a time.

    Raises:
        BaselineError: transformers is missing, too old, or cannot load the model.
    """
    transformers = import_transformers()
    try:
        model = _loaded(transformers, config, directory, dtype, device, seed)
    except BaselineError:
        raise
    except Exception as error:  # whatever a file, a configuration or an allocation raises
        reason = str(error).partition("\n")[0]
        raise BaselineError(f"transformers cannot load the model: {reason}") from error
    # Our side ignores the checkpoint's generation settings (penalties, stop tokens) as well.
    model.generation_config = transformers.GenerationConfig()
    return model


def _loaded(
    transformers: Any,
    config: DecoderConfig,
    directory: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Any:
    """Return the model on the device."""
    if directory is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    else:
        assert isinstance(config, ModelConfig)
        model = _empty_model(transformers, hf_config(config), dtype, device)
        _fill(model, config, dtype, device, seed)
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if softcap is not None and model.config._attn_implementation == "sdpa":
        # transformers 5.17 selects it for Gemma 2 although it ignores the soft cap.
        model.set_attn_implementation("eager")
    if isinstance(config, ModelConfig):
        fit_experts(model, config, dtype)
    return model.to(device).eval()


def _empty_model(transformers: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model of these shapes, its weights tied but not initialised."""
    from transformers.initialization import no_init_weights

    with device, no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


@torch.no_grad()
def _fill(
    model: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Copy our random weights into a model, tensor by tensor."""
    parameters = dict(model.named_parameters())  # those that are tied once
    stored = model.state_dict().keys()
    parameters |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
    filled = set()
    layout = {name: p.stored_in(parameters) for name, p in fused_layout(config).items()}
    for name, tensor in random_weights(config, dtype, seed, device=device):
        for source, part in layout[name].parts(tensor):
            if source.name is None:
                continue  # zeros that transformers leaves out
            parameter = parameters.get(source.name)
            if parameter is None or parameter.shape != source.shape:
                raise BaselineError(
                    f"the model in transformers has no {source.name} of shape {list(source.shape)}"
                )
            source.write(parameter, part)
            filled.add(source.name)
    if others := parameters.keys() - filled:
        raise BaselineError(
            f"the model in transformers has weights that ours has not: {', '.join(sorted(others))}"
        )
