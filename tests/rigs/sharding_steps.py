"""Steps of one rank of a tiny model, or of the whole model, over its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from stepgraph.cache.arena import Arena
from stepgraph.cache.spec import group_layers
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.runtime.execution.inputs import DraftInputs, RowState, StepInputs
from stepgraph.runtime.execution.step_functions import StepFunctions
from stepgraph.runtime.execution.step_key import StepKey, StepOutput
from stepgraph.runtime.kernels import Kernels, select_kernels
from stepgraph.runtime.kernels.ops.collectives import Collectives
from stepgraph.runtime.kernels.weights import MODEL, WeightStorage
from stepgraph.runtime.loading.checkpoint import CheckpointReader
from stepgraph.runtime.loading.loader import iter_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.decoder import Decoder, attention_specs
from stepgraph.runtime.sampling_params import SamplingParams

from .sharding_rig import on_ranks

BLOCK, COLUMNS = 4, 12
CPU = torch.device("cpu")
PROMPTS = ((5, 3, 8, 1, 9, 2, 7, 4, 6, 11, 13, 12, 10, 0, 5, 5, 3, 2, 17, 19), (7, 3), (30,))


class Run(NamedTuple):
    """What a model computes for `PROMPTS`."""

    logits: list[torch.Tensor]
    """Full logits after the prompts, and of the last decode step; `[rows, V]`."""
    tokens: torch.Tensor
    """Of the prefill and decode steps, `[steps, rows]`."""


Weights = Iterable[tuple[str, torch.Tensor]]


class RankSteps:
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
        groups = group_layers(attention_specs(config, dtype.itemsize))
        self.decoder = Decoder(config, kernels, dtype, CPU, groups)
        self.decoder.store(weights)
        rows = len(PROMPTS)
        blocks = 1 + rows * COLUMNS * len(groups)
        self.arena = Arena(groups, blocks, BLOCK, dtype, CPU, "model").tensor
        self.state = RowState.allocate(
            rows,
            len(groups),
            COLUMNS,
            config.vocab_size,
            CPU,
            rope_by_length=self.decoder.plan.rope_by_length,
        )
        tables = 1 + torch.arange(blocks - 1, dtype=torch.int32)
        self.state.block_tables[:, :rows] = tables.view(len(groups), rows, COLUMNS)
        self.full = params is not None
        for row in range(rows if params is not None else 0):
            parameters = self.state.sampling.row_parameters(
                params, seed=row, prompt_ids=[1, 2], output_ids=[], stop_token_ids=()
            )
            self.state.sampling.store_row(row, parameters)
        self.tokens = sum(map(len, PROMPTS))
        layout = StepInputs.layout(
            max_num_seqs=rows, prefill_tokens=self.tokens, prefill_rows=rows, table_updates=1
        )
        self.inputs = StaticBuffers.allocate(StepInputs[torch.Tensor], layout, CPU).device
        drafts = DraftInputs.layout(max_num_seqs=rows, drafts=2)
        self.drafts = StaticBuffers.allocate(DraftInputs[torch.Tensor], drafts, CPU).device
        self.functions = StepFunctions(
            self.decoder, self.arena, BLOCK, self.state, self.inputs, None, compiled, self.drafts
        )
        everyone = torch.arange(rows)
        counts = torch.tensor([len(prompt) for prompt in PROMPTS])
        self.inputs.decode_rows[:rows] = everyone
        self.inputs.prefill_rows[:rows] = everyone
        self.inputs.sample_rows[:rows] = everyone
        self.inputs.query_start_loc[1 : rows + 1] = counts.cumsum(0)
        self.inputs.token_rows[:] = everyone.repeat_interleave(counts)
        self.inputs.positions[:] = torch.cat([torch.arange(n) for n in counts.tolist()])
        ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
        self.inputs.token_ids[:] = ids % config.vocab_size

    def prefill(self) -> StepOutput:
        return self.functions.bind(StepKey("prefill", self.tokens, COLUMNS, self.full))()

    def decode(self, steps: int = 1) -> StepOutput:
        return self.functions.bind(StepKey("decode", len(PROMPTS), COLUMNS, self.full, steps))()

    def verify(self, drafts: Sequence[Sequence[int]]) -> StepOutput:
        self.drafts.token_ids[:, : len(drafts[0])] = torch.tensor(drafts)
        self.drafts.counts.fill_(1 + len(drafts[0]))
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
