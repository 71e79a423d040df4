"""Requests of the measurements, interleaved repetitions, rooflines and equality of tokens."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...profiling.stats import Summary
from ..engine.engine import Engine
from ..models.config import DecoderConfig
from ..sampling_params import SamplingParams

__all__ = ["decode_roofline", "equal_share", "greedy", "interleave"]
__all__ += ["random_prompts", "summarize_repetitions"]


def random_prompts(config: DecoderConfig, count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(
        config.vocab_size, (count, length), generator=generator
    ).tolist()
    return prompts


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters for exactly `max_tokens` greedy tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True).resolved()


def equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of our tokens that equal theirs, position by position.

    Tokens of theirs past the end of ours are ignored.

    Raises:
        ValueError: the numbers of sequences differ, or ours have no token.
    """
    pairs = [
        len(other) > position and other[position] == token
        for one, other in zip(ours, theirs, strict=True)
        for position, token in enumerate(one)
    ]
    if not pairs:
        raise ValueError("no token to compare")
    return sum(pairs) / len(pairs)


def interleave(
    sides: Sequence[Callable[[], None]], repetitions: int, seconds: float = math.inf
) -> None:
    """Run each side `repetitions` times in rounds; each round reverses the order of the last.

    A slow phase of the machine affects all sides, a drift adds as much to each, and no side always
    follows the same other one.

    Args:
        sides: in the order of the first round.
        repetitions: of each side.
        seconds: a side whose next run would exceed this in total is not run again; each side runs
            at least once.
    """
    total, last = [0.0] * len(sides), [0.0] * len(sides)
    order = range(len(sides))
    for number in range(repetitions):
        for i in order if number % 2 == 0 else reversed(order):
            if total[i] + last[i] <= seconds:
                began = time.perf_counter()
                sides[i]()
                last[i] = time.perf_counter() - began
                total[i] += last[i]


def summarize_repetitions(repetitions: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the fields of the steps of some repetitions in the JSON.

    `spread` is (max - min) / median of the repetitions' medians, None of a single repetition.
    """
    medians = [statistics.median(one) for one in repetitions]
    apart = (max(medians) - min(medians)) / statistics.median(medians)
    return {
        "step_ms": Summary.of(itertools.chain.from_iterable(repetitions)).to_json(),
        "repetition_ms": medians,
        "spread": apart if len(medians) > 1 else None,
    }


def decode_roofline(
    engine: Engine, contexts: Sequence[int], bandwidth: float, seconds: float
) -> dict[str, float]:
    """Return the `roofline` of a decode step in the JSON.

    Decode is memory-bound: at any batch size, a step reads every weight once and the keys and
    values of every row's context. These bytes divided by the read bandwidth are its least time.
    That omits smaller terms: activations, the keys and values that a step writes, sampling. The
    fraction is that time divided by the measured one, above 1 if the model fits into a cache.

    Bytes are of the weights and the cache as this engine stores them. The ranks of a CPU
    share its bandwidth, so the bytes of all count; elsewhere the bytes of one rank.

    Args:
        engine: that runs the steps.
        contexts: tokens that each row attends to, the newest included.
        bandwidth: bytes per second that the device reads, measured.
        seconds: measured time of the step.
    """
    kv_bytes = sum(map(engine.kv_bytes_read, contexts))
    shared = engine.config.tensor_parallel if engine.config.device.type == "cpu" else 1
    read = shared * (engine.weight_bytes_read(len(contexts)) + kv_bytes)
    return {
        "bytes_per_step": read,
        "bandwidth_gb_s": bandwidth / 1e9,
        "floor_ms": 1e3 * read / bandwidth,
        "fraction": read / bandwidth / seconds,
    }
