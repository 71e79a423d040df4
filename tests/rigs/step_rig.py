"""The steps of a decoder over tensors of their own, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from stepgraph.cache.arena import Arena, StateMemory, Storage, arena_views
from stepgraph.cache.row_states import RowPools
from stepgraph.cache.spec import group_layers, layouts, row_layout
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.runtime import SamplingParams
from stepgraph.runtime.execution.inputs import DeviceRows, DraftInputs, Int64Array, StepInputs
from stepgraph.runtime.execution.step_functions import StepFunctions
from stepgraph.runtime.kernels import Kernels
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.decoder import Decoder
from stepgraph.runtime.models.plan import model_plan

CPU = torch.device("cpu")


class StepRig:
    """Rows with blocks in random order; of these, nothing but the null block is written yet."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        *,
        rows: int,
        columns: int,
        block_size: int,
        lanes: int,
        drafts: int,
        prefill_tokens: int = 1,
        hidden: int = 0,
        params: Sequence[SamplingParams] = (),
        storage: Storage = "model",
        compiled: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """Make a decoder without weights, and its steps.

        Args:
            config: of the model.
            kernels: of the steps.
            dtype: of the model.
            rows: with blocks.
            columns: blocks of a row in each layer group.
            block_size: slots of a block.
            lanes: rows of the largest step.
            drafts: most drafts of a row in a verify step.
            prefill_tokens: tokens of the largest prefill step.
            hidden: tokens whose hidden states prefill steps keep; 0: none.
            params: of the first rows; the others are greedy.
            storage: of keys and values.
            compiled: whether steps are compiled.
            device: of all tensors.
        """
        generator = torch.Generator().manual_seed(0)
        groups = group_layers(model_plan(config).states)
        self.decoder = Decoder(config, kernels, dtype, device, groups, storage)
        blocks = 2 + rows * columns * len(groups)
        self.arena = Arena(groups, blocks, block_size, dtype, device, storage).tensor
        self.layers = arena_views(self.arena, layouts(groups), block_size, storage)
        self.poison()
        states, memory = self.decoder.plan.row_states, None
        if states:
            pools = RowPools(1 + rows * columns, 1 + rows * columns, ahead=1)
            memory = StateMemory(row_layout(states, dtype.itemsize), pools, block_size, device)
        self.state = DeviceRows.allocate(
            rows,
            len(groups),
            columns,
            config.vocab_size,
            device,
            rope_by_length=self.decoder.plan.rope_by_length,
            recurrent=memory is not None,
            memory=memory,
        )
        order = 1 + torch.randperm(blocks - 2, dtype=torch.int32, generator=generator)
        self.state.block_tables[: len(groups), :rows] = order.view(len(groups), rows, columns)
        if memory is not None:
            entries = torch.randperm(rows * columns, dtype=torch.int32, generator=generator)
            self.state.block_tables[-2:, :rows] = 1 + entries.view(rows, columns)
        for row, own in enumerate(params):
            parameters = self.state.sampling.row_parameters(
                own, seed=row, prompt_ids=[1, 2], output_ids=[], stop_token_ids=()
            )
            self.state.sampling.store_row(row, parameters)
        layout = StepInputs.layout(
            max_num_seqs=lanes, prefill_tokens=prefill_tokens, prefill_rows=lanes, table_updates=1
        )
        self.inputs = StaticBuffers(StepInputs[torch.Tensor], layout, device)
        self.input_arrays = self.inputs.arrays(StepInputs[Int64Array])
        room = DraftInputs.layout(max_num_seqs=lanes, drafts=drafts)
        self.drafts = StaticBuffers(DraftInputs[torch.Tensor], room, device)
        self.draft_arrays = self.drafts.arrays(DraftInputs[Int64Array])
        self.hidden = torch.zeros(hidden, config.hidden_size, dtype=dtype, device=device)
        self.functions = StepFunctions(
            *(self.decoder, self.arena, block_size, self.state, self.inputs.device, None),
            *(compiled, self.drafts.device, self.hidden if hidden else None),
        )

    def poison(self) -> None:
        """Fill every block but the null block with NaN."""
        poison = torch.nan if self.decoder.storage == "model" else 255
        for layers in self.layers:
            layers[:, :, 1:] = cast(float, poison)
