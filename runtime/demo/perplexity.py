"""How well the demo model predicts text it never saw, for each way of storing weights and cache.

Run with `python -m stepgraph.runtime.demo.perplexity --kv-dtype auto int8 fp8`, or with
`--weight-dtype auto int8 fp8 --kv-dtype auto`. Every token goes through a decode step of the engine
(teacher forcing), so what is judged is what serves requests: keys and values quantised when a
token is written, and read as such; linear layers over the weights as stored.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ..config import EngineConfig
from ..engine import Engine
from .train import encode, read_sources, source_files

__all__ = ["held_out_tokens", "perplexity"]

CONTEXT = 2048
"""Tokens of the demo model's context."""

KV_DTYPES = ("auto", "int8", "fp8")
WEIGHT_DTYPES = ("auto", "int8", "fp8")


def held_out_tokens() -> list[int]:
    """Return the files of this Python's standard library that were kept from the demo's training.

    A file is held out by the hash of its path, whatever the version of Python; each begins with the
    end-of-text token.
    """
    tokenizer = Tokenizer.from_file(str(Path(__file__).parent / "tokenizer.json"))
    _, held_out = source_files(Path(sysconfig.get_paths()["stdlib"]))
    tokens: list[int] = encode(tokenizer, read_sources(held_out)).tolist()
    return tokens


def perplexity(engine: Engine, tokens: Sequence[int], window: int) -> float:
    """Return exp(mean negative log-likelihood of a token), over windows of `window` tokens.

    The first token of a window is given, and what is left after the last whole window is not used.

    Raises:
        ValueError: there are fewer than `window` tokens, or it is shorter than 2.
        RequestError: the window does not fit a sequence of the engine.
    """
    if not 2 <= window <= len(tokens):
        raise ValueError(f"window must be from 2 to the {len(tokens)} tokens given, not {window}")
    total, count = 0.0, 0
    for start in range(0, len(tokens) - window + 1, window):
        piece = list(tokens[start : start + window])
        logits = engine.score(piece[:-1])
        target = torch.tensor(piece[1:])
        total += torch.nn.functional.cross_entropy(logits.double(), target, reduction="sum").item()
        count += len(target)
    return math.exp(total / count)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line of JSON for each mode and way of storing weights, keys and values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weight-dtype", nargs="+", default=("auto",), choices=WEIGHT_DTYPES)
    parser.add_argument("--kv-dtype", nargs="+", default=KV_DTYPES, choices=KV_DTYPES)
    parser.add_argument(
        "--mode", nargs="+", default=("auto",), choices=("auto", "eager", "compile", "graph")
    )
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=None, help="use the first ones only")
    options = parser.parse_args(arguments)
    if not 2 <= options.window <= CONTEXT:
        parser.error(
            f"--window must be from 2 to {CONTEXT}, the context of the model, not {options.window}"
        )
    tokens = held_out_tokens()
    count = len(tokens) if options.tokens is None else options.tokens
    if not options.window <= count <= len(tokens):
        parser.error(
            f"--tokens must be from --window, {options.window}, to the {len(tokens)} tokens that "
            f"were held out, not {count}"
        )
    tokens = tokens[:count]
    for mode, weight_dtype, kv_dtype in itertools.product(
        options.mode, options.weight_dtype, options.kv_dtype
    ):
        config = EngineConfig(
            mode=mode,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            max_rows=1,
            max_model_len=CONTEXT,
        )
        with Engine.from_pretrained("demo", config) as engine:
            result = {
                "mode": engine.config.mode,
                "weight_dtype": weight_dtype,
                "weight_bytes_per_step": engine.weight_bytes_per_step,
                "kv_dtype": kv_dtype,
                "kv_bytes_per_token": engine.kv_bytes_per_token,
                "window": options.window,
                "tokens": len(tokens) // options.window * (options.window - 1),
                "perplexity": perplexity(engine, tokens, options.window),
            }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
