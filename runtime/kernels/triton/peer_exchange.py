"""Sizes of the memory that GPUs exchange data in. Imports no triton.

How kernels of several GPUs exchange data: parts in memory that peers read, and flags.

Every rank has a region of the same layout, which all ranks have mapped (`PeerRegions`):

    flags   int32 [2 stages, PROGRAMS, ranks rounded up to a power of two]
    parts   two halves of PROGRAMS slots of `slot_bytes`

Program p of a launch exchanges data with the programs p of the same launch on the other ranks. It
stores its part in its slot, adds one to its epoch, and writes the epoch into its flag of each
peer's region (release); then it waits until all its own flags have reached the epoch (acquire) and
reads the slots of all ranks. Epochs are counted on the device, so a captured launch can be
replayed. Each program has its own epoch, so that programs of a launch wait for no other program of
the same device. All ranks launch the same kernels with the same grids in the same order.

Even and odd epochs use different halves. A program overwrites a slot in epoch e + 2 after all
peers have published epoch e + 1, and a peer publishes it after its launch of epoch e has ended: no
slot is overwritten while another rank still reads it.

A program gives up waiting when the host has set the abort word, when a launch before it has given
up, or when the time limit has passed. It then sets the failure word and goes on with whatever the
slots hold: a captured step ends in any case, and the host raises `RankError`.

At most `PROGRAMS` programs run, so that all of them are on the device at the same time; otherwise
those that wait could keep the multiprocessors that their peers wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_calls import runs_in_turn

__all__ = [
    "ABORT",
    "FAILURE",
    "GAVE_UP_ON_ABORT",
    "LIMIT",
    "PROGRAMS",
    "PeerRegions",
    "begin_exchange",
    "end_exchange",
    "flag_bytes",
    "new_control",
    "part_of",
    "region_bytes",
    "signal_peers",
    "slot_at",
    "slot_bytes_for",
    "wait_for_peers",
]

PROGRAMS = 64
"""Programs of a launch at most: fewer than multiprocessors of any GPU with NVLink."""

_MOST_SLOT_BYTES = 256 << 10
"""Longer tensors are exchanged in several launches; both halves of all slots are 32 MiB."""


def slot_bytes_for(
    ranks: int,
    max_tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of a slot: for rows of a step at once, up to a limit.

    Args:
        ranks: of the group.
        max_tokens: of a step.
        hidden_size: of a row.
        vocab_size: of all ranks; a row of a rank's logits has to fit all slots.
        dtype: of the model.
    """
    unit = 4096 * ranks
    row = (1 << (hidden_size - 1).bit_length()) * dtype.itemsize
    step = -(-max_tokens * hidden_size * dtype.itemsize // PROGRAMS)
    logits = -(-(vocab_size // ranks + 1) * dtype.itemsize // PROGRAMS)
    needed = max(row, logits, min(step, _MOST_SLOT_BYTES))
    return -(-needed // unit) * unit


ABORT, FAILURE, LIMIT = 0, 1, 2
"""Words of `PeerRegions.control`."""
GAVE_UP_ON_ABORT = -1
"""Failure word of a launch that found the abort word set; others are 1 + the missing rank."""

_LOOKS = tl.constexpr(64)
"""Polls of the flags between two looks at the clock and at the words of the host."""
_INTERPRETED_NS = tl.constexpr(1_000_000)
"""What a poll counts as where there is no clock."""
_PROGRAMS = tl.constexpr(PROGRAMS)
_THREADS = tl.constexpr(512)
"""Of a program, at most."""


@dataclass(frozen=True)
class PeerRegions:
    """The regions of all ranks, as one of them sees them."""

    rank: int
    ranks: int
    slot_bytes: int
    """Of each program; a multiple of 4096."""
    region: Tensor
    """uint8 `[region_bytes]`, this rank's own, zero at first."""
    bases: Tensor
    """int64 `[ranks]`: addresses of the regions of all ranks, in their order."""
    epochs: Tensor
    """int32 `[PROGRAMS]`, zero at first: exchanges of each program."""
    control: Tensor
    """int64 `[3]` in host memory that the device can access, see `new_control`."""
    multicast: int = 0
    """Address of a mapping of all regions, whose loads add and whose stores go to all; 0: none."""
    owner: Any = None
    """Keeps the mappings of the other regions."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What every kernel takes last."""
        return self.bases, self.epochs, self.control, self.rank

    @property
    def constants(self) -> dict[str, Any]:
        """What every kernel is compiled for."""
        return {
            "RANKS": self.ranks,
            "FLAGS": triton.next_power_of_2(self.ranks),
            "SLOT": self.slot_bytes,
            "DEVICE": not runs_in_turn(),
        }


def flag_bytes(ranks: int) -> int:
    """Return the bytes of the flags of a region."""
    used = 2 * PROGRAMS * triton.next_power_of_2(ranks) * 4
    return int(-(-used // 4096) * 4096)


def region_bytes(ranks: int, slot_bytes: int) -> int:
    """Return the bytes of the region of a rank."""
    return flag_bytes(ranks) + 2 * PROGRAMS * slot_bytes


def new_control(limit_seconds: float, device: torch.device) -> Tensor:
    """Return the words that the host and the device share: abort, failure, time limit in ns.

    The host writes the first and the last at any time, the device the second; all are in pinned
    memory.
    """
    control = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")
    control[LIMIT] = int(limit_seconds * 1e9)
    return control


@triton.jit
def begin_exchange(epochs_ptr):  # type: ignore[no-untyped-def]
    """The epoch of this program's next exchange; after `wait_for_inputs`."""
    return tl.load(epochs_ptr + tl.program_id(0)) + 1


@triton.jit
def end_exchange(epochs_ptr, epoch):  # type: ignore[no-untyped-def]
    """Keep the epoch for the next launch."""
    tl.store(epochs_ptr + tl.program_id(0), epoch)


@triton.jit
def slot_at(epoch, FLAGS: tl.constexpr, SLOT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offset of this program's slot in the region of any rank, in bytes."""
    FLAG_BYTES: tl.constexpr = (2 * _PROGRAMS * FLAGS * 4 + 4095) // 4096 * 4096
    number = (epoch & 1) * _PROGRAMS + tl.program_id(0)
    return FLAG_BYTES + number.to(tl.int64) * SLOT


@triton.jit
def part_of(base, at, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to elements of `dtype` at an offset of a region; both are multiples of 16."""
    return tl.multiple_of((base + at).to(tl.pointer_type(dtype)), 16)


@triton.jit
def signal_peers(  # type: ignore[no-untyped-def]
    bases_ptr, epoch, rank, STAGE: tl.constexpr, RANKS: tl.constexpr, FLAGS: tl.constexpr,
    DEVICE: tl.constexpr,
):  # fmt: skip
    """Publish what all threads of this program have stored: its flag on each rank becomes `epoch`.

    The barrier orders the stores of all threads before the release (PTX ISA, "Memory Consistency
    Model", causality order). Each flag is stored by threads of the first warp only.
    """
    peer = tl.arange(0, FLAGS)
    base = tl.load(bases_ptr + peer, mask=peer < RANKS, other=0)
    place = (STAGE * _PROGRAMS + tl.program_id(0)) * FLAGS + rank
    flag = base + place * 4
    tl.debug_barrier()
    if DEVICE:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .u32 t;
            mov.u32 t, %tid.x;
            setp.lt.u32 p, t, 32;
            setp.ne.and.b32 p, $3, 0, p;
            @p st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [flag, epoch + tl.zeros([FLAGS], tl.int32), (peer < RANKS).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(flag.to(tl.pointer_type(tl.int32)), epoch, mask=peer < RANKS)


@triton.jit
def wait_for_peers(  # type: ignore[no-untyped-def]
    bases_ptr, control_ptr, epoch, rank, STAGE: tl.constexpr, RANKS: tl.constexpr,
    FLAGS: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    """Wait until this program's flags of all ranks have reached `epoch`; return whether they have.

    The result is the same in all threads. What peers stored before is visible afterwards.
    """
    peer = tl.arange(0, FLAGS)
    present = peer < RANKS
    own = tl.load(bases_ptr + rank)
    place = (STAGE * _PROGRAMS + tl.program_id(0)) * FLAGS + peer
    flags = (own + place * 4).to(tl.pointer_type(tl.int32))
    # Words and clocks may differ between threads; the largest of all threads' answers does not.
    thread = tl.arange(0, _THREADS)
    began = _clock(thread, DEVICE)
    polls = tl.zeros([], tl.int32)
    waits = tl.full([], 1, tl.int32)
    complete = tl.full([], 1, tl.int32)
    while waits > 0:
        seen = tl.atomic_add(
            flags, tl.zeros([FLAGS], tl.int32), mask=present, sem="acquire", scope="sys"
        )
        late = present & (seen - epoch < 0)  # epochs may wrap around
        waits = tl.max(late.to(tl.int32), 0)
        polls += 1
        if (waits > 0) & (polls % _LOOKS == 0):
            elapsed = _clock(thread, DEVICE) - began + polls * (0 if DEVICE else _INTERPRETED_NS)
            word = control_ptr + tl.zeros([_THREADS], tl.int32)
            aborted = tl.load(word, volatile=True) != 0
            failed = tl.load(word + 1, volatile=True) != 0
            overdue = elapsed > tl.load(word + 2, volatile=True)
            if tl.max((aborted | failed | overdue).to(tl.int32), 0) > 0:
                missing = tl.min(tl.where(late, peer, FLAGS), 0).to(tl.int64) + 1
                reason = tl.where(tl.max(aborted.to(tl.int32), 0) > 0, -1, missing)
                tl.store(control_ptr + 1, reason, mask=tl.max(failed.to(tl.int32), 0) == 0)
                waits = 0
                complete = 0
    return complete > 0


@triton.jit
def _clock(thread, DEVICE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nanoseconds, as each thread reads them; zeros where there is no clock."""
    now = thread.to(tl.int64) * 0
    if DEVICE:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [thread], dtype=tl.int64, is_pure=False, pack=1
        )
    return now
