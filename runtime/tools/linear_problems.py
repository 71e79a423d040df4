"""Tuning problems for the products of a model's decode steps: shapes, candidates, tensors.

`linear_timing` times a problem: a key, configurations, and operands that run with a configuration
and measure the error of the result. To tune another operation, add a class with the members of
`Problem` (see `pair_problems.py`), a kind of `LinearConfig`, and a rule in
`linear_configs.config_error`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.ops.weight_storage import WeightStorage, quantise_weight, quantised_dtype
from ..kernels.result_check import relative_error
from ..kernels.triton.combine_output import combine_output, reference_combine_output
from ..kernels.triton.fusion import GateUp, NormLinear, ResidualLinear, fuse
from ..kernels.triton.gate_up import gate_up, reference_gate_up
from ..kernels.triton.head import head, reference_head
from ..kernels.triton.linear import FEW_ROWS, GpuLinear, GpuNorm, LinearConfig, Pending, row_class
from ..kernels.triton.linear_configs import candidate_configs, weight_rows
from ..kernels.triton.norm_linear import norm_linear, reference_norm_linear
from ..kernels.triton.residual_linear import reference_residual_linear, residual_linear
from ..kernels.triton.splits import choose_splits
from ..kernels.triton.tuning import TuningKey, is_tight, tuning_key
from ..models.config import ModelConfig
from ..models.plan import model_plan

__all__ = ["LinearProblem", "Operands", "Problem", "TimedOperands", "problems_of"]


class TimedOperands(Protocol):
    """Random tensors of a problem, with several copies of its weights, and what runs over them."""

    def run(self, number: int, config: LinearConfig | None) -> None:
        """Run everything once over copy `number` of the weights, modulo the copies there are."""

    def poison(self) -> None:
        """Fill the result with NaN."""

    def error(self) -> float:
        """Return how far the result over copy 0 is off: ||out - reference|| / ||reference||."""


class Problem(Protocol):
    """An operation that can be tuned."""

    @property
    def title(self) -> str:
        """Operation, rows, shape and storage, as text."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one run reads, without scales."""

    def key(self, device: torch.device) -> TuningKey:
        """Return what a choice holds for."""

    def configs(self, multiprocessors: int) -> list[LinearConfig]:
        """Return the configurations to time, the default first."""

    def operands(self, device: torch.device, copies: int) -> TimedOperands:
        """Allocate the tensors; `copies` of at least 1."""


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """A product of a decode step, at a number of rows."""

    kernel: str
    rows: int
    n: int
    """Output features; of gate_up those of the result."""
    k: int
    dtype: torch.dtype
    weights: WeightStorage
    pending: bool = False
    """Whether an output of the layer waits to be normed and added, where the kernel norms."""
    gelu: bool = False
    heads: int = 1
    splits: int = 1
    """What combine_output puts together."""
    softcap: float = 0.0
    """Of the head."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the weight as stored."""
        return quantised_dtype(self.weights) or self.dtype

    @property
    def stored_rows(self) -> int:
        """Of the weight: gate_up has two for each feature of the result."""
        return self.n * weight_rows(self.kernel)

    @property
    def weight_bytes(self) -> int:
        """Of the weight, without scales."""
        return self.stored_rows * self.k * self.weight_dtype.itemsize

    @property
    def title(self) -> str:
        """Operation, rows, shape and storage, as text."""
        dtype = str(self.weight_dtype).removeprefix("torch.")
        return f"{self.kernel:15} {self.rows:2} rows, {self.n} x {self.k} {dtype}"

    def key(self, device: torch.device) -> TuningKey:
        """Return what a choice holds for."""
        return tuning_key(
            self.kernel, self.rows, self.n, self.k, self.dtype, self.weight_dtype, device
        )

    def configs(self, multiprocessors: int) -> list[LinearConfig]:
        """Return the configurations to time, the default first."""
        sizes = (self.kernel, self.rows, self.n, self.k, self.weight_dtype.itemsize)
        tight = is_tight(self.pending)
        return candidate_configs(*sizes, multiprocessors, tight=tight)

    def operands(self, device: torch.device, copies: int) -> Operands:
        """Allocate the tensors."""
        return Operands(self, device, copies)


def problems_of(
    model: ModelConfig,
    dtype: torch.dtype,
    weights: WeightStorage,
    rows: Sequence[int],
    multiprocessors: int,
) -> Iterator[LinearProblem]:
    """Yield the products of a model's layers and its head, each once for a class of rows.

    The output projection is one of a kernel of its own too, where attention combines its splits:
    for more than a few rows always (see `product_combines`). Of the rows of one class the most are
    taken. Raises ValueError for more rows than the kernels take.
    """
    plan = model_plan(model)
    layer, attend, head = fuse(plan.layers[0]), plan.layers[0].attend, plan.head
    gelu = any(isinstance(fused, GateUp) and fused.gelu for fused in layer)
    normed = any(isinstance(fused, ResidualLinear) and fused.norm is not None for fused in layer)
    shapes: list[tuple[str, int, int]] = []
    for fused in layer:
        if isinstance(fused, ResidualLinear):
            sizes = (fused.linear.out_features, fused.linear.in_features)
            if fused.name == "combine_output":
                shapes.append((fused.name, *sizes))
            shapes.append(("residual_linear", *sizes))
        elif isinstance(fused, NormLinear | GateUp):
            shapes.append((fused.name, fused.features, fused.linear.in_features))
    shapes.append((head.name, head.out_features, head.in_features))
    for count in {row_class(count): count for count in sorted(rows)}.values():
        splits = choose_splits(
            count, attend.kv_heads, model.max_position_embeddings, multiprocessors
        )
        for kernel, n, k in shapes:
            combines = kernel == "combine_output"
            if combines and count > FEW_ROWS:
                continue
            yield LinearProblem(
                kernel,
                count,
                n,
                k,
                dtype,
                weights,
                pending=normed and kernel in ("norm_linear", "gate_up", "head"),
                gelu=gelu,
                heads=attend.heads if combines else 1,
                splits=splits if combines else 1,
                softcap=plan.logit_softcap if kernel == "head" else 0.0,
            )


class Operands:
    """The `TimedOperands` of a `LinearProblem`."""

    def __init__(self, problem: LinearProblem, device: torch.device, copies: int) -> None:
        """Allocate them; `copies` of at least 1."""
        self.problem = problem
        rows, n, k, dtype = problem.rows, problem.n, problem.k, problem.dtype
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        weight, scales = (random(problem.stored_rows, k) * k**-0.5).to(dtype), None
        if problem.weights != "model":
            weight, scales = quantise_weight(weight, problem.weights)
        first = GpuLinear(weight, scales)
        self.linears = [first] + [
            GpuLinear(weight.clone(), None if scales is None else scales.clone())
            for _ in range(copies - 1)
        ]
        self.x_TK = random(rows, k).to(dtype)
        self.norm = GpuNorm((1 + 0.1 * random(k)).to(dtype), 1e-5)
        self.pending: Pending | None = None
        if problem.pending:
            self.pending = Pending(
                random(rows, k).to(dtype), self.norm, torch.empty_like(self.x_TK)
            )
        self.residual_TN = random(rows, n).to(dtype)
        self.out_TN = torch.full_like(self.residual_TN, torch.nan)
        self.best: tuple[Tensor, Tensor] | None = None
        cells = (rows, problem.heads, problem.splits)
        self.partials = (
            random(*cells, k // problem.heads),
            random(*cells),
            random(*cells).abs() + 0.1,
        )

    def run(self, number: int, config: LinearConfig | None) -> None:
        """Run it over copy `number` of the weight, modulo the copies there are."""
        linear = self.linears[number % len(self.linears)]
        match self.problem.kernel:
            case "norm_linear":
                norm_linear(self.x_TK, self.norm, linear, self.out_TN, self.pending, config)
            case "gate_up":
                gate_up(
                    self.x_TK,
                    self.norm,
                    linear,
                    self.out_TN,
                    gelu=self.problem.gelu,
                    pending=self.pending,
                    config=config,
                )
            case "residual_linear":
                residual_linear(self.x_TK, linear, self.residual_TN, self.out_TN, config)
            case "head":
                self.out_TN, *best = head(
                    self.x_TK, self.norm, linear, self.problem.softcap, self.pending, config
                )
                self.best = (best[0], best[1])
            case _:
                combine_output(*self.partials, linear, self.residual_TN, self.out_TN, config)

    def poison(self) -> None:
        """Fill the result with NaN; the head makes a new one."""
        self.out_TN.fill_(torch.nan)

    def error(self) -> float:
        """Return how far the last result is off; infinite if the best of its chunks are not."""
        if self.best is not None:
            maxima_TC, ids_TC = self.best
            logits_TV = self.out_TN.float()
            right = torch.equal(logits_TV.gather(1, ids_TC.long()), maxima_TC)
            if not (right and torch.equal(maxima_TC.amax(1), logits_TV.amax(1))):
                return float("inf")
        return float(relative_error(self.out_TN, self._reference()))

    def _reference(self) -> Tensor:
        linear = self.linears[0]
        match self.problem.kernel:
            case "norm_linear":
                return reference_norm_linear(self.x_TK, self.norm, linear, self.pending)
            case "gate_up":
                return reference_gate_up(
                    self.x_TK, self.norm, linear, gelu=self.problem.gelu, pending=self.pending
                )
            case "residual_linear":
                return reference_residual_linear(self.x_TK, linear, self.residual_TN)
            case "head":
                return reference_head(
                    self.x_TK, self.norm, linear, self.problem.softcap, self.pending
                )[0]
            case _:
                return reference_combine_output(
                    *self.partials, linear, self.residual_TN, self.problem.dtype
                )
