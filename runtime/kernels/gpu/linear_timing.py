"""How long linear kernels take on a device, by configuration: what tuning decides by.

A kernel is timed as it runs in a step: captured in a CUDA graph, one launch after the other with
dependent launch between them, over weights that are not in the L2 cache. For that there are copies
of the weight, read in turn, that are together larger than the cache. Configurations take turns, so
that whatever disturbs the device for a while spares none of them, and their medians are compared.
Numbers are random, and a configuration whose result is wrong is out.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.errors import TritonError

from ...models.config import ModelConfig
from ..weight_storage import WeightStorage, quantise_weight, quantised_dtype
from .combine_output import combine_output, reference_combine_output
from .gate_up import gate_up, reference_gate_up
from .linear import (
    FEW_ROWS,
    GpuLinear,
    LinearConfig,
    Norm,
    Pending,
    candidate_configs,
    row_class,
)
from .norm_linear import norm_linear, reference_norm_linear
from .residual_linear import reference_residual_linear, residual_linear
from .splits import choose_splits
from .tuning import Tuned, TuningKey, is_tight, tuning_key

__all__ = ["LinearProblem", "Operands", "Timer", "problems_of", "time_on_device", "tune"]

logger = logging.getLogger("stepgraph.runtime")

ROUNDS = 15
"""Times that each configuration is timed."""

LEAST_LAUNCHES = 24
"""Of a kernel in a graph: the time of starting the graph is shared by so many."""

CACHES = 2
"""Sizes of the L2 cache that the copies of a weight fill at least."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""||out - reference|| / ||reference|| that a configuration may have."""


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """A linear kernel of a decoder layer, at a number of rows."""

    kernel: str
    rows: int
    n: int
    """Output features; of gate_up those of the result."""
    k: int
    dtype: torch.dtype
    """Of activations."""
    weights: WeightStorage
    pending: bool = False
    """Whether an output of the layer waits to be normed and added, where the kernel norms."""
    gelu: bool = False
    heads: int = 1
    splits: int = 1
    """What combine_output puts together."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the weight as stored."""
        return quantised_dtype(self.weights) or self.dtype

    @property
    def stored_rows(self) -> int:
        """Of the weight: gate_up has two for each feature of the result."""
        return self.n * (2 if self.kernel == "gate_up" else 1)

    @property
    def weight_bytes(self) -> int:
        """Of the weight, without scales."""
        return self.stored_rows * self.k * self.weight_dtype.itemsize

    def key(self, device: torch.device) -> TuningKey:
        """Return what a choice holds for."""
        return tuning_key(
            self.kernel, self.rows, self.n, self.k, self.dtype, self.weight_dtype, device
        )

    def configs(self, multiprocessors: int) -> list[LinearConfig]:
        """Return what is worth timing, what is run untuned first."""
        sizes = (self.kernel, self.rows, self.n, self.k, self.weight_dtype.itemsize)
        tight = is_tight(self.pending)
        return candidate_configs(*sizes, multiprocessors, tight=tight)


Configs = Sequence[LinearConfig]

Timer = Callable[[LinearProblem, Configs], Sequence[float | None]]
"""Seconds of one launch with each configuration; None for one that cannot run."""


def problems_of(
    model: ModelConfig,
    dtype: torch.dtype,
    weights: WeightStorage,
    rows: Sequence[int],
    multiprocessors: int,
) -> Iterator[LinearProblem]:
    """Yield the linear kernels of a model's layers, each once for a class of rows.

    The output projection is one of a kernel of its own too, where attention combines its splits:
    for more than a few rows always (see `product_combines`). Of the rows of one class the most are
    taken. Raises ValueError for more rows than the kernels take.
    """
    hidden, queries = model.hidden_size, model.query_size
    normed = model.family.output_norms
    shapes = (
        ("norm_linear", queries + 2 * model.kv_size, hidden),
        ("combine_output", hidden, queries),
        ("residual_linear", hidden, queries),
        ("gate_up", model.intermediate_size, hidden),
        ("residual_linear", hidden, model.intermediate_size),
    )
    for count in {row_class(count): count for count in sorted(rows)}.values():
        splits = choose_splits(
            count, model.num_kv_heads, model.max_position_embeddings, multiprocessors
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
                pending=normed and kernel in ("norm_linear", "gate_up"),
                gelu=model.hidden_act != "silu",
                heads=model.num_heads if combines else 1,
                splits=splits if combines else 1,
            )


def tune(problem: LinearProblem, timer: Timer, multiprocessors: int) -> Tuned | None:
    """Return the fastest configuration, or None if not one can run."""
    configs = problem.configs(multiprocessors)
    seconds = timer(problem, configs)
    timed = [(s, i) for i, s in enumerate(seconds) if s is not None]
    if not timed:
        return None
    best, index = min(timed)
    default = best if seconds[0] is None else seconds[0]
    return Tuned(configs[index], best * 1e6, default * 1e6)


class Operands:
    """Random tensors of a problem, with several copies of its weight."""

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
        self.norm = Norm((1 + 0.1 * random(k)).to(dtype), 1e-5)
        self.pending: Pending | None = None
        if problem.pending:
            self.pending = Pending(
                random(rows, k).to(dtype), self.norm, torch.empty_like(self.x_TK)
            )
        self.residual_TN = random(rows, n).to(dtype)
        self.out_TN = torch.full_like(self.residual_TN, torch.nan)
        cells = (rows, problem.heads, problem.splits)
        self.partials = (
            random(*cells, k // problem.heads),
            random(*cells),
            random(*cells).abs() + 0.1,
        )

    def run(self, number: int, config: LinearConfig | None) -> None:
        """Launch the kernel over copy `number` of the weight, modulo the copies there are."""
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
            case _:
                combine_output(*self.partials, linear, self.residual_TN, self.out_TN, config)

    def error(self) -> float:
        """Return how far the last result is off: ||out - reference|| / ||reference||."""
        expected_TN = self._reference().double()
        return float((self.out_TN.double() - expected_TN).norm() / expected_TN.norm())

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
            case _:
                return reference_combine_output(
                    *self.partials, linear, self.residual_TN, self.problem.dtype
                )


def time_on_device(
    problem: LinearProblem, configs: Configs, device: torch.device
) -> list[float | None]:
    """Return the median seconds of a launch on a CUDA device: a `Timer`."""
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, -(-CACHES * cache_bytes // problem.weight_bytes))
    launches = -(-LEAST_LAUNCHES // copies) * copies
    with torch.cuda.device(device):
        operands = Operands(problem, device, copies)
        graphs = [_captured(operands, config, launches) for config in configs]
        seconds: list[list[float]] = [[] for _ in configs]
        for _ in range(ROUNDS):
            for graph, measured in zip(graphs, seconds, strict=True):
                if graph is not None:
                    measured.append(_replay_seconds(graph) / launches)
    return [statistics.median(measured) if measured else None for measured in seconds]


def _captured(
    operands: Operands, config: LinearConfig | None, launches: int
) -> torch.cuda.CUDAGraph | None:
    """A graph of so many launches, replayed once; None if the configuration is no good."""
    operands.out_TN.fill_(torch.nan)
    try:
        operands.run(0, config)
    except TritonError as error:  # it takes more registers or shared memory than there are
        logger.info("%s cannot run with %s: %s", operands.problem, config, error)
        return None
    off = operands.error()
    if not off <= TOLERANCE[operands.problem.dtype]:  # NaN fails too
        logger.warning("%s is wrong with %s: off by %g", operands.problem, config, off)
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            operands.run(number, config)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
