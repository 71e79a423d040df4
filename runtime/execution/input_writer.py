"""Writes the changed inputs of a plan, and copies them to the device and to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from ...graphs.buffers import StaticBuffers
from ...profiling import ranges
from ..resolved_config import ResolvedConfig
from ..scheduling.plan import StepPlan, TableUpdate
from .inputs import (
    DraftInputs,
    EmbedInputs,
    Int64Array,
    StepInputs,
    prefill_fields,
    write_decode_rows,
    write_drafts,
    write_embeds,
    write_prefill,
    write_table_updates,
)
from .prompt_scorer import PromptScorer
from .rank_commands import CommandSender, InputBuffer
from .row_state import RowState
from .step_key import StepKey
from .step_sizes import most_table_updates

__all__ = ["InputWriter"]


class InputWriter:
    """Owns the input buffers of steps and their mirrors on the host."""

    def __init__(
        self,
        config: ResolvedConfig,
        num_groups: int,
        hidden_size: int,
        state: RowState,
        scorer: PromptScorer,
        commands: CommandSender | None,
    ) -> None:
        """Allocate the buffers.

        Args:
            config: of the engine.
            num_groups: layer groups of the cache.
            hidden_size: of the model.
            state: whose block tables are updated.
            scorer: of prompt tokens; its inputs are written along.
            commands: see `Runner`.
        """
        self._state, self._scorer, self._commands = state, scorer, commands
        self.max_prefill_rows = config.max_prefill_rows
        self.inputs = StaticBuffers.allocate(
            StepInputs[torch.Tensor],
            StepInputs.layout(
                max_num_seqs=config.max_num_seqs,
                prefill_tokens=config.prefill_chunk,
                prefill_rows=self.max_prefill_rows,
                table_updates=most_table_updates(config, num_groups),
            ),
            config.device,
        )
        self._host: StepInputs[Int64Array] = self.inputs.arrays(StepInputs[Int64Array])
        self.embeds: StaticBuffers[EmbedInputs[torch.Tensor]] | None = None
        if config.prompt_embeds:
            self.embeds = StaticBuffers.allocate(
                EmbedInputs[torch.Tensor],
                EmbedInputs.layout(prefill_tokens=config.prefill_chunk, hidden_size=hidden_size),
                config.device,
            )
        self.drafts: StaticBuffers[DraftInputs[torch.Tensor]] | None = None
        if config.tokens_per_row:
            self.drafts = StaticBuffers.allocate(
                DraftInputs[torch.Tensor],
                DraftInputs.layout(
                    max_num_seqs=config.max_num_seqs, drafts=config.tokens_per_row[-1] - 1
                ),
                config.device,
            )
            self._host_drafts = self.drafts.arrays(DraftInputs[Int64Array])
            # What other ranks read; `stops` are for a drafter.
            read = ["token_ids", "counts", *["stops"] * bool(config.proposed_drafts)]
            self._draft_fields = dict.fromkeys(read, config.max_num_seqs)
        self.buffers: dict[InputBuffer, StaticBuffers[Any]] = {"steps": self.inputs}
        """Of every step and, where there are any, of embeddings and drafts."""
        if self.embeds is not None:
            self.buffers["embeds"] = self.embeds
        if self.drafts is not None:
            self.buffers["drafts"] = self.drafts
        self._written_drafts: tuple[list[list[int]], list[int]] = ([], [])
        self._embeds_shown = False  # set by the last prefill step
        self.decode_rows: list[int] = []
        """As last written."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(buffers.nbytes for buffers in self.buffers.values())

    def addresses(self) -> dict[str, int]:
        """Return the device address of each field of the buffers, which must never change."""
        return {
            f"{name}.{field}": address
            for name, buffers in self.buffers.items()
            for field, address in buffers.addresses().items()
        }

    def write(self, plan: StepPlan, rows: list[int], prefill_key: StepKey | None) -> None:
        """Write the decoding rows, the chunks of prompts and the updates of block tables."""
        updates = plan.table_updates
        most = self._host.table_updates.shape[0]
        while len(updates) > most:
            self._copy_updates(updates[:most], {})
            updates = updates[most:]
        with ranges.span(ranges.PREPARE, len(rows)):
            self.inputs.begin_write()
            changed: dict[str, int] = {}
            if rows != self.decode_rows:
                write_decode_rows(rows, self._state.null_row, self._host)
                self.decode_rows = rows
                changed["decode_rows"] = len(self._host.decode_rows)
            if prefill_key is not None:
                write_prefill(plan.prefill, self._state.null_row, prefill_key.size, self._host)
                changed |= prefill_fields(prefill_key.size, self.max_prefill_rows)
                self._write_embeds(plan)
                self._scorer.write(plan.prefill)
        if updates:
            self._copy_updates(updates, changed)
        else:
            self._copy(changed)

    def write_drafts(self, drafts: Sequence[Sequence[int]], stops: Sequence[int]) -> None:
        """Write and copy the drafts of the decoding rows, in their order; see `DraftInputs`.

        They seldom change where rows keep their drafts on the device.
        """
        assert self.drafts is not None, "a verify step without speculation"
        written = [list(own) for own in drafts], list(stops)
        if written == self._written_drafts:
            return
        self.drafts.begin_write()
        write_drafts(drafts, stops, self._host_drafts)
        if self._commands is not None:
            self._commands.inputs("drafts", self._host_drafts, self._draft_fields)
        self.drafts.copy_to_device()
        self._written_drafts = written

    def _write_embeds(self, plan: StepPlan) -> None:
        """Copy the embeddings of the chunks, or clear the mask of the last prefill step."""
        if self.embeds is None:
            return
        shown = any(chunk.request.embeds for chunk in plan.prefill)
        if shown or self._embeds_shown:
            self.embeds.begin_write()
            write_embeds(plan.prefill, self.embeds.host)
            if self._commands is not None:
                arrays = self.embeds.arrays(EmbedInputs[npt.NDArray[Any]])
                tokens = plan.prefill_tokens if shown else 0
                counts = {"embeds": tokens, "mask": len(arrays.mask)}
                self._commands.inputs("embeds", arrays, counts)
            self.embeds.copy_to_device()
        self._embeds_shown = shown

    def _copy_updates(self, updates: Sequence[TableUpdate], changed: dict[str, int]) -> None:
        self.inputs.begin_write()
        write_table_updates(updates, self._host)
        self._copy(changed | {"table_updates": len(updates)}, len(updates))

    def _copy(self, changed: dict[str, int], updates: int = 0) -> None:
        """Copy the inputs, of which these fields have changed, and update the block tables."""
        if self._commands is not None:
            self._commands.inputs("steps", self._host, changed, updates)
        with ranges.span(ranges.COPY, self.inputs.nbytes):
            self.inputs.copy_to_device()
        if updates:
            self._state.update_tables(self.inputs.device.table_updates[:updates])
