"""Text on which the demo's drafter is trained and judged: what the demo model itself writes.

A drafter has to predict what its target says, which is not what programmers wrote. Prompts are of
three kinds, as in `stepgraph.runtime.bench.speculation`: `free` is the first tokens of a line,
`code` some lines, `edit` some lines and the first tokens of them once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ..bench.prompt_texts import TextKind
from ..config import EngineConfig
from ..engine.engine import Engine
from ..sampling_params import SamplingParams

__all__ = [
    "DEMO",
    "KINDS",
    "Continuation",
    "continuations",
    "line_starts",
    "prompt",
    "tokenizer",
]

DEMO = Path(__file__).parent
"""The checkpoint of the demo model."""
KINDS: tuple[TextKind, ...] = ("free", "code", "edit")
ROWS = 64
"""Sequences that are continued together."""


class Continuation(NamedTuple):
    """What the model made of a prompt."""

    token_ids: list[int]
    """Prompt and output."""
    prompt_length: int


def tokenizer() -> Tokenizer:
    """Return the demo model's tokenizer."""
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def line_starts(stream: np.ndarray) -> np.ndarray:
    """Return the indices of `stream` `[tokens]` at which a line begins."""
    ids = tokenizer()
    newlines = [i for i in range(ids.get_vocab_size()) if ids.decode([i]).startswith("\n")]
    return np.flatnonzero(np.isin(stream, newlines))[:-1] + 1


def prompt(
    kind: TextKind, stream: np.ndarray, starts: np.ndarray, rng: np.random.Generator
) -> list[int]:
    """Return a prompt from a random line of the source text, begun by the end-of-text token."""
    text = stream[int(rng.choice(starts)) :].tolist()
    if kind == "free":
        return [0, *text[: int(rng.integers(2, 13))]]
    length = int(rng.integers(32, 161))
    if kind == "code":
        return [0, *text[:length]]
    again = int(rng.integers(4, max(5, length // 3)))
    return [0, *text[:length], *text[:again]]


def continuations(
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    lengths: Sequence[int],
    threads: int,
    seed: int,
    model: str = "demo",
) -> list[Continuation]:
    """Return the prompts as continued by the demo model in bfloat16 by so many tokens each.

    `model`: another checkpoint with its tokenizer.
    """
    config = EngineConfig(
        dtype="bfloat16",
        threads=threads,
        max_num_seqs=min(ROWS, len(prompts)),
        max_model_len=max(map(len, prompts)) + max(lengths),
        prefix_cache=False,
    )
    params = [
        SamplingParams(
            max_tokens=length, temperature=temperature, ignore_eos=True, seed=seed + row
        ).resolved()
        for row, (temperature, length) in enumerate(zip(temperatures, lengths, strict=True))
    ]
    with Engine.from_pretrained(model, config) as engine:
        outputs = engine.generate(list(prompts), params)
    return [
        Continuation([*ids, *output.token_ids], len(ids))
        for ids, output in zip(prompts, outputs, strict=True)
    ]
