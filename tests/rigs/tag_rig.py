"""A tiny chat model whose tags are added tokens, as in the checkpoints of Qwen and Hermes."""

from __future__ import annotations

import json
from pathlib import Path

import stepgraph.runtime.demo
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["tag_checkpoint"]

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinks %}<think>\n{% endif %}{% endif %}"
)


def tag_checkpoint(folder: Path, *, special: bool) -> Path:
    """Write a model of random weights; `special` is whether its tags are special tokens."""
    tokenizer = Tokenizer.from_file(str(Path(stepgraph.runtime.demo.__path__[0], "tokenizer.json")))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", END)]
    )
    tags = [AddedToken(text, special=special, normalized=False) for text in TAGS]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tags)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.token_to_id(END),
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
