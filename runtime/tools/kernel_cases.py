"""The kernels of a decoder layer, one by one, each over tensors of a model's shapes.

For compiling them ahead of time, where the tensors have no memory (device "meta"), for checking
them against their references (`tools/verify_kernels.py`), and for timing them: then there are
several copies of weights and cache, so that each call reads what no cache holds any more. The
tensors are shared as a step shares them: what one kernel writes the next reads. Needs triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ...cache.arena import Arena
from ..engine.startup import layer_groups
from ..kernels import AttentionForm, LayerPlace, RaggedBatch, quantise_weight
from ..kernels.ops.kv_storage import read_blocks
from ..kernels.ops.layer_operations import Activate, Attend, Linear, Norm, QKNorm, Residual, Rotate
from ..kernels.ops.layer_plan import ModelPlan
from ..kernels.triton.activation import activate_rows
from ..kernels.triton.combine_output import (
    combine_output,
    product_combines,
    reference_combine_output,
)
from ..kernels.triton.decode_attention import decode_attention, reference_decode_attention
from ..kernels.triton.fusion import Attention, GateUp, NormLinear, ResidualLinear, fuse
from ..kernels.triton.gate_up import gate_up, reference_gate_up
from ..kernels.triton.head import head, reference_head
from ..kernels.triton.kernel_calls import num_multiprocessors
from ..kernels.triton.linear import GpuLinear, GpuNorm, Pending
from ..kernels.triton.matmul import library_linear
from ..kernels.triton.norm import norm_rows
from ..kernels.triton.norm_linear import norm_linear, reference_norm_linear
from ..kernels.triton.paged_attention import triton_paged_attention
from ..kernels.triton.residual_linear import reference_residual_linear, residual_linear
from ..kernels.triton.rotated_heads import HeadRotation
from ..kernels.triton.split_attention import (
    choose_tile,
    new_counters,
    new_partials,
    reference_combine_splits,
)
from ..kernels.triton.splits import choose_splits
from ..kernels.triton.store import rotate_and_store, store_keys_and_values
from ..models.config import ModelConfig
from ..models.plan import model_plan
from ..resolved_config import ResolvedConfig

__all__ = ["KernelCase", "decode_cases", "run_prefill_layers"]

_STANDARD_DEVIATION = 0.02
"""Of weights; what they multiply has one of about 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel launch, with its tensors and its reference."""

    name: str
    """Name of the operation, as in `step_costs.py`."""
    run: Callable[[int], None]
    """Runs it over copy number `i` (modulo their number) of what it reads."""
    outputs: Callable[[], Sequence[Tensor]]
    """Tensors that the last call wrote and does not read: workspace and results."""
    results: Callable[[], Sequence[Tensor]]
    """Results of the last call over copy 0, as `reference` returns them."""
    reference: Callable[[], Sequence[Tensor]]
    """Returns the same results in plain PyTorch, from the current inputs, without changing them."""
    updates: tuple[Tensor, ...] = ()
    """Tensors that the kernel updates in place: it or an earlier kernel reads them."""
    library: Callable[[int], object] | None = None
    """The cuBLAS product of the same shape, without norm, activation and residual."""


def decode_cases(
    model: ModelConfig,
    config: ResolvedConfig,
    device: torch.device,
    *,
    rows: int,
    context: int,
    copies: int = 1,
) -> list[KernelCase]:
    """Return the five operations of a layer that decodes, and the projection to the vocabulary.

    Args:
        model: one that `kernel_obstacle` has nothing against.
        config: dtype, storage of weights and cache, block size.
        device: where the tensors are; "meta" for none.
        rows: that decode, at most `linear.ROW_CLASSES[-1]`.
        context: tokens of each row, the newest included.
        copies: of weights and cache.
    """
    plan = model_plan(model)
    first, attention, out, mlp, last = _kernels_of(plan)
    attends, shapes = attention.attend, _Tensors(config, device)
    form = _form(attends, config)
    norms = [shapes.norm(plan.norm) for _ in range(copies)]
    qkv = [shapes.linear(first.linear) for _ in range(copies)]
    output = [shapes.linear(out.linear) for _ in range(copies)]
    gates = [shapes.linear(mlp.linear) for _ in range(copies)]
    down = [shapes.linear(last.linear) for _ in range(copies)]
    vocabulary = [shapes.linear(plan.head) for _ in range(min(copies, 2))]

    cache = _Cache(model, config, device, rows, context, copies)
    heads, size = attends.heads, attends.head_dim
    tile = choose_tile(heads // attends.kv_heads, size, size, cache.arena.element_size())
    multiprocessors = num_multiprocessors(device)
    splits = choose_splits(rows, attends.kv_heads, context, multiprocessors, tile.positions)
    partials, counters = new_partials(rows, heads, splits, size, device), new_counters(device)
    partials.acc.normal_()
    partials.m.normal_()
    partials.l.uniform_(0.5, 1.5)
    combining = product_combines(partials.acc, output[0], config.dtype)
    x, x_next, delta = (shapes.activations(rows, plan.hidden_size) for _ in range(3))
    qkv_TN, gated_TF = (shapes.activations(rows, f.features) for f in (first, mlp))
    attended_TK = shapes.activations(rows, attends.features)
    rotation = shapes.rotation(plan, attention.qk_norm, rows)

    # In families with output norms, the next kernel adds the residual.
    normed = out.norm is not None

    def pending(out: Tensor = x_next) -> Pending | None:
        return Pending(delta, norms[0], out) if normed else None

    residual, target = (None, delta) if normed else (x, x)
    added = [x_next] if normed else []
    softcap, gelu = plan.logit_softcap, mlp.gelu
    scores: list[Tensor] = []

    def attend(i: int) -> None:
        decode_attention(
            *(qkv_TN, cache.arena, LayerPlace(0, i % copies), rotation, cache.batch, form),
            partials,
            attended_TN=None if combining else attended_TK,
            counters=counters,
            next_weight=output[i % copies].weight,
        )

    def attended() -> list[Tensor]:
        if combining:
            return [reference_combine_splits(partials).to(config.dtype), *cache.newest(cache.arena)]
        return [attended_TK, *cache.newest(cache.arena)]

    def reference_attend() -> list[Tensor]:
        arena = cache.arena.clone()
        out_TK = reference_decode_attention(
            qkv_TN, arena, LayerPlace(0, 0), rotation, cache.batch, form
        )
        return [out_TK, *cache.newest(arena)]

    def combine(i: int) -> None:
        if combining:
            combine_output(*partials, output[i % copies], residual, target)
        else:
            residual_linear(attended_TK, output[i % copies], residual, target)

    def reference_combine() -> list[Tensor]:
        if combining:
            out = reference_combine_output(*partials, output[0], residual, config.dtype)
        else:
            out = reference_residual_linear(attended_TK, output[0], residual)
        return [out]

    def project(i: int) -> None:
        linear = vocabulary[i % len(vocabulary)]
        scores.clear()  # its memory can be reused
        scores[:] = head(x, norms[i % copies], linear, softcap, pending())

    def picked() -> list[Tensor]:
        """The logits, and the logit of the token selected from the chunk maxima."""
        logits_TV, maxima_TC, ids_TC = scores
        id_T1 = ids_TC.gather(1, maxima_TC.argmax(1, keepdim=True)).long()
        return [logits_TV, logits_TV.gather(1, id_T1), *added]

    def with_sum(function: Callable[[Pending | None], Tensor]) -> list[Tensor]:
        """The result of a kernel that may add a pending output, and the sum."""
        sums = [torch.empty_like(tensor) for tensor in added]
        return [function(pending(*sums)), *sums]

    def reference_project() -> list[Tensor]:
        logits_TV, *sums = with_sum(
            lambda pending: reference_head(x, norms[0], vocabulary[0], softcap, pending)[0]
        )
        return [logits_TV, logits_TV.amax(1, keepdim=True), *sums]

    def product(x_TK: Tensor, linears: list[GpuLinear]) -> Callable[[int], object] | None:
        if config.weights != "model":
            return None
        return lambda i: torch.mm(x_TK, linears[i % len(linears)].weight.T)

    return [
        KernelCase(
            "norm_linear",
            lambda i: norm_linear(x, norms[i % copies], qkv[i % copies], qkv_TN, pending()),
            lambda: [qkv_TN, *added],
            lambda: [qkv_TN, *added],
            lambda: with_sum(lambda p: reference_norm_linear(x, norms[0], qkv[0], p)),
            library=product(x, qkv),
        ),
        KernelCase(
            "decode_attention",
            attend,
            lambda: [*partials, attended_TK],
            attended,
            reference_attend,
        ),
        KernelCase(
            "combine_output",
            combine,
            lambda: [],
            lambda: [target],
            reference_combine,
            (target,),
            product(attended_TK, output),
        ),
        KernelCase(
            "gate_up",
            lambda i: gate_up(
                x, norms[i % copies], gates[i % copies], gated_TF, gelu=gelu, pending=pending()
            ),
            lambda: [gated_TF, *added],
            lambda: [gated_TF, *added],
            lambda: with_sum(
                lambda p: reference_gate_up(x, norms[0], gates[0], gelu=gelu, pending=p)
            ),
            library=product(x, gates),
        ),
        KernelCase(
            "down",
            lambda i: residual_linear(gated_TF, down[i % copies], residual, target),
            lambda: [],
            lambda: [target],
            lambda: [reference_residual_linear(gated_TF, down[0], residual)],
            (target,),
            product(gated_TF, down),
        ),
        KernelCase(
            "head",
            project,
            lambda: [*scores, *added],
            picked,
            reference_project,
            library=product(x, vocabulary),
        ),
    ]


def run_prefill_layers(
    model: ModelConfig, config: ResolvedConfig, device: torch.device, *, tokens: int
) -> None:
    """Run the kernels of a layer that prefills a chunk of one row, and of one that decodes it.

    These are the kernels around cuBLAS products; with 8-bit weights also the products.
    """
    plan, shapes = model_plan(model), _Tensors(config, device)
    layer = plan.layers[0].operations
    attend, form = plan.layers[0].attend, _form(plan.layers[0].attend, config)
    hidden, heads, kv_heads, size = (
        plan.hidden_size,
        attend.heads,
        attend.kv_heads,
        attend.head_dim,
    )
    cache = _Cache(model, config, device, 1, config.max_model_len, 1)
    x, normed, delta, x_next = (shapes.activations(tokens, hidden) for _ in range(4))
    norm = shapes.norm(plan.norm)
    adds_normed = any(
        isinstance(op, Norm) and isinstance(after, Residual) for op, after in pairwise(layer)
    )
    norm_rows(x, norm, normed, Pending(delta, norm, x_next) if adds_normed else None)
    for linear, activate in pairwise(layer):
        if isinstance(linear, Linear) and isinstance(activate, Activate):
            both_TF = shapes.activations(tokens, linear.out_features)
            gated_TF = shapes.activations(tokens, activate.features)
            library_linear(normed, shapes.linear(linear), both_TF)
            activate_rows(both_TF, gated_TF, gelu=activate.function == "gelu_tanh")

    positions_T = torch.arange(tokens, device=device)
    rows_T = torch.zeros_like(positions_T)
    one_row = dataclasses.replace(
        cache.batch,
        positions=positions_T,
        slots=positions_T[None],
        token_rows=rows_T,
        rows=rows_T[:1],
        tokens_per_row=tokens,
    )
    decoding = dataclasses.replace(one_row, rows=rows_T, tokens_per_row=1)
    place = LayerPlace(0, 0)
    keys = shapes.activations(tokens, kv_heads * size).view(tokens, kv_heads, size)
    queries = shapes.activations(tokens, heads * size).view(tokens, heads, size)
    if any(isinstance(op, Rotate) for op in layer):
        qk_norm = next((op for op in layer if isinstance(op, QKNorm)), None)
        qkv_TN = shapes.activations(tokens, attend.query_features + 2 * attend.kv_features)
        rotation = shapes.rotation(plan, qk_norm, tokens)
        rotate_and_store(qkv_TN, cache.arena, place, rotation, one_row, form)
    values = None if attend.shared_values else keys
    for batch in (one_row, decoding):
        triton_paged_attention(queries, keys, values, cache.arena, place, batch, form)


def _kernels_of(
    plan: ModelPlan,
) -> tuple[NormLinear, Attention, ResidualLinear, GateUp, ResidualLinear]:
    """The kernels of the first layer."""
    match fuse(plan.layers[0]):
        case (
            NormLinear() as first,
            Attention() as attention,
            ResidualLinear() as output,
            GateUp() as mlp,
            ResidualLinear() as last,
        ):
            return first, attention, output, mlp, last
        case others:
            raise ValueError(f"there are cases of other kernels than {[f.name for f in others]}")


def _form(attend: Attend, config: ResolvedConfig) -> AttentionForm:
    """The constants of attention."""
    return AttentionForm(
        attend.scale, attend.window, attend.softcap, config.storage, attend.value_dim
    )


class _Tensors:
    """Creates random tensors; on "meta" they only have shapes."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    def activations(self, rows: int, features: int) -> torch.Tensor:
        """`[rows, features]` in the model's dtype."""
        return torch.randn(rows, features, device=self.device, dtype=self.config.dtype)

    def ones(self, size: int) -> torch.Tensor:
        """The weight of a norm, near 1."""
        return torch.ones(size, device=self.device, dtype=self.config.dtype)

    def norm(self, norm: Norm) -> GpuNorm:
        """A norm of hidden states."""
        return GpuNorm(self.ones(norm.weight.elements), norm.eps, norm.offset)

    def rotation(self, plan: ModelPlan, norm: QKNorm | None, tokens: int) -> HeadRotation:
        """Norms of queries and keys, and their rotation to random positions."""
        size, traits = plan.rope_dim, norm or plan.norm
        q_norm, k_norm = (None if norm is None else self.ones(size) for _ in range(2))
        angles = torch.rand(tokens, size // 2, device=self.device)
        return HeadRotation(q_norm, k_norm, traits.eps, traits.offset, angles.cos(), angles.sin())

    def linear(self, linear: Linear) -> GpuLinear:
        """A layer with its weight as stored."""
        n, k, bias = linear.out_features, linear.in_features, linear.bias is not None
        config, device = self.config, self.device
        weight = torch.randn(n, k, device=device, dtype=config.dtype).mul_(_STANDARD_DEVIATION)
        bias_N = torch.randn(n, device=device, dtype=config.dtype) if bias else None
        if config.weights == "model":
            return GpuLinear(weight, None, bias_N)
        data, scales = quantise_weight(weight, config.weights)
        return GpuLinear(data, scales, bias_N)


class _Cache:
    """A cache with the context of all rows, in randomly ordered blocks."""

    def __init__(
        self,
        model: ModelConfig,
        config: ResolvedConfig,
        device: torch.device,
        rows: int,
        context: int,
        copies: int,
    ) -> None:
        size = config.block_size
        blocks = -(-context // size)
        (group, *_) = layer_groups(model, config)
        group = dataclasses.replace(group, layers=tuple(range(copies)))
        arena = Arena([group], rows * blocks + 1, size, config.dtype, device, config.storage)
        self.arena = arena.tensor
        order = torch.randperm(rows * blocks, device=device).to(torch.int32) + 1
        tables = order.view(rows, blocks)
        token_rows = torch.arange(rows, device=device)
        self.batch = RaggedBatch(
            positions=torch.full((rows,), context - 1, device=device),
            slots=(tables[:, -1].to(torch.int64) * size + (context - 1) % size)[None],
            token_rows=token_rows,
            rows=token_rows,
            block_tables=tables[None],
            read_blocks=blocks,
            block_size=size,
            tokens_per_row=1,
        )
        self._storage = config.storage
        if device.type != "meta":
            self._fill(model, config, device, copies)

    def newest(self, arena: Tensor) -> list[Tensor]:
        """Keys and values in the last block of each row in the first layer, dequantised."""
        last, size = self.batch.block_tables[0, :, -1:], self.batch.block_size
        return [read_blocks(side, last, size, self._storage) for side in arena[0]]

    def _fill(
        self,
        model: ModelConfig,
        config: ResolvedConfig,
        device: torch.device,
        copies: int,
    ) -> None:
        """Write random keys and values to all slots, 8,192 tokens at a time."""
        size = config.block_size
        slots = self.arena.shape[2] * size
        for layer in range(copies):
            for start in range(0, slots, 8192):
                slots_T = torch.arange(start, min(start + 8192, slots), device=device)
                shape = (2, len(slots_T), model.num_kv_heads, model.head_dim)
                k, v = torch.randn(shape, device=device, dtype=config.dtype)
                store_keys_and_values(k, v, self.arena, layer, slots_T, size, config.storage)
