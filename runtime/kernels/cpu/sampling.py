"""The samplers as operators that a CPU runs in one call each; `sampling.cpp` computes them.

`runtime/sampling/reference_sampler.py` is the reference of both, in plain torch.
Shapes: B lanes, R rows of the state, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.token_masks import LaneMasks

# Small operations of a step as operators of a CPU.
#
# PyTorch would run them on its own threads, which then spin for milliseconds and keep the pool's
# threads from their cores.

torch.library.define(
    "stepgraph::rotations", "(Tensor positions, Tensor frequencies) -> (Tensor, Tensor)"
)

torch.library.define("stepgraph::cap_logits", "(Tensor(a!) logits, float cap) -> ()")


def _fake_rotations(positions_T: Tensor, frequencies_KE: Tensor) -> tuple[Tensor, Tensor]:
    shape = (frequencies_KE.shape[0], positions_T.shape[0], frequencies_KE.shape[1])
    return frequencies_KE.new_empty(shape), frequencies_KE.new_empty(shape)


torch.library.register_fake("stepgraph::rotations", _fake_rotations)
torch.library.register_fake("stepgraph::cap_logits", lambda logits, cap: None)


def reference_rotations(positions_T: Tensor, frequencies_KE: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of rotary embeddings, float32 `[K, T, E]`.

    Args:
        positions_T: int64.
        frequencies_KE: float32, radians a position, of K kinds of rotation and E pairs.
    """
    angles_KTE = positions_T[:, None].float() * frequencies_KE[:, None]
    return angles_KTE.cos(), angles_KTE.sin()


def rotations(positions_T: Tensor, frequencies_KE: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference_rotations`. Runs on CPU after `load_cpu_ops`."""
    cos_KTE, sin_KTE = torch.ops.stepgraph.rotations.default(positions_T, frequencies_KE)
    return cos_KTE, sin_KTE


def reference_cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Return `cap * tanh(logits / cap)` in the dtype of the logits, computed in float32."""
    return (torch.tanh(logits.float() / cap) * cap).to(logits.dtype)


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """As `reference_cap_logits`, in place. Runs on CPU after `load_cpu_ops`.

    Raises RuntimeError for logits that are not contiguous, or not bfloat16 or float32.
    """
    torch.ops.stepgraph.cap_logits.default(logits, cap)
    return logits


torch.library.define("stepgraph::most_likely", "(Tensor logits) -> (Tensor, Tensor)")

torch.library.define(
    "stepgraph::sample_greedy",
    "(Tensor logits, Tensor? mask_bits=None, Tensor? mask_rows=None) -> Tensor",
)

torch.library.define(
    "stepgraph::sample_full",
    "(Tensor logits, Tensor reals, Tensor integers, Tensor(a!) token_counts, Tensor rows, "
    "Tensor positions, Tensor? inputs, int num_top, Tensor? mask_bits=None, "
    "Tensor? mask_rows=None) -> (Tensor, Tensor, Tensor, Tensor)",
)

torch.library.register_fake(
    "stepgraph::sample_greedy",
    lambda logits_BV, *masks: logits_BV.new_empty(logits_BV.shape[0], dtype=torch.int64),
)


def fused_greedy(logits_BV: Tensor, masks: LaneMasks | None = None) -> Tensor:
    """Return the largest logit's token for each lane, int64 `[B]`; of equal ones the lowest id.

    With `masks`, of the tokens that they allow, as after `mask_logits`. `NON_FINITE` where the
    logits hold NaN or +inf, or nothing but -inf. Runs on CPU after `load_cpu_ops`. Raises
    RuntimeError for a dtype other than bfloat16, float16 and float32, and RuntimeError or
    IndexError for masks that do not fit.
    """
    tokens: Tensor = torch.ops.stepgraph.sample_greedy.default(logits_BV, *(masks or ()))
    return tokens


def fused_most_likely(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token of the largest logit, int64 `[B]`, and its probability, float32 `[B]`.

    Both are 0 where `fused_greedy` returns `NON_FINITE`. Runs and raises as `fused_greedy`.
    """
    ids_B, probability_B = torch.ops.stepgraph.most_likely.default(logits_BV)
    return ids_B, probability_B
