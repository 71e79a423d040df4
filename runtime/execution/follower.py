"""Runs the commands of rank 0 on another rank of a tensor-parallel group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from ..distributed.rank_group import RankGroup
from ..errors import RankError
from ..kernels.cpu.threads import limit_threads
from ..sampling.sampling_state import RowParameters
from .outputs import OUTPUT_SETS
from .rank_commands import Command, InputBuffer, unpack
from .runner import Runner
from .step_key import StepKey, StepOutput

__all__ = ["Follower"]

_Array = npt.NDArray[Any]


class _Pending(NamedTuple):
    """A step whose tokens are on their way to the host."""

    arrived: torch.cuda.Event
    output: StepOutput
    lanes: int


class Follower:
    """Applies commands to a prepared runner, until rank 0 closes the group."""

    def __init__(
        self,
        runner: Runner,
        group: RankGroup,
        reload: Callable[[str], None],
        serve: Callable[[float], None],
    ) -> None:
        """Follow with the runner of this rank.

        Args:
            runner: prepared like rank 0's.
            group: of the rank.
            reload: replaces the weights by a source's.
            serve: sets how many seconds this rank waits for the others.
        """
        self._runner = runner
        self._group = group
        self._arrays: dict[InputBuffer, object] = {
            name: buffers.arrays(type(buffers.device))
            for name, buffers in runner.input_buffers.items()
        }
        self._keys: dict[bytes, tuple[StepKey, int, bool]] = {}
        self._pending: deque[_Pending] = deque()
        self._launched = 0
        self._apply: dict[int, Callable[..., None]] = {
            Command.INPUTS: self._inputs,
            Command.ROW: self._row,
            Command.MASKS: self._masks,
            Command.COPY_BLOCKS: runner.blocks.copy,
            Command.CLEAR_DRAFTER: runner.blocks.clear_drafter,
            Command.FORCE_TOKEN: runner.force_token,
            Command.SCORE: runner.scorer.run,
            Command.PADDING: runner.place_padding,
            Command.RELOAD: reload,
            Command.SERVE: serve,
        }

    def follow(self) -> None:
        """Apply commands until rank 0 ends them.

        Raises:
            RankError: the group has failed.
        """
        while True:
            kind, payload = self._receive()
            if kind == Command.CLOSE:
                return
            if kind == Command.RUN:
                if payload not in self._keys:
                    key, lanes, awaits_masks = unpack(payload)
                    self._keys[payload] = StepKey(*key), lanes, awaits_masks
                self._run(*self._keys[payload])
            else:
                self._apply[kind](*unpack(payload))

    def _run(self, key: StepKey, lanes: int, awaits_masks: bool) -> None:
        runner = self._runner
        if awaits_masks:
            assert runner.followed_masks is not None, "this rank has no token masks"
            runner.followed_masks.receive = self._receive_masks
        if runner.threads is not None:
            limit_threads(runner.threads)
        if not lanes:
            runner.run(key)
            return
        if runner.outputs is None:
            self._group.check_in(runner.checked_tokens(runner.run(key), lanes))
            return
        while len(self._pending) >= OUTPUT_SETS:  # whose buffers are used again
            self._check_in_first()
        number, self._launched = self._launched, self._launched + 1
        output = runner.outputs.copy_async(number, key.phase, runner.run(key))
        arrived = runner.outputs.record_event(number, None)
        assert arrived is not None
        self._pending.append(_Pending(arrived, output, lanes))

    def _receive_masks(self) -> None:
        """Apply what rank 0 sends within a step, up to its masks."""
        while True:
            kind, payload = self._receive()
            if kind not in (Command.INPUTS, Command.MASKS):
                raise RankError(
                    f"rank {self._group.rank} awaits token masks, and rank 0 sent the command"
                    f" {Command(kind).name}"
                )
            self._apply[kind](*unpack(payload))
            if kind == Command.MASKS:
                return

    def _masks(
        self, tokens_per_row: int, allowed: list[int], written: _Array, values: _Array
    ) -> None:
        masks = self._runner.followed_masks
        assert masks is not None, "this rank has no token masks"
        masks.write(allowed, written, values, tokens_per_row)

    def _receive(self) -> tuple[int, bytes]:
        """Receive a command, and check in the steps that rank 0 has read before it."""
        steps, checksum, command = self._group.receive()
        while self._group.steps < steps:
            self._check_in_first()
        if self._group.steps == steps and self._group.checksum != checksum:
            raise RankError(
                f"its tokens differ from rank 0's at step {steps}: checksum"
                f" {self._group.checksum:08x}, and {checksum:08x} on rank 0"
            )
        return command

    def _check_in_first(self) -> None:
        step = self._pending.popleft()
        step.arrived.synchronize()
        self._group.check_in(self._runner.checked_tokens(step.output, step.lanes))

    def _inputs(self, buffer: InputBuffer, updates: int, names: list[str], *values: _Array) -> None:
        runner = self._runner
        target, arrays = runner.input_buffers[buffer], self._arrays[buffer]
        target.begin_write()
        for name, own in zip(names, values, strict=True):
            getattr(arrays, name)[: len(own)] = own
        target.copy_to_device()
        if updates:
            runner.state.update_tables(runner.inputs.device.table_updates[:updates])

    def _row(
        self, row: int, rope_length: int, reals: _Array, integers: _Array, *counts: _Array
    ) -> None:
        dense = None
        if counts:
            used, values = map(_copied, counts)
            vocabulary = self._runner.state.sampling.token_counts.shape[1]
            dense = torch.zeros(vocabulary, dtype=torch.int32)
            dense[used] = values
        parameters = RowParameters(_copied(reals), _copied(integers), dense)
        self._runner.assign_row(row, rope_length, parameters)


def _copied(array: _Array) -> torch.Tensor:
    return torch.from_numpy(array.copy())
