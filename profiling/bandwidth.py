"""Measured read bandwidth of a device, the denominator of the roofline."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_CPU_BYTES: Final = 512 * 2**20
_CPU_CACHES: Final = 4
# A reduction over more than 2 GiB is split into several kernels. At 1 GiB a pass takes long enough
# (0.25 ms at 4 TB/s) for its ramp up and down to be about one percent of it.
_CUDA_BYTES: Final = 2**30
_PASSES_PER_EVENT: Final = 8
_PATTERN_FLOATS: Final = 2**22


def measure_read_bandwidth(
    device: "str | torch.device", *, repeats: int = 30, buffer_bytes: int | None = None
) -> float:
    """Measure the read bandwidth of `device` in bytes per second.

    Several reductions read a buffer of random numbers that is far larger than the last-level cache
    and write one number. The fastest pass of all of them counts: other work on the machine only
    makes passes slower, and a limit set too low would flatter the fraction reached. On a CPU it is
    measured with the threads torch is set to (`torch.get_num_threads`).

    Args:
        device: a CPU or a CUDA device.
        repeats: timed passes of each reduction.
        buffer_bytes: size of the buffer. By default 512 MiB on a CPU, or four times its last-level
            cache where that is more, and 1 GiB on a CUDA device.
    """
    import torch

    device = torch.device(device)
    on_cpu = device.type == "cpu"
    if buffer_bytes is None:
        buffer_bytes = max(_CPU_BYTES, _CPU_CACHES * _l3_bytes()) if on_cpu else _CUDA_BYTES
    # Generating random numbers is far slower than reading them: a pattern, over and over.
    pattern = torch.rand(_PATTERN_FLOATS, dtype=torch.float32, device=device)
    floats = pattern.repeat(buffer_bytes // (4 * _PATTERN_FLOATS))
    integers = floats.view(torch.int64)
    readers: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: floats.sum(),
        lambda: integers.sum(),
        lambda: torch.linalg.vector_norm(floats),
    )

    # Events around several passes hide their launches.
    passes = 1 if on_cpu else _PASSES_PER_EVENT

    def read_often(read: Callable[[], torch.Tensor]) -> None:
        for _ in range(passes):
            read()

    for read in readers:
        read()  # faults in pages, starts threads, loads kernels
    # Interleaved, so that a disturbance of the machine spares no reader.
    fastest = min(
        seconds_of(partial(read_often, read), device) for _ in range(repeats) for read in readers
    )
    return floats.nbytes * passes / fastest


def seconds_of(work: Callable[[], object], device: "torch.device") -> float:
    """Return how long some work takes: on a CUDA device the time between events around it."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    import torch

    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _l3_bytes() -> int:
    """The last-level caches of all CPUs together; 0 where the system does not tell."""
    caches: dict[str, int] = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            shared_by = (index / "shared_cpu_list").read_text().strip()
            size = (index / "size").read_text().strip()
        except OSError:
            continue
        if size.endswith("K"):
            caches[shared_by] = int(size[:-1]) * 1024
    return sum(caches.values())
