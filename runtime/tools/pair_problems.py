"""Tuning problems for pairs of products: one fused kernel against two separate kernels.

See `linear_problems.py`, whose protocols these are. Shapes: T rows, K input features of the first
product, D hidden_size, N output features of the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..kernels.ops.weight_storage import WeightStorage, quantised_dtype
from ..kernels.result_check import relative_error
from ..kernels.triton.fused_pair import (
    PairShape,
    default_pair_config,
    fused_pair,
    new_barrier,
    reference_fused_pair,
)
from ..kernels.triton.fusion import GateUp, fuse, product_pairs
from ..kernels.triton.gate_up import gate_up
from ..kernels.triton.linear import FEW_ROWS, SEPARATE, LinearConfig, row_class
from ..kernels.triton.norm_linear import norm_linear
from ..kernels.triton.residual_linear import residual_linear
from ..kernels.triton.tuning import TuningKey, tuning_key
from ..models.config import ModelConfig
from ..models.plan import model_plan
from .random_tensors import RandomTensors

__all__ = ["PairOperands", "PairProblem", "pair_problems"]


@dataclass(frozen=True, slots=True)
class PairProblem:
    """Two products of a decode step."""

    shape: PairShape
    dtype: torch.dtype
    weights: WeightStorage
    gelu: bool = False

    @property
    def title(self) -> str:
        """Operation, rows, shape and storage, as text."""
        shape = self.shape
        dtype = str(quantised_dtype(self.weights) or self.dtype).removeprefix("torch.")
        sizes = f"{shape.k} to {shape.hidden} to {shape.n} {dtype}"
        return f"{shape.name:15} {shape.rows:2} rows, {sizes}"

    @property
    def weight_bytes(self) -> int:
        """Of both weights, without scales."""
        shape = self.shape
        features = shape.k + shape.n * (2 if shape.gated else 1)
        return shape.weight_bytes * shape.hidden * features

    def key(self, device: torch.device) -> TuningKey:
        """Return what a choice holds for."""
        shape, stored = self.shape, quantised_dtype(self.weights) or self.dtype
        sizes = (shape.name, shape.rows, shape.n, shape.k, self.dtype, stored, device)
        return tuning_key(*sizes, hidden=shape.hidden)

    def configs(self, multiprocessors: int) -> list[LinearConfig]:
        """Return the configurations to time: separate kernels, the default, then sizes of pairs."""
        default = default_pair_config(self.shape, multiprocessors)
        configs = [SEPARATE, default]
        prefetches = (default.prefetch, 0)
        for factor, num_warps, ahead in itertools.product((0.5, 1, 2), (8, 16), prefetches):
            block_k = int(default.block_k * factor)
            configs.append(replace(default, block_k=block_k, num_warps=num_warps, prefetch=ahead))
        return list(dict.fromkeys(configs))

    def operands(self, device: torch.device, copies: int) -> PairOperands:
        """Allocate the tensors."""
        return PairOperands(self, device, copies)


def pair_problems(
    model: ModelConfig, dtype: torch.dtype, weights: WeightStorage, rows: Sequence[int]
) -> Iterator[PairProblem]:
    """Yield the pairs of a model's layers for each class of up to four rows.

    Yields nothing for models that norm the outputs of attention and the MLP, and for models with
    layers of several shapes.
    """
    plan, size = model_plan(model), (quantised_dtype(weights) or dtype).itemsize
    if not plan.is_uniform:
        return
    layer = fuse(plan.layers[0])
    few = [count for count in sorted(rows) if count <= FEW_ROWS]
    for count in {row_class(count): count for count in few}.values():
        for first, second in product_pairs([layer, layer]):
            k, gated = first.linear.in_features, isinstance(second, GateUp)
            shape = PairShape(count, k, plan.hidden_size, second.features, gated, size)
            gelu = any(isinstance(fused, GateUp) and fused.gelu for fused in layer)
            yield PairProblem(shape, dtype, weights, gelu=gelu)


class PairOperands:
    """The `TimedOperands` of a `PairProblem`."""

    def __init__(self, problem: PairProblem, device: torch.device, copies: int) -> None:
        """Allocate them; `copies` of at least 1."""
        self.problem = problem
        shape = problem.shape
        random = RandomTensors(problem.dtype, problem.weights, device)
        stored_n = shape.n * (2 if shape.gated else 1)
        self.pairs = [
            (random.linear(shape.hidden, shape.k), random.linear(stored_n, shape.hidden))
            for _ in range(copies)
        ]
        self.a_TK = random.normal(shape.rows, shape.k)
        self.residual_TD = random.normal(shape.rows, shape.hidden)
        self.norm = random.norm(shape.hidden)
        self.x_TD = torch.full_like(self.residual_TD, torch.nan)
        self.out_TN = self.x_TD.new_full((shape.rows, shape.n), torch.nan)
        self.barrier = new_barrier(device)

    def run(self, number: int, config: LinearConfig | None) -> None:
        """Run it over copy `number` of the weights, modulo the copies there are."""
        gated, gelu = self.problem.shape.gated, self.problem.gelu
        first, second = self.pairs[number % len(self.pairs)]
        a_TK, residual_TD, x_TD, out_TN = self.a_TK, self.residual_TD, self.x_TD, self.out_TN
        if config is not None and config.kind == "pair":
            summed = (a_TK, first, residual_TD, x_TD)
            normed = (self.norm, second, out_TN)
            fused_pair(*summed, *normed, self.barrier, config, gated=gated, gelu=gelu)
            return
        residual_linear(a_TK, first, residual_TD, x_TD)
        if gated:
            gate_up(x_TD, self.norm, second, out_TN, gelu=gelu)
        else:
            norm_linear(x_TD, self.norm, second, out_TN)

    def poison(self) -> None:
        """Fill the results with NaN."""
        self.x_TD.fill_(torch.nan)
        self.out_TN.fill_(torch.nan)

    def error(self) -> float:
        """Return how far the worse of the last results is off; NaN if one is."""
        shape, (first, second) = self.problem.shape, self.pairs[0]
        expected = reference_fused_pair(
            *(self.a_TK, first, self.residual_TD, self.norm, second),
            gated=shape.gated,
            gelu=self.problem.gelu,
        )
        errors = map(relative_error, (self.x_TD, self.out_TN), expected)
        return float(torch.stack(list(errors)).max())  # NaN if one is
