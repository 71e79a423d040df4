"""Which configurations can promise `EngineConfig.batch_invariant`: docs/batch-invariance.md."""

from __future__ import annotations

import torch

from .config import EngineConfig
from .errors import ConfigError
from .kernels import WeightStorage, native_gaps
from .models.config import ModelConfig
from .models.decoder_model import DecoderConfig
from .models.plan import plan_of

__all__ = ["check_batch_invariant"]


def check_batch_invariant(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightStorage,
    model: DecoderConfig,
) -> None:
    """Check that the logits of a row can be independent of its batch.

    Args:
        config: with `batch_invariant`.
        device: where the model runs.
        dtype: of weights and activations.
        weights: how the weights of linear layers are stored.
        model: the model.

    Raises:
        ConfigError: they cannot; it says what to change.
    """
    if config.kernels == "torch":
        raise _refusal(
            "kernels='torch'",
            "PyTorch's matrix products add in an order that depends on the number of rows",
            "use kernels='auto' or kernels='native'",
        )
    if not isinstance(model, ModelConfig):
        raise _refusal(
            f"model_impl={config.model_impl!r} and a model of transformers",
            "its layers are compiled by torch.compile, for each number of tokens in another way",
            "use a model with a native family (docs/models.md)",
        )
    if device.type == "cuda":
        _check_cuda(config, weights, model)
        return
    if dtype == torch.float16:
        raise _refusal(
            f"dtype={config.dtype!r} and a model in float16",
            "the C++ operators have no linear layer in float16",
            "use dtype='bfloat16' or dtype='float32'",
        )
    if weights == "fp8":
        raise _refusal(
            "weight_dtype='fp8'",
            "the C++ operators have no linear layer over fp8 weights",
            "use weight_dtype='int8' or weight_dtype='auto'",
        )
    gaps = native_gaps(device.type, dtype, weights, plan_of(model))
    for gap in gaps:
        if gap.name == "attention":
            raise _refusal(f"model type {model.model_type!r}", gap.reason, "use another model")
    if gaps and config.mode == "compile":
        raise _refusal(
            "mode='compile' and this model",
            f"torch.compile compiles one token and several in different ways ({gaps[0].reason})",
            "use mode='auto' or mode='eager'",
        )


def _check_cuda(config: EngineConfig, weights: WeightStorage, model: ModelConfig) -> None:
    """Check what only a GPU refuses; its kernels support all types of weights."""
    gaps = native_gaps("cuda", torch.float32, weights, plan_of(model))
    if gaps:
        raise _refusal(
            f"model type {model.model_type!r} on CUDA",
            "PyTorch operations, whose order of sums depends on the number of tokens, run where"
            f" {gaps[0].reason}",
            "use device='cpu'",
        )
    if config.tensor_parallel > 1:
        raise _refusal(
            f"tensor_parallel={config.tensor_parallel} on CUDA",
            "sums over ranks are made in another order, or by the switch, for other sizes",
            "use tensor_parallel=1 or device='cpu'",
        )


def _refusal(what: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"batch_invariant=True does not support {what}: {reason}. Set batch_invariant=False, or"
        f" {remedy}",
        field="batch_invariant",
    )
