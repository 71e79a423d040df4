"""Steps of a small sample of a model: one layer per kind, random weights and a small cache.

Self-tests run them at start, before weights are loaded. Shapes are the model's. The cache has only
the blocks that the rows of a step need, in random order. Slots that no token may read contain NaN,
and unused columns of the block tables point to a block of NaN.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import cycle
from operator import itemgetter
from typing import NamedTuple

import torch

from ...cache.arena import Arena, StateMemory
from ...cache.row_states import RowPools
from ...cache.spec import group_layers, row_layout
from ...graphs.buffers import StaticBuffers
from ..kernels import Kernels
from ..kernels.choice import Parts
from ..kernels.ops.kv_storage import read_blocks, write_blocks
from ..kernels.weights import GroupedWeight, StoredRows
from ..kernels.weights.grouped import random_weight
from ..models.config import ModelConfig
from ..models.decoder import Decoder, layer_places
from ..models.plan import fused_layout, model_plan
from ..models.resolved_config import ResolvedConfig
from .inputs import (
    DeviceRows,
    Int64Array,
    PrefillChunk,
    StepInputs,
    write_decode_rows,
    write_prefill,
)
from .step_functions import StepFunctions
from .step_key import StepKey

_POOL = 262_147
"""Number of random values; larger weights repeat them. A prime, so that the rows of a weight begin
at different values."""

_CODE_ROWS = 61
"""Random rows of codes; larger weights repeat them. A prime, so that blocks of rows differ."""


class SampleCase(NamedTuple):
    """A step to run."""

    key: StepKey
    chunks: tuple[tuple[int, int], ...]
    """First position and number of tokens of each row; the remaining lanes are padding."""

    def read_blocks(self, block_size: int) -> int:
        """Return the columns of the block tables that have positions in use."""
        return max(-(-sum(chunk) // block_size) for chunk in self.chunks)


def sample_config(model: ModelConfig, *, layers: int, vocabulary: int) -> ModelConfig:
    """Return the model with one layer of each kind, at least `layers`, and at most `vocabulary`
    tokens.

    Of experts it has as many as a token uses: a rounding cannot change the choice, and a layer
    takes little memory.
    """
    plans = model_plan(model).layers
    kinds = [plans.index(plan) for plan in dict.fromkeys(plans)]
    cut = model.with_layers((kinds * layers)[: max(layers, len(kinds))])
    if (experts := cut.experts) is not None:
        count = experts.num_experts_per_tok
        experts = dataclasses.replace(
            experts, num_experts=count, n_group=1, topk_group=1, group_score="max"
        )
    return dataclasses.replace(
        cut,
        experts=experts,
        vocab_size=min(model.vocab_size, vocabulary),
        bos_token_id=None,
        eos_token_ids=(),
    )


def sample_codes(
    model: ModelConfig, kernels: Kernels, generator: torch.Generator
) -> dict[str, list[StoredRows]]:
    """Return random codes of the parameters that have codes in a layer of the model, by name.

    Each has one of the formats of `kernels`, and a part for each of its matrices.
    """

    def of_any_layer(name: str) -> str:
        return re.sub(r"^layers\.\d+", "layers", name)

    def rows(example: GroupedWeight, n: int, at: int) -> StoredRows:
        return StoredRows(
            example.over(lambda numbers: numbers[:1].expand(n, -1).to("meta")),
            lambda first, stop: example.over(
                itemgetter(torch.arange(at + first, at + stop) % _CODE_ROWS)
            ),
        )

    coded = {of_any_layer(name) for name in kernels.codes}
    parameters = [p for name, p in fused_layout(model).items() if of_any_layer(name) in coded]
    codes = {}
    for parameter, form in zip(parameters, cycle(kernels.formats), strict=False):
        example = _exact(random_weight(form, _CODE_ROWS, parameter.shape[1], generator))
        n = parameter.shape[0] // parameter.matrices
        codes[parameter.name] = [rows(example, n, at) for at in range(parameter.matrices)]
    return codes


def _exact(weight: GroupedWeight) -> GroupedWeight:
    """Return the weight with other scales and minimums, so that bfloat16 has all of its numbers.

    Then decoded weights multiply as codes do. Scales become powers of two, and minimums integer
    multiples of them.
    """
    scales, minimums = weight.scales, weight.minimums
    scales = scales.over(lambda numbers: numbers.float().log2().round().exp2().to(numbers.dtype))
    middle = 1 << weight.levels.bits - 1
    if minimums is not None and minimums.run > 1:
        assert minimums.format == scales.format, "formats with runs have both alike"
        minimums = scales._replace(outer=scales.outer * middle)
    elif minimums is not None:
        steps = scales.groups() * (middle if minimums.inner is None else 1)
        minimums = minimums._replace(outer=steps.to(minimums.outer.dtype))
    return dataclasses.replace(weight, scales=scales, minimums=minimums)


def sample_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    codes: Mapping[str, Sequence[StoredRows]],
    kept: Container[str],
) -> Iterator[tuple[str, torch.Tensor | Parts]]:
    """Yield random weights under the names of `fused_layout`, on the device.

    Linear layers keep the scale of their inputs; norms and biases are not neutral. Weights of which
    there are `codes` are decoded, except those to be `kept`.
    """
    pool = torch.randn(_POOL, generator=generator).to(device=device, dtype=dtype)
    for name, fused in fused_layout(model).items():
        if name in codes:
            parts = codes[name]
            decoded = (part.rows(0, part.shape[0]).decode() for part in parts)
            yield name, parts if name in kept else torch.cat(list(decoded))
            continue
        count = math.prod(fused.shape)
        flat = pool.repeat(-(-count // _POOL))[:count] if count > _POOL else pool[:count].clone()
        if name.endswith("norm.weight"):
            flat.mul_(0.1).add_(0.0 if model.family.offset_norms else 1.0)
        elif name.endswith("bias"):
            flat.mul_(0.1)
        elif name.endswith(("A_log.weight", "mamba.decay.weight")):
            # Slow decays, as trained models have. With fast ones a state is little but the newest
            # key and value, and the norm after a query that is almost orthogonal to this key would
            # scale up rounding errors beyond any tolerance.
            flat.mul_(0.5).sub_(4.0)
        else:
            flat.mul_(fused.shape[-1] ** -0.5)
        yield name, flat.view(fused.shape)


class SampleSteps:
    """A sample of a model with all tensors that its steps read and write."""

    def __init__(
        self,
        model: ModelConfig,
        config: ResolvedConfig,
        kernels: Kernels,
        cases: Sequence[SampleCase],
        seed: int,
    ) -> None:
        """Create the model of a `sample_config`; `seed` determines all random values."""
        device, size = config.device, config.user.block_size
        self._block_size, self._storage = size, config.storage
        self._seed = seed
        self.groups = group_layers(model_plan(model).states)
        generator = torch.Generator().manual_seed(seed)
        codes = sample_codes(model, kernels, generator)
        sizes = {name: kernels.parts_bytes(part[:1], config.dtype) for name, part in codes.items()}
        kept = {name: size * len(codes[name]) for name, size in sizes.items() if size is not None}
        kernels = dataclasses.replace(kernels, codes=kept)
        self.model = Decoder(model, kernels, config.dtype, device, self.groups, config.storage)
        self.model.store(sample_weights(model, config.dtype, device, generator, codes, kept))
        blocks = max(sum(-(-sum(chunk) // size) for chunk in case.chunks) for case in cases)
        count = 2 + blocks * len(self.groups)  # the null block first, a block of NaN last
        arena = Arena(self.groups, count, size, config.dtype, device, config.storage)
        self.arena, self.views = arena.tensor, arena.views
        rows = max(config.user.max_num_seqs, max(len(case.chunks) for case in cases))
        columns = max(case.key.read_blocks for case in cases)
        self._row_states, memory = model_plan(model).row_states, None
        if self._row_states:
            pools = RowPools(1 + rows * columns, 1 + rows * columns, ahead=1)
            places = row_layout(self._row_states, config.dtype.itemsize)
            memory = StateMemory(places, pools, size, device)
        self.state = DeviceRows.allocate(
            rows,
            len(self.groups),
            columns,
            model.vocab_size,
            device,
            rope_by_length=self.model.plan.rope_by_length,
            recurrent=memory is not None,
            memory=memory,
        )
        layout = StepInputs.layout(
            max_num_seqs=rows,
            prefill_tokens=max(
                (case.key.size for case in cases if case.key.phase == "prefill"), default=1
            ),
            prefill_rows=config.max_prefill_rows,
            table_updates=1,
        )
        self._inputs = StaticBuffers(StepInputs[torch.Tensor], layout, device)
        self.functions = StepFunctions(
            *(self.model, self.arena, size, self.state, self._inputs.device, None), compiled=False
        )

    def prepare(self, case: SampleCase) -> None:
        """Reset state, inputs and cache to the initial values of the step, equal in every call."""
        generator = torch.Generator().manual_seed(self._seed + 1)
        vocabulary = self.model.config.vocab_size
        token_ids = torch.randint(vocabulary, self.state.token_ids.shape, generator=generator)
        starts = torch.zeros_like(self.state.positions, device="cpu")
        starts[: len(case.chunks)] = torch.tensor([start for start, _ in case.chunks])
        self.state.token_ids.copy_(token_ids)
        self.state.positions.copy_(starts)
        self._fill_cache(case, generator)
        null_row, host = self.state.null_row, self._inputs.arrays(StepInputs[Int64Array])
        self._inputs.begin_write()
        if case.key.phase == "decode":
            write_decode_rows(range(len(case.chunks)), null_row, host)
        else:
            chunks = []
            for row, (start, count) in enumerate(case.chunks):
                drawn = torch.randint(vocabulary, (start + count,), generator=generator)
                chunks.append(PrefillChunk(row, start, drawn.tolist()[start:]))
            write_prefill(chunks, null_row, case.key.size, host)
        self._inputs.copy_to_device()

    def _fill_cache(self, case: SampleCase, generator: torch.Generator) -> None:
        """Assign blocks to the rows, and write random keys and values before their chunks."""
        size, device = self._block_size, self.arena.device
        numbers = torch.Generator(device).manual_seed(self._seed)
        if self._storage == "model":
            self.arena.fill_(float("nan"))
        else:
            self.arena.fill_(255)  # any 8-bit values, with NaN scales
        for view in self.views:
            view[:, :, 0].zero_()
        self._fill_states(case, numbers)
        nowhere = self.views[0].shape[2] - 1
        tables = torch.full(self.state.block_tables.shape, nowhere, dtype=torch.int32)
        tables[:, self.state.null_row] = 0
        places = layer_places(self.groups)
        free = iter((torch.randperm(nowhere - 1, generator=generator) + 1).tolist())
        for group in self.groups:
            window = group.window
            slots = []
            for row, (start, count) in enumerate(case.chunks):
                first = 0 if window is None else max(0, start + 1 - window)
                for column in range(first // size, -(-(start + count) // size)):
                    tables[group.index, row, column] = next(free)
                positions = torch.arange(first, start)
                blocks = tables[group.index, row, positions // size].to(torch.int64)
                slots.append(blocks * size + positions % size)
            slots_S = torch.cat(slots).to(device)
            for layer, state in zip(group.layers, group.states, strict=True):
                shape = (len(slots_S), state.heads, state.head_dim)
                for side in self.views[places[layer].layout][places[layer].position]:
                    x = torch.randn(shape, generator=numbers, device=device)
                    write_blocks(side, slots_S, x.to(self.model.dtype), size, self._storage)
        self.state.block_tables[: len(self.groups)].copy_(tables[: len(self.groups)])

    def _fill_states(self, case: SampleCase, numbers: torch.Generator) -> None:
        """Give every column of the rows random recurrent state; decode steps begin in a block
        whose snapshot is not stored yet."""
        memory, state, size = self.state.memory, self.state, self._block_size
        if memory is None or state.stored is None:
            return
        layout = row_layout(self._row_states, self.model.dtype.itemsize)
        for own, place in zip(self._row_states, layout.places, strict=True):
            for tensor, parts, offsets, entries in (
                (memory.snapshots, own.snapshot, place.snapshot, 1),
                (memory.inputs, own.inputs, place.inputs, size),
            ):
                for part, at in zip(parts, offsets, strict=True):
                    dtype = self.model.dtype if part.dtype == "model" else torch.float32
                    count = entries * math.prod(part.shape)
                    drawn = torch.randn(
                        len(tensor) - 1, count, generator=numbers, device=tensor.device
                    )
                    start, stop = at * entries, at * entries + count * dtype.itemsize
                    # Decays are logarithms, so large numbers would not stay finite.
                    values = (0.1 * drawn).to(dtype).view(torch.uint8)
                    tensor[1:, start:stop].copy_(values)
        rows, columns = state.block_tables.shape[1] - 1, state.block_tables.shape[2]
        tables = 1 + torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
        state.block_tables[-2:, :rows].copy_(tables.to(state.block_tables.device))
        state.stored.zero_()
        for row, (start, _) in enumerate(case.chunks):
            before = case.key.phase == "decode" and start >= size
            state.stored[row] = start // size - before

    def stored(self) -> torch.Tensor:
        """Return all cached vectors except padding, flat; NaN where nothing was written."""
        blocks = torch.arange(1, self.views[0].shape[2], device=self.arena.device)
        sides = [side for view in self.views for side in view.flatten(0, 1)]
        read = [read_blocks(s, blocks, self._block_size, self._storage) for s in sides]
        return torch.cat([vectors.flatten() for vectors in read])

    def close(self) -> None:
        """Release the weights."""
        if self.model.stack is not None:
            self.model.stack.close()
