"""Tuning problems for the two products of a mixture of experts.

See `linear_problems.py`, whose protocols these are. The tokens of a run choose experts at random;
there are copies of the choice, not of the weights, so that runs in turn read different experts.
Shapes: T tokens, K experts of a token, D hidden_size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..kernels import Experts, ExpertTensors
from ..kernels.ops.weight_storage import WeightStorage, quantised_dtype
from ..kernels.result_check import relative_error
from ..kernels.triton.expert_blocks import PairBlocks, down_of_blocks, gate_up_of_blocks
from ..kernels.triton.expert_pairs import down_of_pairs, gate_up_of_pairs
from ..kernels.triton.expert_routing import Routed
from ..kernels.triton.expert_tiles import (
    ExpertSizes,
    candidate_tiles,
    default_tiles,
    expert_tiles,
)
from ..kernels.triton.experts import reference_experts_of_choice
from ..kernels.triton.linear import EXPERT_PRODUCTS, LinearConfig
from ..kernels.triton.tuning import TuningKey
from ..models.config import ModelConfig
from ..models.plan import model_plan
from .random_tensors import RandomTensors

__all__ = ["ExpertOperands", "ExpertProblem", "expert_problems"]

_GATE_UP, _DOWN = EXPERT_PRODUCTS


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertProblem:
    """A product of a mixture of experts in a step of so many tokens."""

    kernel: str
    """One of `EXPERT_PRODUCTS`. Tune the first one first: the second one is of the same kind."""
    rows: int
    """T."""
    op: Experts
    dtype: torch.dtype
    weights: WeightStorage

    @property
    def title(self) -> str:
        """Operation, tokens, shape and storage, as text."""
        op, (n, k) = self.op, self._sizes(torch.device("meta")).product(self.kernel)
        dtype = str(self._stored).removeprefix("torch.")
        return (
            f"{self.kernel:15} {self.rows:2} rows, {op.per_token} of {op.total} x {n} x {k} {dtype}"
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that one run reads on average, without scales."""
        n, k = self._sizes(torch.device("meta")).product(self.kernel)
        return round(self.op.expected_experts(self.rows) * n * k * self._stored.itemsize)

    def key(self, device: torch.device) -> TuningKey:
        """Return what a choice holds for."""
        return self._sizes(device).key(self.kernel)

    def configs(self, multiprocessors: int) -> list[LinearConfig]:
        """Return the configurations to time, the default first."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        sizes = self._sizes(device)
        kind = None if self.kernel == _GATE_UP else expert_tiles(sizes)[0].kind
        return candidate_tiles(self.kernel, sizes, kind)

    def operands(self, device: torch.device, copies: int) -> ExpertOperands:
        """Allocate the tensors."""
        return ExpertOperands(self, self._sizes(device), copies)

    @property
    def _stored(self) -> torch.dtype:
        return quantised_dtype(self.weights) or self.dtype

    def _sizes(self, device: torch.device) -> ExpertSizes:
        weight = torch.empty(0, dtype=self._stored, device=device)
        scales = torch.empty(0, 0) if self.weights == "fp8" else None
        return ExpertSizes.of(self.op, self.rows, self.dtype, weight, scales)


def expert_problems(
    model: ModelConfig, dtype: torch.dtype, weights: WeightStorage, rows: Sequence[int]
) -> Iterator[ExpertProblem]:
    """Yield the products of each mixture of a model, for each number of tokens."""
    ops = (op for op in model_plan(model).operations if isinstance(op, Experts))
    # Mixtures of several layers differ in the names of their parameters, if in anything.
    mixtures = {(op.gate_up.shape, op.down.shape, op.routing): op for op in ops}
    for op in mixtures.values():
        for count in sorted(set(rows)):
            for kernel in EXPERT_PRODUCTS:
                yield ExpertProblem(kernel, count, op, dtype, weights)


class ExpertOperands:
    """The `TimedOperands` of an `ExpertProblem`."""

    def __init__(self, problem: ExpertProblem, sizes: ExpertSizes, copies: int) -> None:
        """Allocate them; `copies` of the choice, at least 1."""
        self.problem, self.sizes = problem, sizes
        op, device = problem.op, sizes.device
        random = RandomTensors(problem.dtype, problem.weights, device)
        gate_up = random.linear(*op.gate_up.shape)
        down = random.linear(*op.down.shape)

        def bias(parameter: object, size: int) -> Tensor | None:
            return None if parameter is None else random.normal(size)

        self.tensors = ExpertTensors(
            router=random.normal(*op.router.shape),
            router_bias=None,
            correction=None,
            gate_up=gate_up.weight,
            gate_up_scales=gate_up.scales,
            gate_up_bias=bias(op.gate_up_bias, op.gate_up.shape[0]),
            down=down.weight,
            down_scales=down.scales,
            down_bias=bias(op.down_bias, op.down.shape[0]),
        )
        self.x_TD = random.normal(problem.rows, op.router.shape[1])
        self.choices = [self._choice(random) for _ in range(copies)]
        self.out_TD = torch.full_like(self.x_TD, torch.nan)
        self.inner: list[tuple[PairBlocks | None, Tensor] | None] = [None] * copies
        """Of each choice the results of the first product, which the second one reads."""
        if problem.kernel == _DOWN:
            first = expert_tiles(sizes)[0]
            self.inner = [self._gate_up(at, first) for at in range(copies)]

    def run(self, number: int, config: LinearConfig | None) -> None:
        """Run the product for choice `number`, modulo the choices there are."""
        at, sizes = number % len(self.choices), self.sizes
        if self.problem.kernel == _GATE_UP:
            self.inner[at] = self._gate_up(at, config or default_tiles(_GATE_UP, sizes))
        else:
            self._down(at, config or expert_tiles(sizes)[1])

    def poison(self) -> None:
        """Fill the results with NaN; the first product makes a new one."""
        self.out_TD.fill_(torch.nan)

    def error(self) -> float:
        """Return how far the sum of the experts for choice 0 is off, with the default sizes of the
        other product."""
        if self.problem.kernel == _GATE_UP and (inner := self.inner[0]) is not None:
            kind = "pairs" if inner[0] is None else "blocks"
            self._down(0, default_tiles(_DOWN, self.sizes, kind))
        expected_TD = torch.empty_like(self.out_TD)
        chosen = (self.problem.op, self.x_TD, self.tensors, self.choices[0])
        reference_experts_of_choice(*chosen, None, expected_TD)
        return float(relative_error(self.out_TD, expected_TD))

    def _gate_up(self, at: int, config: LinearConfig) -> tuple[PairBlocks | None, Tensor]:
        chosen = (self.problem.op, self.x_TD, self.tensors, self.choices[at], config)
        if config.kind == "pairs":
            return None, gate_up_of_pairs(*chosen)
        return gate_up_of_blocks(*chosen)

    def _down(self, at: int, config: LinearConfig) -> None:
        inner = self.inner[at]
        assert inner is not None
        op, (blocks, values) = self.problem.op, inner
        ends = (self.tensors, self.choices[at], None, self.out_TD, 1.0, config)
        if blocks is None:
            down_of_pairs(op, values, *ends)
        else:
            down_of_blocks(op, blocks, values, *ends)

    def _choice(self, random: RandomTensors) -> Routed:
        """Experts as a router that prefers none would choose them."""
        op, tokens = self.problem.op, self.problem.rows
        logits_TR = random.normal(tokens, op.routed, dtype=torch.float32)
        chosen_TK = logits_TR.topk(op.routing.top_k).indices
        shared = torch.arange(op.routed, op.total, device=logits_TR.device)
        experts_TK = torch.cat((chosen_TK, shared.expand(tokens, -1)), dim=1)
        weights_TK = torch.full(experts_TK.shape, 1 / op.per_token, device=logits_TR.device)
        return Routed(logits_TR, weights_TK, experts_TK.to(torch.int32))
