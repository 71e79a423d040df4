"""The decoder of every family, described by its `ModelPlan`.

Shape suffixes: T tokens of a step, D hidden_size, V vocab_size, B sampled positions, F features
that a drafter takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...cache.arena import Storage
from ...cache.spec import (
    FullAttentionSpec,
    LatentSpec,
    LayerGroup,
    LayerSpec,
    SlidingWindowSpec,
)
from ..kernels import DecodeStep, Experts, Kernels, RaggedBatch
from ..kernels.cpu.elementwise import (
    cap_logits,
    reference_cap_logits,
)
from ..kernels.ops.layer_plan import ModelPlan
from ..operation_scopes import operation
from .config import ModelConfig
from .decoder_model import DecoderConfig
from .layer_stack import LayerStack
from .modules import Projection
from .operations import collectives_of
from .plan import model_plan, plan_of, rope_kinds
from .sharded_vocabulary import ShardedVocabulary

__all__ = ["Decoder", "attention_specs"]


class Decoder(LayerStack):
    """Token ids to hidden states to logits, reading and writing the arena.

    Built empty; `store` gives it its weights one by one, under the names of
    `layout.fused_layout`. That of a config with a `shard` is the part of one rank: all ranks run
    the same steps, and its kernels have the collectives of their group.
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
        """Make the modules.

        Args:
            config: of the model.
            kernels: of its operations.
            dtype: of weights and activations.
            device: where it runs.
            groups: those of the arena.
            storage: how the arena stores what layers write.
            plan: the plan of the config with layers that attend to less; None: the plan itself.
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
        embedding is left out: a step reads one of its rows per sequence.
        """
        unread = 0.0
        if self.lm_head is not self.embed_tokens:
            unread += sum(p.nbytes for p in self.embed_tokens.parameters())
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

    def decode_tapped(
        self, x_TD: torch.Tensor, arena: torch.Tensor, batch: RaggedBatch, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderModel.decode_tapped`."""
        inner = tuple(tap for tap in taps if tap < len(self.layers))
        hidden_TD, outputs_TF = self.run_layers(x_TD, arena, batch, inner)
        if outputs_TF is None:
            return hidden_TD, hidden_TD
        if len(inner) < len(taps):
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


def attention_specs(
    config: DecoderConfig, element_bytes: int, scale_bytes: int = 0
) -> list[LayerSpec]:
    """Return the cache layout of each layer.

    `element_bytes` is the size of a stored element, `scale_bytes` that of the scale of a vector.
    """
    specs: list[LayerSpec] = []
    for layer in plan_of(config).layers:
        attend = layer.attend
        sizes = (attend.kv_heads, attend.head_dim, element_bytes, scale_bytes)
        if attend.shared_values:
            specs.append(LatentSpec(*sizes))
        elif attend.reach:
            specs.append(SlidingWindowSpec(*sizes, window=attend.reach))
        else:
            specs.append(FullAttentionSpec(*sizes))
    return specs
