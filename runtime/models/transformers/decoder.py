"""A decoder whose modules are those of transformers, around our cache, attention and products."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ....cache.arena import Storage, arena_views
from ....cache.spec import LayerGroup, layouts
from ...errors import CheckpointError
from ...kernels import (
    DecodeStep,
    Kernels,
    PackedMemory,
    RaggedBatch,
    Stack,
)
from ...kernels.ops.attention import Attend
from ...kernels.ops.linear import Projection, stored_bytes
from ...operation_scopes import operation
from ..decoder import Decoder, layer_places
from ..sharding import ShardedVocabulary
from .attention import IMPLEMENTATION, CurrentStep, PagedLayer, PagedStep
from .config import LinearGroup, TransformersConfig, freeze_rotations, linear_groups
from .probe import Probe, head_of, run_head, set_implementation

# Replaces the linear layers of a transformers model by projections with our kernels.
#
# Layers with the same input are one product: the first to be called computes it for all.


class FirstOfProduct(nn.Module):
    """Stands in the place of the first linear layer of a group, and computes all of them."""

    def __init__(self, product: Projection, sizes: list[int]) -> None:
        """`sizes` are the output features of the layers, in the order in which they are called."""
        super().__init__()
        self.product = product
        self.sizes = sizes
        self.following: list[Tensor] = []
        """Results of layers that are not called yet."""

    def forward(self, x: Tensor) -> Tensor:
        out_TN: Tensor = self.product(x.reshape(-1, x.shape[-1]))
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


def stacked(model: nn.Module, group: LinearGroup) -> tuple[Tensor, Tensor | None]:
    """Return the weights of a group, `[out_features, in_features]`, and its biases.

    Members without a bias have zeros there; None if no member has one.
    """
    weights, biases = [], []
    for member in group.members:
        module: Any = model.get_submodule(member.module)
        weight = module.weight.data
        weights.append(weight.T if member.transposed else weight)
        biases.append(module.bias.data if member.bias else weight.new_zeros(member.out_features))
    stacked = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
    return stacked, torch.cat(biases) if group.operation.bias else None


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
    """Make an `nn.Embedding` look up rows of a projection that has the values of its weight.

    Its weight becomes a tensor without elements, of which models read the dtype or the device.
    """
    assert projection.weight is not None
    del embedding.weight
    embedding.projection = projection
    empty = torch.empty(0, dtype=projection.dtype, device=projection.weight.device)
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
                replaced = path.removesuffix(".product").removesuffix(".first")
                _scope(layer.get_submodule(replaced), replaced.rpartition(".")[2])
        _scope(layer, "layer", index)


def _scope(module: Any, name: str, layer: int | None = None) -> None:
    forward = module.forward

    def scoped(*arguments: Any, **keywords: Any) -> Any:
        with operation(name, layer):
            return forward(*arguments, **keywords)

    module.forward = scoped


class TransformersDecoder(nn.Module):
    """Runs a causal language model of transformers, with the interface of `Decoder`."""

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

        `groups` are the layer groups of the arena, `storage` is how it stores keys and values.
        Raises `CheckpointError` if a weight to quantise holds NaN or infinity.
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
        self._layouts = layouts(groups)
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

    def _replace_linears(self, model: Any) -> None:
        """Replace the linear layers that the probe found, freeing each weight when it is stored."""
        probe, groups = self.config.probe, linear_groups(self.config.probe)
        shared = probe.tied and probe.packed_embedding
        embeddings = model.get_input_embeddings()
        shapes = [group.operation.weight.shape for group in groups]
        if probe.packed_embedding and not shared:
            shapes.append(embeddings.weight.shape)
        memory = None
        if self.kernels.pack is not None:
            sizes = [stored_bytes(self.kernels, n, k, self.dtype) for n, k in shapes]
            memory = PackedMemory(sum(sizes), len(sizes))
        for group in groups:
            projection = Projection(self.kernels, *group.operation.weight.shape)
            self._store(group.name, projection, *stacked(model, group), memory)
            first = FirstOfProduct(projection, [member.out_features for member in group.members])
            model.set_submodule(group.name, first)
            for member in group.members[1:]:
                model.set_submodule(member.module, NextOfProduct(first))
            if shared and group.layer is None:
                store_rows(embeddings, projection)
        if probe.packed_embedding and not shared:
            projection = Projection(self.kernels, *embeddings.weight.shape)
            self._store(probe.embedding, projection, embeddings.weight.data, None, memory)
            store_rows(embeddings, projection)
        gc.collect()  # modules refer to each other

    @torch.no_grad()
    def overwrite(self, model: Any) -> None:
        """Copy the weights of another model of the same config, which is on the CPU.

        The addresses of all tensors, and with them captured graphs and compiled code, stay valid.
        Raises `CheckpointError` for NaN or infinity in a weight to quantise; some are overwritten.
        """
        probe = self.config.probe
        for group in linear_groups(probe):
            first: Any = self.model.get_submodule(group.name)
            self._store(group.name, first.product, *stacked(model, group))
        if probe.packed_embedding and not probe.tied:
            weight = model.get_input_embeddings().weight
            self._store(probe.embedding, self._embeddings.projection, weight, None)
        ours = self.model.state_dict()
        for name, value in model.state_dict().items():
            if name in ours:
                ours[name].copy_(value)

    def _store(
        self,
        name: str,
        projection: Projection,
        weight: Tensor,
        bias: Tensor | None,
        memory: PackedMemory | None = None,
    ) -> None:
        """Store a weight as the kernels want it, in the tensors of an earlier one if there are."""
        try:
            stored = projection.as_stored(weight, self.dtype, self.device)
        except ValueError as error:
            raise CheckpointError(
                f"{name} cannot be stored as {self.kernels.weights}: {error}; look at the"
                " checkpoint, or use weight_dtype='auto'"
            ) from error
        if bias is not None:
            stored["bias"] = bias.to(self.device)
        if memory is not None:
            stored["weight"] = memory.place(stored["weight"])
        projection.dtype = self.dtype
        for leaf, value in stored.items():
            held: Tensor | None = getattr(projection, leaf)
            if held is None:
                setattr(projection, leaf, nn.Parameter(value, requires_grad=False))
            else:
                held.copy_(value)


DecoderModel: TypeAlias = Decoder | TransformersDecoder
"""Token ids to hidden states to logits, reading and writing the arena."""
