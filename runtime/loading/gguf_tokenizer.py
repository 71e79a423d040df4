"""Builds the tokenizer of a GGUF file from its metadata.

The metadata has the tokens with their kinds, merges or scores, and the name of a pre-tokenizer,
whose rules are in the code of llama.cpp and equal the models' `tokenizer.json`. As in llama.cpp,
texts are not normalised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError
from .gguf_file import GGUFFile
from .tokenizer import TextTokenizer, TokenizerConfig, text_tokenizer
from .vocabulary import (
    ANY_CASE,
    CONTRACTIONS,
    KIMI,
    NORMAL,
    SPACES,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    word_pattern,
)

_GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"
_LLAMA3 = (word_pattern(r"\p{N}{1,3}", contractions=ANY_CASE),)
_QWEN2 = (word_pattern(r"\p{N}", contractions=ANY_CASE),)
_QWEN35 = (word_pattern(r"\p{N}", contractions=ANY_CASE, letters=r"\p{L}\p{M}"),)
_O200K = (word_pattern(r"\p{N}{1,3}", cased=True, contractions=ANY_CASE),)
_DIGITS = (r"\p{N}", _GPT2)
_HAN = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{SPACES}",
)
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"), (_GPT2,)),
    **dict.fromkeys(("granite-docling", "a.x-4.0", "mellum"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _O200K),
    **{"qwen35": _QWEN35, "falcon-h1": _LLAMA3, "kimi-k2": (KIMI,)},
    "tekken": (word_pattern(r"\p{N}", cased=True),),
    "deepseek-llm": (
        *(r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
        *(
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN,
            r"\p{N}+",
        ),
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""The patterns that pre-tokenizers split texts at, one after the other."""
_WHOLE_WORDS = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
        *("lfm2", "glm4", "tekken"),
    )
)
"""Pre-tokenizers of models that do not split a word that is a token."""
_BEGINNING = _WHOLE_WORDS - {"glm4"}
"""Pre-tokenizers of models whose texts begin with the BOS token, unless the metadata denies it."""
_SPECIAL = {
    **{"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"},
    **{"sep_token": "seperator", "mask_token": "mask"},
}
"""Name of a special token -> its name in metadata."""


def gguf_tokenizer(file: GGUFFile, *, eos_token_ids: Sequence[int] = ()) -> TextTokenizer | None:
    """Return the tokenizer of a GGUF file, with its chat templates; None if it has no tokens.

    Raises:
        CheckpointError: the tokenizer is of an unknown kind, or inconsistent.
    """
    path, kind = file.path, file.get("tokenizer.ggml.model", str)
    if kind in (None, "none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model = {bounded_repr(kind, 60)} is not supported; supported:"
            f" {', '.join(builders)}. Use the original checkpoint in safetensors"
        )
    tokens = file.require("tokenizer.ggml.tokens", list)
    listed = file.get("tokenizer.ggml.token_type", np.ndarray)
    kinds = [NORMAL] * len(tokens) if listed is None else listed.tolist()
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.token_type lists {len(kinds)} kinds of {len(tokens)} tokens"
        )
    try:
        tokenizer, begins = builders[kind](file, tokens, kinds)
    except CheckpointError:
        raise
    except Exception as error:  # `tokenizers` raises bare `Exception`
        raise CheckpointError(f"{path}: its tokenizer is damaged: {bounded_text(error)}") from error
    special_tokens = {
        name: tokens[token_id]
        for name, theirs in _SPECIAL.items()
        if (token_id := file.get(f"tokenizer.ggml.{theirs}_token_id", int)) is not None
        and token_id < len(tokens)
    }
    adds = {
        name: file.get(f"tokenizer.ggml.add_{name}_token", bool, default)
        for name, default in (("bos", begins), ("eos", False))
    }
    begin, end = (special_tokens.get(f"{n}_token") if added else None for n, added in adds.items())
    key = "tokenizer.chat_template"
    names = {"default": key} | {
        name.removeprefix(f"{key}."): name for name in file.keys if name.startswith(f"{key}.")
    }
    sources = {name: source for name, k in names.items() if (source := file.get(k, str))}
    config = TokenizerConfig(path, special_tokens, (begin, end), sources)
    return text_tokenizer(tokenizer, config, eos_token_ids)


def _byte_level(file: GGUFFile, tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE, and whether texts begin with the BOS token by default."""
    name = file.get("tokenizer.ggml.pre", str, "default")
    patterns = _PATTERNS.get(name or "")
    if patterns is None:
        raise CheckpointError(
            f"{file.path}: the pre-tokenizer {bounded_repr(name, 60)} is not supported; supported:"
            f" {', '.join(_PATTERNS)}. Use the original checkpoint in safetensors"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges", list)]
    tokenizer = byte_level_tokenizer(
        tokens, kinds, merges, patterns, whole_words=name in _WHOLE_WORDS
    )
    return tokenizer, name in _BEGINNING


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    """Return a BPE that merges by scores, and that texts begin with the BOS token by default."""
    scores = file.require("tokenizer.ggml.scores", np.ndarray)
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores lists {len(scores)} scores of {len(tokens)} tokens"
        )
    unknown = file.get("tokenizer.ggml.unknown_token_id", int)
    spaced = bool(file.get("tokenizer.ggml.add_space_prefix", bool, True))
    return sentencepiece_tokenizer(tokens, kinds, scores.tolist(), unknown, spaced=spaced), True
