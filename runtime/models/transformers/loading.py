"""Loads the weights of a checkpoint with transformers and makes the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....cache.arena import Arena, Storage
from ....cache.spec import LayerGroup, group_layers
from ...bounded_repr import bounded_text
from ...errors import CheckpointError
from ...kernels import Kernels, RaggedBatch
from ...kernels.choice import Parts
from ...kernels.result_check import tolerance
from .attention import IMPLEMENTATION, quiet, reason_of, register
from .config import TransformersConfig, model_class_of
from .decoder import TransformersDecoder
from .probe import set_implementation


def check_report(report: Mapping[str, Any], architecture: str) -> None:
    """Raise `CheckpointError` for parameters that transformers could not load."""
    for key, problem in (
        ("missing_keys", "missing"),
        ("mismatched_keys", "of another shape"),
        ("conversion_errors", "not convertible"),
        ("error_msgs", "not loaded"),
    ):
        names = sorted(map(_shown, report.get(key) or ()))
        if names:
            raise CheckpointError(
                f"the tensors of the checkpoint do not fit {architecture}, {len(names)} {problem}:"
                f" {bounded_text(', '.join(names), 500)}"
            )


def _shown(found: object) -> str:
    """Show an item of a report: a name, or a name with the shapes of checkpoint and model."""
    match found:
        case (name, torch.Size() as stored, torch.Size() as wanted):
            return f"{name} {list(stored)} instead of {list(wanted)}"
    return str(found)


# Compares a loaded model with transformers' own attention, before it serves.
#
# The probe sees shapes, not numbers. This finds what has no shape: positions that a model derives
# from the length of its input, a state that it keeps between calls, embeddings that it changes.

_PROMPT, _TOKENS = 5, 9
"""Tokens of a prefill step, and with the decode steps after it."""

_BLOCK_SIZE = 16

_TOLERANCES = 30
"""The tolerance of a model, in tolerances of an operation."""


def check_against_transformers(decoder: TransformersDecoder) -> None:
    """Compare the logits of a prefill and some decode steps with one forward pass of transformers.

    Half of the tokens of each kind must agree: with experts, rounding can send a token to another
    one. Raises `CheckpointError` if they differ.
    """
    vocabulary = decoder.config.vocab_size
    ids_T = torch.arange(3, 3 + 11 * _TOKENS, 11, device=decoder.device) % vocabulary
    with torch.no_grad():
        set_implementation(decoder.model, "eager")
        try:
            output = decoder.model(input_ids=ids_T[None], use_cache=False)
        finally:
            set_implementation(decoder.model, IMPLEMENTATION)
        expected_TV = output.logits[0].float()
        found_TV = _of_steps(decoder, ids_T).float()
    size_T = expected_TV.std(dim=-1) + 1e-30
    gap_T = (found_TV - expected_TV).abs().amax(dim=-1) / size_T
    limit = _TOLERANCES * tolerance(decoder.dtype)
    for name, part in (("prefill", slice(0, _PROMPT)), ("decode", slice(_PROMPT, _TOKENS))):
        gap = float(gap_T[part].median())
        if not gap <= limit:  # NaN fails too
            raise CheckpointError(
                f"the logits of {name} steps of {decoder.config.architecture} differ from those of"
                f" transformers by {gap:.2g} standard deviations, allowed are {limit:.2g}: it"
                " depends on something other than tokens, positions and the cache. Use transformers"
                " itself for this model"
            )


def _of_steps(decoder: TransformersDecoder, ids_T: Tensor) -> Tensor:
    """One row in a small cache of its own."""
    device, dtype = decoder.device, decoder.dtype
    groups = group_layers(decoder.config.plan.states)
    arena = Arena(groups, len(groups) + 1, _BLOCK_SIZE, dtype, device)
    tables = torch.zeros(len(groups), 2, 1, dtype=torch.int32)
    tables[:, 0, 0] = 1 + torch.arange(len(groups))
    tables = tables.to(device)
    layers = decoder.paged_layers(groups, "model")
    logits = []
    for start, end in ((0, _PROMPT), *((t, t + 1) for t in range(_PROMPT, _TOKENS))):
        positions_C = torch.arange(start, end, device=device)
        batch = RaggedBatch(
            positions=positions_C,
            slots=tables[:, 0].to(torch.int64) * _BLOCK_SIZE + positions_C,
            token_rows=torch.zeros_like(positions_C),
            rows=torch.zeros(1, dtype=torch.int64, device=device),
            block_tables=tables,
            read_blocks=1,
            block_size=_BLOCK_SIZE,
            tokens_per_row=end - start,
        )
        hidden_CD = decoder.decode(decoder.embed(ids_T[start:end]), arena.tensor, batch, layers)
        logits.append(decoder.logits(hidden_CD))
    return torch.cat(logits)


def load_decoder(
    weights: Path | dict[str, torch.Tensor],
    config: TransformersConfig,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[LayerGroup],
    storage: Storage = "model",
    codes: Iterable[tuple[str, Tensor | Parts]] = (),
) -> TransformersDecoder:
    """Load a checkpoint, from safetensors files only, and check the decoder.

    `weights` is its directory, or all of its tensors by name; `codes` are as of
    `TransformersDecoder`. Raises `CheckpointError` if transformers cannot load it, parameters are
    missing or cannot be quantised, or its logits differ from transformers'.
    """
    model = load_model(weights, config, dtype)
    decoder = TransformersDecoder(config, model, codes, kernels, dtype, device, groups, storage)
    check_against_transformers(decoder)
    return decoder


def overwrite_decoder(
    decoder: TransformersDecoder,
    model: Any,
    codes: Iterable[tuple[str, Tensor | Parts]],
    config: TransformersConfig,
) -> None:
    """Give a decoder the weights of a model of the same constants that `load_model` returned.

    Raises `CheckpointError` for NaN or infinity in a weight to quantise, and if the logits differ
    from transformers'. Some weights are overwritten then.
    """
    decoder.overwrite_from(model, codes)
    decoder.config = config
    check_against_transformers(decoder)


def load_model(
    weights: Path | dict[str, torch.Tensor], config: TransformersConfig, dtype: torch.dtype
) -> Any:
    """Return the model with its weights on the CPU.

    `weights` are as of `load_decoder`; a dict is emptied, so that the decoder can free each weight
    that it has stored.

    Raises `CheckpointError` if transformers cannot load it, or parameters are missing.
    """
    register()
    try:
        with quiet():
            model, report = model_class_of(config).from_pretrained(
                weights if isinstance(weights, Path) else None,
                state_dict=None if isinstance(weights, Path) else weights,
                config=config.source,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # the report has them all
                output_loading_info=True,
            )
    except Exception as error:  # of any type, from any model
        place = weights if isinstance(weights, Path) else f"the weights of {config.architecture}"
        raise CheckpointError(f"transformers cannot load {place}: {reason_of(error)}") from error
    if not isinstance(weights, Path):
        weights.clear()
    check_report(report, config.architecture)
    return model
