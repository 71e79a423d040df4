"""Prompts for the text between a prefix and a suffix (fill in the middle, FIM)."""

from __future__ import annotations

from typing import Final, NamedTuple

from ..errors import RequestError
from .tokenizer import TextTokenizer


class _Layout(NamedTuple):
    """The special tokens before the two texts and after them."""

    first: str
    second: str
    end: str = ""
    suffix_first: bool = False


_LAYOUTS: Final = (
    _Layout("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    _Layout("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    _Layout("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Layout("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Layout("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Layout("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # CodeGeeX
    _Layout("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Layout("[SUFFIX]", "[PREFIX]", suffix_first=True),  # Codestral
)
_ENDS: Final = ("▁<EOT>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|cursor|>")
"""Tokens with which models end the middle, besides their end-of-sequence tokens."""


def _layout(tokenizer: TextTokenizer) -> _Layout | None:
    known = tokenizer.added_tokens
    for layout in _LAYOUTS:
        if all(token in known for token in layout[:3] if token):
            return layout
    return None


def fills_in_middle(tokenizer: TextTokenizer) -> bool:
    """Return whether a tokenizer has the tokens of such prompts."""
    return _layout(tokenizer) is not None


def middle_prompt(tokenizer: TextTokenizer, prefix: str, suffix: str) -> str:
    """Return the prompt for the text between two texts.

    Raises:
        RequestError: the tokenizer lacks the tokens.
    """
    layout = _layout(tokenizer)
    if layout is None:
        raise RequestError(
            "suffix needs a model that fills in the middle, whose tokenizer has tokens such as"
            " <|fim_prefix|>: this one has none of the known ones, so leave suffix out",
            field="suffix",
        )
    texts = (suffix, prefix) if layout.suffix_first else (prefix, suffix)
    return f"{layout.first}{texts[0]}{layout.second}{texts[1]}{layout.end}"


def middle_ends(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return the ids of tokens that end the middle, besides end-of-sequence tokens."""
    known = tokenizer.added_tokens
    return tuple(known[token] for token in _ENDS if token in known)
