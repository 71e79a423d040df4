"""What rank 0 sends the other ranks of a tensor-parallel group: changes on the device, and steps.

The commands follow one another exactly as rank 0 applies them to its own device. While nothing but
tokens changes, a step is one command, its key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import astuple
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..distributed.rank_group import RankGroup
from ..sampling.sampling_state import RowParameters
from .step_key import StepKey

__all__ = ["Command", "CommandSender", "pack", "unpack"]

BlockCopy = Literal["within", "to_host", "from_host"]
InputBuffer = Literal["steps", "embeds", "drafts"]
_Array = npt.NDArray[Any]


class Command(IntEnum):
    """Kind of a message. `Follower` has a function for each, which takes what `pack` was given."""

    RUN = 1
    INPUTS = 2
    ROW = 3
    COPY_BLOCKS = 4
    FORCE_TOKEN = 5
    SCORE = 6
    PADDING = 7
    RELOAD = 8
    SERVE = 9
    CLOSE = 10
    MASKS = 11
    CLEAR_DRAFTER = 12


class CommandSender:
    """Sends the commands of a runner. Every method publishes one, before the runner applies it."""

    def __init__(self, group: RankGroup) -> None:
        """Send to the ranks of a group, of which this is rank 0."""
        assert group.rank == 0
        self.group = group
        self._send = group.send
        self._runs: dict[tuple[StepKey, int, bool], bytes] = {}

    def run(self, key: StepKey, lanes: int, *, awaits_masks: bool = False) -> None:
        """Run a step, whose first `lanes` tokens are checked in.

        If it awaits masks, these follow with `masks`, after new drafts of the step if it has any.
        """
        packed = self._runs.get((key, lanes, awaits_masks))
        if packed is None:
            packed = pack([astuple(key), lanes, awaits_masks])
            self._runs[key, lanes, awaits_masks] = packed
        self._send(Command.RUN, packed)

    def masks(
        self,
        allowed: Sequence[int],
        written: Sequence[int],
        masks: npt.NDArray[np.int32],
        tokens_per_row: int,
    ) -> None:
        """Write the masks of a step.

        Args:
            allowed: rows that may sample any token.
            written: indices of the other masks that were written.
            masks: all masks, `[masks, words]`.
            tokens_per_row: masks of each row that are copied to the device.
        """
        index = np.array(written, dtype=np.int64)
        self._send(Command.MASKS, pack([tokens_per_row, [*allowed]], [index, masks[index]]))

    def inputs(
        self, buffer: InputBuffer, arrays: object, counts: dict[str, int], updates: int = 0
    ) -> None:
        """Copy the first `counts` elements of fields of a dataclass of arrays.

        Afterwards write the first `updates` of `table_updates` into the block tables.
        """
        values = [getattr(arrays, name)[:count] for name, count in counts.items()]
        self._send(Command.INPUTS, pack([buffer, updates, [*counts]], values))

    def row(self, row: int, rope_length: int, parameters: RowParameters) -> None:
        """Assign a row to a request."""
        arrays = [parameters.reals.numpy(), parameters.integers.numpy()]
        if (counts := parameters.token_counts) is not None:
            used = counts.nonzero()[:, 0]
            arrays += [used.numpy(), counts[used].numpy()]
        self._send(Command.ROW, pack([row, rope_length], arrays))

    def call(self, command: Command, *arguments: object) -> None:
        """Apply a command whose arguments are numbers, strings and lists of them."""
        self._send(command, pack(arguments))


def pack(arguments: Sequence[object], arrays: Sequence[_Array] = ()) -> bytes:
    """Return the payload of a message: arguments that JSON has, and arrays after them."""
    layout = [(array.dtype.str, array.shape) for array in arrays]
    head = json.dumps([arguments, layout]).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *(a.tobytes() for a in arrays)])


def unpack(payload: bytes) -> list[Any]:
    """Return the arguments and arrays of `pack`; the arrays are read-only."""
    begin = 4 + int.from_bytes(payload[:4], "little")
    arguments, layout = json.loads(payload[4:begin])
    for dtype, shape in layout:
        array = np.frombuffer(payload, dtype, math.prod(shape), begin).reshape(shape)
        arguments.append(array)
        begin += array.nbytes
    return list(arguments)
