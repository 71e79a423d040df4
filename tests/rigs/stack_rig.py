"""A decoder whose layers run as one operation or one by one, over a poisoned cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from stepgraph.cache.arena import Arena, Storage
from stepgraph.cache.spec import LayerGroup, group_layers
from stepgraph.runtime.kernels import RaggedBatch, select_kernels
from stepgraph.runtime.kernels.ops.attention import Attend
from stepgraph.runtime.kernels.weights import MODEL, WeightStorage
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.decoder import Decoder
from stepgraph.runtime.models.plan import model_plan

from .tiny_models import TinyModel, load_weights

CPU = torch.device("cpu")
BLOCK_SIZE = 8
ROWS = 3
LENGTH = 160


def ragged_batch(
    tables: torch.Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    live: Sequence[bool] | bool = True,
    per_row: int | None = None,
) -> RaggedBatch:
    """Tokens, those of a row together; what is not `live` goes to the null block."""
    rows_T, positions_T = torch.tensor(rows), torch.tensor(positions)
    blocks = tables[:, rows_T, positions_T // BLOCK_SIZE].long()
    counts = [len(list(group)) for _, group in itertools.groupby(rows)]
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    return RaggedBatch(
        positions=positions_T,
        slots=(blocks * BLOCK_SIZE + positions_T % BLOCK_SIZE) * torch.tensor(live),
        token_rows=rows_T,
        rows=torch.tensor(list(dict.fromkeys(rows))),
        block_tables=tables,
        read_blocks=tables.shape[-1],
        block_size=BLOCK_SIZE,
        tokens_per_row=per_row,
        query_start_loc=None if per_row else starts,
    )


class Rig:
    """A decoder and an arena that is NaN wherever a step has no business."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        storage: Storage = "model",
        weights: WeightStorage = MODEL,
    ) -> None:
        torch.manual_seed(0)
        self.config, self.dtype, self.storage = config, dtype, storage
        groups = group_layers(model_plan(config).states)
        self.decoder = Decoder(
            config, select_kernels(CPU, "compile", dtype, weights), dtype, CPU, groups, storage
        )
        self.plan = self.decoder.plan
        self.make_cache(groups, config.hidden_size, config.head_dim)

    def make_cache(self, groups: Sequence[LayerGroup], hidden_size: int, head_dim: int) -> None:
        """Make an arena of random numbers, and tables of random blocks."""
        self.groups, self.hidden_size = groups, hidden_size
        dtype, storage = self.dtype, self.storage
        self.columns = LENGTH // BLOCK_SIZE
        blocks = 1 + ROWS * self.columns * len(groups)
        self.arena = Arena(groups, blocks, BLOCK_SIZE, dtype, CPU, storage).tensor
        tables = 1 + torch.randperm(blocks - 1, dtype=torch.int32)
        self.tables = torch.zeros(len(groups), ROWS + 1, self.columns, dtype=torch.int32)
        self.tables[:, :ROWS] = tables.view(len(groups), ROWS, self.columns)
        if storage == "model":
            self.arena.normal_()
        else:
            # Scales are bfloat16 of ordinary size, and data is anything.
            width = head_dim * BLOCK_SIZE
            self.arena.random_(0, 120)
            scales = torch.rand(self.arena[..., width::2].shape) * 0.02
            self.arena[..., width:] = scales.bfloat16().view(torch.uint8)

    @classmethod
    def of(cls, model: TinyModel, dtype: torch.dtype, **form: Any) -> Rig:
        rig = cls(read_config(model.directory), dtype, **form)
        load_weights(rig.decoder, model.directory)
        return rig

    def inputs(self, chunks: Sequence[tuple[int, int, int]]) -> RaggedBatch:
        rows = [row for row, _, n in chunks for _ in range(n)]
        return ragged_batch(self.tables, rows, [at + i for _, at, n in chunks for i in range(n)])

    def hidden(self, inputs: RaggedBatch) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = (len(inputs.positions), self.hidden_size)
        return torch.randn(shape, generator=generator).to(self.dtype)

    def poison(self, inputs: RaggedBatch) -> None:
        """Everything becomes NaN that no token of the step reads before it is written."""
        seen = torch.zeros(len(self.groups), self.arena.shape[2], BLOCK_SIZE, dtype=torch.bool)
        for group in self.groups:
            for row, at in zip(inputs.token_rows, inputs.positions, strict=True):
                for layer in group.layers:
                    read = torch.tensor(self.seen(layer, int(at)))
                    blocks = self.tables[group.index, row, read // BLOCK_SIZE]
                    seen[group.index, blocks, read % BLOCK_SIZE] = True
        kept = seen.any(0)
        if self.storage == "model":
            self.arena.masked_fill_(~kept[None, None, :, None, :, None], torch.nan)
        else:
            self.arena[:, :, ~kept.any(-1)] = 255  # all ones are NaN in bfloat16

    def seen(self, layer: int, position: int) -> range:
        """Positions that a token attends to in a layer."""
        operations = self.plan.layers[layer].operations
        (attend,) = (op for op in operations if isinstance(op, Attend))
        begin = max(0, position - (attend.window or LENGTH) + 1)
        if attend.chunk:
            begin = max(begin, position - position % attend.chunk)
        return range(begin, position + 1)

    def step(
        self, inputs: RaggedBatch, x_TD: torch.Tensor, *, stacked: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and the arena afterwards, which the next call does not see."""
        arena, stack = self.arena.clone(), self.decoder.stack
        assert stack is not None
        if not stacked:
            self.decoder.stack = None
        with torch.no_grad():
            out = self.decoder.decode(x_TD, arena, inputs)
        self.decoder.stack = stack
        return out, arena


# Tokens of a step as (row, first position, count).
CHUNKS = {
    "T=1": [(0, 37, 1)],
    "T=2": [(0, 9, 1), (2, 150, 1)],
    "T=7": [(1, 0, 7)],
    "T=33": [(0, 5, 1), (1, 17, 31), (2, 0, 1)],
    "T=130": [(0, 20, 80), (1, 0, 49), (2, 129, 1)],
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.06}
"""Of the largest element: bfloat16 rounds to 2**-9 of it, several times a layer."""


def assert_agrees(rig: Rig, inputs: RaggedBatch, x_TD: torch.Tensor) -> None:
    """The stack and the modules return and write the same.

    Norms of small vectors magnify roundings: where the difference exceeds the tolerance, it may be
    up to eight times what one more rounding of the inputs changes.
    """
    expected, expected_arena = rig.step(inputs, x_TD, stacked=False)
    out, arena = rig.step(inputs, x_TD)
    assert out.isfinite().all()
    size = expected.double().abs().max()
    # In quantised storage a rounding of the input may go to the next code.
    limit = TOLERANCE[rig.dtype] if rig.storage == "model" else 5e-3
    error_T = (out.double() - expected.double()).abs().amax(1) / size
    error = (arena.double() - expected_arena.double()).abs()
    allowed = 8 * limit + 0.05 * expected_arena.double().abs()
    if error_T.max() >= limit or (error > allowed).any():
        for again in _rounded_again(x_TD):
            moved, moved_arena = rig.step(inputs, again, stacked=False)
            moved_T = (moved.double() - expected.double()).abs().amax(1) / size
            error_T[error_T < 8 * moved_T] = 0
            error[error < 8 * (moved_arena.double() - expected_arena.double()).abs()] = 0
    assert error_T.max() < limit, error_T.max()
    # Which bytes were written is the same; what the first layer writes is nearly so.
    if rig.storage == "model":
        assert torch.equal(arena.isnan(), expected_arena.isnan())
        assert not (error > allowed).any(), error.nan_to_num().max()


def _rounded_again(x_TD: torch.Tensor) -> list[torch.Tensor]:
    """Four copies of `x_TD` whose elements are each one rounding away from it."""
    eps = torch.finfo(x_TD.dtype).eps
    return [x_TD * (1 + eps * (2 * torch.randint(2, x_TD.shape) - 1)).to(x_TD) for _ in range(4)]
