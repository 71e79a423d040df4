"""The dimensions of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .limits import require_sizes

__all__ = ["LatentConfig"]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token is cached as one vector that all heads share: a latent, from which each head's keys and
    values are projected, and a key that carries the position. Raises `ConfigError`.
    """

    q_lora_rank: int | None
    """Elements that the queries are compressed to; None: they are projected at once."""
    kv_lora_rank: int
    """Elements of the latent."""
    qk_nope_head_dim: int
    """Elements of a head's queries and keys that are not rotated."""
    qk_rope_head_dim: int
    """Elements that are rotated; all heads share those of the key."""
    v_head_dim: int
    """Elements of a head's values."""
    rope_interleave: bool = True
    """Whether the elements of a rotated pair are neighbours."""

    def __post_init__(self) -> None:
        names = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
        if self.q_lora_rank is not None:
            names.append("q_lora_rank")
        require_sizes(self, names)
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim = {self.qk_rope_head_dim} must be even: rotary embeddings turn "
                "pairs of elements"
            )
        if self.kv_lora_rank % 2:
            raise ConfigError(
                f"kv_lora_rank = {self.kv_lora_rank} must be even: the latents of an 8-bit cache "
                "are followed by scales of 2 bytes"
            )

    @property
    def cached_dim(self) -> int:
        """Elements that the cache holds of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head's queries."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
