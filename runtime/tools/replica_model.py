"""Step times and capacity of a replica: a tensor-parallel group of GPUs that serves one model.

A step takes the longer of what its memory traffic needs (`group_costs.py`) and what its
floating-point operations need, or their sum where they do not overlap, plus the time of its
collective operations. Memory traffic is assumed to reach the full bandwidth: a best case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ...profiling.roofline import step_flops
from ..config import EngineConfig
from ..kernels.ops.layer_plan import ModelPlan
from ..models.config import ModelConfig
from ..models.layout import plan_weights_per_step
from ..resolved_config import ResolvedConfig
from .group_costs import MULTIPROCESSORS, group_step, rank_plans
from .link_costs import NVLINK_4, Link, step_collectives
from .step_costs import StoredSizes, predicted_seconds
from .step_report import read_model, stored_sizes, untuned_parts

__all__ = ["GPUS", "Gpu", "Replica", "StepSeconds"]


class Gpu(NamedTuple):
    """What a GPU is assumed to reach, which is less than what its data sheet says."""

    name: str
    bytes_per_s: float
    """Memory bandwidth."""
    flops: float
    """Floating-point operations per second of large matrix products."""
    memory_bytes: float
    """For weights and cache."""
    link: Link = NVLINK_4
    overlaps: bool = True
    """Whether it reads memory and computes at the same time."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 3.0e12, 0.6 * 989e12, 0.9 * 80e9),
        Gpu("H200", 4.3e12, 0.6 * 989e12, 0.9 * 141e9),
    )
}
"""Bandwidths as in docs/gpu-predictions.md. 60 % of the dense bfloat16 operations of NVIDIA's data
sheet, and 90 % of the memory."""


class StepSeconds(NamedTuple):
    """The parts of a step."""

    memory: float
    """Memory traffic and the edges between kernels."""
    compute: float
    """Floating-point operations."""
    link: float
    """Collective operations, which overlap with neither."""
    overlaps: bool = True
    """Whether memory traffic and operations overlap."""

    @property
    def total(self) -> float:
        """The time of the step."""
        combine = max if self.overlaps else sum
        return combine((self.memory, self.compute)) + self.link


@dataclass(frozen=True)
class Replica:
    """A model on a group of equal GPUs."""

    source: str
    """As `Engine.from_pretrained`; only the configuration is read."""
    gpu: Gpu
    ranks: int
    config: EngineConfig = field(default_factory=EngineConfig)
    """Dtypes of the model, its weights and its cache; nothing else of it counts."""

    def decode(self, rows: int, context: int) -> StepSeconds:
        """Return the seconds of a greedy decode step of `rows` rows of `context` tokens each."""
        if (rows, context) not in self._decoded:
            self._decoded[rows, context] = self._decode(rows, context)
        return self._decoded[rows, context]

    def _decode(self, rows: int, context: int) -> StepSeconds:
        parts = untuned_parts(self._resolved, rows, MULTIPROCESSORS)
        # Ranks differ in one token of the vocabulary at most.
        step = group_step((self.plan,), self._sizes, parts, rows=rows, context=context)
        return StepSeconds(
            predicted_seconds(step.slowest, self.gpu.bytes_per_s),
            self.flops(rows, context, sampled=rows) / self.gpu.flops,
            step.collective_seconds(self.gpu.link),
            self.gpu.overlaps,
        )

    def prefill(self, tokens: int, first: int) -> StepSeconds:
        """Return the seconds of a step of `tokens` prompt tokens that follow `first` others."""
        exchanged = step_collectives(
            self.plan, tokens=tokens, rows=1, element_bytes=self._sizes.element_bytes
        )
        return StepSeconds(
            self.decode(1, first + tokens).memory,
            self.flops(tokens, first + tokens // 2, sampled=1) / self.gpu.flops,
            sum(each.seconds(self.gpu.link) for each in exchanged),
            self.gpu.overlaps,
        )

    def flops(self, tokens: int, context: int, *, sampled: int) -> int:
        """Return the floating-point operations of one rank in a step.

        Args:
            tokens: of the step.
            context: tokens that each of them attends to, on average.
            sampled: rows whose logits are computed.
        """
        plan = self.plan
        head, attend = plan.head.weight.elements, plan.layers[0].attend
        positions = sum(min(context, layer.attend.reach or context) for layer in plan.layers)
        weights = plan_weights_per_step(plan) - head
        heads = (attend.heads, attend.head_dim, attend.value_dim)
        return step_flops(weights, tokens, positions, *heads) + 2 * head * sampled

    @cached_property
    def plan(self) -> ModelPlan:
        """The plan of the first rank."""
        return rank_plans(self._read[1], self.ranks)[0]

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a rank stores."""
        return sum(
            self._sizes.matrix_bytes(*parameter.shape)
            if parameter.is_matrix
            else parameter.elements * self._sizes.element_bytes
            for parameter in self.plan.parameters()
        )

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of a cached token on a rank."""
        attends = [layer.attend for layer in self.plan.layers]
        return sum(op.sides * op.kv_heads for op in attends) * self._sizes.kv_vector_bytes

    @property
    def cached_tokens(self) -> int:
        """Tokens that the cache has room for; negative if the weights do not fit."""
        return int((self.gpu.memory_bytes - self.weight_bytes) // self.kv_bytes)

    @cached_property
    def _decoded(self) -> dict[tuple[int, int], StepSeconds]:
        """Decode steps by rows and context."""
        return {}

    @cached_property
    def _read(self) -> tuple[ModelConfig, ModelPlan, ResolvedConfig]:
        return read_model(self.source, self.config, 1)

    @property
    def _resolved(self) -> ResolvedConfig:
        return self._read[2]

    @cached_property
    def _sizes(self) -> StoredSizes:
        return stored_sizes(self._resolved, self._read[0].head_dim)
