"""A mixture of experts in plain PyTorch: routing, and the products of the chosen experts.

Shapes: T tokens, D hidden_size, F features of an expert, R routed experts, E experts (the routed
ones, then the shared ones), K experts of a token, N = T * K pairs of a token and an expert, B
blocks of M pairs with the same expert.

Rounding: the logits of the router and the scores are float32. Gate and up of an expert are rounded
to the model's dtype, and so is their activation. The products of `down` remain float32. They are
multiplied by their scores and summed in float32, in the order of the choice, then the shared
experts; the sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights import dequantise
from .activation import Activate, activation
from .linear import LinearTensors, linear_in_float32, projection, reference_linear
from .operation import Binding, LayerStep, Operation, Run, ShardedLayer, Vector
from .parameter import Parameter, cut

Scores = Literal["softmax", "sigmoid", "softmax_chosen"]

_LEAST_SUM = 1e-20
"""Added to the sum that scores are divided by: all sigmoids of a token may be zero."""
_MOST_BLOCK_ROWS = 128
_FLOAT32 = 4
_GATHERED_ELEMENTS = 1 << 25
"""Most elements of the weights that are gathered at once on a device, if one expert has fewer."""


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

    Experts whose activation is not `gated` have no gate, and only an up in `gate_up`.

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
    expert_scales: Parameter | None = None
    """float32 `[routed]`: factor of the score of each expert, after the choice (Gemma 4)."""
    router_input: bool = False
    """Whether the value is (input of the experts, input of the router), and not the same one."""

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
    def traits(self) -> frozenset[str]:
        return super().traits | (frozenset() if self.activate.gated else {"ungated"})

    @property
    def chooses_by_logits(self) -> bool:
        """Whether experts are chosen by the logits, not by scores."""
        return self.correction is None and self.routing.group_score == "max"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        optional = (
            *(self.router_bias, self.correction, self.expert_scales),
            *(self.gate_up_bias, self.down_bias),
        )
        required = (self.router, self.gate_up, self.down)
        return (*required, *(p for p in optional if p is not None))

    def bind(self, to: Binding) -> Run:
        router, gated = to.module(self.router, Vector), self.activate.gated
        correction, scales = (
            None if p is None else to.module(p, partial(Vector, p.dtype))
            for p in (self.correction, self.expert_scales)
        )
        # Kernels know gated experts only: others keep plain weights, for plain PyTorch.
        run_experts = to.kernels.experts if gated else to.kernels.ungated_experts
        assert run_experts is not None, "all kernels of models have some"
        gate_up, down = (
            projection(to, p) if gated else to.module(p, Vector) for p in (self.gate_up, self.down)
        )
        router_input = self.router_input

        def stored(held: Any) -> LinearTensors:
            return LinearTensors(held.weight, held.scales if gated else None, held.bias)

        def run(value: Any, step: LayerStep) -> Tensor:
            x_TD, router_TD = value if router_input else (value, None)
            tensors = ExpertTensors(
                router.weight,
                router.bias,
                None if correction is None else correction.weight,
                None if scales is None else scales.weight,
                stored(gate_up),
                stored(down),
            )
            return run_experts(self, x_TD, tensors, step.batch.live_tokens, router_TD)

        return run

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if self.activate.features % ranks:
            yield f"{ranks} does not divide {self.activate.features} features of an expert"

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        """Each expert with the rank's part of its features."""
        width = self.activate.features
        part = layer.rank.part(width)
        # Of each expert the gate, then the up.
        rows = [
            range(start + part.start, start + part.stop)
            for start in range(0, self.activate.parts * width * self.total, width)
        ]
        own = replace(
            self,
            gate_up=cut(self.gate_up, rows),
            down=layer.rank.columns(self.down),
            activate=replace(self.activate, features=len(part)),
            gate_up_bias=None if self.gate_up_bias is None else cut(self.gate_up_bias, rows),
            down_bias=layer.rank.once(self.down_bias),
        )
        yield from layer.rank.summed(own, self.down.shape[0] // self.total)

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        routing = 6 * _FLOAT32 * self.routed + 4 * 8 * self.per_token
        products = 2 * _FLOAT32 * self.per_token * hidden
        # All tokens may have chosen one expert; its inner features are gate and up, and activated.
        inner = (itemsize + _FLOAT32) * (hidden + 4 * self.activate.features)
        return itemsize * 3 * hidden + routing + products + inner


class ExpertTensors(NamedTuple):
    """The tensors of a mixture of experts, as stored by the kernels."""

    router: Tensor
    """`[R, D]` in the model's dtype."""
    router_bias: Tensor | None
    """`[R]`."""
    correction: Tensor | None
    """float32 `[R]`."""
    expert_scales: Tensor | None
    """float32 `[R]`."""
    gate_up: LinearTensors
    """Weight `[E * 2F, D]`, or each gate and up packed: `[E * 2 * ceil(F / 32), steps, 32, w]`."""
    down: LinearTensors
    """Weight `[E * D, F]`, or packed by expert: `[E * ceil(D / 32), steps, 32, w]`."""


def by_expert(linear: LinearTensors, total: int) -> LinearTensors:
    """Return the tensors of stacked experts with a first dimension of experts."""
    return _each(linear, lambda stacked: stacked.view(total, -1, *stacked.shape[1:]))


def _each(linear: LinearTensors, function: Callable[[Tensor], Tensor]) -> LinearTensors:
    weight, scales, bias = linear
    scales = None if scales is None else function(scales)
    return LinearTensors(function(weight), scales, None if bias is None else function(bias))


def reference_route(
    op: Experts, logits_TR: Tensor, correction_R: Tensor | None, scales_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the scores, float32 `[T, top_k]`, and the experts, int64 `[T, top_k]`, of each token.

    The experts are in descending order of what the choice is made by: the logits, or the scores
    plus `correction_R` (float32) if there is one or if groups are chosen by sums. Of equal ones the
    expert with the lower number comes first, and so for groups.
    """
    routing = op.routing
    match routing.scores:
        case "softmax":
            scores_TR = logits_TR.softmax(-1)
        case "sigmoid":
            scores_TR = logits_TR.sigmoid()
        case "softmax_chosen":
            scores_TR = logits_TR
    # Scores increase with the logits, but large logits have equal scores.
    choice_TR = logits_TR if op.chooses_by_logits else scores_TR
    if correction_R is not None:
        choice_TR = choice_TR + correction_R
    if routing.top_groups < routing.groups:
        choice_TR = _within_groups(op, choice_TR)
    experts_TK = _largest(choice_TR, routing.top_k)
    weights_TK = scores_TR.gather(1, experts_TK)
    if routing.scores == "softmax_chosen":
        weights_TK = weights_TK.softmax(-1)
    if routing.normalised:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _LEAST_SUM)
    weights_TK = weights_TK * routing.scale
    return weights_TK if scales_R is None else weights_TK * scales_R[experts_TK], experts_TK


def _within_groups(op: Experts, choice_TR: Tensor) -> Tensor:
    """Return minus infinity for experts outside of the best groups (DeepSeek-V2, 2405.04434)."""
    groups = op.routing.groups
    grouped_TGE = choice_TR.unflatten(-1, (groups, -1))
    if op.routing.group_score == "max":
        score_TG = grouped_TGE.amax(-1)
    else:
        score_TG = grouped_TGE.topk(2, dim=-1).values.sum(-1)
    best = _largest(score_TG, op.routing.top_groups)
    excluded_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter(1, best, False)
    within_TGE: Tensor = grouped_TGE.masked_fill(excluded_TG[..., None], -torch.inf)
    return within_TGE.flatten(1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values of each row; of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def reference_experts(
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    live_T: Tensor | None = None,
    router_TD: Tensor | None = None,
) -> Tensor:
    """Return the output of a mixture, `[T, D]` in the dtype of `x_TD`, over unpacked weights.

    `live_T` is false for padding, which uses no expert and whose output is zero. `router_TD` is
    what the router reads, if it is not `x_TD`. On a CPU only the
    weights of chosen experts are read. On other devices all shapes are static and nothing waits for
    the device.
    """
    bias = None if tensors.router_bias is None else tensors.router_bias.float()
    routed_TD = x_TD if router_TD is None else router_TD
    logits_TR = F.linear(routed_TD.float(), tensors.router.float(), bias)
    choice = op, logits_TR, tensors.correction, live_T, tensors.expert_scales
    weights_TK, experts_TK = reference_choice(*choice)
    return reference_products(op, x_TD, tensors, weights_TK, experts_TK)


def reference_products(
    op: Experts, x_TD: Tensor, tensors: ExpertTensors, weights_TK: Tensor, experts_TK: Tensor
) -> Tensor:
    """Return the weighted sum of the outputs of the experts that `reference_choice` returned.

    See `reference_experts`.
    """
    run = _by_expert if x_TD.device.type == "cpu" else _by_block
    return run(op, x_TD, tensors, weights_TK, experts_TK)


def reference_choice(
    op: Experts,
    logits_TR: Tensor,
    correction_R: Tensor | None,
    live_T: Tensor | None,
    scales_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights and experts of each token, `[T, K]`, shared ones included.

    As `reference_route`. The experts of padding have the number E, and weight 0.
    """
    weights_TK, experts_TK = reference_route(op, logits_TR, correction_R, scales_R)
    if op.shared:
        shared = torch.arange(op.routed, op.total, device=logits_TR.device)
        shared = shared.expand(len(logits_TR), -1)
        experts_TK = torch.cat((experts_TK, shared), dim=1)
        weights_TK = F.pad(weights_TK, (0, op.shared), value=1.0)
    if live_T is not None:
        experts_TK = experts_TK.masked_fill(~live_T[:, None], op.total)
        weights_TK = weights_TK.masked_fill(~live_T[:, None], 0.0)
    return weights_TK, experts_TK


def _by_expert(
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    weights_TK: Tensor,
    experts_TK: Tensor,
) -> Tensor:
    """Compute expert by expert; reads the numbers of their tokens on the host."""
    linears = by_expert(tensors.gate_up, op.total), by_expert(tensors.down, op.total)
    weights_N, chosen_N = weights_TK.flatten(), experts_TK.flatten()
    order_N = chosen_N.argsort(stable=True)
    counts = chosen_N.bincount(minlength=op.total)[: op.total].tolist()
    products_ND = x_TD.new_zeros(len(weights_N), x_TD.shape[1], dtype=torch.float32)
    for expert, pairs in enumerate(order_N[: sum(counts)].split(counts)):
        if len(pairs):
            inputs = x_TD[pairs // experts_TK.shape[1]]
            if op.scaled_inputs:
                inputs = _scaled(inputs, weights_N[pairs])
            products_ND[pairs] = _expert(op, inputs, expert, *linears)
    return _summed(op, products_ND, weights_TK).to(x_TD.dtype)


def _expert(
    op: Experts, x_MD: Tensor, expert: int, gate_up: LinearTensors, down: LinearTensors
) -> Tensor:
    """Return the products of one expert, float32 `[M, D]`, of tensors `by_expert`."""
    weight, scales, bias = _each(gate_up, lambda stacked: stacked[expert])
    parts = reference_linear(x_MD, weight, bias, op.activate.parts * op.activate.features, scales)
    inner_MF = activation(op.activate)(*parts.chunk(op.activate.parts, dim=-1))
    return linear_in_float32(inner_MF, _each(down, lambda stacked: stacked[expert]))


def _by_block(
    op: Experts,
    x_TD: Tensor,
    tensors: ExpertTensors,
    weights_TK: Tensor,
    experts_TK: Tensor,
) -> Tensor:
    """Compute blocks of pairs with the same expert; all shapes follow from the arguments.

    The pairs are sorted by expert, and the pairs of each expert fill whole blocks:

        experts of pairs 0 to 5: 2 0 2 2 0 2, blocks of 2
        sorted pairs             1 4 | 0 2 | 3 5
        block -> expert          0     2     2       further blocks have no pairs
    """
    tokens, per_token = experts_TK.shape
    pairs, total, device = tokens * per_token, op.total, x_TD.device
    rows = _block_rows(pairs, total)
    blocks = min(pairs, pairs // rows + total)
    padding_N = experts_TK.flatten() == total
    chosen_N = experts_TK.flatten().clamp(max=total - 1)

    order_N = chosen_N.argsort(stable=True)
    counts_E = (chosen_N[:, None] == torch.arange(total, device=device)).sum(0)
    blocks_E = (counts_E + rows - 1) // rows
    last_E = blocks_E.cumsum(0)
    sorted_N = chosen_N[order_N]
    rank_N = torch.arange(pairs, device=device) - (counts_E.cumsum(0) - counts_E)[sorted_N]
    place_N = (last_E - blocks_E)[sorted_N] * rows + rank_N  # of the sorted pairs
    expert_B = torch.searchsorted(last_E, torch.arange(blocks, device=device), right=True)
    pair_BM = torch.zeros(blocks * rows, dtype=torch.int64, device=device)
    pair_BM = pair_BM.scatter(0, place_N, order_N).view(blocks, rows)

    x_BMD = x_TD[pair_BM // per_token]
    if op.scaled_inputs:
        x_BMD = _scaled(x_BMD, weights_TK.flatten()[pair_BM])
    expert_B = expert_B.clamp(max=total - 1)
    at_once = max(
        1, _GATHERED_ELEMENTS // (op.activate.parts * op.activate.features * x_TD.shape[1])
    )
    linears = by_expert(tensors.gate_up, total), by_expert(tensors.down, total)
    products = torch.cat(
        [
            _blocks(op, part, experts, *linears)
            for part, experts in zip(x_BMD.split(at_once), expert_B.split(at_once), strict=True)
        ]
    ).flatten(0, 1)
    products_ND = torch.empty_like(products[:pairs])
    products_ND[order_N] = products[place_N]
    products_ND = products_ND.masked_fill(padding_N[:, None], 0.0)
    return _summed(op, products_ND, weights_TK).to(x_TD.dtype)


def _block_rows(pairs: int, total: int) -> int:
    """Rows of a block: about as many as an expert has pairs, a power of two."""
    return min(_MOST_BLOCK_ROWS, 1 << max(0, (pairs - 1) // total).bit_length())


def _blocks(
    op: Experts, x_BMD: Tensor, expert_B: Tensor, gate_up: LinearTensors, down: LinearTensors
) -> Tensor:
    """Return the products of blocks, float32 `[B, M, D]`, of tensors `by_expert`."""

    def product(x: Tensor, linear: LinearTensors) -> Tensor:
        weight, scales, bias = linear
        weight_BNK = weight[expert_B]
        if scales is None:
            weight_BNK = weight_BNK.float()
        else:
            data_NK, scales = weight_BNK.flatten(0, 1), scales[expert_B].flatten(0, 1)
            weight_BNK = dequantise(data_NK, scales).unflatten(0, weight_BNK.shape[:2])
        out = x.float() @ weight_BNK.transpose(1, 2)
        return out if bias is None else out + bias[expert_B][:, None].float()

    parts = product(x_BMD, gate_up)
    inner_BMF = activation(op.activate)(*parts.to(x_BMD.dtype).chunk(op.activate.parts, dim=-1))
    return product(inner_BMF, down)


def _scaled(x: Tensor, weights: Tensor) -> Tensor:
    """Return inputs times their scores, rounded."""
    return (x.float() * weights[..., None]).to(x.dtype)


def _summed(op: Experts, products_ND: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sums of the products of each token, float32 `[T, D]`, in order."""
    products_TKD = products_ND.unflatten(0, weights_TK.shape)
    if not op.scaled_inputs:
        products_TKD = products_TKD * weights_TK[..., None]
    sum_TD: Tensor = products_TKD[:, 0]
    for place in range(1, products_TKD.shape[1]):
        sum_TD = sum_TD + products_TKD[:, place]
    return sum_TD


def converted_bytes(
    op: Experts, hidden: int, itemsize: int, *, quantised: bool, on_cpu: bool
) -> int:
    """Return the bytes of the weights that `reference_experts` gathers and converts at once.

    `itemsize` is of a stored weight, `quantised` whether it has 8 bits. On a CPU they are converted
    expert by expert.
    """
    gate_up = op.activate.parts * op.activate.features * hidden
    if on_cpu:
        if quantised:
            return 2 * _FLOAT32 * gate_up
        return 0 if itemsize == _FLOAT32 else _FLOAT32 * gate_up // 2
    at_once = max(1, _GATHERED_ELEMENTS // gate_up)
    return at_once * gate_up * (itemsize + _FLOAT32)
