"""How checkpoints store modules for multi-token prediction, and what such a module computes.

A module is a decoder layer on the hidden state of a token and the embedding of the next one:

    layer(fuse(norm(embedding) | norm(hidden state)))   then a norm, and the head of the model

Which hidden state it was trained with is not in a checkpoint: the notes below say where it is from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DEEPSEEK_MTP", "MIMO_MTP", "MtpLayout"]


@dataclass(frozen=True, kw_only=True)
class MtpLayout:
    """The modules of a family. Names are those of a checkpoint, relative to the module."""

    modules: str
    """What the names of all modules begin with, before their number."""
    after_last: bool
    """Whether modules are numbered from the number of the model's layers on, and not from 0."""
    layer: int
    """The layer of the model that the layer of a module equals in kind; -1: the last one."""
    embedding_norm: str
    hidden_norm: str
    fuse: str
    """The projection of both, joined, to the input of the layer."""
    norm: str
    """Of the output of the layer, before the head."""
    hidden_first: bool
    """Whether the hidden state precedes the embedding in the input of `fuse`."""
    normed: bool
    """Whether hidden states are taken after the norm before the head: those of the model, and those
    of the module itself when it continues its own draft; otherwise before it."""
    copies: frozenset[str] = frozenset()
    """Tensors that repeat those of the model."""

    def prefix(self, num_layers: int) -> str:
        """Return what the names of the first module's tensors begin with."""
        return f"{self.modules}{num_layers if self.after_last else 0}."

    def holds(self, name: str, num_layers: int) -> bool:
        """Whether a tensor belongs to a module of a model with so many layers."""
        number = re.match(r"(\d{1,9})\.", name.removeprefix(self.modules))
        if number is None or not name.startswith(self.modules):
            return False
        return int(number[1]) >= num_layers or not self.after_last


DEEPSEEK_MTP = MtpLayout(
    modules="model.layers.",
    after_last=True,
    layer=-1,
    embedding_norm="enorm",
    hidden_norm="hnorm",
    fuse="eh_proj",
    norm="shared_head.norm",
    hidden_first=False,
    normed=True,
    copies=frozenset({"embed_tokens.weight", "shared_head.head.weight"}),
)
"""DeepSeek-V3 (arXiv 2412.19437, section 2.2). Further drafts are accepted more often if the output
is normed: vLLM #45895, ROCm/ATOM #1764."""

MIMO_MTP = MtpLayout(
    modules="model.mtp_layers.",
    after_last=False,
    layer=0,
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    fuse="input_proj",
    norm="final_layernorm",
    hidden_first=True,
    normed=False,
)
"""MiMo-7B (arXiv 2505.07608). Its authors' code takes the model's state before the norm (vLLM
#17433); the state of further drafts, which the authors do not compute, is taken there too."""
