"""Drafts leave the distribution of sampled tokens as it is: chi-square of triples of tokens.

Each draw is a request of three tokens. The second and the third are verified in one step, with
drafts that are likely tokens, so that many are accepted and many are not. Triples are compared with
their probabilities by transformers (logits and processors, softmax in float64), and with draws of
an engine without speculation. `ALARM` is the probability that any comparison of a run fails though
all distributions are equal; seeds are fixed, so a run that passes does so again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.request import Request
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from ..rigs.speculation_rig import guess
from ..rigs.tiny_models import TinyModel

pytestmark = pytest.mark.native_kernels

ALARM = 1e-3
TOKENS = 3
LEAST_EXPECTED = 10.0
"""Draws of a cell of the chi-square; rarer triples are counted together."""

Triple = tuple[int, ...]


class Case(NamedTuple):
    """A set of draws."""

    context: tuple[int, ...]
    params: dict[str, Any]


PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.2, "top_p": 0.6},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
)
CONTEXTS = ((5, 6, 7), (9, 3, 44, 12, 60, 2, 31), (80,), tuple(range(20, 50)))
CASES = [Case(context, params) for context in CONTEXTS for params in PARAMS]


class Reference:
    """The probabilities of tokens after a context, by transformers."""

    def __init__(self, tiny: TinyModel, case: Case) -> None:
        self._model = tiny.reference
        self._context = list(case.context)
        params = case.params
        self._processors = LogitsProcessorList(
            [
                hf.TemperatureLogitsWarper(params["temperature"]),
                *([hf.TopKLogitsWarper(params["top_k"])] if "top_k" in params else []),
                *([hf.TopPLogitsWarper(params["top_p"])] if "top_p" in params else []),
                *([hf.MinPLogitsWarper(params["min_p"])] if "min_p" in params else []),
            ]
        )
        self._known: dict[Triple, dict[int, float]] = {}

    def following(self, tokens: Triple) -> dict[int, float]:
        """Return the possible next tokens after some tokens of the output, the likeliest first."""
        if tokens not in self._known:
            ids = torch.tensor([[*self._context, *tokens]])
            with torch.no_grad():
                logits = self._model(ids).logits[:, -1].double()
            probabilities = self._processors(ids, logits).softmax(-1)[0]  # type: ignore[arg-type]
            order = probabilities.argsort(descending=True).tolist()
            found = {token: float(probabilities[token]) for token in order}
            self._known[tokens] = {token: p for token, p in found.items() if p > 0}
        return self._known[tokens]

    def triples(self) -> dict[Triple, float]:
        """Return the probability of each output."""
        found: dict[Triple, float] = {(): 1.0}
        for _ in range(TOKENS):
            found = {
                (*tokens, token): p * own
                for tokens, p in found.items()
                for token, own in self.following(tokens).items()
            }
        return found

    def likely(self, request: Request) -> Sequence[int]:
        """Return an output whose drafts are likely: the best ones, or each the second best."""
        tokens = tuple(request.output_ids)
        while len(tokens) < TOKENS:
            best = list(self.following(tokens))
            tokens = (*tokens, best[min(request.seed % 2, len(best) - 1)])
        return tokens


def chi_square(found: Counter[Triple], expected: dict[Triple, float]) -> float:
    """Return the probability of draws that deviate as much from what is expected, or more."""
    total = sum(found.values())
    assert set(found) <= set(expected), "a token that the processors leave out was drawn"
    rare = [triple for triple, p in expected.items() if p * total < LEAST_EXPECTED]
    cells = [(found[t], p * total) for t, p in expected.items() if p * total >= LEAST_EXPECTED]
    if rare:
        cells.append((sum(found[t] for t in rare), total * sum(expected[t] for t in rare)))
    statistic = sum((count - own) ** 2 / own for count, own in cells)
    return upper_tail(statistic, len(cells) - 1)


def two_samples(one: Counter[Triple], other: Counter[Triple]) -> float:
    """Return the probability that two sets of as many draws differ as much, or more."""
    frequent = [t for t in one | other if one[t] + other[t] >= 2 * LEAST_EXPECTED]
    pairs = [(one[t], other[t]) for t in frequent]
    rest = (
        sum(one.values()) - sum(a for a, _ in pairs),
        sum(other.values()) - sum(b for _, b in pairs),
    )
    if sum(rest):
        pairs.append(rest)
    return upper_tail(sum((a - b) ** 2 / (a + b) for a, b in pairs), len(pairs) - 1)


def upper_tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def draw(engine: Engine, case: Case, count: int) -> Counter[Triple]:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **case.params)
    found: Counter[Triple] = Counter()
    for first in range(0, count, 2000):  # so that few requests wait
        prompts = [list(case.context)] * min(2000, count - first)
        found.update(tuple(o.token_ids) for o in engine.generate(prompts, params))
    return found


def check(
    open_engine: Callable[..., Engine],
    tiny: TinyModel,
    case: Case,
    seed: int,
    draws: int,
    comparisons: int,
) -> tuple[float, float]:
    reference = Reference(tiny, case)
    config: dict[str, Any] = {
        "max_num_seqs": 64, "max_model_len": 64, "dtype": "float32",
        "kernels": "native" if have_compiler() else "torch",
    }  # fmt: skip
    plain = open_engine("base", seed=2 * seed, **config)
    engine = open_engine(
        "base", seed=2 * seed + 1, speculation={"num_speculative_tokens": 2}, **config
    )
    guesses = guess(engine, {}, right=1.0)
    guesses._known = reference.likely
    found = draw(engine, case, draws)
    assert guesses.accepted > draws // 20
    assert guesses.rejected > draws // 20
    exact = chi_square(found, reference.triples())
    against_plain = two_samples(found, draw(plain, case, draws))
    assert min(exact, against_plain) > ALARM / comparisons
    return exact, against_plain


def test_the_distribution_is_unchanged(open_engine: Callable[..., Engine], base: TinyModel) -> None:
    check(open_engine, base, CASES[0], 0, 1500, 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_20_sets_of_20000_draws(
    open_engine: Callable[..., Engine], base: TinyModel, number: int
) -> None:
    exact, plain = check(open_engine, base, CASES[number], 1 + number, 20_000, 2 * len(CASES))
    print(f"set {number}: p = {exact:.3f} against transformers, {plain:.3f} against plain sampling")


def test_a_bias_is_found() -> None:
    """Half a percent too much of one of eight triples, in 20,000 draws; and none."""
    expected = {(i,): 1 / 8 for i in range(8)}
    counts = Counter({(i,): 2500 for i in range(8)})
    assert chi_square(counts, expected) == 1.0
    counts[(0,)] += 350
    counts[(1,)] -= 350
    assert chi_square(counts, expected) < ALARM / (2 * len(CASES))
    assert two_samples(counts, Counter({(i,): 2500 for i in range(8)})) < 1e-3
