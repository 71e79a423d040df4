"""Saves random weights of a native model as a checkpoint that other runtimes load."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...loading.checkpoint import INDEX_FILE
from ...loading.loader import random_weights
from ...models.config import ModelConfig
from ...models.layout import fused_layout
from .transformers_config import hf_config

__all__ = ["save_random_weights"]

FILE_BYTES = 2 << 30
"""Of a file, about: as much is in memory at a time."""


def save_random_weights(
    config: ModelConfig,
    directory: Path,
    dtype: torch.dtype,
    seed: int,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights of `random_weights` and a config.json, file by file.

    Raises:
        BaselineError: transformers, which writes the config, is missing or too old.
    """
    source = hf_config(config)
    source.dtype = dtype
    source.architectures = [config.family.architecture]
    source.save_pretrained(directory)
    layout = fused_layout(config)
    missing = Counter(part.name for fused in layout.values() for part in fused.sources)
    unfinished: dict[str, torch.Tensor] = {}
    finished: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}

    def write() -> None:
        name = f"model-{len(set(files.values())):05d}.safetensors"
        save_file(finished, directory / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(finished, name))
        finished.clear()

    for name, tensor in random_weights(config, dtype, seed):
        for part, values in layout[name].parts(tensor):
            if part.name is None:
                continue  # zeros that checkpoints leave out
            if part.name not in unfinished:
                unfinished[part.name] = torch.empty(part.shape, dtype=dtype)
            part.write(unfinished[part.name], values)
            missing[part.name] -= 1
            if not missing[part.name]:
                finished[part.name] = unfinished.pop(part.name)
        if sum(tensor.nbytes for tensor in finished.values()) >= file_bytes:
            write()
    if finished:
        write()
    total = sum((directory / file).stat().st_size for file in set(files.values()))
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (directory / INDEX_FILE).write_text(json.dumps(index))
