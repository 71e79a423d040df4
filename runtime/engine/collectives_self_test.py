"""The self-test of collectives: random tensors of known seeds, against sums in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from ..kernels.ops.collectives import Collectives
from ..kernels.result_check import brief, disagreement, tolerance

__all__ = ["CollectiveCases", "CollectivesCheck", "check_collectives"]


@dataclass(frozen=True)
class CollectiveCases:
    """What the steps of a model exchange."""

    tokens: tuple[int, ...]
    """Rows of its sums, ascending."""
    hidden_size: int
    vocab_sizes: tuple[int, ...]
    """Tokens of the vocabulary that each rank has."""
    dtype: torch.dtype
    device: torch.device
    seed: int

    def part(self, rank: int, case: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor of a rank, random numbers that all ranks know."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * case + rank)
        return torch.randn(*shape, generator=generator).to(self.device, dtype or self.dtype)


@dataclass(frozen=True)
class CollectivesCheck:
    """What the self-test found on one rank."""

    error: str | None
    """How a result differs, or what was raised; None: all are right."""
    checksum: int
    """Of the bits of all results, which are the same on all ranks."""


def check_collectives(collectives: Collectives, cases: CollectiveCases) -> CollectivesCheck:
    """Compare every operation, several times over, with plain torch. All ranks call it."""
    checksum, problem = 0, None
    limit = tolerance(cases.dtype)
    try:
        with torch.no_grad():
            for name, found, expected in _results(collectives, cases):
                stored = found.contiguous().view(-1).view(torch.uint8).cpu()
                checksum = crc32(stored.numpy().tobytes(), checksum)
                if failure := getattr(collectives, "failure", None):
                    return CollectivesCheck(problem or str(failure), checksum)
                # After a wrong result the rest is run nevertheless: other ranks wait for it.
                difference = disagreement(found.float(), expected.float(), limit)
                if problem is None and difference is not None:
                    problem = f"{name}: {difference}"
    except Exception as error:  # of a compiler or a device
        return CollectivesCheck(problem or brief(error), checksum)
    return CollectivesCheck(problem, checksum)


def _results(
    collectives: Collectives, cases: CollectiveCases
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, the result and the expected result of each operation."""
    rank, ranks = collectives.rank, range(collectives.ranks)
    number = itertools.count()
    for tokens in (*cases.tokens, cases.tokens[0]):
        case, shape = next(number), (tokens, cases.hidden_size)
        total = torch.zeros(shape, device=cases.device)
        for other in ranks:
            total += cases.part(other, case, *shape)
        found = collectives.all_reduce(cases.part(rank, case, *shape))
        yield f"all_reduce {list(shape)}", found, total.to(cases.dtype)
    for rows in (1, 3):
        case = next(number)
        parts = [
            cases.part(other, case, rows, size) for other, size in enumerate(cases.vocab_sizes)
        ]
        found = collectives.gather(parts[rank], cases.vocab_sizes)
        yield f"gather [{rows}, {sum(cases.vocab_sizes)}]", found, torch.cat(parts, dim=1)
        case = next(number)
        values = [cases.part(other, case, rows, dtype=torch.float32) for other in ranks]
        best_B = torch.stack(values).argmax(0)
        ids_B = torch.arange(rows, device=cases.device)
        found, ids = collectives.largest(values[rank], ids_B + rows * rank)
        yield f"largest [{rows}]", found, torch.stack(values).amax(0)
        yield f"ids of largest [{rows}]", ids, ids_B + rows * best_B
