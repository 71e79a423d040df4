"""Block-parallel drafters: all drafts in one pass. See `block_drafter.py`.

    tokens          a   b   c   d        d is the newest one
    context         a   b   c            keys and values of the features of each
    block                       d  ?  ?  tokens that attend to the context and to the whole block
    drafts                         e  f  predicted at the masked positions

Keys and values of the block lie in the slots of its positions, until the next steps overwrite them.

Shape suffixes: T tokens, B rows, D hidden_size, F features, L layers, G key/value heads, E
head_dim, N tokens of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch.nn import functional as F

from ....cache.spec import LayerGroup
from ...errors import CheckpointError, ConfigError
from ...kernels import Kernels, RaggedBatch
from ...kernels.ops.kv_storage import write_blocks
from ...kernels.ops.layer_plan import ModelPlan
from ...kernels.ops.norms import RMSNorm, mean_square
from ...kernels.ops.operation import Vector
from ...kernels.ops.parameter import Parameter, Source
from ...kernels.ops.rotation import rotate
from ..config import ModelConfig
from ..config_keys import Json, read_field, read_optional
from ..decoder import Decoder
from ..layers.tensors import matrix, vector
from ..plan import model_plan
from .drafter import (
    MOST_DRAFTS,
    DrafterConfig,
    Drafts,
    FollowedTokens,
    NewestTokens,
    SharedLayers,
    ascending_layers,
    check_fits,
    check_neutral,
    layer_config,
)

# Block-parallel drafters (DFlash, arXiv 2602.06036) in their published layout.
#
# A few layers of the kind of Qwen 3 fill a block of masked tokens in one pass. Their keys and
# values of the context are made of hidden states of the target. Embedding and output projection are
# those of the target.

_ARCHITECTURE = "DFlashDraftModel"

_LAYER_TYPES = ("qwen3",)

_NEUTRAL = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "attention_bias": False,
}


def is_block_drafter(config: Json) -> bool:
    """Whether a `config.json` describes a block-parallel drafter."""
    architectures = config.get("architectures")
    named = isinstance(architectures, list) and _ARCHITECTURE in architectures
    return named or "dflash_config" in config


def block_config(
    name: str, config: Json, names: Mapping[str, object], target: ModelConfig
) -> DrafterConfig:
    """Read the `config.json` of a block-parallel drafter: see `ReadDrafter`."""
    own = config.get("dflash_config")
    fields = {**config, **own} if isinstance(own, dict) else config
    if any(name.startswith("candidate_selector.") for name in names):
        raise CheckpointError(
            "the checkpoint has a candidate_selector: it is of DFlash 2, which is not supported;"
            " use a DFlash model of the first version"
        )
    check_neutral(fields, _NEUTRAL)
    model = layer_config(config, _LAYER_TYPES)
    sizes = ("vocab_size", "hidden_size")
    check_fits(name, {field: (getattr(model, field), getattr(target, field)) for field in sizes})
    block_size = read_field(fields, "block_size", int, 16)
    if block_size < 2:
        raise CheckpointError(
            f"block_size = {block_size} must be at least 2: the newest token and one to draft"
        )
    mask_id = read_field(fields, "mask_token_id", int)
    if not 0 <= mask_id < target.vocab_size:
        raise ConfigError(
            f"mask_token_id = {mask_id} has no embedding in the model, whose tokens are 0 to"
            f" {target.vocab_size - 1}: use a drafter that was trained for this model"
        )
    key, layers = "target_layer_ids", target.num_layers
    listed = ascending_layers(key, fields.get(key), layers)
    # transformers, with which they are trained, norms what it returns of the last layer.
    aux_layers = tuple(layers if layer == layers - 1 else layer for layer in listed)
    plan = model_plan(model)
    plan = replace(plan, norm=replace(plan.norm, weight=vector("norm", "norm", model.hidden_size)))
    return DrafterConfig(
        kind="dflash",
        name=name,
        model=model,
        plan=plan,
        parameters=tuple(_parameters(model, plan, len(aux_layers))),
        aux_layers=aux_layers,
        most_drafts=min(block_size - 1, MOST_DRAFTS),
        mask_id=mask_id,
        causal=_is_causal(config, model),
    )


def _is_causal(config: Json, model: ModelConfig) -> bool:
    """Whether blocks are causal; by default, in sliding layers only."""
    slides = {model.window(layer) is not None for layer in range(model.num_layers)}
    given = read_optional(config, "is_causal", bool)
    causal = slides if given is None else {given}
    if len(causal) > 1 or (slides != {False} and causal != {True}):
        raise CheckpointError(
            "the drafter has layers with a window among layers without, or a window and a block"
            " that is not causal: this is not supported, use another drafter"
        )
    return causal == {True}


def _parameters(model: ModelConfig, plan: ModelPlan, features: int) -> Iterator[Parameter]:
    hidden, head_dim, layers = model.hidden_size, model.head_dim, range(len(plan.layers))
    yield matrix("fc", "fc", hidden, features * hidden)
    yield vector("hidden_norm", "hidden_norm", hidden)
    # Of the normed features to keys of the first layer, its values, and so on.
    shape = (plan.attend.kv_heads * head_dim, hidden)
    names = [f"layers.{i}.self_attn.{kind}_proj.weight" for i in layers for kind in ("k", "v")]
    yield Parameter("context.weight", tuple(Source(name, shape) for name in names))
    norms = tuple(Source(f"layers.{i}.self_attn.k_norm.weight", (head_dim,)) for i in layers)
    yield Parameter("key_norms.weight", norms, viewed_as=(len(layers), head_dim), exact=True)
    for index, layer in enumerate(plan.layers):
        for parameter in layer.parameters:
            yield parameter.within(f"layers.{index}.", f"layers.{index}.")
    yield plan.norm.weight


class BlockDrafter(SharedLayers):
    """A block-parallel drafter."""

    def __init__(
        self, config: DrafterConfig, target: Decoder, kernels: Kernels, group: LayerGroup
    ) -> None:
        """See `load_drafter`."""
        super().__init__(config, target, kernels, group)
        assert len(self.inverse_frequencies) == 1, "layers of one kind"
        self._mask_id, self._causal = config.mask_id, config.causal
        self._eps = config.model.rms_norm_eps
        self.fc, self.context = self._projection("fc"), self._projection("context")
        self.hidden_norm, self.key_norms = RMSNorm(self._eps), Vector()

    def follow(self, tokens: FollowedTokens, arena: torch.Tensor) -> None:
        """See `Drafter.follow`."""
        assert tokens.features is not None
        context_TD = self.hidden_norm(self.fc(tokens.features))
        attend, batch = self.plan.attend, tokens.batch
        shape = (len(context_TD), len(self.layers), 2, attend.kv_heads, attend.head_dim)
        k_TLGE, v_TLGE = self.context(context_TD).view(shape).unbind(2)
        cos_KTE, sin_KTE = self._rotations(batch)
        turned = rotate(self._normed(k_TLGE).flatten(1, 2), cos_KTE[0], sin_KTE[0])
        self._write(arena, batch, turned.view(k_TLGE.shape), v_TLGE)

    def propose(
        self, tokens: FollowedTokens, newest: NewestTokens, arena: torch.Tensor, count: int
    ) -> Drafts:
        """See `Drafter.propose`."""
        self.follow(tokens, arena)
        rows, size = len(newest.token_ids), 1 + count
        ids_BN = F.pad(newest.token_ids[:, None], (0, count), value=self._mask_id)
        batch = newest.batch(0, size)
        x_TD = self._embedding.rows(ids_BN.flatten())
        attended = None if self._causal else _to_the_end(batch, size)
        normed_TD, _ = self.run_layers(x_TD, arena, batch, attended=attended)
        masked_TD = normed_TD.unflatten(0, (rows, size))[:, 1:].flatten(0, 1)
        ids_T, probabilities_T = self._head.most_likely(self, masked_TD)
        return Drafts(ids_T.view(rows, count), probabilities_T.view(rows, count))

    def _normed(self, k_TLGE: torch.Tensor) -> torch.Tensor:
        """The keys, normed with the weight of their layer."""
        assert self.key_norms.weight is not None
        reciprocal = torch.rsqrt(mean_square(k_TLGE)[..., None] + self._eps)
        return self.key_norms.weight[:, None] * (k_TLGE.float() * reciprocal).to(k_TLGE.dtype)

    def _write(
        self,
        arena: torch.Tensor,
        batch: RaggedBatch,
        k_TLGE: torch.Tensor,
        v_TLGE: torch.Tensor,
    ) -> None:
        """Store keys and values of all layers."""
        slots_T, size = batch.slots[self._places[0].group], batch.block_size
        for layer, own in enumerate(self._places):
            for side, x_TLGE in enumerate((k_TLGE, v_TLGE)):
                x_TGE = x_TLGE[:, layer]
                write_blocks(arena[own.position, side], slots_T, x_TGE, size, self.storage)


def _to_the_end(batch: RaggedBatch, size: int) -> RaggedBatch:
    """The batch whose tokens attend up to the last token of their row."""
    last_B1 = batch.positions.view(-1, size)[:, -1:]
    return dataclasses.replace(batch, positions=last_B1.repeat(1, size).flatten())
