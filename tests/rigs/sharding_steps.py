"""Steps of one rank of a tiny model, or of the whole model, over its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from stepgraph.runtime.execution.step_key import StepKey, StepOutput
from stepgraph.runtime.kernels import Kernels, select_kernels
from stepgraph.runtime.kernels.ops.collectives import Collectives
from stepgraph.runtime.kernels.weights import MODEL, WeightStorage
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.loading.loader import iter_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.sampling_params import SamplingParams

from .sharding_rig import on_ranks
from .step_rig import CPU, StepRig

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
        inputs = self.inputs.device
        everyone = torch.arange(rows)
        counts = torch.tensor([len(prompt) for prompt in PROMPTS])
        inputs.decode_rows[:rows] = everyone
        inputs.prefill_rows[:rows] = everyone
        inputs.sample_rows[:rows] = everyone
        inputs.query_start_loc[1 : rows + 1] = counts.cumsum(0)
        inputs.token_rows[:] = everyone.repeat_interleave(counts)
        inputs.positions[:] = torch.cat([torch.arange(n) for n in counts.tolist()])
        ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
        inputs.token_ids[:] = ids % config.vocab_size

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
