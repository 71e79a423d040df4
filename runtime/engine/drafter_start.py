"""Starts the drafter of an engine: finds it, plans its memory, loads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...cache.arena import Arena, HostArena
from ...cache.spec import LayerGroup
from ..errors import ConfigError
from ..execution.drafter_cache import DrafterCache
from ..kernels import Kernels
from ..loading.drafter_loading import load_drafter
from ..loading.drafter_source import find_drafter
from ..loading.loader import Source
from ..memory.footprint import DrafterBytes
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.decoder_model import DecoderModel
from ..models.drafters.drafter import Drafter
from ..models.drafters.drafter_config import DrafterConfig
from ..resolved_config import ResolvedConfig

__all__ = ["FoundDrafter", "find_engine_drafter"]

_OWN_DIRECTORY = "drafter"
"""In the checkpoint of a model: its drafter."""


@dataclass(frozen=True)
class FoundDrafter:
    """A drafter that fits the model of an engine, before its weights are read."""

    config: DrafterConfig
    layers: LayerGroup
    """Its layers; the index is that of the layer group of the model whose block tables it uses."""

    def memory(self, kernels: Kernels, engine: ResolvedConfig, hidden_size: int) -> DrafterBytes:
        """Return the memory that it adds to that of a model of this hidden size."""
        block = self.layers.spec.block_bytes(engine.block_size) * len(self.layers.layers)
        # Hidden states of layers, and what joins them.
        per_token = 2 * len(self.config.taps) * hidden_size * engine.dtype.itemsize
        return DrafterBytes(self.config.weight_bytes(kernels, engine.dtype), block, per_token)

    def load(self, model: DecoderModel, engine: ResolvedConfig, *, progress: bool) -> Drafter:
        """Load its weights."""
        assert isinstance(model, Decoder), "others were refused"
        return load_drafter(
            self.config,
            model,
            model.kernels,
            engine.dtype,
            engine.device,
            self.layers,
            engine.storage,
            seed=engine.seed,
            progress=progress,
        )

    def allocate(
        self, drafter: Drafter, engine: ResolvedConfig, num_blocks: int, host_blocks: int
    ) -> DrafterCache:
        """Allocate arenas for as many blocks as those of the model have."""
        own = LayerGroup(0, self.layers.spec, self.layers.layers)
        arena = Arena(
            [own], num_blocks, engine.block_size, engine.dtype, engine.device, engine.storage
        )
        arena.tensor.zero_()  # what the drafter has not computed reads as zeros
        host = HostArena(arena, host_blocks) if host_blocks else None
        return DrafterCache(drafter, arena, host, self.layers.index)


def find_engine_drafter(
    found: Source, engine: ResolvedConfig, groups: Sequence[LayerGroup]
) -> FoundDrafter | None:
    """Find the drafter of an engine; None if it has none. Each rank of a group has the whole one.

    Raises:
        CheckpointError: there is no such drafter, or its checkpoint is damaged.
        ConfigError: it does not fit the model or the engine.
    """
    speculation = engine.speculation
    if speculation is None or not speculation.uses_drafter:
        return None
    if engine.model_impl != "native":
        raise ConfigError(
            f"speculation method {speculation.method!r} needs a model of a native family, not one"
            " whose layers transformers makes: use 'suffix'"
        )
    config = find_drafter(
        _checkpoint(found, speculation.method, speculation.model),
        found.config.whole if isinstance(found.config, ModelConfig) else found.config,
        speculation.method,
        found.directory,
    )
    if speculation.num_speculative_tokens > config.most_drafts:
        raise ConfigError(
            f"the drafter {config.name} proposes at most {config.most_drafts} tokens: lower"
            f" num_speculative_tokens = {speculation.num_speculative_tokens} to that"
        )
    group = _widest(groups)
    spec = config.layer_spec(
        engine.kv_element_bytes, engine.kv_scale_bytes, group.spec.window_tokens
    )
    return FoundDrafter(config, LayerGroup(group.index, spec, tuple(range(len(config.layers)))))


def _checkpoint(found: Source, method: str, model: str | None) -> str:
    """Return the checkpoint of the drafter; see `Speculation.model`."""
    if model is not None:
        return model
    if found.directory is None:
        raise ConfigError(
            f"speculation method {method!r} needs a model, as {found.name} has no directory: give"
            f" {{'method': {method!r}, 'model': ...}}"
        )
    if method == "mtp":
        return str(found.directory)
    own = found.directory / _OWN_DIRECTORY
    if not own.is_dir():
        raise ConfigError(
            f"speculation method {method!r} needs a model, as there is no {own}: give"
            f" {{'method': {method!r}, 'model': ...}}"
        )
    return str(own)


def _widest(groups: Sequence[LayerGroup]) -> LayerGroup:
    """Return the first layer group with full attention, or the one with the widest window."""
    return max(groups, key=lambda group: group.spec.window_tokens or float("inf"))
