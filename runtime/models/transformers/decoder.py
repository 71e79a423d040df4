"""A decoder whose modules are those of transformers, around our cache, attention and products."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ....cache.arena import Storage, arena_views
from ....cache.spec import LayerGroup, layouts
from ...kernels import DecodeStep, Kernels, RaggedBatch, Stack
from ...kernels.choice import Parts
from ...kernels.ops.attention import Attend
from ...kernels.ops.linear import Linear, Projection
from ...kernels.ops.parameter import Parameter
from ...operation_scopes import operation
from ..decoder import Decoder, StoredModule, layer_places
from ..sharding import ShardedVocabulary
from .attention import IMPLEMENTATION, CurrentStep, PagedLayer, PagedStep
from .config import LinearGroup, TransformersConfig, freeze_rotations, linear_groups
from .probe import Probe, head_of, run_head, set_implementation

# Replaces the linear layers of a transformers model by projections with our kernels.
#
# Layers with the same input are one product: the first to be called computes it for all.


class FirstOfProduct(Projection):
    """Stands in the place of the first linear layer of a group, and computes all of them."""

    def __init__(self, kernels: Kernels, group: LinearGroup) -> None:
        super().__init__(kernels, *group.operation.weight.shape)
        self.sizes = [member.out_features for member in group.members]
        self.following: list[Tensor] = []
        """Results of layers that are not called yet."""

    def forward(self, x: Tensor) -> Tensor:
        out_TN = super().forward(x.reshape(-1, x.shape[-1]))
        out = out_TN.view(*x.shape[:-1], out_TN.shape[-1])
        if len(self.sizes) == 1:
            return out
        parts: list[Tensor] = list(out.split(self.sizes, dim=-1))
        self.following = parts[1:]
        return parts[0]


class NextOfProduct(nn.Module):
    """Stands in the place of another linear layer of a group."""

    def __init__(self, first: FirstOfProduct) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        return self.first.following.pop(0)


# Input embeddings whose rows a projection stores.
#
# The class of an embedding may do something with the rows, such as to scale them (Gemma). It stays
# the model's: only its lookup is replaced.


class _RowsOfProjection(nn.Embedding):
    """The lookup of an embedding: the last base of its class before `nn.Embedding`."""

    projection: Projection

    def forward(self, input: Tensor) -> Tensor:
        rows: Tensor = self.projection.rows(input.reshape(-1)).unflatten(0, input.shape)
        return rows


def store_rows(embedding: Any, projection: Projection) -> None:
    """Make an `nn.Embedding` look up rows of a projection that will have the values of its weight.

    Its weight becomes a tensor without elements, of which models read the dtype or the device.
    """
    empty = embedding.weight.data.new_empty(0)
    del embedding.weight
    embedding.projection = projection
    embedding.register_buffer("weight", empty, persistent=False)
    own = type(embedding)
    bases = (_RowsOfProjection,) if own is nn.Embedding else (own, _RowsOfProjection)
    embedding.__class__ = type(own.__name__, bases, {})


# Profiler scopes for the modules of a transformers model, in steps that are not compiled.


def add_scopes(model: nn.Module, probe: Probe) -> None:
    """Make each decoder layer, and each module in it with parameters of its own, a scope.

    A scope has the name of the module in its parent, such as `q_proj`.
    """
    for index, prefix in enumerate(probe.layers):
        layer = model.get_submodule(prefix.removesuffix("."))
        for path, module in layer.named_modules():
            if path and any(True for _ in module.parameters(recurse=False)):
                replaced = path.removesuffix(".first")
                _scope(layer.get_submodule(replaced), replaced.rpartition(".")[2])
        _scope(layer, "layer", index)


def _scope(module: Any, name: str, layer: int | None = None) -> None:
    forward = module.forward

    def scoped(*arguments: Any, **keywords: Any) -> Any:
        with operation(name, layer):
            return forward(*arguments, **keywords)

    module.forward = scoped


class TransformersDecoder(StoredModule):
    """Runs a causal language model of transformers, with the interface of `Decoder`."""

    def __init__(
        self,
        config: TransformersConfig,
        model: Any,
        codes: Iterable[tuple[str, Tensor | Parts]],
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[LayerGroup],
        storage: Storage = "model",
    ) -> None:
        """Take a loaded model on the CPU, whose linear layers are replaced.

        Args:
            config: of the model.
            model: its weights in `Kernels.codes` are not read.
            codes: these weights.
            kernels: of its linear layers and of attention.
            dtype: of weights and activations.
            device: where it runs.
            groups: the layer groups of the arena.
            storage: how the arena stores keys and values.

        Raises `CheckpointError` if a weight to quantise holds NaN or infinity.
        """
        super().__init__(kernels, dtype, device)
        self.config = config
        self.storage: Storage = storage
        self.stack: Stack | None = None
        self.decode_step: DecodeStep | None = None
        self.vocabulary: ShardedVocabulary | None = None
        set_implementation(model, IMPLEMENTATION)
        freeze_rotations(model)
        read = {source.name for parameter in self.layout() for source in parameter.sources}
        tensors = {name: value for name, value in model.state_dict().items() if name in read}
        _replace_linears(model, config, kernels)
        self.model = model
        self.store(chain(codes, self._weights(tensors)))
        probe = config.probe
        model.to(device).eval().requires_grad_(False)
        self._embeddings = model.get_input_embeddings()
        self._base = model.get_submodule(probe.base)
        self._head = head_of(model, probe.base, probe.output)
        self._layers = self.paged_layers(groups, storage)
        self._layouts = layouts(groups)
        self._current = CurrentStep(model)

    def layout(self) -> Iterator[Parameter]:
        """Yield the parameters of projections: linear layers, and embeddings that they store."""
        plan = self.config.plan
        operations = (*(op for layer in plan.layers for op in layer.operations), plan.head)
        linears = [p for op in operations if isinstance(op, Linear) for p in op.parameters]
        yield from dict.fromkeys(p for p in (plan.embedding, *linears) if p.viewed_as is None)

    def holder(self, path: str) -> nn.Module:
        """Return the module that stands in the place of a module of transformers."""
        module: nn.Module = self.model.get_submodule(path)
        return module.projection if isinstance(module, _RowsOfProjection) else module

    def _weights(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that are not codes, and remove what they are made of."""
        for parameter in self.layout():
            if parameter.name not in self.kernels.codes:
                yield parameter.name, self._stacked(parameter, tensors)

    def _stacked(self, parameter: Parameter, tensors: dict[str, Tensor]) -> Tensor:
        parts = [
            torch.zeros(source.part_shape, dtype=self.dtype)
            if source.name is None
            else source.read(tensors.pop(source.name))
            for source in parameter.sources
        ]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

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

        `layers` are the layers of `arena`; None: of the groups that the decoder was made for.
        """
        arenas = arena_views(arena, self._layouts, batch.block_size, self.storage)
        step = PagedStep(self.kernels.attention, arenas, batch, layers or self._layers)
        with operation("layers"), self._current.running(step.attend):
            output = self._base(
                inputs_embeds=x_TD[None], position_ids=batch.positions[None], use_cache=False
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Return logits `[B, vocab_size]`, by the model's own `forward`."""
        with operation("head"):
            return run_head(self._head, hidden_BD[None])[0]

    own_logits = logits

    def paged_layers(
        self, groups: Sequence[LayerGroup], storage: Storage
    ) -> tuple[PagedLayer, ...]:
        """Return the attention calls of a forward pass, over an arena of these groups."""
        layers, operations = [], [op for p in self.config.plan.layers for op in p.operations]
        attends = [op for op in operations if isinstance(op, Attend)]
        for place, attend in zip(layer_places(groups), attends, strict=True):
            layers.append(PagedLayer(place, attend.form(storage), attend.head_dim))
        return tuple(layers)

    @torch.no_grad()
    def overwrite_from(self, model: Any, codes: Iterable[tuple[str, Tensor | Parts]]) -> None:
        """Copy the weights of another model of the same config; arguments as of the constructor.

        See `overwrite`.
        """
        tensors, ours = model.state_dict(), self.model.state_dict()
        self.overwrite(chain(codes, self._weights(tensors)))
        for name, value in tensors.items():
            module = name.rpartition(".")[0]
            if name in ours and not isinstance(self.model.get_submodule(module), Projection):
                ours[name].copy_(value)


def _replace_linears(model: Any, config: TransformersConfig, kernels: Kernels) -> None:
    """Replace the linear layers that the probe found by projections without weights."""
    probe, embeddings = config.probe, model.get_input_embeddings()
    rows = None
    for group in linear_groups(probe):
        first = FirstOfProduct(kernels, group)
        model.set_submodule(group.name, first)
        for member in group.members[1:]:
            model.set_submodule(member.module, NextOfProduct(first))
        if probe.tied and group.layer is None:
            rows = first
    if probe.packed_embedding:
        store_rows(embeddings, rows or Projection(kernels, *embeddings.weight.shape))
    gc.collect()  # modules refer to each other


DecoderModel: TypeAlias = Decoder | TransformersDecoder
"""Token ids to hidden states to logits, reading and writing the arena."""
