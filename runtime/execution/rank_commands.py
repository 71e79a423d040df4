"""What rank 0 sends the other ranks of a tensor-parallel group: changes on the device, and steps.

The commands follow one another exactly as rank 0 applies them to its own device. While nothing but
tokens changes, a step is one command, its key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from struct import Struct
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..distributed.rank_group import RankGroup
from ..sampling.sampling_state import RowParameters
from .step_key import StepKey, StepPart

__all__ = ["INPUT_BUFFERS", "Command", "CommandSender", "Inputs", "decode_inputs"]

BlockCopy = Literal["within", "to_host", "from_host"]
InputBuffer = Literal["steps", "embeds", "drafts"]
INPUT_BUFFERS: tuple[InputBuffer, ...] = ("steps", "embeds", "drafts")

_PARTS: tuple[StepPart, ...] = ("whole", "forward", "sample")
_PREFILL, _FULL_SAMPLER, _MASKED, _AWAITS_MASKS, _PART = 1, 2, 4, 8, 16
"""Bits of a key; from the last one on the index of its part."""
_RUN = Struct("<BIIHHHI")
_INPUTS, _FIELD = Struct("<BBI"), Struct("<BI")
_ROW = Struct("<Iqq")
_MASKS = Struct("<III")


class Command(IntEnum):
    """Kind of a message. Those that `CommandSender.call` sends have their arguments as JSON."""

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


class Inputs(NamedTuple):
    """Changed fields of static buffers."""

    buffer: InputBuffer
    updates: int
    """Entries of `table_updates` to write into the block tables, after the copy."""
    values: list[tuple[str, npt.NDArray[Any]]]
    """Name of each field, and its first elements."""


class CommandSender:
    """Sends the commands of a runner. Every method publishes one, before the runner applies it.

    What only prepares a step does not wake a rank that sleeps: the step does.
    """

    def __init__(self, group: RankGroup) -> None:
        """Send to the ranks of a group, of which this is rank 0."""
        assert group.rank == 0
        self.group = group
        self._send = group.writer.send
        self._runs: dict[tuple[StepKey, int, bool], bytes] = {}
        self._fields: dict[type, dict[str, int]] = {}
        """Indices of the fields of dataclasses."""

    def run(self, key: StepKey, lanes: int, *, awaits_masks: bool = False) -> None:
        """Run a step, whose first `lanes` tokens are checked in.

        If it awaits masks, these follow with `masks`, after new drafts of the step if it has any.
        """
        encoded = self._runs.get((key, lanes, awaits_masks))
        if encoded is None:
            encoded = encode_run(key, lanes, awaits_masks=awaits_masks)
            self._runs[key, lanes, awaits_masks] = encoded
        self._send(Command.RUN, encoded)

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
            written: indices of other masks that were written, those of the former rows not.
            masks: all masks, `[masks, words]`.
            tokens_per_row: masks of each row that are copied to the device.
        """
        header = _MASKS.pack(len(allowed), len(written), tokens_per_row)
        indices = np.asarray((*allowed, *written), dtype=np.uint32).tobytes()
        words = b"".join([masks[index].tobytes() for index in written])
        self._send(Command.MASKS, header + indices + words)

    def inputs(
        self, buffer: InputBuffer, arrays: object, counts: dict[str, int], updates: int = 0
    ) -> None:
        """Copy the first `counts` elements of fields of a dataclass of arrays; see `Inputs`."""
        indices = self._fields.get(type(arrays))
        if indices is None:
            names = [field.name for field in fields(arrays)]  # type: ignore[arg-type]
            indices = self._fields[type(arrays)] = {name: i for i, name in enumerate(names)}
        parts = [_INPUTS.pack(INPUT_BUFFERS.index(buffer), len(counts), updates)]
        parts += [_FIELD.pack(indices[name], count) for name, count in counts.items()]
        parts += [getattr(arrays, name)[:count].tobytes() for name, count in counts.items()]
        self._send(Command.INPUTS, b"".join(parts), wake=False)

    def row(self, row: int, rope_length: int, parameters: RowParameters) -> None:
        """Assign a row to a request."""
        counts = parameters.token_counts
        used = torch.zeros(0, dtype=torch.int64) if counts is None else counts.nonzero()[:, 0]
        parts = [
            _ROW.pack(row, rope_length, -1 if counts is None else len(used)),
            *(tensor.numpy().tobytes() for tensor in (parameters.reals, parameters.integers)),
        ]
        if counts is not None:
            parts += [used.numpy().tobytes(), counts[used].numpy().tobytes()]
        self._send(Command.ROW, b"".join(parts), wake=False)

    def call(self, command: Command, *arguments: object, wake: bool = False) -> None:
        """Apply a command whose arguments are numbers, strings and lists of them."""
        self._send(command, json.dumps(arguments).encode(), wake=wake)


def encode_run(key: StepKey, lanes: int, *, awaits_masks: bool = False) -> bytes:
    """Return the payload of `Command.RUN`."""
    flags = (
        _PREFILL * (key.phase == "prefill")
        | _FULL_SAMPLER * key.full_sampler
        | _MASKED * key.masked
        | _AWAITS_MASKS * awaits_masks
        | _PART * _PARTS.index(key.part)
    )
    sizes = key.size, key.read_blocks, key.steps, key.tokens_per_row, key.drafts
    return _RUN.pack(flags, *sizes, lanes)


def decode_run(payload: bytes) -> tuple[StepKey, int, bool]:
    """Return key and lanes of `Command.RUN`, and whether the step awaits masks."""
    flags, size, read_blocks, steps, tokens_per_row, drafts, lanes = _RUN.unpack(payload)
    key = StepKey(
        "prefill" if flags & _PREFILL else "decode",
        size,
        read_blocks,
        bool(flags & _FULL_SAMPLER),
        steps,
        tokens_per_row,
        drafts,
        bool(flags & _MASKED),
        _PARTS[flags // _PART],
    )
    return key, lanes, bool(flags & _AWAITS_MASKS)


def decode_inputs(payload: bytes, arrays: dict[InputBuffer, object]) -> Inputs:
    """Return the fields of `Command.INPUTS`; `arrays` are the dataclasses that they belong to."""
    buffer, count, updates = _INPUTS.unpack_from(payload)
    name: InputBuffer = INPUT_BUFFERS[buffer]
    targets = fields(arrays[name])  # type: ignore[arg-type]
    begin = _INPUTS.size + count * _FIELD.size
    values = []
    for index in range(count):
        field, length = _FIELD.unpack_from(payload, _INPUTS.size + index * _FIELD.size)
        target: npt.NDArray[Any] = getattr(arrays[name], targets[field].name)
        shape = (length, *target.shape[1:])
        elements = int(np.prod(shape))
        array = np.frombuffer(payload, target.dtype, elements, begin).reshape(shape)
        values.append((targets[field].name, array))
        begin += array.nbytes
    return Inputs(name, updates, values)


def decode_row(
    payload: bytes, vocab_size: int, sizes: tuple[int, int]
) -> tuple[int, int, RowParameters]:
    """Return row, rope length and parameters of `Command.ROW`; `sizes` are the parameters'."""
    row, rope_length, used = _ROW.unpack_from(payload)
    begin = _ROW.size
    reals = np.frombuffer(payload, np.float32, sizes[0], begin)
    begin += reals.nbytes
    integers = np.frombuffer(payload, np.int64, sizes[1], begin)
    begin += integers.nbytes
    counts = None
    if used >= 0:
        ids = np.frombuffer(payload, np.int64, used, begin)
        values = np.frombuffer(payload, np.int32, used, begin + ids.nbytes)
        dense = np.zeros(vocab_size, np.int32)
        dense[ids] = values
        counts = torch.from_numpy(dense)
    parameters = RowParameters(
        torch.from_numpy(reals.copy()), torch.from_numpy(integers.copy()), counts
    )
    return row, rope_length, parameters


def decode_masks(
    payload: bytes, words: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.int32], int]:
    """Return the arguments of `FollowedMasks.write`, given the words of a mask."""
    allowed, written, tokens_per_row = _MASKS.unpack_from(payload)
    indices = np.frombuffer(payload, np.uint32, allowed + written, _MASKS.size)
    begin = _MASKS.size + indices.nbytes
    masks = np.frombuffer(payload, np.int32, written * words, begin).reshape(written, words)
    return indices[:allowed], indices[allowed:], masks, tokens_per_row
