"""An EAGLE-3 head in plain PyTorch: what the demo's drafter is trained with, and a reference.

The head predicts what a target model says next, from hidden states of three of its layers. The
entry of position p takes these features at p and the embedding of token p+1, and predicts token
p+2. Drafts after the first one need features that no target has computed, and take the hidden state
of the entry before instead:

    entry            p       p+1     p+2      tokens x are known up to x_p+1; a, b, c are drafts
    feature          f_p     g_p     g_p+1    f: fused features, g: hidden states of the head
    embedding of     x_p+1   a       b
    draft            a       b       c        attends to entries 0..p from features, and to its own

Names and shapes of weights are those of the published checkpoints; the hidden state that an entry
hands on is the one before the last norm, as in vLLM. Shared with the target, and so not
in the checkpoint, is the embedding. Source: EAGLE-3, https://arxiv.org/abs/2503.01840, and
`vllm/model_executor/models/llama_eagle3.py`.

Shape suffixes: B sequences, P entries, S chains (positions from which the head goes on drafting),
D hidden_size, H heads, G key/value heads, Q query heads of each, E head_dim, V draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

__all__ = ["Eagle3Config", "Eagle3Head", "TargetFeatures", "load_head", "save_head"]

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes of a head; `hidden_size`, `vocab_size` and the layer ids refer to the target."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, int, int]
    """As vLLM counts: id i is the output of layer i-1, before any norm, so the input of layer i."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def published(self) -> dict[str, Any]:
        """Return `config.json` as vLLM reads it."""
        fields = asdict(self)
        ids = list(fields.pop("aux_layer_ids"))
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **fields,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": ids,
        }

    @classmethod
    def from_published(cls, config: dict[str, Any]) -> Eagle3Config:
        """Return the fields of a `config.json`; see `published`."""
        own = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        ids = tuple(config["eagle_aux_hidden_state_layer_ids"])
        return cls(**own, aux_layer_ids=ids)


class _Norm(nn.Module):
    """RMS norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        E, inputs = config.head_dim, 2 * config.hidden_size
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * E, bias=False)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * E, bias=False)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * E, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * E, config.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        D, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, inner, bias=False)
        self.up_proj = nn.Linear(D, inner, bias=False)
        self.down_proj = nn.Linear(inner, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = _Norm(D, eps)
        self.hidden_norm = _Norm(D, eps)
        self.post_attention_layernorm = _Norm(D, eps)


class Eagle3Head(nn.Module):
    """The head; `state_dict()` is the published checkpoint."""

    d2t: torch.Tensor
    """int64 `[V]`: id of the target = id of the draft vocabulary + d2t[that id]."""
    t2d: torch.Tensor
    """bool `[vocab_size]`: whether the draft vocabulary has that token."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        D = config.hidden_size
        self.fc = nn.Linear(3 * D, D, bias=False)
        self.midlayer = _Layer(config)
        self.norm = _Norm(D, config.rms_norm_eps)
        self.lm_head = nn.Linear(D, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def set_vocabulary(self, ids: torch.Tensor) -> None:
        """Draft only the tokens of these ids, int64 `[V]`, ascending."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()[ids] = True

    def target_ids(self) -> torch.Tensor:
        """Return the target's id of each id of the draft vocabulary, int64 `[V]`."""
        return torch.arange(len(self.d2t)) + self.d2t

    def unroll(
        self,
        features_BPF: torch.Tensor,
        embeds_BND: torch.Tensor,
        chains_S: torch.Tensor,
        steps: int,
    ) -> list[torch.Tensor]:
        """Return logits of all entries, then of further drafts of some of them, given their tokens.

        Tokens are the true ones (training-time test of EAGLE-3): as long as drafts are right, these
        are the logits that drafting computes.

        Args:
            features_BPF: features of the target at positions 0..P-1.
            embeds_BND: embeddings of tokens 1..P+steps-1, so N = P + steps - 1.
            chains_S: ascending positions from which to draft `steps - 1` further tokens.
            steps: drafts of a chain, at least 1.

        Returns:
            `[B, P, V]` (for token p+2 in row p), then `steps - 1` times `[B, S, V]`: for token
            p+2+i, with p = chains_S[s].
        """
        P = features_BPF.shape[1]
        positions_P = torch.arange(P)
        hidden_BPD = self.fc(features_BPF)
        q_BGQPE, k_BGPE, v_BGPE = self._project(embeds_BND[:, :P], hidden_BPD, positions_P)
        attended = F.scaled_dot_product_attention(
            q_BGQPE.flatten(1, 2), k_BGPE, v_BGPE, is_causal=True, enable_gqa=True
        )
        hidden_BPD, logits = self._finish(hidden_BPD, attended)
        outputs = [logits]
        if steps == 1:
            return outputs

        masked_SP = positions_P[None, :] > chains_S[:, None]
        hidden_BSD = hidden_BPD[:, chains_S]
        chain: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(1, steps):
            at_S = chains_S + step
            q_BGQSE, k_BGSE, v_BGSE = self._project(embeds_BND[:, at_S], hidden_BSD, at_S)
            chain.append((k_BGSE, v_BGSE))
            attended = _attend_chain(q_BGQSE, k_BGPE, v_BGPE, masked_SP, chain)
            hidden_BSD, logits = self._finish(hidden_BSD, attended)
            outputs.append(logits)
        return outputs

    @torch.no_grad()
    def draft(
        self,
        features_PF: torch.Tensor,
        token_ids: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
        count: int,
    ) -> list[int]:
        """Return the `count` drafts after a text, in a plain loop without a cache.

        Args:
            features_PF: features of the target at the P tokens that it has computed.
            token_ids: int64 `[P + 1]`: these tokens and the newest one.
            embed: the target's embedding.
            count: at least 1.
        """
        P = len(features_PF)
        tokens = token_ids.tolist()
        for step in range(1, count + 1):
            logits = self.unroll(
                features_PF[None], embed(torch.tensor([tokens[1:]])), torch.tensor([P - 1]), step
            )
            draft = int(logits[-1][0, -1].argmax())
            tokens.append(draft + int(self.d2t[draft]))
        return tokens[P + 1 :]

    def _project(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries `[B, G, Q, T, E]`, keys and values `[B, G, T, E]`, rotated."""
        layer, config = self.midlayer, self.config
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
        B, T, _ = x.shape
        G, E = config.num_key_value_heads, config.head_dim
        q = layer.self_attn.q_proj(x).view(B, T, G, -1, E).permute(0, 2, 3, 1, 4)
        k = layer.self_attn.k_proj(x).view(B, T, G, E).transpose(1, 2)
        v = layer.self_attn.v_proj(x).view(B, T, G, E).transpose(1, 2)
        cos, sin = _rotation(positions, E, config.rope_theta)
        return _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype), v

    def _finish(
        self, residual: torch.Tensor, attended_BHTE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden state before the last norm `[B, T, D]`, and logits `[B, T, V]`."""
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(attended_BHTE.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden, self.lm_head(self.norm(hidden))


def _attend_chain(
    q_BGQSE: torch.Tensor,
    k_BGPE: torch.Tensor,
    v_BGPE: torch.Tensor,
    masked_SP: torch.Tensor,
    chain: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Return `[B, H, S, E]`: each query attends to the entries of its context and of its chain."""
    q = q_BGQSE * q_BGQSE.shape[-1] ** -0.5
    context = torch.einsum("bgqse,bgpe->bgqsp", q, k_BGPE).float()
    context = context.masked_fill(masked_SP, float("-inf"))
    own = torch.stack([(q * k[:, :, None]).sum(-1) for k, _ in chain], -1).float()
    weights = torch.cat([context, own], -1).softmax(-1).to(v_BGPE.dtype)
    P = k_BGPE.shape[2]
    out = torch.einsum("bgqsp,bgpe->bgqse", weights[..., :P], v_BGPE)
    for number, (_, v) in enumerate(chain):
        out = out + weights[..., P + number, None] * v[:, :, None]
    return out.flatten(1, 2)


def _rotation(positions: torch.Tensor, E: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines `[T, E]` of Llama's rotary embedding."""
    frequencies = theta ** (-torch.arange(0, E, 2, dtype=torch.float32) / E)
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class TargetFeatures:
    """Runs a target of transformers and keeps the hidden states that a head takes."""

    def __init__(self, target: Any, aux_layer_ids: tuple[int, ...]) -> None:
        self.target = target
        self._outputs: dict[int, torch.Tensor] = {}
        self._ids = aux_layer_ids
        for index in aux_layer_ids:
            # The last entry of transformers' own `hidden_states` is normed, so layers are hooked.
            target.model.layers[index - 1].register_forward_hook(self._keeper(index))

    def _keeper(self, index: int) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self._outputs[index] = output

        return keep

    @torch.no_grad()
    def __call__(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features `[B, T, 3 * D]` and the normed final hidden state `[B, T, D]`."""
        final = self.target.model(token_ids, use_cache=False).last_hidden_state
        return torch.cat([self._outputs[index] for index in self._ids], -1), final

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's embeddings `[..., D]`."""
        out: torch.Tensor = self.target.model.embed_tokens(token_ids).detach()
        return out


def save_head(head: Eagle3Head, directory: Path) -> None:
    """Write `config.json` and `model.safetensors` (bfloat16)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(head.config.published(), indent=2) + "\n")
    weights = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous()
        for name, value in head.state_dict().items()
    }
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})


def load_head(directory: Path) -> Eagle3Head:
    """Return the head of a checkpoint, in float32.

    Raises:
        RuntimeError: weights are missing, unknown or of another shape.
    """
    config = json.loads((directory / CONFIG).read_text())
    head = Eagle3Head(Eagle3Config.from_published(config))
    head.load_state_dict(load_file(directory / WEIGHTS))
    return head.eval()
