"""Small operations of a step as operators of a CPU.

PyTorch would run them on its own threads, which then spin for milliseconds and keep the pool's
threads from their cores.
"""

import torch
from torch import Tensor

__all__ = ["cap_logits", "reference_cap_logits", "reference_rotations", "rotations"]

torch.library.define(
    "stepgraph::rotations", "(Tensor positions, Tensor frequencies) -> (Tensor, Tensor)"
)
torch.library.define("stepgraph::cap_logits", "(Tensor(a!) logits, float cap) -> ()")


def _fake_rotations(positions_T: Tensor, frequencies_KE: Tensor) -> tuple[Tensor, Tensor]:
    shape = (frequencies_KE.shape[0], positions_T.shape[0], frequencies_KE.shape[1])
    return frequencies_KE.new_empty(shape), frequencies_KE.new_empty(shape)


def _fake_cap_logits(logits: Tensor, cap: float) -> None:
    return None


torch.library.register_fake("stepgraph::rotations", _fake_rotations)
torch.library.register_fake("stepgraph::cap_logits", _fake_cap_logits)


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
