"""Prompts for the text between a prefix and a suffix, in the layouts of published models."""

from __future__ import annotations

import pytest
from stepgraph.runtime import RequestError
from stepgraph.runtime.loading.fill_in_middle import fills_in_middle, middle_ends, middle_prompt
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def tokenizer_with(*special: str) -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE(dict.fromkeys(["a", "b"], 0) | {"b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return TextTokenizer(tokenizer)


@pytest.mark.parametrize(
    ("special", "prompt"),
    [
        ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|>", "0a{1b}2"),
        ("<fim_prefix> <fim_suffix> <fim_middle>", "0a{1b}2"),
        ("▁<PRE> ▁<SUF> ▁<MID>", "0a{1b}2"),
        ("[SUFFIX] [PREFIX]", "0b}1a{"),
        ("<[fim-suffix]> <[fim-prefix]> <[fim-middle]>", "0b}1a{2"),
    ],
)
def test_each_layout_has_its_order(special: str, prompt: str) -> None:
    tokens = special.split()
    for number, token in enumerate(tokens):
        prompt = prompt.replace(str(number), token)
    tokenizer = tokenizer_with(*tokens)
    assert fills_in_middle(tokenizer)
    assert middle_prompt(tokenizer, "a{", "b}") == prompt
    assert middle_ends(tokenizer) == ()


def test_end_tokens_are_found_and_other_tokenizers_refused() -> None:
    tokenizer = tokenizer_with("▁<PRE>", "▁<SUF>", "▁<EOT>")
    assert middle_ends(tokenizer) == (tokenizer.added_tokens["▁<EOT>"],)
    assert not fills_in_middle(tokenizer)
    with pytest.raises(RequestError) as raised:
        middle_prompt(tokenizer, "a", "b")
    assert raised.value.field == "suffix"
