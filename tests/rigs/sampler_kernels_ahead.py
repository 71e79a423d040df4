"""Compiles the kernels of the Triton sampler for steps of every kind, and prints them as JSON.

Run by `test_gpu_compile_ahead.py` in a process that does not interpret kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from stepgraph.runtime.kernels.ops.batch import Feedback
from stepgraph.runtime.kernels.ops.token_masks import LaneMasks
from stepgraph.runtime.kernels.triton.kernel_calls import record_kernel_calls
from stepgraph.runtime.sampling.samplers import triton_sampler
from stepgraph.runtime.sampling.sampling_state import SamplingState
from stepgraph.runtime.tools.compile_ahead import compile_kernel_calls

META = torch.device("meta")
VOCAB_SIZE, ROWS, LANES = 128256, 8, 32


def ids(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, device=META)


def steps() -> dict[str, Callable[[], object]]:
    """The sampling parts of decode and verify steps, with and without token masks."""
    words = torch.empty(ROWS + 1, -(-VOCAB_SIZE // 32), dtype=torch.int32, device=META)
    state = SamplingState(
        torch.empty(ROWS + 1, 306, device=META),
        ids(ROWS + 1, 335),
        torch.empty(ROWS + 1, VOCAB_SIZE, dtype=torch.int32, device=META),
    )
    decoded, verified = (
        torch.empty(lanes, VOCAB_SIZE, dtype=torch.bfloat16, device=META) for lanes in (ROWS, LANES)
    )
    feed = Feedback(ids(ROWS), ids(ROWS), ids(ROWS + 1), ids(ROWS + 1))
    masks, lane_masks = LaneMasks(words, ids(ROWS)), LaneMasks(words, ids(LANES))
    greedy, full, drafted = (
        triton_sampler.greedy_step,
        triton_sampler.full_step,
        triton_sampler.drafted,
    )
    assert greedy is not None
    assert full is not None
    follow = state, ids(LANES), ids(LANES)
    return {
        "decode greedy": lambda: greedy(decoded, feed),
        "decode greedy masked": lambda: greedy(decoded, feed, masks),
        "decode sampled": lambda: full(decoded, state, feed),
        "decode sampled masked": lambda: full(decoded, state, feed, masks),
        "verify greedy masked": lambda: triton_sampler.greedy(verified, lane_masks),
        "verify 4 sampled": lambda: drafted(verified, *follow, ids(8, 4)),
        "verify 16 sampled": lambda: drafted(verified, *follow, ids(2, 16)),
        "verify 4 sampled masked": lambda: drafted(verified, *follow, ids(8, 4), lane_masks),
    }


def main() -> None:
    """Print the kernels of each step."""
    document = {}
    for name, step in steps().items():
        with record_kernel_calls() as calls:
            step()
        document[name] = [kernel.to_json() for kernel in compile_kernel_calls(calls, 90)]
    print(json.dumps(document))


if __name__ == "__main__":
    main()
