"""The decoder of every family, described by `ModelConfig`.

Shape suffixes: T tokens of a step, E half of what is rotated of a head, D hidden_size, F
intermediate_size, K kinds of rotation, V vocab_size, B sampled positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ...cache.arena import Storage
from ...cache.spec import (
    FullAttentionSpec,
    LatentSpec,
    LayerGroup,
    LayerSpec,
    SlidingWindowSpec,
)
from ..errors import CheckpointError
from ..kernels import (
    DecodeEnds,
    DecodeStep,
    Kernels,
    PackedMemory,
    RaggedBatch,
    Stack,
    StackLayer,
    StackLinear,
    StackShape,
)
from ..kernels.cpu.elementwise import (
    cap_logits,
    reference_cap_logits,
    reference_rotations,
    rotations,
)
from ..operation_scopes import operation
from .attention import Attention, LatentAttention, Place
from .config import ModelConfig
from .layout import fused_layout
from .modules import Projection, RMSNorm
from .rope import inverse_frequencies

__all__ = ["Decoder", "attention_specs"]


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, kernels: Kernels, layer: int, place: Place) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.hidden_act = config.hidden_act

        def norm() -> RMSNorm:
            return RMSNorm(config.rms_norm_eps, offset=config.family.offset_norms)

        self.input_norm = norm()
        self.attention: Attention | LatentAttention = (
            Attention(config, kernels, layer, place)
            if config.latent is None
            else LatentAttention(config, kernels, layer, place, config.latent)
        )
        self.attention_output_norm = norm() if config.family.output_norms else None
        self.mlp_norm = norm()
        self.gate_up = Projection(kernels, 2 * inner, hidden)
        self.down = Projection(kernels, hidden, inner)
        self.mlp_output_norm = norm() if config.family.output_norms else None

    def stacked(self, rope: int) -> StackLayer:
        """The layer as one of a `Stack`; `rope` is its kind of rotation."""
        attention = self.attention
        assert isinstance(attention, Attention)
        return StackLayer(
            input_norm=_weight(self.input_norm),
            qkv=_linear(attention.qkv),
            q_norm=_weight_if_any(attention.q_norm),
            k_norm=_weight_if_any(attention.k_norm),
            output=_linear(attention.output),
            attention_output_norm=_weight_if_any(self.attention_output_norm),
            mlp_norm=_weight(self.mlp_norm),
            gate_up=_linear(self.gate_up),
            down=_linear(self.down),
            mlp_output_norm=_weight_if_any(self.mlp_output_norm),
            group=attention.place.group,
            position=attention.place.position,
            window=attention.window,
            rope=rope,
        )

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TE: torch.Tensor,
        sin_TE: torch.Tensor,
        arena: torch.Tensor,
        batch: RaggedBatch,
    ) -> torch.Tensor:
        normed_TD = _normed("input_norm", self.input_norm, x_TD)
        attended_TD = self.attention(normed_TD, cos_TE, sin_TE, arena, batch)
        if self.attention_output_norm is not None:
            attended_TD = _normed("attention_output_norm", self.attention_output_norm, attended_TD)
        with operation("residual"):
            x_TD = x_TD + attended_TD
        normed_TD = _normed("mlp_norm", self.mlp_norm, x_TD)
        with operation("gate_up_linear"):
            gate_TF, up_TF = self.gate_up(normed_TD).chunk(2, dim=-1)
        del normed_TD  # what follows takes the most memory of a step
        with operation("activate"):
            inner_TF = self.activate(gate_TF) * up_TF
        with operation("down_linear"):
            out_TD: torch.Tensor = self.down(inner_TF)
        if self.mlp_output_norm is not None:
            out_TD = _normed("mlp_output_norm", self.mlp_output_norm, out_TD)
        with operation("residual"):
            return x_TD + out_TD

    def activate(self, gate_TF: torch.Tensor) -> torch.Tensor:
        if self.hidden_act == "silu":
            return F.silu(gate_TF)
        return F.gelu(gate_TF, approximate="tanh")


def _normed(name: str, norm: RMSNorm, x_TD: torch.Tensor) -> torch.Tensor:
    with operation(name):
        normed_TD: torch.Tensor = norm(x_TD)
        return normed_TD


def _weight(module: RMSNorm | Projection) -> torch.Tensor:
    assert module.weight is not None
    return module.weight


def _weight_if_any(norm: RMSNorm | None) -> torch.Tensor | None:
    return None if norm is None else _weight(norm)


def _linear(projection: Projection) -> StackLinear:
    return StackLinear(_weight(projection), projection.scales, projection.bias)


class Decoder(nn.Module):
    """Token ids to hidden states to logits, reading and writing the arena.

    Built empty; `store` gives it its weights one by one, under the names of
    `layout.fused_layout`.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[LayerGroup],
        storage: Storage = "model",
    ) -> None:
        """`groups` are those of the arena, `storage` is how it stores what layers write."""
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.storage: Storage = storage
        self.stack: Stack | None = None
        self.decode_step: DecodeStep | None = None
        places = {
            layer: Place(group.index, position, storage)
            for group in groups
            for position, layer in enumerate(group.layers)
        }
        self.embed_tokens = Projection(kernels, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, kernels, layer, places[layer]) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.rms_norm_eps, offset=config.family.offset_norms)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else Projection(kernels, config.vocab_size, config.hidden_size)
        )
        self.embedding_scale: float | None = None
        if config.family.scaled_embeddings:
            # Rounded like the embeddings themselves: in bfloat16 the root of 1152 is 34.
            self.embedding_scale = torch.tensor(config.hidden_size**0.5).to(dtype).item()
        ropes = [config.rope(layer) for layer in range(config.num_layers)]
        kinds = list(dict.fromkeys(ropes))
        self.rope_kinds = [kinds.index(rope) for rope in ropes]
        frequencies_KE = torch.stack([inverse_frequencies(r, config.rope_dim) for r in kinds])
        self.inverse_frequencies = nn.Buffer(frequencies_KE.to(device), persistent=False)
        amplitudes = [rope.scaling.amplitude for rope in kinds]
        self.amplitudes: torch.Tensor | None = (
            None
            if all(amplitude == 1.0 for amplitude in amplitudes)
            else nn.Buffer(torch.tensor(amplitudes, device=device)[:, None, None], persistent=False)
        )

    def store(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take every weight; those of linear layers are stored as the kernels want them.

        Raises:
            CheckpointError: a weight to quantise holds NaN or infinity.
        """
        memory = self._packed_memory()
        for name, tensor in weights:
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            tensor = tensor.to(self.dtype)
            if isinstance(module, Projection) and leaf == "weight":
                try:
                    module.store(tensor, self.device)
                except ValueError as error:
                    raise CheckpointError(self._unfit(name, error)) from error
                if memory is not None:
                    placed = memory.place(_weight(module))
                    module.weight = nn.Parameter(placed, requires_grad=False)
            else:
                assert leaf in ("weight", "bias"), name
                setattr(module, leaf, nn.Parameter(tensor.to(self.device), requires_grad=False))
        self.stack = self._make_stack()
        self.decode_step = self._make_decode_step()

    def _packed_memory(self) -> PackedMemory | None:
        """Room for the weights of all linear layers, where the CPU kernels read them packed."""
        if self.kernels.pack is None or self.kernels.make_stack is None:
            return None
        sizes = [
            self.kernels.stored_bytes(module.out_features, module.in_features, self.dtype)
            for module in self.modules()
            if isinstance(module, Projection)
        ]
        return PackedMemory(sum(sizes), len(sizes))

    def _make_stack(self) -> Stack | None:
        """All layers as one operation, or None where they run one by one."""
        config = self.config
        if self.kernels.make_stack is None or config.latent is not None:
            return None
        shape = StackShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.score_scale,
            softcap=config.attn_logit_softcapping or 0.0,
            offset_norms=config.family.offset_norms,
            gelu=config.hidden_act != "silu",
            storage=self.storage,
        )
        layers: list[StackLayer] = []
        for layer, rope in zip(self.layers, self.rope_kinds, strict=True):
            assert isinstance(layer, Layer)
            layers.append(layer.stacked(rope))
        return self.kernels.make_stack(shape, layers, _weight(self.norm))

    def _make_decode_step(self) -> DecodeStep | None:
        """A whole decode step as kernels of their own, or None where it is made of parts."""
        if self.kernels.make_decode_step is None or self.stack is None:
            return None
        amplitudes = self.amplitudes
        if amplitudes is None:
            amplitudes = self.inverse_frequencies.new_ones(len(self.inverse_frequencies))
        ends = DecodeEnds(
            embedding=_linear(self.embed_tokens),
            embedding_factor=1.0 if self.embedding_scale is None else self.embedding_scale,
            frequencies=self.inverse_frequencies,
            amplitudes=amplitudes.flatten(),
            norm=_weight(self.norm),
            head=_linear(self.lm_head),
            logit_softcap=self.config.final_logit_softcapping or 0.0,
        )
        return self.kernels.make_decode_step(self.stack, ends)

    def _unfit(self, name: str, error: ValueError) -> str:
        sources = ", ".join(filter(None, fused_layout(self.config)[name].sources))
        return (
            f"{name} cannot be stored as {self.kernels.weights}: {error} (it is made of {sources});"
            " look at the checkpoint, or use weight_dtype='auto'"
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters as stored, a tied embedding counted once."""
        return sum(p.nbytes for p in self.parameters())

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of the parameters that a decode step reads in full.

        An untied input embedding is left out: a step reads one of its rows per sequence.
        """
        if self.lm_head is self.embed_tokens:
            return self.weight_bytes
        return self.weight_bytes - sum(p.nbytes for p in self.embed_tokens.parameters())

    @property
    def _runs_natively_on_cpu(self) -> bool:
        return self.stack is not None and self.device.type == "cpu"

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[T, hidden_size]` as the first layer takes them."""
        x_TD = self.embed_tokens.rows(token_ids_T)
        return x_TD if self.embedding_scale is None else x_TD * self.embedding_scale

    def forward(
        self, token_ids_T: torch.Tensor, arena: torch.Tensor, batch: RaggedBatch
    ) -> torch.Tensor:
        """Return the final hidden states `[T, hidden_size]`; writes the tokens' keys and values."""
        return self.decode(self.embed(token_ids_T), arena, batch)

    def decode(self, x_TD: torch.Tensor, arena: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """As `forward`, for tokens that are embedded."""
        with operation("rotations"):
            rotations_of = rotations if self._runs_natively_on_cpu else reference_rotations
            cos_KTE, sin_KTE = rotations_of(batch.positions, self.inverse_frequencies)
            if self.amplitudes is not None:
                cos_KTE, sin_KTE = cos_KTE * self.amplitudes, sin_KTE * self.amplitudes
        if self.stack is not None:
            with operation("layers"):
                return self.stack.run(x_TD, arena, batch, cos_KTE, sin_KTE)
        for index, (layer, kind) in enumerate(zip(self.layers, self.rope_kinds, strict=True)):
            with operation("layer", index):
                x_TD = layer(x_TD, cos_KTE[kind], sin_KTE[kind], arena, batch)
        with operation("final_norm"):
            normed: torch.Tensor = self.norm(x_TD)
        return normed

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Return logits `[B, vocab_size]` in the model's dtype."""
        with operation("head"):
            logits: torch.Tensor = self.lm_head(hidden_BD)
            cap = self.config.final_logit_softcapping
            if cap is None:
                return logits
            capped = cap_logits if self._runs_natively_on_cpu else reference_cap_logits
            return capped(logits, cap)


def attention_specs(
    config: ModelConfig, element_bytes: int, scale_bytes: int = 0
) -> list[LayerSpec]:
    """Return what each layer stores in the cache.

    `element_bytes` are those of a stored element, `scale_bytes` those of the scale of a vector.
    """
    sizes = (config.num_kv_heads, config.head_dim, element_bytes, scale_bytes)
    if config.latent is not None:
        return [LatentSpec(*sizes)] * config.num_layers
    windows = [config.window(layer) for layer in range(config.num_layers)]
    return [
        FullAttentionSpec(*sizes) if window is None else SlidingWindowSpec(*sizes, window=window)
        for window in windows
    ]
