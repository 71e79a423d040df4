"""Tuning problems for the products of a model's decode steps: shapes, candidates, tensors.

`linear_timing` times a problem: a key, configurations, and operands that run with a configuration
and measure the error of the result. To tune another operation, add a class with the members of
`Problem` (see `pair_problems.py`), a kind of `LinearConfig`, and a rule in
`linear_configs.config_error`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.ops.weight_storage import WeightStorage, quantised_dtype
from ..kernels.result_check import relative_error
from ..kernels.triton.fusion import GateUp, NormLinear, ResidualLinear, fuse
from ..kernels.triton.linear import FEW_ROWS, GpuLinear, LinearConfig, Pending, row_class
from ..kernels.triton.linear_configs import candidate_configs, weight_rows
from ..kernels.triton.operations import Operations
from ..kernels.triton.splits import choose_splits
from ..kernels.triton.tuning import TuningKey, is_tight, tuning_key
from ..models.config import ModelConfig
from ..models.plan import model_plan
from .random_tensors import RandomTensors, cloned

__all__ = ["LinearProblem", "Operands", "Problem", "TimedOperands", "problems_of"]

_NATIVE, _PLAIN = Operations.native(), Operations.reference()


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
        """The dtype of activations."""

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
    """A product of a decode step with a given number of rows."""

    kernel: str
    """The field of `Operations` that computes it."""
    rows: int
    n: int
    """Output features; for gate_up those after the activation."""
    k: int
    """Input features."""
    dtype: torch.dtype
    """The dtype of activations."""
    weights: WeightStorage
    pending: bool = False
    """The kernel first norms the previous output and adds it to its input."""
    gelu: bool = False
    """gate_up applies gelu; otherwise silu."""
    heads: int = 1
    """Query heads whose splits combine_output combines; 1 for other kernels."""
    splits: int = 1
    """Splits of each head that combine_output combines; 1 for other kernels."""
    softcap: float = 0.0
    """Soft cap of the logits; 0: none, and for kernels other than the head."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype in which the weight is stored."""
        return quantised_dtype(self.weights) or self.dtype

    @property
    def stored_rows(self) -> int:
        """Rows of the weight; gate_up has two for each output feature."""
        return self.n * weight_rows(self.kernel)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, without scales."""
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
    layer = [fused for kind in dict.fromkeys(plan.layers) for fused in fuse(kind)]
    attend, head = plan.layers[0].attend, plan.head
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
        for kernel, n, k in dict.fromkeys(shapes):
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
        rows, k = problem.rows, problem.k
        random = RandomTensors(problem.dtype, problem.weights, device)
        first = random.linear(problem.stored_rows, k)
        self.linears = [first, *(cloned(first) for _ in range(copies - 1))]
        self.x_TK, self.norm = random.normal(rows, k), random.norm(k)
        self.pending: Pending | None = None
        if problem.pending:
            self.pending = Pending(random.normal(rows, k), self.norm, torch.empty_like(self.x_TK))
        self.residual_TN = random.normal(rows, problem.n)
        self.out_TN = torch.full_like(self.residual_TN, torch.nan)
        self.best: list[Tensor] = []
        """Of the head: the largest logit of each chunk, and its token."""
        cells = (rows, problem.heads, problem.splits)
        self.partials = (
            random.normal(*cells, k // problem.heads, dtype=torch.float32),
            random.normal(*cells, dtype=torch.float32),
            random.normal(*cells, dtype=torch.float32).abs() + 0.1,
        )

    def run(self, number: int, config: LinearConfig | None) -> None:
        """Run it over copy `number` of the weight, modulo the copies there are."""
        linear = self.linears[number % len(self.linears)]
        self.out_TN, *self.best = self._run(_NATIVE, linear, self.out_TN, config=config)

    def poison(self) -> None:
        """Fill the result with NaN; the head makes a new one."""
        self.out_TN.fill_(torch.nan)

    def error(self) -> float:
        """Return how far the last result is off; infinite if the best of its chunks are not."""
        if self.best:
            maxima_TC, ids_TC = self.best
            logits_TV = self.out_TN.float()
            right = torch.equal(logits_TV.gather(1, ids_TC.long()), maxima_TC)
            if not (right and torch.equal(maxima_TC.amax(1), logits_TV.amax(1))):
                return float("inf")
        expected_TN, *_ = self._run(_PLAIN, self.linears[0], torch.empty_like(self.out_TN))
        return float(relative_error(self.out_TN, expected_TN))

    def _run(
        self, operations: Operations, linear: GpuLinear, out_TN: Tensor, **config: Any
    ) -> tuple[Tensor, ...]:
        """Run the operation; return its result, and of the head the best of each chunk too."""
        problem, pending = self.problem, self.pending
        normed = (self.x_TK, self.norm, linear)
        match problem.kernel:
            case "head":
                return operations.head(*normed, problem.softcap, pending, **config)
            case "norm_linear":
                operations.norm_linear(*normed, out_TN, pending, **config)
            case "gate_up":
                operations.gate_up(*normed, out_TN, gelu=problem.gelu, pending=pending, **config)
            case "residual_linear":
                operations.residual_linear(self.x_TK, linear, self.residual_TN, out_TN, **config)
            case _:
                operations.combine_output(
                    *self.partials, linear, self.residual_TN, out_TN, **config
                )
        return (out_TN,)
