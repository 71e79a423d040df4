"""The decoder of every family, described by its `ModelPlan`.

Shape suffixes: T tokens of a step, D hidden_size, V vocab_size, B sampled positions, F features
that a drafter takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.arena import Storage, arena_views
from ...cache.spec import LayerGroup, RowPlace, layouts, row_layout
from ..bounded_repr import bounded_text
from ..errors import CheckpointError
from ..kernels import DecodeStep, Experts, Kernels, LayerPlace, PackedMemory, RaggedBatch, Stack
from ..kernels.choice import Parts
from ..kernels.cpu.sampling import (
    cap_logits,
    reference_cap_logits,
    reference_rotations,
    rotations,
)
from ..kernels.ops.layer_plan import BoundModel, LayerPlan, ModelPlan
from ..kernels.ops.linear import Projection
from ..kernels.ops.operation import (
    LAYER_INPUT,
    Binding,
    LayerStep,
    Replace,
    Residual,
    Run,
    Vector,
    collectives_of,
    per_token,
)
from ..kernels.ops.parameter import Parameter
from ..operation_scopes import operation
from ..rope_lengths import UNLIMITED, RopeLengths
from .config import DecoderConfig, ModelConfig
from .layer_kinds import rope_kinds
from .plan import model_plan, parameter_bytes
from .rope import Rope, inverse_frequencies, pair_amplitudes, pair_exponents
from .sharding import ShardedVocabulary

# Rotary positions whose frequencies depend on the length of the sequence.
#
# `longrope` has one factor of each pair's frequency within the context of the first training and
# another one beyond it (Ding et al. 2024). `dynamic` scales the base with the length ("NTK-aware"
# scaling): for a context of L positions, factor f and length l > L the base is multiplied by
# (f * l / L - (f - 1)) ** (d / (d - 2)), with d rotated elements of a head.
#
# Shape suffixes: T tokens, K kinds of rotation, E pairs of a head.


def rope_lengths(config: DecoderConfig) -> RopeLengths | None:
    """Return how the rotations of a model depend on the length; None if they do not."""
    if not isinstance(config, ModelConfig):
        return None
    kinds = list(dict.fromkeys(config.rope(layer).scaling for layer in range(config.num_layers)))
    first = {
        kind: tuple(s.original_max_position_embeddings for s in kinds if s.type == kind)
        for kind in ("longrope", "dynamic")
    }
    if not any(first.values()):
        return None
    recomputes = config.family.recomputes_long and first["longrope"]
    return RopeLengths(
        switches=first["longrope"],
        grows=first["dynamic"],
        recompute_above=min(first["longrope"]) if recomputes else UNLIMITED,
    )


class FrequenciesByLength(nn.Module):
    """The frequencies of each token's pairs."""

    def __init__(self, kinds: Sequence[Rope], head_dim: int, device: torch.device) -> None:
        super().__init__()
        self._kinds = tuple((rope, rope.dim(head_dim)) for rope in kinds)
        short_KE = torch.stack([inverse_frequencies(rope, head_dim) for rope in kinds])
        long_KE = short_KE.clone()
        for long_E, (rope, dim) in zip(long_KE, self._kinds, strict=True):
            pairs = pair_exponents(dim)
            if rope.scaling.type == "longrope":
                divisors = torch.tensor(rope.scaling.long_factor) * rope.theta**pairs
                long_E[: len(pairs)] = 1.0 / divisors
            elif rope.scaling.type == "dynamic":
                long_E[: len(pairs)] = pairs
        self._short_KE = nn.Buffer(short_KE.to(device), persistent=False)
        self._long_KE = nn.Buffer(long_KE.to(device), persistent=False)
        """`longrope`: frequencies beyond the first context; `dynamic`: exponents of the base."""

    def forward(self, lengths_T: Tensor) -> Tensor:
        """Return radians per position, float32 `[K, T, E]`.

        `lengths_T`, int64, are the lengths whose parameters rotate each token.
        """
        return torch.stack([self._of(kind, lengths_T) for kind in range(len(self._kinds))])

    def _of(self, kind: int, lengths_T: Tensor) -> Tensor:
        """Return the frequencies of one rotation, `[T, E]`."""
        (rope, dim), short_E, long_TE = self._kinds[kind], self._short_KE[kind], self._long_KE[kind]
        scaling, first = rope.scaling, rope.scaling.original_max_position_embeddings
        if not scaling.by_length:
            return short_E.expand(lengths_T.shape[0], -1)
        if scaling.type == "dynamic":
            grown_T = scaling.factor * lengths_T.float() / first - (scaling.factor - 1)
            # Of lengths within the context, which are not used, the base could be negative.
            base_T = rope.theta * grown_T.clamp(min=1.0) ** (dim / (dim - 2))
            long_TE = torch.where(short_E == 0.0, 0.0, base_T[:, None] ** -long_TE)
        return torch.where((lengths_T > first)[:, None], long_TE, short_E)


# The layers of a plan and the norm after them: hidden states to hidden states.
#
# Shape suffixes: T tokens of a step, E half of what is rotated of a head, D hidden_size, K kinds of
# rotation.


class Layer(nn.Module):
    """One decoder layer: runs its plan operation by operation."""

    def __init__(
        self,
        plan: LayerPlan,
        kernels: Kernels,
        places: Iterator[LayerPlace],
        row_places: Iterator[RowPlace],
        storage: Storage,
        earlier: Sequence[Layer] = (),
    ) -> None:
        """Bind the operations; each takes the places of its states.

        `earlier` are the layers before it, whose states operations may read.
        """
        super().__init__()
        self.places: tuple[LayerPlace, ...] = ()
        """Of its states."""
        self._operations: list[tuple[str, Run | float | None, tuple[str, ...], str]] = []
        """Name and function of each operation (of residual additions, the factor of the value; None
        where the value becomes the hidden states), and the names of the values that it reads and
        writes."""
        for op in plan.operations:
            own = tuple(next(places) for _ in op.states)
            self.places += own
            if op.source_layer is not None:
                own = earlier[op.source_layer].places
            row_place = None if op.row_state is None else next(row_places)
            to = Binding(self._module, kernels, own, storage, row_place, len(earlier))
            run: Run | float | None = None
            if isinstance(op, Residual):
                run = op.scale
            elif not isinstance(op, Replace):
                run = op.bind(to)
            self._operations.append((op.name, run, op.reads, op.writes))

    def _module(self, parameter: Parameter, make: Callable[[], nn.Module]) -> nn.Module:
        """The module that holds a parameter, in the tree that its name describes."""
        parent: nn.Module = self
        *path, name, _ = parameter.name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        if not hasattr(parent, name):
            parent.add_module(name, make())
        return parent.get_submodule(name)

    def forward(self, x_TD: torch.Tensor, step: LayerStep) -> torch.Tensor:
        value: Any = x_TD
        named: dict[str, Any] = {LAYER_INPUT: x_TD}
        for name, run, reads, writes in self._operations:
            if reads:
                value = tuple(named[of] for of in reads)
                value = value if len(value) > 1 else value[0]
            with operation(name):
                if run is None:
                    x_TD = value
                elif not isinstance(run, float):
                    value = run(value, step)
                else:
                    x_TD = value = x_TD + (value if run == 1.0 else value * run)
            if writes:
                named[writes] = value
        return x_TD


def layer_places(groups: Sequence[LayerGroup]) -> tuple[LayerPlace, ...]:
    """Return the place of each of a plan's states in the arena of these groups."""
    places: dict[int, LayerPlace] = {}
    order = list(layouts(groups))
    for group in groups:
        positions = dict.fromkeys(order, 0)
        for layer, state in zip(group.layers, group.states, strict=True):
            layout = state.layout
            places[layer] = LayerPlace(group.index, positions[layout], order.index(layout))
            positions[layout] += 1
    return tuple(places[layer] for layer in range(len(places)))


class StoredModule(nn.Module, ABC):
    """A model whose linear layers are stored as the kernels read them.

    Built empty; `store` gives it its weights one by one, under the names of `layout`.
    """

    def __init__(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        """Set the kernels of all operations, and dtype and device of weights and activations."""
        super().__init__()
        self.kernels = kernels
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def layout(self) -> Iterator[Parameter]:
        """Yield the parameters that `store` expects."""

    def holder(self, path: str) -> nn.Module:
        """Return the module that holds a parameter, whose name is `path` and an attribute."""
        return self.get_submodule(path)

    def store(self, weights: Iterable[tuple[str, Tensor | Parts]]) -> None:
        """Store every weight, linear layers in the format of the kernels.

        Weights in `Kernels.codes` are given as parts, or quantised to int4.

        Raises:
            CheckpointError: a weight to quantise holds NaN or infinity.
        """
        sizes = self._packed_sizes()
        memory = PackedMemory(sum(sizes.values()), len(sizes)) if sizes else None
        for name, weight in weights:
            packed = memory.take(sizes[name]) if memory is not None and name in sizes else None
            module, stored = self._as_stored(name, weight, packed)
            if isinstance(module, Projection) and "weight" in stored:
                module.dtype = self.dtype
            for leaf, value in stored.items():
                setattr(module, leaf, nn.Parameter(value, requires_grad=False))
            del weight, stored, value  # one that was quantised, before the next one is allocated

    def overwrite(self, weights: Iterable[tuple[str, Tensor | Parts]]) -> None:
        """Copy other weights of the same shapes into the tensors that `store` made.

        Their addresses, and with them captured graphs and compiled code, stay valid. If it raises,
        some weights are new and others are not.

        Raises:
            CheckpointError: as `store`.
        """
        sizes = self._packed_sizes()
        for name, weight in weights:
            packed = torch.empty(sizes[name], dtype=torch.uint8) if name in sizes else None
            module, stored = self._as_stored(name, weight, packed)
            for leaf, value in stored.items():
                target: nn.Parameter = getattr(module, leaf)
                assert target.shape == value.shape, name
                target.data.copy_(value)
            del weight, stored, value  # before the next one is allocated

    def _as_stored(
        self, name: str, weight: Tensor | Parts, packed: Tensor | None
    ) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """Return the module of a weight, and the values of its attributes on the device.

        Packed weights are written to `packed`.
        """
        path, _, leaf = name.rpartition(".")
        module = self.holder(path)
        if not isinstance(module, Projection) or leaf != "weight":
            assert leaf in ("weight", "bias"), name
            assert isinstance(weight, Tensor), name
            own = module.dtype if isinstance(module, Vector) else None
            return module, {leaf: weight.to(own or self.dtype).to(self.device)}
        try:
            if isinstance(weight, Tensor):
                weight = weight.to(self.dtype)
                if name in self.kernels.codes:
                    codes = self.kernels.weights.codes
                    weight = [codes(matrix) for matrix in weight.chunk(module.matrices)]
            return module, module.as_stored(weight, self.dtype, self.device, packed)
        except ValueError as error:
            raise CheckpointError(self._unfit(name, error)) from error

    def _packed_sizes(self) -> dict[str, int]:
        """Bytes of the weights of all linear layers, where the CPU kernels read them packed."""
        if self.kernels.pack_parts is None:
            return {}
        matrices = (parameter for parameter in self.layout() if parameter.is_matrix)
        return {own.name: parameter_bytes(own, self.kernels, self.dtype) for own in matrices}

    def _unfit(self, name: str, error: ValueError) -> str:
        (parameter,) = (found for found in self.layout() if found.name == name)
        sources = bounded_text(", ".join(parameter.source_names), 300)
        return (
            f"{name} cannot be stored as {self.kernels.weights}: {error} (it is made of {sources});"
            " look at the checkpoint, or use weight_dtype='auto'"
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters as stored, one that is used twice counted once."""
        return sum(p.nbytes for p in self.parameters())


class LayerStack(StoredModule):
    """The layers of a plan and the norm after them, reading and writing the arena."""

    def __init__(
        self,
        plan: ModelPlan,
        ropes: Sequence[Rope],
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[LayerGroup],
        storage: Storage = "model",
    ) -> None:
        """Make the modules.

        Args:
            plan: of the model that the layers are part of.
            ropes: the rotations that its layers index.
            kernels: of its operations.
            dtype: of weights and activations.
            device: where it runs.
            groups: the layer groups of the arena.
            storage: how the arena stores what layers write.
        """
        super().__init__(kernels, dtype, device)
        self.plan = plan
        self.storage: Storage = storage
        self.stack: Stack | None = None
        self.embedding_factor = plan.embedding_scale
        self._places = layer_places(groups)
        self._layouts = layouts(groups)
        self._row_places = row_layout(plan.row_states, dtype.itemsize).places
        places, row_places = iter(self._places), iter(self._row_places)
        layers: list[Layer] = []
        for layer in plan.layers:
            layers.append(Layer(layer, kernels, places, row_places, storage, layers))
        self.layers = nn.ModuleList(layers)
        around = {
            name: Layer(part, kernels, places, row_places, storage)
            for name, part in plan.surroundings.items()
        }
        self.layer_inputs = around.get("layer_inputs")
        self.before = around.get("before")
        self.after = around.get("after")
        self.norm = plan.norm.module()
        frequencies_KE = torch.stack([inverse_frequencies(r, plan.rope_dim) for r in ropes])
        self.inverse_frequencies = nn.Buffer(frequencies_KE.to(device), persistent=False)
        self._frequencies_by_length: FrequenciesByLength | None = None
        if plan.rope_by_length:
            self._frequencies_by_length = FrequenciesByLength(ropes, plan.rope_dim, device)
        amplitudes_KE = torch.stack([pair_amplitudes(r, plan.rope_dim) for r in ropes])
        self.amplitudes: torch.Tensor | None = (
            None
            if bool((amplitudes_KE == 1.0).all())
            else nn.Buffer(amplitudes_KE[:, None].to(device), persistent=False)
        )

    def layout(self) -> Iterator[Parameter]:
        """See `StoredModule.layout`."""
        return self.plan.parameters()

    def store(self, weights: Iterable[tuple[str, Tensor | Parts]]) -> None:
        """See `StoredModule.store`."""
        super().store(weights)
        self._make_native()

    def _make_native(self) -> None:
        """Use one operation for all layers if the kernels support the plan."""
        self.stack = None
        if self.kernels.make_stack is not None and self.kernels.runs_stack(self.plan):
            self.stack = self.kernels.make_stack(self._bound_model())

    def _bound_model(self) -> BoundModel:
        amplitudes = self.amplitudes
        if amplitudes is None:
            amplitudes = torch.ones_like(self.inverse_frequencies)
        return BoundModel(
            plan=self.plan,
            tensors={name: tensor.detach() for name, tensor in self.named_parameters()},
            places=self._places,
            row_places=self._row_places,
            storage=self.storage,
            embedding_factor=self.embedding_factor,
            frequencies=self.inverse_frequencies,
            amplitudes=amplitudes.view_as(self.inverse_frequencies),
            collectives=self.kernels.collectives,
        )

    def close(self) -> None:
        """Release the weights that the operation of all layers holds."""
        if self.stack is not None:
            self.stack.close()

    @property
    def runs_natively_on_cpu(self) -> bool:
        """Whether operations outside of the layers run in C++ too."""
        native = self.stack is not None or self.kernels.batch_invariant
        return native and self.kernels.library is not None

    def run_layers(
        self,
        x_TD: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
        aux_layers: tuple[int, ...] = (),
        embeddings_TD: torch.Tensor | None = None,
        attended: RaggedBatch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the normed hidden states `[T, D]`, and the outputs of some layers.

        Args:
            x_TD: the input of the first layer.
            arena: of keys and values.
            batch: the tokens.
            aux_layers: ascending layers whose outputs are returned side by side,
                `[T, len(aux_layers) * D]`. None is returned without any.
            embeddings_TD: those that the operation `JoinNorms` needs.
            attended: the batch with the positions up to which tokens attend; None: their own.
        """
        with operation("rotations"):
            cos_KTE, sin_KTE = self._rotations(batch)
        batch = attended or batch
        if self.stack is not None:
            inputs = (cos_KTE, sin_KTE, (arena,), batch, embeddings_TD)
            with operation("layers"):
                return self.stack.run(x_TD, inputs, aux_layers)
        arenas = arena_views(arena, self._layouts, batch.block_size, self.storage)
        step = LayerStep(cos_KTE, sin_KTE, arenas, batch, embeddings_TD)
        if self.layer_inputs is not None:
            with operation("layer_inputs"):
                inputs_TLP = self.layer_inputs(x_TD, step)
            step = LayerStep(cos_KTE, sin_KTE, arenas, batch, embeddings_TD, inputs_TLP)
        if self.before is not None:
            x_TD = self.before(x_TD, step)
        outputs = []
        for index, layer in enumerate(self.layers):
            with operation("layer", index):
                x_TD = layer(x_TD, step)
            if any(aux == index for aux in aux_layers):  # `in` is always false in compiled code
                outputs.append(x_TD)
        if self.after is not None:
            x_TD = self.after(x_TD, step)
        with operation("final_norm"):
            normed_TD = per_token(self.kernels, self.norm)(x_TD)
        return normed_TD, torch.cat(outputs, dim=-1) if outputs else None

    def _rotations(self, batch: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of the tokens, float32 `[K, T, E]`."""
        if self._frequencies_by_length is not None:
            lengths_T = batch.rope_lengths
            if lengths_T is None:
                lengths_T = batch.positions + 1
            turn = per_token(self.kernels, self._rotations_by_length)
            cos_KTE, sin_KTE = turn(batch.positions, lengths_T).movedim(0, 2).contiguous()
        else:
            rotations_of = rotations if self.runs_natively_on_cpu else reference_rotations
            cos_KTE, sin_KTE = rotations_of(batch.positions, self.inverse_frequencies)
        if self.amplitudes is None:
            return cos_KTE, sin_KTE
        return cos_KTE * self.amplitudes, sin_KTE * self.amplitudes

    def _rotations_by_length(
        self, positions_T: torch.Tensor, lengths_T: torch.Tensor
    ) -> torch.Tensor:
        """Return cosines and sines `[T, 2, K, E]` of tokens whose sequences have these lengths."""
        assert self._frequencies_by_length is not None
        frequencies_KTE = self._frequencies_by_length(lengths_T)
        angles_KTE = positions_T[:, None].float() * frequencies_KTE
        return torch.stack((angles_KTE.cos(), angles_KTE.sin())).movedim(2, 0)


class Decoder(LayerStack):
    """Token ids to hidden states to logits, reading and writing the arena.

    Its parameters have the names of `fused_layout`. With a `shard`, its config is of one rank: all
    ranks run the same steps, and its kernels have the collectives of their group.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[LayerGroup],
        storage: Storage = "model",
        *,
        plan: ModelPlan | None = None,
    ) -> None:
        """Make the modules; see `LayerStack`.

        `plan` is the plan of the config with layers that attend to less; None: the plan itself.
        """
        plan = plan or model_plan(config)
        super().__init__(plan, rope_kinds(config), kernels, dtype, device, groups, storage)
        self.config = config
        self.decode_step: DecodeStep | None = None
        self.vocabulary = (
            None if plan.shard is None else ShardedVocabulary(plan.shard, collectives_of(kernels))
        )
        self.embed_tokens = Projection(kernels, *plan.embedding.shape)
        self.lm_head = (
            self.embed_tokens if plan.tied else Projection(kernels, *plan.head.weight.shape)
        )
        if config.family.scaled_embeddings:
            # Rounded like the embeddings themselves: in bfloat16 the root of 1152 is 34.
            self.embedding_factor = torch.tensor(plan.embedding_scale).to(dtype).item()
        self.logit_softcap = plan.logit_softcap

    def _make_native(self) -> None:
        """Use one operation for all layers, and separate decode kernels, if the kernels support
        the plan."""
        super()._make_native()
        make_decode_step = self.kernels.make_decode_step
        if self.stack is None or make_decode_step is None:
            self.decode_step = None
        else:
            self.decode_step = make_decode_step(self.stack, self._bound_model())

    def weight_bytes_read(self, rows: float) -> int:
        """Return the bytes of the parameters that a decode step of `rows` rows reads.

        Of experts it reads those that the rows use (`Experts.expected_experts`). An untied input
        embedding and the table of per-layer embeddings are left out: a step reads one of their rows
        per sequence.
        """
        unread = 0.0
        if self.lm_head is not self.embed_tokens:
            unread += sum(p.nbytes for p in self.embed_tokens.parameters())
        if self.layer_inputs is not None:
            unread += sum(p.nbytes for p in self.layer_inputs.get_submodule("table").parameters())
        for plan, layer in zip(self.plan.layers, self.layers, strict=True):
            for op in plan.operations:
                if isinstance(op, Experts):
                    unused = 1 - op.expected_experts(rows) / op.total
                    for weight in (op.gate_up, op.down):
                        module = layer.get_submodule(weight.name.removesuffix(".weight"))
                        unread += unused * sum(p.nbytes for p in module.parameters())
        return self.weight_bytes - round(unread)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[T, hidden_size]` as the first layer takes them."""
        if self.vocabulary is None:
            x_TD = self.embed_tokens.rows(token_ids_T)
        else:
            x_TD = self.vocabulary.embed(token_ids_T, self.embed_tokens.rows)
        return x_TD if self.embedding_factor == 1.0 else x_TD * self.embedding_factor

    def forward(
        self, token_ids_T: torch.Tensor, arena: torch.Tensor, batch: RaggedBatch
    ) -> torch.Tensor:
        """Return the final hidden states `[T, hidden_size]`; writes the tokens' keys and values."""
        return self.decode(self.embed(token_ids_T), arena, batch)

    def decode(self, x_TD: torch.Tensor, arena: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """As `forward`, from embeddings."""
        return self.run_layers(x_TD, arena, batch)[0]

    def decode_with_aux_layers(
        self,
        x_TD: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
        aux_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `decode`, and return what a drafter takes as features, `[T, len(aux_layers) * D]`.

        These are the outputs of the layers `aux_layers`, ascending, before the final norm, side by
        side; the number of layers stands for the final hidden states.
        """
        inner = tuple(layer for layer in aux_layers if layer < len(self.layers))
        hidden_TD, outputs_TF = self.run_layers(x_TD, arena, batch, inner)
        if outputs_TF is None:
            return hidden_TD, hidden_TD
        if len(inner) < len(aux_layers):
            outputs_TF = torch.cat((outputs_TF, hidden_TD), dim=-1)
        return hidden_TD, outputs_TF

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Return logits `[B, vocab_size]` in the model's dtype."""
        logits_BW = self.own_logits(hidden_BD)
        return logits_BW if self.vocabulary is None else self.vocabulary.gather(logits_BW)

    def own_logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens whose rows of the head this rank holds."""
        with operation("head"):
            logits: torch.Tensor = self.lm_head(hidden_BD)
            if self.plan.logit_scale != 1.0:
                logits = logits * self.plan.logit_scale
            cap = self.logit_softcap
            if not cap:
                return logits
            capped = cap_logits if self.runs_natively_on_cpu else reference_cap_logits
            return capped(logits, cap)
