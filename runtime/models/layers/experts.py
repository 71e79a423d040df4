"""Mixtures of experts: their dimensions and routing, layouts of checkpoints, and operations.

Shapes: R routed experts, S shared ones, D hidden_size, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from ...arguments import Range
from ...errors import ConfigError
from ...kernels.ops.activation import Activate, GateOutput
from ...kernels.ops.experts import Experts, Routing, Scores
from ...kernels.ops.operation import Add, Operation
from ...kernels.ops.parameter import ExpertRows, Parameter, Shape, Slice, Source
from .dimensions import MOST_SIZE, Dimensions, Number, Size
from .mlp import mlp
from .tensors import in_float32, linear

GroupScore = Literal["max", "top_2_sum"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Dimensions):
    """A mixture of experts in place of the MLP (Shazeer et al. 2017). Raises `ConfigError`."""

    num_experts: Annotated[int, Range(1, 2048)]
    """Experts that the router chooses from."""
    num_experts_per_tok: Size
    """Experts that it chooses for a token."""
    moe_intermediate_size: Size
    """Width of an expert."""
    n_shared_experts: Annotated[int, Range(0, 2048)] = 0
    """Experts that every token uses in addition."""
    shared_expert_intermediate_size: Annotated[int, Range(0, MOST_SIZE)] = 0
    """Width of an MLP that every token uses too, perhaps times a gate of the token; 0: there is
    none."""
    moe_latent_size: Size | None = None
    """Features of the latent space in which experts compute, between projections from and to the
    hidden states (Nemotron 3 Super); None: they read the hidden states."""
    scores: Scores = "softmax"
    """As `Routing.scores`."""
    norm_topk_prob: bool = False
    """Whether the scores of a token's experts are divided by their sum."""
    routed_scaling_factor: Number = 1.0
    """Factor of the scores."""
    n_group: Size = 1
    """Groups of consecutive experts."""
    topk_group: Size = 1
    """Groups that a token chooses from."""
    group_score: GroupScore = "max"
    """As `Routing.group_score`."""
    use_expert_bias: bool = True
    """Whether the choice of experts is corrected, in families with a correction."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an MLP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts % self.n_group:
            raise ConfigError(
                f"num_experts = {self.num_experts} must be a multiple of n_group = {self.n_group}"
            )
        if self.topk_group > self.n_group:
            raise ConfigError(
                f"topk_group = {self.topk_group} must be at most n_group = {self.n_group}"
            )
        size = self.num_experts // self.n_group
        if self.num_experts_per_tok > self.topk_group * size:
            raise ConfigError(
                f"num_experts_per_tok = {self.num_experts_per_tok} must be at most "
                f"{self.topk_group * size}, the experts of topk_group = {self.topk_group} groups "
                f"of num_experts = {self.num_experts}"
            )
        if self.group_score == "top_2_sum" and size < 2:
            raise ConfigError(
                f"n_group = {self.n_group} must leave at least 2 of num_experts = "
                f"{self.num_experts} to a group, whose score is the sum of its two largest"
            )

    @property
    def routing(self) -> Routing:
        """How a token chooses its experts."""
        return Routing(
            top_k=self.num_experts_per_tok,
            scores=self.scores,
            normalised=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            top_groups=self.topk_group,
            group_score=self.group_score,
        )


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The tensors of a mixture in a checkpoint, with names relative to the layer.

    In names of the tensors of one expert, {} is its number. Other tensors are stacked by expert:
    `[experts, 2F, D]` and `[experts, D, F]`, gate before up.
    """

    router: str
    gate_up: tuple[str, ...]
    """Names of gate and up; one if they are one tensor."""
    down: str
    transposed: bool = False
    """Whether stacked tensors are `[experts, D, 2F]` and `[experts, F, D]`."""
    interleaved: bool = False
    """Whether rows of gate and up alternate."""

    @property
    def is_stacked(self) -> bool:
        """Whether all experts are one tensor."""
        return "{}" not in self.down

    @staticmethod
    def of_tensors(
        at: str, router: str = "gate", names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    ) -> ExpertLayout:
        """Return the layout with tensors of each expert, gate, up and down, in the module `at`."""
        *gate_up, down = (f"{at}experts.{{}}.{name}.weight" for name in names)
        return ExpertLayout(router=f"{at}{router}", gate_up=tuple(gate_up), down=down)

    @staticmethod
    def stacked(at: str, router: str = "gate", **traits: bool) -> ExpertLayout:
        """Return the layout with tensors of all experts in the module `at`."""
        gate_up, down = f"{at}experts.gate_up_proj", f"{at}experts.down_proj"
        return ExpertLayout(router=f"{at}{router}", gate_up=(gate_up,), down=down, **traits)

    @staticmethod
    def both(at: str, router: str = "gate") -> tuple[ExpertLayout, ...]:
        """Return both: published checkpoints have tensors of each expert."""
        return ExpertLayout.of_tensors(at, router), ExpertLayout.stacked(at, router)


@dataclass(frozen=True, kw_only=True)
class MixtureNorms:
    """Norms and scales of a mixture in parallel with an MLP (Gemma 4), by their names in a
    checkpoint."""

    mlp_output: str = "post_feedforward_layernorm_1"
    router: str = "router.scale"
    """Of the input of the router, whose dot products are divided by the root of the hidden size."""
    input: str = "pre_feedforward_layernorm_2"
    output: str = "post_feedforward_layernorm_2"
    expert_scales: str = "router.per_expert_scale"
    """Factor of the score of each expert."""


@dataclass(frozen=True, kw_only=True)
class ExpertTraits:
    """The traits of the mixtures of a family."""

    scores: Scores = "softmax"
    group_score: GroupScore = "max"
    dense_layers: Callable[[Mapping[str, Any], int], tuple[int, ...]] = lambda config, layers: ()
    """Returns which of a number of layers have an MLP. Raises `CheckpointError`."""
    layouts: tuple[ExpertLayout, ...]
    """Layouts of checkpoints; published ones have the first."""
    optional: bool = False
    """Whether a config without experts has an MLP in every layer."""
    shared: str = ""
    """Name of the MLP that all tokens use; empty: there is none."""
    shared_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of its projections; the last one is its output."""
    shared_gate: str = ""
    """Name of the projection to the gate of that MLP; empty: it has no gate."""
    router_bias: bool = False
    """The router has a bias."""
    biases: bool = False
    """Experts have biases: stacked tensors with the suffix `_bias`."""
    correction: str = ""
    """Name of the correction of scores for the choice of experts; empty: there is none."""
    correction_rows: bool = False
    """The correction is stored as a matrix with one row (ERNIE 4.5)."""
    latent: tuple[str, str] = ("", "")
    """Names of the projections to and from the latent space of `moe_latent_size`."""
    exact: bool = False
    """Experts keep the model's dtype: no kernel has experts without gate."""
    scaled_inputs: bool = False
    """Scores multiply the input of an expert, not its output (Llama 4)."""
    parallel_to_mlp: MixtureNorms | None = None
    """The tensors of mixtures whose output is added to an MLP's; None: they replace MLPs."""


def experts(moe: ExpertsConfig, traits: ExpertTraits, model: int, function: Activate) -> Experts:
    """The operation of a layer with experts; its value is the sum of theirs.

    Its weights are `[(R + S) * 2F, D]`, or F of them without gate, and `[(R + S) * D, F]`: of the
    routed experts, then of the shared ones, which are slices of one MLP in a checkpoint. `model` is
    the hidden size of the model, `function` the activation of an expert.
    """
    hidden, parts = moe.moe_latent_size or model, function.parts
    width, routed, always = moe.moe_intermediate_size, moe.num_experts, moe.n_shared_experts
    total, first, parallel = routed + always, traits.layouts[0], traits.parallel_to_mlp
    slices = [(expert * width, width) for expert in range(always)]

    def of_shared(name: str, axis: int, part: tuple[int, int]) -> Source:
        stored = (hidden, always * width) if axis else (always * width, hidden)
        return Source(f"{traits.shared}.{name}.weight", stored, Slice(axis, *part))

    def parameter(
        name: str, shape: Shape, sources: Callable[[ExpertLayout], Iterable[Source]], **more: Any
    ) -> Parameter:
        """A parameter with alternative layouts."""
        own, *others = dict.fromkeys(tuple(sources(layout)) for layout in traits.layouts)
        return Parameter(f"experts.{name}", own, shape, alternatives=tuple(others), **more)

    def gate_up(layout: ExpertLayout) -> Iterator[Source]:
        shape = (parts * width, hidden)
        yield from _of_experts(layout, layout.gate_up, routed, shape, layout.interleaved)
        for part in slices:
            yield from (of_shared(name, 0, part) for name in ("gate_proj", "up_proj"))

    def down(layout: ExpertLayout) -> Iterator[Source]:
        yield from _of_experts(layout, (layout.down,), routed, (hidden, width))
        yield from (of_shared("down_proj", 1, part) for part in slices)

    def bias(name: str, weight: str, size: int, interleaved: bool = False) -> Parameter | None:
        if not traits.biases:
            return None
        stored = weight.removesuffix("_blocks") + "_bias"
        rows = _expert_rows(routed, size, interleaved)
        sources = tuple(Source(stored, (routed, size), part) for part in rows)
        return Parameter(f"experts.{name}.bias", sources, (routed * size,))

    def storage(each: int) -> dict[str, Any]:
        return {"exact": True} if traits.exact else {"matrices": each * total}

    def router(leaf: str, shape: Shape, **more: Any) -> Parameter:
        def sources(layout: ExpertLayout) -> list[Source]:
            return [Source(f"{layout.router}.{leaf}", shape)]

        return parameter(f"router.{leaf}", shape, sources, **more)

    correction = scales = None
    if traits.correction and moe.use_expert_bias:
        stored = (1, routed) if traits.correction_rows else (routed,)
        correction = in_float32("experts.correction", traits.correction, *stored, shape=(routed,))
    if parallel is not None:
        scales = in_float32("experts.scales", parallel.expert_scales, routed)
    return Experts(
        name="experts",
        router=router("weight", (routed, model), exact=True),
        gate_up=parameter(
            "gate_up.weight", (total * parts * width, hidden), gate_up, **storage(parts)
        ),
        down=parameter("down.weight", (total * hidden, width), down, **storage(1)),
        routing=moe.routing,
        activate=function,
        router_bias=router("bias", (routed,)) if traits.router_bias else None,
        correction=correction,
        gate_up_bias=bias("gate_up", first.gate_up[0], 2 * width, first.interleaved),
        down_bias=bias("down", first.down, hidden),
        shared=always,
        scaled_inputs=traits.scaled_inputs,
        expert_scales=scales,
        router_input=parallel is not None or moe.moe_latent_size is not None,
    )


def _of_experts(
    layout: ExpertLayout,
    names: tuple[str, ...],
    routed: int,
    shape: tuple[int, int],
    interleaved: bool = False,
) -> Iterator[Source]:
    """Yield the tensors of the routed experts; `shape` is of all `names` of one expert."""
    rows, columns = shape
    if layout.is_stacked:
        stored = (columns, rows) if layout.transposed else shape
        for part in _expert_rows(routed, rows, interleaved, layout.transposed):
            yield Source(names[0], (routed, *stored), part)
        return
    for expert in range(routed):
        for name in names:
            yield Source(name.format(expert), (rows // len(names), columns))


def _expert_rows(
    routed: int, rows: int, interleaved: bool, transposed: bool = False
) -> Iterator[ExpertRows]:
    """Yield the rows of each expert in a stacked tensor, or its bias; of gate and up one by one if
    they alternate."""
    step = 2 if interleaved else 1
    for expert in range(routed):
        for start in range(step):
            yield ExpertRows(expert, start, rows // step, step, transposed)


def routed_and_shared(
    moe: ExpertsConfig, traits: ExpertTraits, hidden: int, activate: Callable[[int], Activate]
) -> Iterator[Operation]:
    """The operations of a layer with experts in place of an MLP: those in a latent space follow a
    projection to it, and an MLP that all tokens use is added, perhaps times a gate of the token
    (Qwen2-MoE). `activate` returns the activation of a number of features."""
    routed: Operation = experts(moe, traits, hidden, activate(moe.moe_intermediate_size))
    if (size := moe.moe_latent_size) is not None:
        into, out = traits.latent
        latent = linear("experts.latent", {into: size}, hidden)
        yield replace(latent, reads=("mlp_normed",), writes="latent")
        yield replace(routed, reads=("latent", "mlp_normed"))
        routed = linear("experts.output", {out: hidden}, size)
    if not (inner := moe.shared_expert_intermediate_size):
        yield routed
        return
    yield replace(routed, writes="routed")
    names = [f"{traits.shared}.{name}" for name in traits.shared_names]
    up, *rest, down = mlp(hidden, names, activate(inner), ours="shared.")
    yield from (replace(up, reads=("mlp_normed",)), *rest, replace(down, writes="shared"))
    if not traits.shared_gate:
        yield Add(name="add_shared", reads=("routed", "shared"))
        return
    gate = linear("shared.gate", {traits.shared_gate: 1}, hidden)
    yield replace(gate, reads=("mlp_normed",), writes="shared_gate")
    reads = ("shared", "shared_gate")
    gated = GateOutput(name="gate_shared", reads=reads, features=hidden, per_feature=False)
    yield replace(gated, writes="gated_shared")
    yield Add(name="add_shared", reads=("routed", "gated_shared"))
