"""The dimensions and the routing of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError
from ..kernels.ops.expert_operations import Routing
from .limits import require_numbers, require_sizes

__all__ = ["ExpertLayout", "ExpertTraits", "ExpertsConfig"]

_MOST_EXPERTS = 2048


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP (Shazeer et al. 2017). Raises `ConfigError`."""

    num_experts: int
    """Experts that the router chooses from."""
    num_experts_per_tok: int
    """Experts that it chooses for a token."""
    moe_intermediate_size: int
    """Width of an expert."""
    n_shared_experts: int = 0
    """Experts that every token uses in addition."""
    scores: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    """As `Routing.scores`."""
    norm_topk_prob: bool = False
    """Whether the scores of a token's experts are divided by their sum."""
    routed_scaling_factor: float = 1.0
    """Factor of the scores."""
    n_group: int = 1
    """Groups of consecutive experts."""
    topk_group: int = 1
    """Groups that a token chooses from."""
    group_score: Literal["max", "top_2_sum"] = "max"
    """As `Routing.group_score`."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an MLP."""

    def __post_init__(self) -> None:
        require_sizes(
            self,
            (
                "num_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "n_group",
                "topk_group",
            ),
        )
        require_numbers(self, ("routed_scaling_factor",))
        for name in ("num_experts", "n_shared_experts"):
            count = getattr(self, name)
            if not 0 <= count <= _MOST_EXPERTS:
                bound = "not be negative" if count < 0 else f"be at most {_MOST_EXPERTS}"
                raise ConfigError(f"{name} = {count} must {bound}")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok = {self.num_experts_per_tok} must be at most num_experts = "
                f"{self.num_experts}"
            )
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
                f"{self.topk_group * size}, the experts of topk_group = {self.topk_group} groups"
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

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.dense_layers


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The tensors of a mixture in a checkpoint, with names relative to the layer.

    In names of the tensors of one expert, {} is its number. Other tensors are stacked by expert:
    `[experts, 2F, D]` and `[experts, D, F]`, gate before up.
    """

    router: str = "mlp.gate"
    gate_up: tuple[str, ...] = ("mlp.experts.gate_up_proj",)
    """Names of gate and up; one if they are one tensor."""
    down: str = "mlp.experts.down_proj"
    transposed: bool = False
    """Whether stacked tensors are `[experts, D, 2F]` and `[experts, F, D]`."""
    interleaved: bool = False
    """Whether rows of gate and up alternate."""

    @property
    def is_stacked(self) -> bool:
        """Whether all experts are one tensor."""
        return "{}" not in self.down


@dataclass(frozen=True, kw_only=True)
class ExpertTraits:
    """The traits of the mixtures of a family."""

    routing: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Returns the fields of `ExpertsConfig` that describe the routing and shared experts, from a
    `config.json`. Raises `CheckpointError`."""
    dense_layers: Callable[[Mapping[str, Any], int], tuple[int, ...]] = lambda config, layers: ()
    """Returns which of so many layers have an MLP. Raises `CheckpointError`."""
    layouts: tuple[ExpertLayout, ...]
    """Layouts of checkpoints; the first is that of published ones."""
    optional: bool = False
    """Whether a config without experts has an MLP in every layer."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Field of `ExpertsConfig` -> its key in `config.json`, where they differ."""
    shared: str = ""
    """Name of the MLP that all tokens use; empty: there is none."""
    router_bias: bool = False
    """The router has a bias."""
    biases: bool = False
    """Experts have biases: stacked tensors with the suffix `_bias`."""
    correction: str = ""
    """Name of the correction of scores for the choice of experts; empty: there is none."""
    mxfp4: bool = False
    """Checkpoints may store experts in mxfp4."""
    scaled_inputs: bool = False
    """Scores multiply the input of an expert, not its output (Llama 4)."""
