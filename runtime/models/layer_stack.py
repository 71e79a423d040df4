"""The layers of a plan and the norm after them: hidden states to hidden states.

Shape suffixes: T tokens of a step, E half of what is rotated of a head, D hidden_size, K kinds of
rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...cache.arena import Storage
from ...cache.spec import LayerGroup
from ..errors import CheckpointError
from ..kernels import Kernels, LayerPlace, PackedMemory, RaggedBatch, Stack
from ..kernels.cpu.elementwise import reference_rotations, rotations
from ..kernels.ops.bound_model import BoundModel
from ..kernels.ops.layer_operations import Residual
from ..kernels.ops.layer_plan import LayerPlan, ModelPlan
from ..kernels.ops.parameter import Parameter
from ..operation_scopes import operation
from .config import Rope
from .each_token import each_token
from .modules import Projection, RMSNorm, Vector
from .operations import LayerStep, bind
from .rope import inverse_frequencies, pair_amplitudes
from .rope_by_length import FrequenciesByLength

__all__ = ["Layer", "LayerStack"]

_SOURCES_SHOWN = 4


class Layer(nn.Module):
    """One decoder layer: runs its plan operation by operation."""

    def __init__(
        self, plan: LayerPlan, kernels: Kernels, place: LayerPlace, storage: Storage
    ) -> None:
        super().__init__()
        self._operations = [
            (
                op.name,
                op.scale
                if isinstance(op, Residual)
                else bind(op, self._module, kernels, place, storage),
            )
            for op in plan.operations
        ]
        """Name and function of each operation; of residual additions, the factor of the value."""

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
        for name, run in self._operations:
            with operation(name):
                if not isinstance(run, float):
                    value = run(value, step)
                else:
                    x_TD = value = x_TD + (value if run == 1.0 else value * run)
        return x_TD


class LayerStack(nn.Module):
    """The layers of a plan and the norm after them, reading and writing the arena.

    Built empty; `store` gives it its weights one by one, under the names of `layout`.
    """

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
            groups: those of the arena.
            storage: how the arena stores what layers write.
        """
        super().__init__()
        self.plan = plan
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.storage: Storage = storage
        self.stack: Stack | None = None
        self.embedding_factor = plan.embedding_scale
        places = {
            layer: LayerPlace(group.index, position)
            for group in groups
            for position, layer in enumerate(group.layers)
        }
        self._places = tuple(places[layer] for layer in range(len(plan.layers)))
        self.layers = nn.ModuleList(
            Layer(layer, kernels, place, storage)
            for layer, place in zip(plan.layers, self._places, strict=True)
        )
        self.norm = RMSNorm(plan.norm.eps, offset=plan.norm.offset)
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
        """Yield the parameters that `store` expects."""
        return self.plan.parameters()

    def store(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Store every weight; those of linear layers in the format of the kernels.

        Raises:
            CheckpointError: a weight to quantise holds NaN or infinity.
        """
        memory = self._packed_memory()
        for name, tensor in weights:
            module, stored = self._as_stored(name, tensor)
            if isinstance(module, Projection) and "weight" in stored:
                module.dtype = self.dtype
                if memory is not None:
                    stored["weight"] = memory.place(stored["weight"])
            for leaf, value in stored.items():
                setattr(module, leaf, nn.Parameter(value, requires_grad=False))
            del tensor, stored, value  # one that was quantised, before the next one is allocated
        self._make_native()

    def overwrite(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy other weights of the same shapes into the tensors that `store` made.

        Their addresses, and with them captured graphs and compiled code, stay valid. If it raises,
        some weights are new and others are not.

        Raises:
            CheckpointError: as `store`.
        """
        for name, tensor in weights:
            module, stored = self._as_stored(name, tensor)
            for leaf, value in stored.items():
                target: nn.Parameter = getattr(module, leaf)
                assert target.shape == value.shape, name
                target.data.copy_(value)
            del tensor, stored, value  # before the next one is allocated

    def _as_stored(
        self, name: str, tensor: torch.Tensor
    ) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """Return the module of a weight, and the values of its attributes on the device."""
        path, _, leaf = name.rpartition(".")
        module = self.get_submodule(path)
        own = module.dtype if isinstance(module, Vector) else None
        tensor = tensor.to(own or self.dtype)
        if not isinstance(module, Projection) or leaf != "weight":
            assert leaf in ("weight", "bias"), name
            return module, {leaf: tensor.to(self.device)}
        try:
            return module, module.as_stored(tensor, self.device)
        except ValueError as error:
            raise CheckpointError(self._unfit(name, error)) from error

    def _packed_memory(self) -> PackedMemory | None:
        """Room for the weights of all linear layers, where the CPU kernels read them packed."""
        if self.kernels.pack is None or self.kernels.make_stack is None:
            return None
        sizes = [
            module.stored_bytes(self.dtype)
            for module in self.modules()
            if isinstance(module, Projection)
        ]
        return PackedMemory(sum(sizes), len(sizes))

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
            storage=self.storage,
            embedding_factor=self.embedding_factor,
            frequencies=self.inverse_frequencies,
            amplitudes=amplitudes.view_as(self.inverse_frequencies),
            collectives=self.kernels.collectives,
        )

    def _unfit(self, name: str, error: ValueError) -> str:
        (parameter,) = (found for found in self.layout() if found.name == name)
        names = parameter.source_names
        rest = len(names) - _SOURCES_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        sources = ", ".join(names[:_SOURCES_SHOWN]) + more
        return (
            f"{name} cannot be stored as {self.kernels.weights}: {error} (it is made of {sources});"
            " look at the checkpoint, or use weight_dtype='auto'"
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters as stored, one that is used twice counted once."""
        return sum(p.nbytes for p in self.parameters())

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
        taps: tuple[int, ...] = (),
        embeddings_TD: torch.Tensor | None = None,
        attended: RaggedBatch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the normed hidden states `[T, D]`, and the outputs of some layers.

        Args:
            x_TD: the input of the first layer.
            arena: of keys and values.
            batch: the tokens.
            taps: layers whose outputs are returned side by side, `[T, len(taps) * D]`; ascending.
                None is returned without any.
            embeddings_TD: those that the operation `JoinNorms` needs.
            attended: the batch with the positions up to which tokens attend; None: their own.
        """
        with operation("rotations"):
            cos_KTE, sin_KTE = self._rotations(batch)
        batch = attended or batch
        if self.stack is not None:
            with operation("layers"):
                return self.stack.run(x_TD, arena, batch, cos_KTE, sin_KTE, taps, embeddings_TD)
        step = LayerStep(cos_KTE, sin_KTE, arena, batch, embeddings_TD)
        outputs = []
        for index, layer in enumerate(self.layers):
            with operation("layer", index):
                x_TD = layer(x_TD, step)
            if any(tap == index for tap in taps):  # `in` is always false in compiled code
                outputs.append(x_TD)
        with operation("final_norm"):
            normed_TD = each_token(self.kernels, self.norm)(x_TD)
        return normed_TD, torch.cat(outputs, dim=-1) if outputs else None

    def _rotations(self, batch: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of the tokens, float32 `[K, T, E]`."""
        if self._frequencies_by_length is not None:
            lengths_T = batch.rope_lengths
            if lengths_T is None:
                lengths_T = batch.positions + 1
            turn = each_token(self.kernels, self._rotations_by_length)
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
