"""Checkpoints like those of the tiny models, and what an engine holds of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime import Engine

from .engine_rig import greedy, opened

if TYPE_CHECKING:
    from ..conftest import TinyModel


__all__ = ["TOKENS", "Write", "make_write", "opened", "results", "storage", "unchanged"]

Write = Callable[..., Path]
TOKENS = [5, 1, 19, 7, 30, 2, 11, 23, 3, 8]


@pytest.fixture(name="write")
def make_write(tiny: Callable[[str], TinyModel], tmp_path: Path) -> Write:
    """Write a checkpoint like that of a variant: other weights, and changes of its config."""

    def make(variant: str = "base", seed: int = 1, **config: Any) -> Path:
        directory = tmp_path / f"{variant}-{seed}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny(variant).directory, directory)
        generator = torch.Generator().manual_seed(seed)
        for path in directory.glob("*.safetensors"):
            tensors = load_file(path)
            for tensor in tensors.values():
                tensor *= 1.0 + 0.5 * torch.randn(tensor.shape, generator=generator)
            save_file(tensors, path)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return directory

    return make


def results(engine: Engine) -> torch.Tensor:
    """Logits of prefill and decode steps."""
    return engine.score(TOKENS, 4)


def storage(engine: Engine) -> dict[str, tuple[int, int]]:
    """Address and contents of every parameter, in a form that can be compared."""
    return {
        name: (p.data_ptr(), hash(p.detach().contiguous().view(torch.uint8).numpy().tobytes()))
        for name, p in engine.decoder.named_parameters()
    }


@contextmanager
def unchanged(engine: Engine) -> Iterator[None]:
    """Assert that the block changes neither weights nor what is cached, and that it serves."""
    before, logits, tokenizer = storage(engine), results(engine), engine.tokenizer
    engine.generate([TOKENS * 4], greedy())
    yield
    output = engine.generate([TOKENS * 4], greedy())[0]
    assert output.cached_tokens
    assert storage(engine) == before
    assert torch.equal(results(engine), logits)
    assert engine.tokenizer is tokenizer
    assert engine.stats()["healthy"]
    engine.check_integrity()
