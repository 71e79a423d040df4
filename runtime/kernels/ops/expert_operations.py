"""The operation of a mixture of experts, and how its tokens choose experts.

Shapes: D hidden_size, F features of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .layer_operations import Activate, Operation
from .parameter import Parameter

__all__ = ["Experts", "Routing", "Scores"]

Scores = Literal["softmax", "sigmoid", "softmax_chosen"]


class Routing(NamedTuple):
    """How a token chooses its experts from the logits of the router."""

    top_k: int
    """Experts of a token."""
    scores: Scores = "softmax"
    """Function of the logits of all experts, or softmax over the logits of the chosen ones."""
    normalised: bool = False
    """Whether the scores of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the chosen scores."""
    groups: int = 1
    """Groups of consecutive experts; a token chooses from `top_groups` of them."""
    top_groups: int = 1
    group_score: Literal["max", "top_2_sum"] = "max"
    """Score of a group: its largest, or the sum of its two largest."""


@dataclass(frozen=True, kw_only=True)
class Experts(Operation):
    """A mixture of gated MLPs, each token through `routing.top_k` of them.

    The weights of all experts are stacked: rows `e * 2F` to `(e + 1) * 2F` of `gate_up` are gate
    and up of expert e, rows `e * D` to `(e + 1) * D` of `down` its output. After the routed experts
    come `shared` ones, which process every token with weight 1. A shared MLP of n times F features
    is n of these: it is the sum over slices of its features.
    """

    router: Parameter
    """`[routed, D]`, never quantised; the logits are computed in float32."""
    gate_up: Parameter
    """`[(routed + shared) * 2F, D]`."""
    down: Parameter
    """`[(routed + shared) * D, F]`."""
    routing: Routing
    activate: Activate
    """Function of gate and up; its features are F."""
    router_bias: Parameter | None = None
    """`[routed]`, added to the logits."""
    correction: Parameter | None = None
    """float32 `[routed]`, added to the scores for the choice of experts only (DeepSeek-V3)."""
    gate_up_bias: Parameter | None = None
    """`[(routed + shared) * 2F]`."""
    down_bias: Parameter | None = None
    """`[(routed + shared) * D]`."""
    shared: int = 0
    scaled_inputs: bool = False
    """Whether scores multiply the input of an expert, not its output (Llama 4)."""

    @property
    def routed(self) -> int:
        """Number of experts that the router chooses from."""
        return self.router.shape[0]

    @property
    def total(self) -> int:
        """Number of experts, shared ones included."""
        return self.routed + self.shared

    @property
    def per_token(self) -> int:
        """Experts that process a token, shared ones included."""
        return self.routing.top_k + self.shared

    def expected_experts(self, tokens: float) -> float:
        """Return how many different experts process a number of tokens, if all are equally likely.

        A token chooses k of R experts, so one of them is chosen by none of n tokens with
        probability (1 - k / R)**n: R * (1 - (1 - k / R)**n), and all shared ones.
        """
        unused: float = (1 - self.routing.top_k / self.routed) ** tokens
        return self.routed * (1 - unused) + self.shared

    @property
    def chooses_by_logits(self) -> bool:
        """Whether experts are chosen by the logits, not by scores."""
        return self.correction is None and self.routing.group_score == "max"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        optional = (self.router_bias, self.correction, self.gate_up_bias, self.down_bias)
        required = (self.router, self.gate_up, self.down)
        return (*required, *(p for p in optional if p is not None))
