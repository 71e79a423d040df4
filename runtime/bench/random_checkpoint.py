"""Saves a checkpoint with random weights of any causal language model of transformers.

python -m stepgraph.runtime.bench.random_checkpoint DIRECTORY MODEL_TYPE [NAME=VALUE ...]

The shapes are the defaults of the model type, changed by NAME=VALUE with a value in JSON, for
example `gpt_neox hidden_size=768 num_hidden_layers=12`. Needs the package transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from ..config import DTYPES
from .runtimes.transformers_config import import_transformers

__all__ = ["save_random_checkpoint"]


def save_random_checkpoint(
    directory: str, model_type: str, changes: dict[str, Any], dtype: torch.dtype, seed: int = 0
) -> int:
    """Save a model with the weights that transformers initialises it with.

    Returns:
        The number of its parameters.

    Raises:
        BaselineError: transformers is missing or too old.
        ValueError: it has no such model type or refuses the changes.
    """
    transformers = import_transformers()
    config = transformers.AutoConfig.for_model(model_type, **changes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError("no =")
        return name, json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with JSON") from error


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("model_type")
    parser.add_argument("changes", nargs="*", type=_change, metavar="NAME=VALUE")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    count = save_random_checkpoint(
        given.directory,
        given.model_type,
        dict(given.changes),
        getattr(torch, given.dtype),
        given.seed,
    )
    print(f"{given.directory}: {count / 1e6:.0f} million parameters")


if __name__ == "__main__":
    _main()
