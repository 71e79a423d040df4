"""Ranks of a tensor-parallel group as threads, and shards of tiny models for them."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from stepgraph.cache.spec import group_layers
from stepgraph.runtime.kernels import Kernels
from stepgraph.runtime.loading.loader import random_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.decoder import Decoder
from stepgraph.runtime.models.families import FAMILIES
from stepgraph.runtime.models.plan import fused_layout, model_plan

from .tiny_models import BASE, VARIANTS

T = TypeVar("T")
_PATIENCE = 600.0
"""Seconds; another rank may compile a sampler meanwhile."""


class Meeting:
    """Where the ranks of a group exchange objects."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._places: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def exchange(self, rank: int, value: T) -> list[T]:
        """Return the values of all ranks, once all have come."""
        self._places[rank] = value
        self._barrier.wait(_PATIENCE)
        values = list(self._places)
        self._barrier.wait(_PATIENCE)  # before the next exchange replaces them
        return values

    def end(self) -> None:
        """Let all waiting ranks fail: another one has."""
        self._barrier.abort()


class ThreadCollectives:
    """`Collectives` of a thread. Tensors of different shapes are errors, and counted are calls."""

    communicator = 0

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.ranks = rank, meeting.ranks
        self._meeting = meeting
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, x_BF: torch.Tensor) -> torch.Tensor:
        values = self._exchange("all_reduce", x_BF, x_BF.shape, x_BF.clone())
        total = values[0].float()
        for value in values[1:]:
            total = total + value.float()
        return total.to(x_BF.dtype)

    def gather(self, x_BF: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        assert x_BF.shape[1] == sizes[self.rank]
        rows = (x_BF.shape[0], sum(sizes))
        return torch.cat(self._exchange("gather", x_BF, rows, x_BF.clone()), dim=1)

    def close(self) -> None:
        pass

    def _exchange(self, name: str, x: torch.Tensor, shape: Sequence[int], own: Any) -> list[Any]:
        call = (name, tuple(shape))
        self.calls.append(call)
        calls, values = zip(*self._meeting.exchange(self.rank, ((call, x.dtype), own)), strict=True)
        assert len(set(calls)) == 1, f"ranks disagree: {calls}"
        return list(values)


def on_ranks(ranks: int, run: Callable[[ThreadCollectives], T]) -> list[T]:
    """Return what `run` returns on each rank; raise what failed first."""
    meeting = Meeting(ranks)

    def guarded(rank: int) -> T:
        try:
            with torch.no_grad():
                return run(ThreadCollectives(rank, meeting))
        except BaseException:
            meeting.end()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(ranks)]
    failures = [f.exception() for f in futures if f.exception() is not None]
    own = [e for e in failures if not isinstance(e, threading.BrokenBarrierError)]
    for failure in own or failures:
        raise failure
    return [future.result() for future in futures]


def write_checkpoint(config: ModelConfig, directory: Path, seed: int = 0) -> None:
    """Write random float32 weights that spread the logits, in the layout of the family."""
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor] = {}
    for name, fused in fused_layout(config).items():
        for source in fused.sources:
            if source.name is None or source.name in stored:
                continue
            x = torch.randn(source.shape, generator=generator)
            if name.endswith("norm.weight"):
                x = 0.2 * x + (0.0 if config.family.offset_norms else 1.0)
            elif name == "embed_tokens.weight":
                x *= 0.02 if config.family.scaled_embeddings else 0.3
            elif len(fused.shape) == 1:
                x *= 0.3
            else:
                x *= 2.0 * fused.shape[-1] ** -0.5
            stored[source.name] = x
    save_file(stored, directory / "model.safetensors")


def tiny_config(variant: str, ranks: int) -> ModelConfig:
    """The tiny model, with as many more heads and features as its ranks need."""
    fields: dict[str, Any] = {**BASE, "model_type": "llama", **VARIANTS[variant]}
    fields["architectures"] = [FAMILIES[fields["model_type"]].architecture]
    config = ModelConfig.from_hf(fields)
    kv_heads = config.num_kv_heads
    if kv_heads % ranks and ranks % kv_heads:
        kv_heads = _round_up(kv_heads, ranks)
    experts = config.experts
    if experts is not None:
        width = _round_up(experts.moe_intermediate_size, ranks)
        experts = dataclasses.replace(experts, moe_intermediate_size=width)
    return dataclasses.replace(
        config,
        num_kv_heads=kv_heads,
        num_heads=_round_up(config.num_heads, math.lcm(kv_heads, ranks)),
        intermediate_size=_round_up(config.intermediate_size, ranks),
        experts=experts,
    )


def random_decoder(config: ModelConfig, kernels: Kernels, dtype: torch.dtype) -> Decoder:
    """A decoder on the CPU with random weights."""
    groups = group_layers(model_plan(config).states)
    decoder = Decoder(config, kernels, dtype, torch.device("cpu"), groups)
    decoder.store(random_weights(config, dtype))
    return decoder


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
