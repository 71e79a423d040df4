"""Splits the plan of a model over the ranks of a tensor-parallel group (Shoeybi et al. 2019).

Queries, keys, values, gates and ups are cut by output rows, by heads or features; the products
after them by input columns, whose results the ranks add (`AllReduce`). Experts are cut by features,
each of them, so that all ranks have the same work whichever experts a token chooses. Embedding and
head are cut by tokens of the vocabulary. Norms, routers, what latent attention caches and, with
fewer key/value heads than ranks, these heads are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..errors import ConfigError
from ..kernels.ops.expert_operations import Experts
from ..kernels.ops.layer_operations import (
    Activate,
    AllReduce,
    Attend,
    LatentRotate,
    LatentToValues,
    Linear,
    Norm,
    Opaque,
    Operation,
    QKNorm,
    QueriesToLatent,
    Rotate,
)
from ..kernels.ops.layer_plan import LayerPlan, ModelPlan, Shard
from ..kernels.ops.parameter import Parameter, cut, zeros

__all__ = ["allowed_ranks", "check_ranks", "shard_plan"]

_MOST_RANKS = 64


def shard_plan(plan: ModelPlan, rank: int, ranks: int) -> ModelPlan:
    """Return the plan of one rank; of a single one it is the plan itself.

    Raises:
        ConfigError: as `check_ranks`.
    """
    assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
    assert plan.shard is None, "the plan of the whole model"
    check_ranks(plan, ranks)
    if ranks == 1:
        return plan
    sharding = _Sharding(rank, ranks)
    layers = {layer: sharding.layer(layer) for layer in dict.fromkeys(plan.layers)}
    tokens = [replace(sharding, rank=r).part(plan.vocab_size) for r in range(ranks)]
    head = plan.head
    return replace(
        plan,
        embedding=cut(plan.embedding, [tokens[rank]]),
        layers=tuple(layers[layer] for layer in plan.layers),
        head=replace(head, weight=cut(head.weight, [tokens[rank]])),
        shard=Shard(rank, ranks, tokens[rank], tuple(map(len, tokens))),
    )


def check_ranks(plan: ModelPlan, ranks: int) -> None:
    """Refuse a number of ranks that the model cannot be split over.

    Raises:
        ConfigError: names what `ranks` does not divide, and the numbers that are possible.
    """
    if ranks == 1:
        return
    obstacles = list(dict.fromkeys(_obstacles(plan, ranks)))
    if obstacles:
        allowed = ", ".join(map(str, allowed_ranks(plan)))
        raise ConfigError(
            f"the model cannot be split over {ranks} ranks: {'; '.join(obstacles)}."
            f" tensor_parallel can be {allowed}; replicas run any model",
            field="tensor_parallel",
        )


def allowed_ranks(plan: ModelPlan) -> tuple[int, ...]:
    """Return the numbers of ranks that a model can be split over, up to 64."""
    return tuple(n for n in range(1, _MOST_RANKS + 1) if not any(_obstacles(plan, n)))


def _obstacles(plan: ModelPlan, ranks: int) -> Iterator[str]:
    """Yield what `ranks` does not divide."""
    for operation in plan.operations:
        match operation:
            case Opaque() if ranks > 1:
                yield "it is run by transformers, and not by a native family"
            case Attend(heads=heads, kv_heads=kv_heads):
                if heads % ranks:
                    yield f"{ranks} does not divide {heads} query heads"
                if kv_heads % ranks and ranks % kv_heads:
                    yield f"{ranks} is neither a divisor nor a multiple of {kv_heads} kv heads"
            case Activate(features=features) if features % ranks:
                yield f"{ranks} does not divide {features} features of an MLP (intermediate_size)"
            case Experts(activate=activate) if activate.features % ranks:
                yield f"{ranks} does not divide {activate.features} features of an expert"
    if plan.vocab_size < ranks:
        yield f"the vocabulary has {plan.vocab_size} tokens"


@dataclass(frozen=True)
class _Sharding:
    """Cuts operations for one rank."""

    rank: int
    ranks: int

    def part(self, size: int) -> range:
        """The rank's share of `size` elements: shares differ by at most one."""
        return range(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)

    def kv_heads(self, attend: Attend) -> range:
        """The key/value heads that serve the rank's query heads."""
        if attend.kv_heads >= self.ranks:
            return self.part(attend.kv_heads)
        first = attend.kv_heads * self.rank // self.ranks
        return range(first, first + 1)

    def layer(self, layer: LayerPlan) -> LayerPlan:
        """The layer of the rank."""
        return LayerPlan(tuple(self._operations(layer)))

    def _operations(self, layer: LayerPlan) -> Iterator[Operation]:
        is_cut = False
        for op, following in zip(layer.operations, (*layer.operations[1:], None), strict=True):
            match op:
                case Linear() if is_cut:
                    yield self._by_columns(op)
                    yield self._all_reduce(op.out_features)
                    is_cut = False
                case Linear():
                    kept = self._kept(op, following, layer.attend)
                    is_cut = kept is not None
                    yield op if kept is None else self._by_rows(op, kept)
                case Experts():
                    yield self._experts(op)
                    yield self._all_reduce(op.router.shape[1])
                case _:
                    yield self._within_heads(op, layer.attend)

    def _all_reduce(self, features: int) -> AllReduce:
        return AllReduce(name="all_reduce", ranks=self.ranks, features=features)

    def _kept(
        self, op: Linear, following: Operation | None, attend: Attend
    ) -> Sequence[range] | None:
        """The units of each part of a product that the next operation needs; None: all of all."""
        match following:
            case QKNorm() | Rotate() | Attend():
                kv_heads = self.kv_heads(attend)
                return self.part(attend.heads), kv_heads, kv_heads
            case LatentRotate():
                first, *others = op.split or (op.out_features,)
                return self.part(first), *map(range, others)
            case Activate():
                return [self.part(features) for features in op.split]
            case Norm(part=0):
                return None
        raise TypeError(f"no way to split {op.name} before {following}")

    def _by_rows(self, op: Linear, kept: Sequence[range]) -> Linear:
        """A product with these units of each part of its result."""
        starts = accumulate(op.split[:-1], initial=0)
        rows = [
            range((start + units.start) * op.unit, (start + units.stop) * op.unit)
            for start, units in zip(starts, kept, strict=True)
        ]
        return replace(
            op,
            weight=cut(op.weight, rows),
            bias=None if op.bias is None else cut(op.bias, rows),
            split=tuple(map(len, kept)) if op.split else (),
        )

    def _by_columns(self, op: Linear) -> Linear:
        """A product with the rank's part of its input; one rank adds the bias."""
        return replace(op, weight=self._columns(op.weight), bias=self._once(op.bias))

    def _columns(self, weight: Parameter) -> Parameter:
        rows, columns = weight.stacked_shape
        return cut(weight, [range(rows)], self.part(columns))

    def _once(self, bias: Parameter | None) -> Parameter | None:
        """A bias that only the first rank adds."""
        return bias if bias is None or self.rank == 0 else zeros(bias)

    def _within_heads(self, op: Operation, attend: Attend) -> Operation:
        """An operation of the rank's heads or features, or of replicated values."""
        match op:
            case Attend():
                heads, sinks = self.part(op.heads), op.sinks
                return replace(
                    op,
                    heads=len(heads),
                    kv_heads=len(self.kv_heads(op)),
                    sinks=None if sinks is None else cut(sinks, [heads]),
                )
            case QKNorm(all_heads=True):
                return replace(
                    op,
                    q=_heads(op.q, self.part(attend.heads), attend.heads),
                    k=_heads(op.k, self.kv_heads(attend), attend.kv_heads),
                    ranks=self.ranks,
                )
            case LatentRotate():
                return replace(op, heads=len(self.part(op.heads)))
            case QueriesToLatent() | LatentToValues():
                return replace(op, kv_up=_heads(op.kv_up, self.part(attend.heads), attend.heads))
            case Activate():
                return replace(op, features=len(self.part(op.features)))
        return op

    def _experts(self, op: Experts) -> Experts:
        """Each expert with the rank's part of its features."""
        width = op.activate.features
        part = self.part(width)
        # Of each expert the gate, then the up.
        rows = [
            range(start + part.start, start + part.stop)
            for start in range(0, 2 * width * op.total, width)
        ]
        return replace(
            op,
            gate_up=cut(op.gate_up, rows),
            down=self._columns(op.down),
            activate=replace(op.activate, features=len(part)),
            gate_up_bias=None if op.gate_up_bias is None else cut(op.gate_up_bias, rows),
            down_bias=self._once(op.down_bias),
        )


def _heads(parameter: Parameter, heads: range, total: int) -> Parameter:
    """The rows of some of `total` heads."""
    rows = parameter.stacked_shape[0] // total
    return cut(parameter, [range(heads.start * rows, heads.stop * rows)])
