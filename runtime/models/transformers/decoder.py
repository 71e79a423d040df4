"""A decoder whose modules are those of transformers, around our cache, attention and products."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

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
from ..decoder import Decoder
from ..modules import Projection, ShardedVocabulary
from .attention import IMPLEMENTATION, CurrentStep, PagedLayer, PagedStep
from .config import LinearGroup, TransformersConfig, freeze_rotations, layer_prefixes, linear_groups
from .probe import Probe, head_of, run_head, set_implementation

__all__ = ["DecoderModel", "TransformersDecoder", "add_scopes"]


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


def stacked_weight(model: nn.Module, group: LinearGroup) -> Tensor:
    """Return the weights of a group, `[out_features, in_features]`."""
    weights = []
    for member in group.members:
        weight: Any = model.get_submodule(member.module).weight
        weights.append(weight.data.T if member.transposed else weight.data)
    return weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)


def stacked_bias(model: nn.Module, group: LinearGroup) -> Tensor | None:
    """Return the biases of a group, with zeros for members without; None if none has one."""
    if not group.bias:
        return None
    parts = []
    for member in group.members:
        module: Any = model.get_submodule(member.module)
        has = member.bias
        parts.append(module.bias.data if has else module.weight.new_zeros(member.out_features))
    return torch.cat(parts)


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
    for index, prefix in enumerate(layer_prefixes(probe.attention)):
        layer = model.get_submodule(prefix.removesuffix("."))
        for path, module in layer.named_modules():
            if path and any(True for _ in module.parameters(recurse=False)):
                _scope(layer.get_submodule(_stand_in(path)), _stand_in(path).rpartition(".")[2])
        _scope(layer, "layer", index)


def _stand_in(path: str) -> str:
    """Return the path of the module that a projection belongs to."""
    return path.removesuffix(".product").removesuffix(".first")


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

        `layers` are the layers of `arena`; None: of the groups that the decoder was made for.
        """
        step = PagedStep(self.kernels.attention, arena, batch, layers or self._layers)
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
            first = FirstOfProduct(projection, [member.out_features for member in group.members])
            model.set_submodule(group.name, first)
            for member in group.members[1:]:
                model.set_submodule(member.module, NextOfProduct(first))
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
            self._overwrite(group.name, first.product, weight, bias)
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
        for leaf, value in self._stored(name, projection, weight, bias).items():
            getattr(projection, leaf).copy_(value)

    def _projection(
        self, name: str, weight: Tensor, bias: Tensor | None, memory: PackedMemory | None
    ) -> Projection:
        """Return a projection that stores a weight as the kernels want."""
        projection = Projection(self.kernels, *weight.shape)
        projection.dtype = self.dtype
        stored = self._stored(name, projection, weight, bias)
        if memory is not None:
            stored["weight"] = memory.place(stored["weight"])
        for leaf, value in stored.items():
            setattr(projection, leaf, nn.Parameter(value, requires_grad=False))
        return projection

    def _stored(
        self, name: str, projection: Projection, weight: Tensor, bias: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the values of the parameters of a projection, as the kernels want them."""
        try:
            stored = projection.as_stored(weight, self.device)
        except ValueError as error:
            raise CheckpointError(
                f"{name} cannot be stored as {self.kernels.weights}: {error}; look at the"
                " checkpoint, or use weight_dtype='auto'"
            ) from error
        if bias is not None:
            stored["bias"] = bias.to(self.device)
        return stored

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


DecoderModel: TypeAlias = Decoder | TransformersDecoder

"""Token ids to hidden states to logits, reading and writing the arena."""
