"""How many blocks an engine's requests take, and of how many bytes: to give its cache a size."""

from __future__ import annotations

import dataclasses

from ..config import EngineConfig
from ..engine.startup import layer_groups
from ..models.config import ModelConfig
from ..resolved_config import ResolvedConfig

__all__ = ["RequestBlocks"]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The use of blocks by requests of one length."""

    each: int
    """The most blocks that one of them holds at once, over all layer groups."""
    num_groups: int
    num_sliding: int
    """Of those, the groups of layers with a sliding window."""
    block_bytes: int
    """Over the layers of a group; they are the same in every group."""

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig, num_tokens: int) -> RequestBlocks:
        """Count the blocks of a request of `num_tokens` tokens, prompt and output.

        Raises:
            ConfigError: the configuration cannot work on this device or with this model.
        """
        groups = layer_groups(model, ResolvedConfig.resolve(config, model))
        size = config.block_size
        return cls(
            sum(g.spec.most_blocks(num_tokens, size, config.prefill_chunk) for g in groups),
            len(groups),
            sum(g.spec.window_tokens is not None for g in groups),
            groups[0].spec.block_bytes(size) * len(groups[0].layers),
        )

    def pool(self, rows: int) -> int:
        """Return the blocks, null block included, in which so many of them never lack any.

        Whoever is admitted last leaves a block in each group to every other.
        """
        return rows * (self.each + self.num_groups) + 1

    def full_pool(self, rows: int) -> int:
        """Return as many, with none to spare, for rows that fill a block more while all decode.

        That block is what they leave to others until then; sliding windows take no more of them.
        """
        return rows * (self.each + self.num_sliding) + 1
