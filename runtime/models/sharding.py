"""Splits the plan of a model over the ranks of a tensor-parallel group (Shoeybi et al. 2019).

Queries, keys, values, gates and ups are cut by output rows, by heads or features; the products
after them by input columns, whose results the ranks add (`AllReduce`). Experts are cut by features,
each of them, so that all ranks have the same work whichever experts a token chooses. The delta rule
is cut by key heads, its recurrent state and convolution included. Embedding and head are cut by
tokens of the vocabulary. Norms, routers, what latent attention caches and, with fewer key/value
heads than ranks, these heads are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.ops.attention import Attend
from ..kernels.ops.batch import NON_FINITE
from ..kernels.ops.collectives import Collectives, largest_of_ranks
from ..kernels.ops.layer_plan import LayerPlan, ModelPlan, Shard
from ..kernels.ops.operation import Operation, Rank, ShardedLayer
from ..kernels.ops.parameter import cut

_MOST_RANKS = 64


def shard_plan(plan: ModelPlan, rank: int, ranks: int) -> ModelPlan:
    """Return the plan of one rank; of a single one it is the plan itself.

    Raises `ConfigError` as `check_ranks`.
    """
    assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
    assert plan.shard is None, "the plan of the whole model"
    check_ranks(plan, ranks)
    if ranks == 1:
        return plan
    own = Rank(rank, ranks)
    layers = {layer: _sharded(layer, own) for layer in dict.fromkeys(plan.layers)}
    tokens = [Rank(r, ranks).part(plan.vocab_size) for r in range(ranks)]
    head = plan.head
    return replace(
        plan,
        embedding=cut(plan.embedding, [tokens[rank]]),
        layers=tuple(layers[layer] for layer in plan.layers),
        head=replace(head, weight=cut(head.weight, [tokens[rank]])),
        shard=Shard(rank, ranks, tokens[rank], tuple(map(len, tokens))),
    )


def _sharded(layer: LayerPlan, rank: Rank) -> LayerPlan:
    attends = (op for op in layer.operations if isinstance(op, Attend))
    heads, kv_heads = next(((op.heads, op.kv_heads) for op in attends), (0, 0))
    operations: list[Operation] = []
    state = ShardedLayer(rank, heads, kv_heads)
    for op, following in zip(layer.operations, (*layer.operations[1:], None), strict=True):
        operations += op.shard(state, following)
    return LayerPlan(tuple(operations))


def check_ranks(plan: ModelPlan, ranks: int) -> None:
    """Raise `ConfigError` for a number of ranks that the model cannot be split over.

    It names what `ranks` does not divide, and the numbers that are possible.
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
        yield from operation.rank_obstacle(ranks)
    if plan.vocab_size < ranks:
        yield f"the vocabulary has {plan.vocab_size} tokens"


# Embeddings, logits and most likely tokens of a vocabulary that is split over ranks.
#
# Shape suffixes: T tokens of a step, D hidden_size, B sampled positions, W tokens of the vocabulary
# that the rank holds, V all of them.


@dataclass(frozen=True)
class ShardedVocabulary:
    """The rows of the embedding and of the head that one rank holds."""

    shard: Shard
    collectives: Collectives

    def embed(self, token_ids_T: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings `[T, D]`; `rows` looks up rows of the rank's part."""
        held = self.shard.vocab
        index_T = token_ids_T - held.start
        own_T = (index_T >= 0) & (index_T < len(held))
        x_TD = rows(index_T.clamp(0, len(held) - 1))
        # One rank adds the embedding to zeros, so the sum is exact.
        return self.collectives.all_reduce(x_TD.masked_fill(~own_T[:, None], 0.0))

    def gather(self, logits_BW: Tensor) -> Tensor:
        """Return the logits of all ranks, `[B, V]`."""
        return self.collectives.gather(logits_BW, self.shard.vocab_sizes)

    def greedy(self, logits_BW: Tensor, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what `sample` returns for the logits of all ranks, int64 `[B]`.

        `sample` has the signature of `sample_greedy`.
        """
        # Of a rank without a finite largest logit only the value counts.
        own_B = sample(logits_BW).clamp(min=0) + self.shard.vocab.start
        values_B = logits_BW.amax(-1).float()  # NaN if one of them is
        values_B, ids_B = largest_of_ranks(self.collectives, values_B, own_B)
        return torch.where(values_B.isfinite(), ids_B, NON_FINITE)

    def most_likely(
        self, logits_BW: Tensor, own: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the most likely token, int64 `[B]`, and its probability, float32 `[B]`.

        `own` returns them for the tokens of the rank.
        """
        ids_B, probability_B = own(logits_BW)
        top_B = logits_BW.gather(1, ids_B[:, None])[:, 0].float()
        ids_B = ids_B + self.shard.vocab.start
        best_B, best_ids_B = largest_of_ranks(self.collectives, top_B, ids_B)
        # The sum of exp(logit - best) over the tokens of the rank.
        sums_B1 = ((top_B - best_B).exp() / probability_B)[:, None]
        return best_ids_B, self.collectives.all_reduce(sums_B1)[:, 0].reciprocal()
