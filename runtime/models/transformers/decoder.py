"""A decoder whose modules are those of transformers, around our cache, attention and products."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....cache.arena import Storage
from ....cache.spec import LayerGroup
from ...errors import CheckpointError
from ...kernels import (
    AttentionForm,
    DecodeStep,
    Kernels,
    LayerPlace,
    PackedMemory,
    RaggedBatch,
    Stack,
)
from ...operation_scopes import operation
from ..modules import Projection
from ..sharded_vocabulary import ShardedVocabulary
from .attention import IMPLEMENTATION, CurrentStep, PagedLayer, PagedStep
from .config import TransformersConfig
from .embedding import store_rows
from .head import head_of, run_head
from .plan import LinearGroup, linear_groups
from .probe import set_implementation
from .products import (
    make_projection,
    stacked_bias,
    stacked_weight,
    stand_ins,
    stored_values,
)
from .ropes import freeze_rotations

__all__ = ["TransformersDecoder"]


class TransformersDecoder(nn.Module):
    """A `DecoderModel` that runs a causal language model of transformers."""

    def __init__(
        self,
        config: TransformersConfig,
        model: Any,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[LayerGroup],
        storage: Storage = "model",
    ) -> None:
        """Take a loaded model on the CPU, whose linear layers are replaced one by one.

        `groups` are those of the arena, `storage` is how it stores keys and values.

        Raises:
            CheckpointError: a weight to quantise holds NaN or infinity.
        """
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.storage: Storage = storage
        self.stack: Stack | None = None
        self.decode_step: DecodeStep | None = None
        self.vocabulary: ShardedVocabulary | None = None
        set_implementation(model, IMPLEMENTATION)
        freeze_rotations(model)
        self._replace_linears(model)
        probe = config.probe
        self.model = model.to(device).eval().requires_grad_(False)
        self._embeddings = model.get_input_embeddings()
        self._base = model.get_submodule(probe.base)
        self._head = head_of(model, probe.base, probe.output)
        self._layers = self.paged_layers(groups, storage)
        self._current = CurrentStep(model)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters as stored, a tied embedding counted once."""
        parameters: Iterator[Tensor] = self.model.parameters()
        return sum(parameter.nbytes for parameter in parameters)

    def weight_bytes_read(self, rows: float) -> int:
        """Return the bytes of the parameters that a decode step reads, all experts among them.

        An untied input embedding is left out: a step reads one of its rows per sequence.
        """
        if self.config.plan.tied:
            return self.weight_bytes
        parameters: Iterator[Tensor] = self._embeddings.parameters()
        return self.weight_bytes - sum(parameter.nbytes for parameter in parameters)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings `[T, hidden_size]`: `inputs_embeds` of transformers."""
        embeddings: Tensor = self._embeddings(token_ids_T)
        return embeddings

    def decode(
        self,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        layers: tuple[PagedLayer, ...] | None = None,
    ) -> Tensor:
        """Return the final hidden states `[T, hidden_size]`; writes the tokens' keys and values.

        `layers` are those of `arena`; None: of the groups that the decoder was made for.
        """
        step = PagedStep(self.kernels.attention, arena, batch, layers or self._layers)
        with operation("layers"), self._current.running(step):
            output = self._base(
                inputs_embeds=x_TD[None], position_ids=batch.positions[None], use_cache=False
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def decode_tapped(
        self, x_TD: Tensor, arena: Tensor, batch: RaggedBatch, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderModel.decode_tapped`; `taps` can be the final hidden states only."""
        assert taps == (self.config.num_layers,), "drafters with other taps are refused"
        hidden_TD = self.decode(x_TD, arena, batch)
        return hidden_TD, hidden_TD

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Return logits `[B, vocab_size]`, by the model's own `forward`."""
        with operation("head"):
            return run_head(self._head, hidden_BD[None])[0]

    own_logits = logits

    def paged_layers(
        self, groups: Sequence[LayerGroup], storage: Storage
    ) -> tuple[PagedLayer, ...]:
        """Return the attention calls of a forward pass, over an arena of these groups."""
        places = {
            layer: LayerPlace(group.index, position)
            for group in groups
            for position, layer in enumerate(group.layers)
        }
        layers = []
        for index, plan in enumerate(self.config.plan.layers):
            attend = plan.attend
            form = AttentionForm(
                scale=attend.scale,
                window=attend.window,
                softcap=attend.softcap,
                storage=storage,
                value_dim=attend.value_dim,
                chunk=attend.chunk,
            )
            layers.append(PagedLayer(places[index], form, attend.kv_heads, attend.head_dim))
        return tuple(layers)

    def _replace_linears(self, model: Any) -> None:
        """Replace the linear layers that the probe found, freeing each weight when it is stored."""
        probe, groups = self.config.probe, linear_groups(self.config.probe)
        shared = probe.tied and probe.packed_embedding
        memory = self._packed_memory(groups)
        embeddings = model.get_input_embeddings()
        for group in groups:
            weight = stacked_weight(model, group)
            projection = self._projection(group.name, weight, stacked_bias(model, group), memory)
            del weight
            for member, module in zip(group.members, stand_ins(projection, group), strict=True):
                model.set_submodule(member.module, module)
            if shared and group.layer is None:
                store_rows(embeddings, projection)
        if probe.packed_embedding and not shared:
            projection = self._projection(probe.embedding, embeddings.weight.data, None, memory)
            store_rows(embeddings, projection)
        gc.collect()  # modules refer to each other

    @torch.no_grad()
    def overwrite(self, model: Any) -> None:
        """Copy the weights of another model of the same config, which is on the CPU.

        The addresses of all tensors, and with them captured graphs and compiled code, stay valid.

        Raises:
            CheckpointError: a weight to quantise holds NaN or infinity. Some are overwritten.
        """
        probe = self.config.probe
        for group in linear_groups(probe):
            first: Any = self.model.get_submodule(group.name)
            weight, bias = stacked_weight(model, group), stacked_bias(model, group)
            self._overwrite(group.name, first.product.projection, weight, bias)
        if probe.packed_embedding and not probe.tied:
            weight = model.get_input_embeddings().weight
            self._overwrite(probe.embedding, self._embeddings.projection, weight, None)
        ours = self.model.state_dict()
        for name, value in model.state_dict().items():
            if name in ours:
                ours[name].copy_(value)

    def _overwrite(
        self, name: str, projection: Projection, weight: Tensor, bias: Tensor | None
    ) -> None:
        with self._quantising(name):
            stored = stored_values(projection, weight, bias, self.device)
        for leaf, value in stored.items():
            getattr(projection, leaf).copy_(value)

    def _projection(
        self, name: str, weight: Tensor, bias: Tensor | None, memory: PackedMemory | None
    ) -> Projection:
        with self._quantising(name):
            return make_projection(self.kernels, weight, bias, self.dtype, self.device, memory)

    @contextmanager
    def _quantising(self, name: str) -> Iterator[None]:
        """Convert what `stored_values` raises."""
        try:
            yield
        except ValueError as error:
            raise CheckpointError(
                f"{name} cannot be stored as {self.kernels.weights}: {error}; look at the"
                " checkpoint, or use weight_dtype='auto'"
            ) from error

    def _packed_memory(self, groups: Sequence[LinearGroup]) -> PackedMemory | None:
        """Room for all packed weights, where the CPU kernels pack them."""
        if self.kernels.pack is None:
            return None
        shapes = [(group.out_features, group.in_features) for group in groups]
        probe, plan = self.config.probe, self.config.plan
        if probe.packed_embedding and not plan.tied:
            shapes.append((plan.embedding.shape[0], plan.embedding.shape[1]))
        sizes = [self.kernels.stored_bytes(n, k, self.dtype) for n, k in shapes]
        return PackedMemory(sum(sizes), len(sizes))
