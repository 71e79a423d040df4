"""What measurements ask engines for: random prompts, decoded greedily, and let go of at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.engine import Engine
from ..models.config import ModelConfig
from ..sampling_params import SamplingParams

__all__ = ["abort_all", "equal_share", "greedy", "random_prompts"]


def random_prompts(config: ModelConfig, count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(
        config.vocab_size, (count, length), generator=generator
    ).tolist()
    return prompts


def greedy(max_tokens: int) -> SamplingParams:
    """Ask for exactly so many tokens, whatever they are."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def abort_all(engine: Engine, ids: Sequence[str]) -> None:
    """End requests, and leave the engine idle."""
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()


def equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of our tokens that are theirs, position by position.

    What they decoded beyond ours is not looked at.

    Raises:
        ValueError: there are not as many sequences of theirs, or we have no token.
    """
    pairs = [
        len(other) > position and other[position] == token
        for one, other in zip(ours, theirs, strict=True)
        for position, token in enumerate(one)
    ]
    if not pairs:
        raise ValueError("there is no token to compare")
    return sum(pairs) / len(pairs)
