"""Ranks of a tensor-parallel group as threads, shards of tiny models for them, and their steps."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from stepgraph.cache.spec import group_layers
from stepgraph.runtime.execution.inputs import PrefillChunk, write_decode_rows, write_prefill
from stepgraph.runtime.execution.step_key import StepKey, StepOutput
from stepgraph.runtime.kernels import Kernels, select_kernels
from stepgraph.runtime.kernels.ops.collectives import Collectives
from stepgraph.runtime.kernels.weights import MODEL, WeightStorage
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.loading.loader import iter_weights, random_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.decoder import Decoder
from stepgraph.runtime.models.families import FAMILIES
from stepgraph.runtime.models.layers.delta_rule import GatedDeltaRule
from stepgraph.runtime.models.plan import fused_layout, model_plan
from stepgraph.runtime.sampling_params import SamplingParams

from .step_rig import CPU, StepRig
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


def reference_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def reference_largest(
    values: Sequence[torch.Tensor], ids: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of equal ones the first, NaN as the largest."""
    best, best_ids = values[0].clone(), ids[0].clone()
    for value, number in zip(values[1:], ids[1:], strict=True):
        better = (value > best) | (value.isnan() & ~best.isnan())
        best, best_ids = torch.where(better, value, best), torch.where(better, number, best_ids)
    return best, best_ids


class ThreadCollectives:
    """`Collectives` of a thread. Tensors of different shapes are errors, and counted are calls."""

    communicator = 0

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.ranks = rank, meeting.ranks
        self._meeting = meeting
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, x_BF: torch.Tensor) -> torch.Tensor:
        values = self._exchange("all_reduce", x_BF, x_BF.shape, x_BF.clone())
        return reference_sum(values)

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
        sizes = ("moe_intermediate_size", "shared_expert_intermediate_size")
        rounded = {name: _round_up(getattr(experts, name), ranks) for name in sizes}
        experts = dataclasses.replace(experts, **rounded)
    delta = config.mixer
    if isinstance(delta, GatedDeltaRule):
        key_heads = _round_up(delta.linear_num_key_heads, ranks)
        each = delta.linear_num_value_heads // delta.linear_num_key_heads
        delta = dataclasses.replace(
            delta, linear_num_key_heads=key_heads, linear_num_value_heads=key_heads * each
        )
    return dataclasses.replace(
        config,
        num_kv_heads=kv_heads,
        num_heads=_round_up(config.num_heads, math.lcm(kv_heads, ranks)),
        intermediate_size=_round_up(config.intermediate_size, ranks),
        experts=experts,
        mixer=delta,
    )


def random_decoder(config: ModelConfig, kernels: Kernels, dtype: torch.dtype) -> Decoder:
    """A decoder on the CPU with random weights."""
    groups = group_layers(model_plan(config).states)
    decoder = Decoder(config, kernels, dtype, torch.device("cpu"), groups)
    decoder.store(random_weights(config, dtype))
    return decoder


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


BLOCK, COLUMNS = 4, 12
PROMPTS = ((5, 3, 8, 1, 9, 2, 7, 4, 6, 11, 13, 12, 10, 0, 5, 5, 3, 2, 17, 19), (7, 3), (30,))


class Run(NamedTuple):
    """What a model computes for `PROMPTS`."""

    logits: list[torch.Tensor]
    """Full logits after the prompts, and of the last decode step; `[rows, V]`."""
    tokens: torch.Tensor
    """Of the prefill and decode steps, `[steps, rows]`."""


Weights = Iterable[tuple[str, torch.Tensor]]


class RankSteps(StepRig):
    """The steps of a decoder, of a whole model or of the shard of its config."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        *,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        params: SamplingParams | None = None,
    ) -> None:
        rows, self.tokens = len(PROMPTS), sum(map(len, PROMPTS))
        super().__init__(
            config,
            kernels,
            dtype,
            rows=rows,
            columns=COLUMNS,
            block_size=BLOCK,
            lanes=rows,
            drafts=2,
            prefill_tokens=self.tokens,
            params=[params] * rows if params is not None else (),
            compiled=compiled,
        )
        self.decoder.store(weights)
        self.full = params is not None
        prompts = [[token % config.vocab_size for token in prompt] for prompt in PROMPTS]
        chunks = [PrefillChunk(row, 0, prompt) for row, prompt in enumerate(prompts)]
        write_prefill(chunks, rows, self.tokens, self.input_arrays)
        write_decode_rows(range(rows), rows, self.input_arrays)

    def prefill(self) -> StepOutput:
        return self.functions.bind(StepKey("prefill", self.tokens, COLUMNS, self.full))()

    def decode(self) -> StepOutput:
        return self.functions.bind(StepKey("decode", len(PROMPTS), COLUMNS, self.full))()

    def verify(self, drafts: Sequence[Sequence[int]]) -> StepOutput:
        self.drafts.device.token_ids[:, : len(drafts[0])] = torch.tensor(drafts)
        self.drafts.device.counts.fill_(1 + len(drafts[0]))
        key = StepKey("decode", len(PROMPTS), COLUMNS, self.full, tokens_per_row=1 + len(drafts[0]))
        return self.functions.bind(key)()

    def full_logits(self, output: StepOutput) -> torch.Tensor:
        """The logits of all tokens, `[..., V]`."""
        if self.full or self.decoder.vocabulary is None:
            return output.logits
        positions = output.logits.shape[:-1]
        gathered = self.decoder.vocabulary.gather(output.logits.flatten(0, -2))
        return gathered.view(*positions, -1)

    def run(self, steps: int = 6) -> Run:
        """Prefill all prompts, then decode step by step."""
        outputs = [self.prefill()]
        first = self.full_logits(outputs[0]).clone()
        tokens = [outputs[0].tokens.clone()]
        for _ in range(steps):
            outputs.append(self.decode())
            tokens.append(outputs[-1].tokens.clone())
        last = self.full_logits(outputs[-1]).clone()
        self.functions.close()
        return Run([first, last], torch.stack(tokens))


def stored_weights(
    config: ModelConfig, directory: Path, dtype: torch.dtype = torch.float32
) -> Weights:
    """The weights of a checkpoint, or the part of one rank."""
    with CheckpointReader(directory) as reader:
        yield from iter_weights(reader, config, dtype)


def whole_run(config: ModelConfig, directory: Path, **options: Any) -> Run:
    """What the whole model computes, in plain PyTorch."""
    weights = stored_weights(config, directory, options.get("dtype", torch.float32))
    with torch.no_grad():
        return RankSteps(config, weights, plain_kernels(), **options).run()


def sharded_runs(
    config: ModelConfig,
    directory: Path,
    ranks: int,
    kernels: Kernels | None = None,
    **options: Any,
) -> list[Run]:
    """What each rank computes."""
    return on_ranks(
        ranks,
        lambda group: rank_steps(config, directory, group, kernels, **options).run(),
    )


def rank_steps(
    config: ModelConfig,
    directory: Path,
    collectives: Collectives,
    kernels: Kernels | None = None,
    **options: Any,
) -> RankSteps:
    """The steps of one rank."""
    own = replace(config, shard=(collectives.rank, collectives.ranks))
    weights = stored_weights(own, directory, options.get("dtype", torch.float32))
    kernels = replace(kernels or plain_kernels(), collectives=collectives)
    return RankSteps(own, weights, kernels, **options)


def plain_kernels(weights: WeightStorage = MODEL) -> Kernels:
    return select_kernels(CPU, "eager", torch.float32, weights)
