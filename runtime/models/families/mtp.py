"""How checkpoints store modules for multi-token prediction (MTP), and what such a module computes.

A module is one decoder layer, or a few, on the hidden state of a token and the embedding of the
next one:

    layers(fuse(norm(embedding) | norm(hidden state)))   then a norm, and the head of the model

Which hidden state it was trained with is not in a checkpoint: the notes below say where it is from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...kernels.ops.attention import Attend
from ...kernels.ops.experts import Experts
from ...kernels.ops.operation import Operation


@dataclass(frozen=True, kw_only=True)
class MtpLayout:
    """The modules of a family.

    Names are as in a checkpoint, without `modules`; in them {} is the number of the module.
    """

    modules: str
    """What the names of all modules begin with."""
    after_last: bool = False
    """Whether modules are numbered from the number of the model's layers on, and not from 0."""
    layers: Mapping[str, int | type[Operation]]
    """What the names of a layer begin with -> the layer of the model that it equals in kind: its
    number (-1: the last one), or the last one with an operation of this type."""
    dense: bool = False
    """Whether the layer has an MLP where the model's layer has experts."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer of the model -> their names in the layer of a module."""
    embedding_norm: str
    hidden_norm: str
    fuse: str
    """The projection of both, joined, to the input of the layer."""
    norm: str
    """Of the output of the layer, before the head; empty: the norm of the model."""
    hidden_first: bool = False
    """Whether the hidden state precedes the embedding in the input of `fuse`."""
    normed: bool
    """Whether hidden states are taken after the norm before the head: those of the model, and those
    of the module itself when it continues its own draft; otherwise before it."""
    copies: tuple[str, ...] = ()
    """Tensors that repeat tensors of the model."""

    def first(self, name: str, num_layers: int) -> str:
        """Return a name of the layout in the first module of a model with this many layers."""
        return self.modules + name.format(num_layers if self.after_last else 0)

    def is_first(self, tensor: str, num_layers: int) -> bool:
        """Whether a tensor is one of the first module's own."""
        names = (self.embedding_norm, self.hidden_norm, self.fuse, *filter(None, [self.norm]))
        begins = [*self.layers, *(f"{name}." for name in names)]
        return tensor.startswith(
            tuple(self.first(name, num_layers) for name in begins)
        ) and tensor not in [self.first(name, num_layers) for name in self.copies]

    def holds(self, name: str, num_layers: int) -> bool:
        """Whether a tensor belongs to a module of a model with this many layers."""
        if not name.startswith(self.modules):
            return False
        number = re.match(r"(\d{1,9})\.", name.removeprefix(self.modules))
        return not self.after_last or (number is not None and int(number[1]) >= num_layers)


DEEPSEEK_MTP = MtpLayout(
    modules="model.layers.",
    after_last=True,
    layers={"{}.": -1},
    embedding_norm="{}.enorm",
    hidden_norm="{}.hnorm",
    fuse="{}.eh_proj",
    norm="{}.shared_head.norm",
    normed=True,
    copies=("{}.embed_tokens.weight", "{}.shared_head.head.weight"),
)
"""DeepSeek-V3 (arXiv 2412.19437, section 2.2), GLM-4.5 to 4.7 and GLM-4.7-Flash (`MtpModel` of
transformers 5.24; vLLM's `glm4_moe_mtp.py` and `glm4_moe_lite_mtp.py`). Further drafts are accepted
more often if the output is normed: vLLM #45895, ROCm/ATOM #1764."""

HY_V3_MTP = replace(
    DEEPSEEK_MTP,
    norm="{}.final_layernorm",
    copies=("{}.embed_tokens.weight", "{}.shared_head.weight", "{}.shared_head.head.weight"),
)
"""Hy3 (vLLM's `hy_v3_mtp.py`, which uses the head of the model too)."""

MIMO_MTP = MtpLayout(
    modules="model.mtp_layers.",
    layers={"{}.": 0},
    embedding_norm="{}.token_layernorm",
    hidden_norm="{}.hidden_layernorm",
    fuse="{}.input_proj",
    norm="{}.final_layernorm",
    hidden_first=True,
    normed=False,
)
"""MiMo-7B (arXiv 2505.07608). Its authors' code takes the model's state before the norm (vLLM
#17433); the state of further drafts, which the authors do not compute, is taken there too."""

MIMO_V2_MTP = MtpLayout(
    modules="model.mtp.layers.",
    layers={"{}.": 1},
    dense=True,
    renamed={"post_attention_layernorm.weight": "pre_mlp_layernorm.weight"},
    embedding_norm="{}.enorm",
    hidden_norm="{}.hnorm",
    fuse="{}.eh_proj",
    norm="{}.final_layernorm",
    normed=True,
)
"""MiMo-V2-Flash (vLLM's `mimo_v2_mtp.py`, SGLang's `mimo_v2_flash_nextn.py`): a layer with a
window, as the second layer of the model has, and an MLP."""

ERNIE_MTP = MtpLayout(
    modules="model.mtp_",
    layers={"block.{}.": 0},
    dense=True,
    embedding_norm="emb_norm.{}",
    hidden_norm="hidden_norm.{}",
    fuse="linear_proj.{}",
    norm="",
    normed=False,
)
"""ERNIE 4.5. Its authors' code (`Ernie4_5_MoeModel` of PaddleFormers) takes the state before the
norm, and norms the output of a module as that of the model. vLLM's `ernie_mtp.py` takes the normed
state and norms no output."""

QWEN3_NEXT_MTP = MtpLayout(
    modules="mtp.",
    layers={"layers.{}.": Attend},
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    fuse="fc",
    norm="norm",
    normed=True,
)
"""Qwen3-Next and Qwen3.5 (vLLM's `qwen3_next_mtp.py` and `qwen3_5_mtp.py`)."""

NEMOTRON_H_MTP = MtpLayout(
    modules="mtp.",
    layers={"layers.0.": Attend, "layers.1.": Experts},
    embedding_norm="layers.0.enorm",
    hidden_norm="layers.0.hnorm",
    fuse="layers.0.eh_proj",
    norm="layers.1.final_layernorm",
    normed=True,
)
"""Nemotron 3 with the `mtp_hybrid_override_pattern` *E: a layer with attention, then one with
experts (vLLM's `nemotron_h_mtp.py`)."""
