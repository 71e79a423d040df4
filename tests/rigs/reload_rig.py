"""Checkpoints like those of the tiny models, and what an engine holds of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine

from .engine_rig import greedy
from .tiny_models import Tiny, changed_checkpoint

Write = Callable[..., Path]
TOKENS = [5, 1, 19, 7, 30, 2, 11, 23, 3, 8]


@pytest.fixture(name="write")
def make_write(tiny: Tiny, tmp_path: Path) -> Write:
    """Write a checkpoint like that of a variant: other weights, and changes of its config."""

    def make(variant: str = "base", seed: int = 1, **config: Any) -> Path:
        directory = tmp_path / f"{variant}-{seed}-{len(list(tmp_path.iterdir()))}"
        generator = torch.Generator().manual_seed(seed)

        def scale(tensors: dict[str, torch.Tensor]) -> None:
            for tensor in tensors.values():
                tensor *= 1.0 + 0.5 * torch.randn(tensor.shape, generator=generator)

        return changed_checkpoint(tiny(variant).directory, directory, scale, **config)

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
