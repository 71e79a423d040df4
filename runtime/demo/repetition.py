"""How well the demo model repeats a text that its prompt has begun to repeat.

Run with `python -m stepgraph.runtime.demo.repetition`. A prompt is an excerpt and its first tokens
once more, or an `edit` prompt of `stepgraph.runtime.bench.speculation`. Two shares are measured of
the tokens that repeat the excerpt again and again: `predicted`, those that the model finds most
likely after the text up to them, and `written`, those that its own greedy continuation has at their
place. After a token that it leaves out or adds, none of these is right.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from ..bench.prompt_texts import REPEATED, prompt_text
from ..config import EngineConfig
from ..engine.engine import Engine
from .drafter_text import continuations, line_starts, tokenizer
from .perplexity import held_out_tokens

__all__ = ["Repetition", "held_out_repetitions", "predicted_share", "written_share"]

OUTPUT = 200
"""Tokens of an output."""
AGAIN = 16
"""Tokens of an excerpt that a prompt repeats."""


class Repetition(NamedTuple):
    """A prompt and how it goes on."""

    prompt: list[int]
    expected: list[int]


def held_out_repetitions(size: int, rows: int) -> list[Repetition]:
    """Return prompts with excerpts of `size` tokens from files that were kept from training."""
    stream = np.asarray(held_out_tokens())
    starts = np.random.default_rng(size).choice(line_starts(stream[:-size]), rows)
    excerpts = [stream[start : start + size].tolist() for start in starts]
    return [
        Repetition([0, *text, *text[:AGAIN]], list(islice(cycle(text), AGAIN, AGAIN + OUTPUT)))
        for text in excerpts
    ]


def bench_repetitions(rows: int) -> list[Repetition]:
    """Return the `edit` prompts of the benchmark."""
    ids = tokenizer()
    cases = []
    for index in range(rows):
        part = prompt_text("code", index)
        rest = ids.encode(part[REPEATED:] + 3 * part, add_special_tokens=False).ids
        prompt = ids.encode(prompt_text("edit", index)).ids
        cases.append(Repetition(prompt, rest[:OUTPUT]))
    return cases


def predicted_share(cases: Sequence[Repetition], model: str, threads: int) -> float:
    """Return the mean share of tokens that are predicted."""
    longest = max(len(case.prompt) for case in cases) + OUTPUT
    config = EngineConfig(
        dtype="bfloat16", threads=threads, max_num_seqs=1, max_model_len=longest, prefix_cache=False
    )
    shares = []
    with Engine.from_pretrained(model, config) as engine:
        for case in cases:
            logits = engine.score([*case.prompt, *case.expected[:-1]])
            likeliest = logits[len(case.prompt) - 1 :].argmax(-1).tolist()
            shares.append(_equal_share(likeliest, case.expected))
    return statistics.fmean(shares)


def written_share(cases: Sequence[Repetition], model: str, threads: int) -> float:
    """Return the mean share of tokens that are written."""
    rows = continuations(
        [case.prompt for case in cases],
        [0.0] * len(cases),
        [OUTPUT] * len(cases),
        threads,
        seed=0,
        model=model,
    )
    outputs = [row.token_ids[row.prompt_length :] for row in rows]
    pairs = zip(cases, outputs, strict=True)
    return statistics.fmean(_equal_share(ids, case.expected) for case, ids in pairs)


def _equal_share(ids: Sequence[int], expected: Sequence[int]) -> float:
    return statistics.fmean(a == b for a, b in zip(ids, expected, strict=True))


def main() -> None:
    """Print a line of JSON for each kind of prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="a checkpoint with the demo's tokenizer")
    parser.add_argument("--size", type=int, nargs="+", default=(64, 128, 256, 512))
    parser.add_argument("--rows", type=int, default=16, help="prompts of each size")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    sets = {str(size): held_out_repetitions(size, args.rows) for size in args.size}
    for excerpt, cases in {**sets, "bench": bench_repetitions(8)}.items():
        shares = {
            "predicted": round(predicted_share(cases, args.model, args.threads), 3),
            "written": round(written_share(cases, args.model, args.threads), 3),
        }
        print(json.dumps({"excerpt": excerpt, **shares}), flush=True)


if __name__ == "__main__":
    main()
