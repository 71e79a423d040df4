"""How well the demo model predicts text it never saw, for each way of storing weights and cache.

Run with `python -m stepgraph.runtime.demo.perplexity --kv-dtype auto int8 fp8`, or with
`--weight-dtype auto int8 fp8 --kv-dtype auto`. Every token goes through a decode step of the engine
(teacher forcing), so what is judged is what serves requests: keys and values quantised when a
token is written, and read as such; linear layers over the weights as stored.

`--text` takes `held-out` (the files of the standard library that were kept from training),
`test-suite` (a fortieth of its test suite, none of which was trained on), or paths of Python files.
Each line has the loss of every window. Windows differ far more from each other than from one way of
storing to the next, so ways are compared window by window: `change` is the relative change of the
perplexity from that of the first way, `standard_error` that of the mean over the windows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ..config import EngineConfig
from ..engine.engine import Engine
from .train import encode, in_sample, read_sources, source_files

__all__ = ["held_out_tokens", "perplexity", "text_tokens", "window_losses"]

CONTEXT = 2048
"""Tokens of the demo model's context."""

KV_DTYPES = ("auto", "int8", "fp8")
WEIGHT_DTYPES = ("auto", "int8", "fp8")


def held_out_tokens() -> list[int]:
    """Return the files of this Python's standard library that were kept from the demo's training.

    A file is held out by the hash of its path, whatever the version of Python; each begins with the
    end-of-text token.
    """
    return text_tokens("held-out")


def text_tokens(text: str) -> list[int]:
    """Return the tokens of `held-out`, `test-suite`, or the Python file or directory of that path.

    Raises:
        ValueError: there is no Python file at that path.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    if text == "held-out":
        _, files = source_files(stdlib)
    elif text == "test-suite":
        suite = sorted((stdlib / "test").rglob("*.py"))
        files = [path for path in suite if in_sample(path.relative_to(stdlib))]
    else:
        path = Path(text)
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    sources = read_sources([path for path in files if path.is_file()])
    if not sources:
        raise ValueError(f"there is no Python file at {text!r}")
    tokenizer = Tokenizer.from_file(str(Path(__file__).parent / "tokenizer.json"))
    tokens: list[int] = encode(tokenizer, sources).tolist()
    return tokens


def window_losses(engine: Engine, tokens: Sequence[int], window: int) -> list[float]:
    """Return the mean negative log-likelihood of a token in each window, in nats.

    The first token of a window is given, and what is left after the last whole window is not used.

    Raises:
        ValueError: there are fewer than `window` tokens, or it is shorter than 2.
        RequestError: the window does not fit a sequence of the engine.
    """
    if not 2 <= window <= len(tokens):
        raise ValueError(f"window must be from 2 to the {len(tokens)} tokens given, not {window}")
    losses = []
    for start in range(0, len(tokens) - window + 1, window):
        piece = list(tokens[start : start + window])
        logits = engine.score(piece[:-1])
        target = torch.tensor(piece[1:])
        losses.append(torch.nn.functional.cross_entropy(logits.double(), target).item())
    return losses


def perplexity(engine: Engine, tokens: Sequence[int], window: int) -> float:
    """Return exp(mean negative log-likelihood of a token); see `window_losses`."""
    return math.exp(statistics.fmean(window_losses(engine, tokens, window)))


def _change(losses: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Return the relative change of the perplexity and its standard error, from paired windows."""
    differences = [loss - other for loss, other in zip(losses, base, strict=True)]
    change = math.expm1(statistics.fmean(differences))
    if len(differences) < 2:
        return {"change": change}
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {"change": change, "standard_error": error}


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
    parser.add_argument(
        "--text",
        nargs="+",
        default=("held-out",),
        metavar="TEXT",
        help="held-out, test-suite, or paths of Python files or directories",
    )
    options = parser.parse_args(arguments)
    if not 2 <= options.window <= CONTEXT:
        parser.error(
            f"--window must be from 2 to {CONTEXT}, the context of the model, not {options.window}"
        )
    texts: dict[str, list[int]] = {}
    for name in options.text:
        try:
            tokens = text_tokens(name)
        except ValueError as error:
            parser.error(f"--text: {error}")
        count = len(tokens) if options.tokens is None else options.tokens
        if not options.window <= count <= len(tokens):
            parser.error(
                f"--tokens must be from --window, {options.window}, to the {len(tokens)} tokens of "
                f"{name}, not {count}"
            )
        texts[name] = tokens[:count]
    base: dict[str, list[float]] = {}
    for mode, weight_dtype, kv_dtype in itertools.product(
        options.mode, options.weight_dtype, options.kv_dtype
    ):
        config = EngineConfig(
            mode=mode,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            max_num_seqs=1,
            max_model_len=CONTEXT,
        )
        with Engine.from_pretrained("demo", config) as engine:
            for name, tokens in texts.items():
                losses = window_losses(engine, tokens, options.window)
                result = {
                    "mode": engine.config.mode,
                    "weight_dtype": weight_dtype,
                    "weight_bytes_per_step": engine.weight_bytes_per_step,
                    "kv_dtype": kv_dtype,
                    "kv_bytes_per_token": engine.kv_bytes_per_token,
                    "text": name,
                    "window": options.window,
                    "tokens": len(losses) * (options.window - 1),
                    "perplexity": math.exp(statistics.fmean(losses)),
                    **_change(losses, base.setdefault(name, losses)),
                    "window_losses": [round(loss, 6) for loss in losses],
                }
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
