"""Tiny random models on disk, each with the transformers model that it was saved from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.loading.loader import iter_weights
from stepgraph.runtime.models.decoder import Decoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .expert_models import EXPERT_VARIANTS, YARN
from .family_variants import BIASES, FAMILY_VARIANTS, LENGTH_VARIANTS, sliding, variant
from .hybrid_models import HYBRID_VARIANTS

LLAMA3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

VARIANTS: dict[str, dict[str, Any]] = {
    # Six query heads over two kv heads, and 6 * 16 != 48.
    "base": {},
    "micro": variant(layers=1, vocab=31, hidden=16, features=24, heads=2, kv_heads=1, head_dim=8),
    # Everything at once that a compiled engine can stumble over.
    "odd": {
        **variant(vocab=131, hidden=21, features=37, heads=3, kv_heads=1, head_dim=10, tied=False),
        **{"rope_parameters": LLAMA3_ROPE, "max_shard_size": "20KB", **BIASES},
    },
    # Rows of whole blocks of 128, and of blocks and a part of one.
    "wide": variant(layers=1, hidden=128, features=300, heads=4, head_dim=40),
    # Rows of whole groups of 32 and 64, of which quantised checkpoints are made.
    "wide_groups": variant(layers=2, hidden=128, features=192, heads=4, kv_heads=2, head_dim=32),
    "one_kv_head": variant(kv_heads=1, tied=False),
    "as_many_kv_heads": variant(heads=4, kv_heads=4, head_dim=None),
    "biases": BIASES,
    "sharded": variant(max_shard_size="50KB", tied=False),
    "llama3_rope": variant(rope=LLAMA3_ROPE),
    "linear_rope": variant(rope=LINEAR_ROPE),
    "text": variant(layers=2, vocab=320),
    # Other families. Prompts of the tests are longer than several of their windows.
    # Of these layers the last two slide: three groups of two layers.
    "qwen3": variant("qwen3", 6, head_dim=14, attention_bias=True)
    | sliding(11, max_window_layers=4),
    "qwen3_yarn": variant("qwen3", tied=False, rope=YARN),
    "mistral": variant("mistral", window=13, head_dim=20, tied=False),
    "mistral_full": variant("mistral", window=None),
    "gemma2": {
        **variant("gemma2", 4, window=9, query_pre_attn_scalar=24),
        **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0},
    },
    "gemma3": {
        **variant("gemma3_text", 7, window=10, query_pre_attn_scalar=20),  # the sixth is full
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "deepseek_v2": {
        **variant("deepseek_v2", kv_heads=6, first_k_dense_replace=3, q_lora_rank=None, **BIASES),
        **{"kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14},
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9},
    },
    "deepseek_v3": {
        **variant("deepseek_v3", kv_heads=6, head_dim=8, first_k_dense_replace=3, tied=False),
        **{"q_lora_rank": 22, "kv_lora_rank": 18, "v_head_dim": 12},
        **{"qk_nope_head_dim": 9, "qk_rope_head_dim": 8},
        "rms_norm_eps": 1e-3,  # of the norms between layers only
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    **FAMILY_VARIANTS,
    **LENGTH_VARIANTS,
    **EXPERT_VARIANTS,
    **HYBRID_VARIANTS,
}
BASE: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 256, "pad_token_id": None, "tie_word_embeddings": True},
}
EOS_TOKEN_IDS = [13, 22]


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint, and what transformers makes of it in float32, computed once."""

    directory: Path
    reference: PreTrainedModel
    known_greedy: dict[str, list[list[int]]] = field(default_factory=dict, repr=False)
    known_logits: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def vocab_size(self) -> int:
        return int(self.reference.config.vocab_size)

    def prompts(self, *lengths: int, seed: int = 1) -> list[list[int]]:
        """Random prompts of the given lengths."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(self.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    def greedy(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, **settings: Any
    ) -> list[list[int]]:
        """What transformers' `generate` appends to each prompt, decoded as one padded batch.

        Without an end-of-sequence token, unless `settings` name one; what follows it is padding.
        """
        key = repr((prompts, new_tokens, sorted(settings.items())))
        if key in self.known_greedy:
            return [list(row) for row in self.known_greedy[key]]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        options = {"eos_token_id": None, "pad_token_id": 0} | settings
        output = self.reference.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options
        )
        self.known_greedy[key] = output[:, longest:].tolist()
        return [list(row) for row in self.known_greedy[key]]

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits behind every token, float32 `[len(token_ids), V]`."""
        key = tuple(token_ids)
        if key not in self.known_logits:
            self.known_logits[key] = self.reference(torch.tensor([token_ids])).logits[0]
        return self.known_logits[key].clone()

    def reload(self, dtype: torch.dtype) -> PreTrainedModel:
        """The checkpoint as transformers runs it in another dtype, soft caps included."""
        return AutoModelForCausalLM.from_pretrained(
            self.directory, dtype=dtype, attn_implementation="eager"
        ).eval()


Tiny = Callable[[str], TinyModel]
"""The fixture `tiny`: returns the model of a variant."""


def load_weights(decoder: Decoder, directory: Path) -> None:
    """Store the weights of a checkpoint in a decoder."""
    with CheckpointReader(directory) as reader:
        decoder.store(iter_weights(reader, decoder.config, decoder.dtype))


def changed_checkpoint(
    source: Path,
    target: Path,
    edit: Callable[[dict[str, torch.Tensor]], Any] | None = None,
    **config: Any,
) -> Path:
    """Copy a checkpoint, and edit its tensors, file by file, and fields of its config.

    It may be copied to where it is.
    """
    if source != target:
        shutil.copytree(source, target, dirs_exist_ok=True)
    content = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(content))
    for path in target.glob("*.safetensors") if edit is not None else ():
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    return target


def random_model(settings: Mapping[str, Any]) -> PreTrainedModel:
    """A model with the fields of a configuration and weights by `randomize`."""
    fields = dict(settings)
    config = AutoConfig.for_model(fields.pop("model_type", "llama"), **fields)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    # The clamp and gain of gpt-oss experts, for which transformers 5.17 has constants.
    for module in model.modules():
        for name, setting in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")):
            if hasattr(module, name) and hasattr(model.config, setting):
                setattr(module, name, getattr(model.config, setting))
    randomize(model)
    return model


def randomize(model: PreTrainedModel) -> None:
    """Give weights that spread the logits (standard deviation about 3), so argmax is robust.

    Matrices are scaled by the number of their inputs, so that what a layer adds is of order one,
    and embeddings are small, because a model with tied ones would otherwise repeat its last token.
    Gemma multiplies its embeddings by the root of the hidden size. Gemma 2 and 3 and Qwen3-Next
    multiply norms by one plus their weight, but not the norms in layers with the delta rule.
    """
    torch.manual_seed(3)
    gemma = model.config.model_type.startswith("gemma")
    offset = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5")
    one = 0.0 if model.config.model_type.startswith(offset) else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.3)
            elif name == "model.norm.weight":
                parameter.normal_(20.0 if gemma else one + 0.5, 0.25)
            elif "norm" in name:
                parameter.normal_(1.0 if "linear_attn" in name else one, 0.2)
            elif name.endswith("A_log"):
                parameter.uniform_(-3.0, 1.0)
            elif name.endswith(".D"):
                parameter.normal_(1.0, 0.5)
            elif gemma and parameter.dim() == 1:  # scales of Gemma 3n and 4
                parameter.normal_(one, 0.2)
            elif "per_layer" in name or "altup." in name:
                parameter.normal_(0.0, 0.7 * parameter.shape[-1] ** -0.5)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.02 if gemma else 0.3)
            else:
                parameter.normal_(0.0, 2.0 * parameter.shape[1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            elif name.endswith("layer_scalar"):  # exact in bfloat16
                buffer.copy_(torch.randint(45, 80, (1,)) / 64)


CORPUS = ["def main(): return 'the naïve café' # stop here, then there and over there"] * 8


def byte_level_tokenizer(vocab_size: int, corpus: Sequence[str] = CORPUS) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
