"""Compares a loaded model with transformers' own attention, before it serves.

The probe sees shapes, not numbers. This finds what has no shape: positions that a model derives
from the length of its input, a state that it keeps between calls, embeddings that it changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....cache.arena import Arena
from ....cache.spec import group_layers
from ...errors import CheckpointError
from ...kernels import RaggedBatch
from ...kernels.result_check import tolerance
from ..decoder import attention_specs
from .attention import IMPLEMENTATION
from .decoder import TransformersDecoder
from .probe import set_implementation

__all__ = ["check_against_transformers"]

_PROMPT, _TOKENS = 5, 9
"""Tokens of a prefill step, and with the decode steps after it."""
_BLOCK_SIZE = 16
_TOLERANCES = 30
"""The tolerance of a model, in tolerances of an operation."""


def check_against_transformers(decoder: TransformersDecoder) -> None:
    """Compare the logits of a prefill and some decode steps with one forward pass of transformers.

    Half of the tokens of each kind must agree: with experts, rounding can send a token to another
    one.

    Raises:
        CheckpointError: they differ.
    """
    vocabulary = decoder.config.vocab_size
    ids_T = torch.arange(3, 3 + 11 * _TOKENS, 11, device=decoder.device) % vocabulary
    with torch.no_grad():
        expected_TV = _of_transformers(decoder, ids_T).float()
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


def _of_transformers(decoder: TransformersDecoder, ids_T: Tensor) -> Tensor:
    set_implementation(decoder.model, "eager")
    try:
        logits: Tensor = decoder.model(input_ids=ids_T[None], use_cache=False).logits[0]
    finally:
        set_implementation(decoder.model, IMPLEMENTATION)
    return logits


def _of_steps(decoder: TransformersDecoder, ids_T: Tensor) -> Tensor:
    """One row in a small cache of its own."""
    device, dtype = decoder.device, decoder.dtype
    groups = group_layers(attention_specs(decoder.config, dtype.itemsize))
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
