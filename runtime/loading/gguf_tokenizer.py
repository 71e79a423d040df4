"""Builds the tokenizer of a GGUF file from its metadata.

The metadata has the tokens with their kinds, merges or scores, and the name of a pre-tokenizer,
whose rules are in the code of llama.cpp and equal the models' `tokenizer.json`. As in llama.cpp,
texts are not normalised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError
from .gguf_file import GGUFFile
from .tokenizer import TextTokenizer, TokenizerConfig, text_tokenizer

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, *, cased: bool = False, contractions: str = "") -> str:
    """Return the pattern of tiktoken's vocabularies since cl100k: words, digits, punctuation.

    Args:
        digits: pattern of numbers.
        cased: whether words end before a capital letter that follows lower case.
        contractions: pattern of English contractions, which follow `cased` words.
    """
    begin, marks = r"[^\r\n\p{L}\p{N}]?", r"[\r\n]*"
    words = rf"{contractions}|{begin}\p{{L}}+" if contractions else rf"{begin}\p{{L}}+"
    if cased:
        end, marks = f"{contractions}?" if contractions else "", r"[\r\n/]*"
        words = rf"{begin}{_UPPER}*{_LOWER}+{end}|{begin}{_UPPER}+{_LOWER}*{end}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{marks}|\s*[\r\n]+|{_SPACES}"


_ANY_CASE = f"(?i:{_CONTRACTIONS})"
_LLAMA3 = (_words(r"\p{N}{1,3}", contractions=_ANY_CASE),)
_QWEN2 = (_words(r"\p{N}", contractions=_ANY_CASE),)
_O200K = (_words(r"\p{N}{1,3}", cased=True, contractions=_ANY_CASE),)
_DIGITS = (r"\p{N}", _GPT2)
_HAN = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
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
    "tekken": (_words(r"\p{N}", cased=True),),
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
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "glm4", "tekken")
)
"""Pre-tokenizers of models that do not split a word that is a token."""
_BEGINNING = _WHOLE_WORDS - {"glm4"}
"""Pre-tokenizers of models whose texts begin with the BOS token, unless the metadata denies it."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
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
    kinds = file.get("tokenizer.ggml.token_type", np.ndarray)
    if kinds is None:
        kinds = np.full(len(tokens), _NORMAL)
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.token_type lists {len(kinds)} kinds of {len(tokens)} tokens"
        )
    try:
        tokenizer, begins = builders[kind](file, tokens, kinds)
        tokenizer.add_tokens(
            [
                AddedToken(tokens[i], normalized=False, special=bool(kinds[i] != _USER_DEFINED))
                for i in np.flatnonzero((kinds >= _UNKNOWN) & (kinds <= _USER_DEFINED))
            ]
        )
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


def _byte_level(file: GGUFFile, tokens: list[str], kinds: np.ndarray) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE, and whether texts begin with the BOS token by default."""
    name = file.get("tokenizer.ggml.pre", str, "default")
    patterns = _PATTERNS.get(name or "")
    if patterns is None:
        raise CheckpointError(
            f"{file.path}: the pre-tokenizer {bounded_repr(name, 60)} is not supported; supported:"
            f" {', '.join(_PATTERNS)}. Use the original checkpoint in safetensors"
        )
    merges = file.require("tokenizer.ggml.merges", list)
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=name in _WHOLE_WORDS,
        )
    )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in _BEGINNING


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: np.ndarray) -> tuple[Tokenizer, bool]:
    """Return a BPE that merges the pair whose token has the best score, as SentencePiece does."""
    scores = file.require("tokenizer.ggml.scores", np.ndarray)
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores lists {len(scores)} scores of {len(tokens)} tokens"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    normal = np.flatnonzero(kinds == _NORMAL)
    merges = [
        (left, right)
        for token in map(tokens.__getitem__, normal[np.argsort(-scores[normal], kind="stable")])
        for end in range(len(token) - 1, 0, -1)
        if (left := token[:end]) in vocabulary and (right := token[end:]) in vocabulary
    ]
    unknown = file.get("tokenizer.ggml.unknown_token_id", int)
    model = models.BPE(
        vocabulary,
        merges,
        unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaced = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    before = [normalizers.Prepend("▁")] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            *([decoders.Strip(" ", 1, 0)] if spaced else []),
        ]
    )
    return tokenizer, True
