"""The lines that `stepgraph bench --speculate` prints."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ....profiling.stats import Summary

__all__ = ["HEADER", "Case", "Measured", "Run", "comparison_line"]

HEADER = (
    "batch temp kind   drafts      | tokens/s plain   spec  ratio (quartiles) | accepted |"
    " ITL us p50 plain  spec  p99 plain  spec  ratio (95 %)      | floor us/token plain spec | n"
)

RESAMPLES = 400


class Case(NamedTuple):
    """What all sides decode."""

    rows: int
    temperature: float
    kind: str


class Run(NamedTuple):
    """One repetition."""

    speed: float
    """Tokens per second, once all prompts are prefilled."""
    itl_us: list[float]
    """Microseconds between tokens of a row; several tokens of a step have 0 between them."""
    tokens: list[list[int]]


@dataclass
class Measured:
    """The repetitions of a case by the sides of one name, and what their drafts did."""

    runs: list[Run] = field(default_factory=list)
    verified_rows: int = 0
    accepted: int = 0


def comparison_line(base: Measured, name: str, own: Measured, case: Case, floors: str) -> str:
    """Return the comparison of the side of a name with its base.

    `floors`: times per token, plain and with drafts, that the bandwidth of the memory allows.
    """
    accepted = f"{1 + own.accepted / own.verified_rows:.2f}" if own.verified_rows else "-"
    speeds = [statistics.median(run.speed for run in side.runs) for side in (base, own)]
    pairs = list(zip(base.runs, own.runs, strict=True))
    ratios = [b.speed / a.speed for a, b in pairs]
    if len(ratios) == 1:  # which has no quartiles of its own
        ratios *= 2
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    one, other = (Summary.of(t for run in side.runs for t in run.itl_us) for side in (base, own))
    tails = f"{'-':>10} {'-':>5} {'-':>6} {'':13}"
    if one.p99 is not None and other.p99 is not None:
        low_tail, high_tail = _tail_interval(pairs)
        tails = f"{one.p99:10.0f} {other.p99:5.0f} {other.p99 / one.p99:6.3f}"
        tails += f" ({low_tail:5.3f}-{high_tail:5.3f})"
    same = all(a.tokens == b.tokens for a, b in pairs)
    return (
        f"{case.rows:5} {case.temperature:4g} {case.kind:6} {name:11} |"
        f" {speeds[0]:14.0f} {speeds[1]:6.0f} {ratio:6.2f} ({low:4.2f}-{high:4.2f}) |"
        f" {accepted:>8} | {one.p50:16.0f} {other.p50:5.0f} {tails} | {floors:>25} |"
        f" {one.n} {'same tokens' if same else 'other tokens'}"
    )


def _tail_interval(pairs: list[tuple[Run, Run]]) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of p99, by bootstrap over the repetitions.

    Times of one repetition depend on each other, so that single ones cannot be resampled. See
    Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
    """
    times = [tuple(np.array(run.itl_us) for run in pair) for pair in pairs]
    chosen = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = [times[i] for i in chosen.integers(len(pairs), size=len(pairs))]
        one, other = (np.percentile(np.concatenate(side), 99) for side in zip(*drawn, strict=True))
        ratios.append(other / one)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)
