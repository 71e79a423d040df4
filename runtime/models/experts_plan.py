"""A mixture of experts as an operation, from the layouts of checkpoints.

Shapes: R routed experts, S shared ones, D hidden_size, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..kernels.ops.expert_operations import Experts
from ..kernels.ops.expert_selections import ExpertRows, Slice
from ..kernels.ops.parameter import Parameter, Shape, Source
from .config import ModelConfig
from .experts_config import ExpertLayout, ExpertsConfig, ExpertTraits
from .mlp_plan import activate

__all__ = ["experts"]

Sources = tuple[Source, ...]


def experts(config: ModelConfig, moe: ExpertsConfig) -> Experts:
    """The operation of a layer with experts; its value is the sum of theirs."""
    traits = config.family.experts
    assert traits is not None, "only families with experts have an `ExpertsConfig`"
    build = _Builder(config, moe, traits)
    return Experts(
        name="experts",
        router=build.router("weight"),
        gate_up=build.gate_up(),
        down=build.down(),
        routing=moe.routing,
        activate=activate(config, moe.moe_intermediate_size),
        router_bias=build.router("bias") if traits.router_bias else None,
        correction=build.correction(),
        gate_up_bias=build.gate_up_bias(),
        down_bias=build.down_bias(),
        shared=moe.n_shared_experts,
        scaled_inputs=traits.scaled_inputs,
    )


class _Builder:
    """Builds the parameters of a mixture."""

    def __init__(self, config: ModelConfig, moe: ExpertsConfig, traits: ExpertTraits) -> None:
        self.traits = traits
        self.routed, self.shared = moe.num_experts, moe.n_shared_experts
        self.hidden, self.width = config.hidden_size, moe.moe_intermediate_size
        self.shared_bias = config.mlp_bias and self.shared > 0

    def router(self, leaf: str) -> Parameter:
        shape = (self.routed, self.hidden) if leaf == "weight" else (self.routed,)
        names = dict.fromkeys(layout.router for layout in self.traits.layouts)
        candidates = [(Source(f"{name}.{leaf}", shape),) for name in names]
        exact = leaf == "weight"
        return _parameter(f"experts.router.{leaf}", shape, candidates)._replace(exact=exact)

    def correction(self) -> Parameter | None:
        if not self.traits.correction:
            return None
        source = Source(self.traits.correction, (self.routed,))
        return Parameter("experts.correction.weight", (source,), dtype=torch.float32)

    def gate_up(self) -> Parameter:
        """`[(R + S) * 2F, D]`."""
        width, shared = self.width, f"{self.traits.shared}."
        shape = (self.shared * width, self.hidden)
        always = tuple(
            Source(f"{shared}{name}.weight", shape, Slice(0, expert * width, width))
            for expert in range(self.shared)
            for name in ("gate_proj", "up_proj")
        )
        candidates = [(*self._gate_up(layout), *always) for layout in self.traits.layouts]
        total = self.routed + self.shared
        whole = (total * 2 * width, self.hidden)
        return _parameter("experts.gate_up.weight", whole, candidates, 2 * total)

    def _gate_up(self, layout: ExpertLayout) -> Iterator[Source]:
        """The sources of the routed experts."""
        width, hidden = self.width, self.hidden
        if not layout.is_stacked:
            for expert in range(self.routed):
                for name in layout.gate_up:
                    yield Source(name.format(expert), (width, hidden))
            return
        (name,) = layout.gate_up
        stored = (hidden, 2 * width) if layout.transposed else (2 * width, hidden)
        for rows in _gate_up_rows(self.routed, width, layout):
            yield Source(name, (self.routed, *stored), rows)

    def down(self) -> Parameter:
        """`[(R + S) * D, F]`."""
        width, hidden = self.width, self.hidden
        always = tuple(
            Source(
                f"{self.traits.shared}.down_proj.weight",
                (hidden, self.shared * width),
                Slice(1, expert * width, width),
            )
            for expert in range(self.shared)
        )
        candidates = [(*self._down(layout), *always) for layout in self.traits.layouts]
        total = self.routed + self.shared
        whole = (total * hidden, width)
        return _parameter("experts.down.weight", whole, candidates, total)

    def _down(self, layout: ExpertLayout) -> Iterator[Source]:
        width, hidden = self.width, self.hidden
        stored = (width, hidden) if layout.transposed else (hidden, width)
        for expert in range(self.routed):
            if layout.is_stacked:
                rows = ExpertRows(expert, 0, hidden, transposed=layout.transposed)
                yield Source(layout.down, (self.routed, *stored), rows)
            else:
                yield Source(layout.down.format(expert), stored)

    def gate_up_bias(self) -> Parameter | None:
        """`[(R + S) * 2F]`: of routed experts, or of the shared MLP."""
        width = self.width
        if self.traits.biases:
            layout = self.traits.layouts[0]
            name, shape = _bias_name(layout.gate_up[0]), (self.routed, 2 * width)
            rows = _gate_up_rows(self.routed, width, replace(layout, transposed=False))
            return _bias("gate_up", tuple(Source(name, shape, part) for part in rows))
        if not self.shared_bias:
            return None
        always = (
            Source(
                f"{self.traits.shared}.{name}.bias",
                (self.shared * width,),
                Slice(0, expert * width, width),
            )
            for expert in range(self.shared)
            for name in ("gate_proj", "up_proj")
        )
        return _bias("gate_up", (Source(None, (self.routed * 2 * width,)), *always))

    def down_bias(self) -> Parameter | None:
        """`[(R + S) * D]`; the first shared expert has the bias of the shared MLP."""
        hidden = self.hidden
        if self.traits.biases:
            name = _bias_name(self.traits.layouts[0].down)
            sources = tuple(
                Source(name, (self.routed, hidden), ExpertRows(expert, 0, hidden))
                for expert in range(self.routed)
            )
            return _bias("down", sources)
        if not self.shared_bias:
            return None
        sources = (
            Source(None, (self.routed * hidden,)),
            Source(f"{self.traits.shared}.down_proj.bias", (hidden,)),
            Source(None, ((self.shared - 1) * hidden,)),
        )
        return _bias("down", sources)


def _gate_up_rows(routed: int, width: int, layout: ExpertLayout) -> Iterator[ExpertRows]:
    """Yield the rows of each expert's gate and up in a stacked tensor, or its bias."""
    for expert in range(routed):
        if layout.interleaved:
            yield ExpertRows(expert, 0, width, 2, layout.transposed)
            yield ExpertRows(expert, 1, width, 2, layout.transposed)
        else:
            yield ExpertRows(expert, 0, 2 * width, 1, layout.transposed)


def _bias_name(weight: str) -> str:
    return weight.removesuffix("_blocks") + "_bias"


def _bias(ours: str, sources: Sources) -> Parameter:
    size = sum(source.part_shape[0] for source in sources)
    return _parameter(f"experts.{ours}.bias", (size,), [sources])


def _parameter(
    name: str, shape: Shape, candidates: Sequence[Sources], matrices: int = 1
) -> Parameter:
    """A parameter with alternative layouts."""
    first, *others = candidates
    return Parameter(name, first, shape, matrices=matrices, alternatives=tuple(others))
