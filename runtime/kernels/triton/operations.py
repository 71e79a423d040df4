"""Every operation that the steps of a GPU are made of, each in two versions.

`Operations.native` has the Triton kernels and the library's products, `Operations.reference` plain
torch, and `with_reference` mixes them: where a kernel fails its self-test (`self_test.py`), only
that kernel is replaced. Both versions of an operation have the same signature, write into the same
arguments and return the same kind of result. The plain ones have static shapes and wait for
nothing, so they can be captured in a CUDA graph.

A new operation needs a field here, a function in `native`, one in `reference_operations.py`, and
an entry in `operation_check.WRITES` that names what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..ops.expert_operations import Experts
from ..ops.experts import ExpertTensors
from . import reference_operations as plain
from .activation import activate_rows
from .any_rows import linear_of_any_rows
from .begin import Beginning, begin_decode
from .combine_output import combine_output
from .decode_attention import decode_attention
from .expert_routing import Routed, route
from .experts import experts, experts_of_any_tokens
from .gate_up import gate_up
from .greedy import pick_greedy
from .head import head
from .matmul import library_linear
from .norm import norm_rows
from .norm_linear import norm_linear
from .paged_attention import triton_paged_attention
from .prefill_attention import prefill_attention
from .prefill_tiles import prefill_tiles
from .rank_operations import pick_of_ranks, plain_pick_of_ranks, plain_sum_rows, sum_rows
from .residual_linear import residual_linear
from .store import rotate_and_store

__all__ = ["Operations"]


@dataclass(frozen=True, slots=True)
class Operations:
    """One function an operation; signatures are those of the kernels of the same name."""

    begin_decode: Callable[..., Beginning]
    """`begin.begin_decode`: rows to tokens, slots, angles and embeddings."""
    norm_linear: Callable[..., None]
    """`norm_linear.norm_linear`."""
    decode_attention: Callable[..., None]
    """`decode_attention.decode_attention`. Plain torch reads `batch.read_blocks` columns of the
    block tables; the kernel stops at the length of each row."""
    residual_linear: Callable[..., None]
    """`residual_linear.residual_linear`."""
    combine_output: Callable[..., None]
    """`combine_output.combine_output`."""
    gate_up: Callable[..., None]
    """`gate_up.gate_up`."""
    norm_rows: Callable[..., None]
    """`norm.norm_rows`."""
    sum_rows: Callable[..., None]
    """`rank_operations.sum_rows`: over the ranks of a group."""
    activate_rows: Callable[..., None]
    """`activation.activate_rows`."""
    linear: Callable[..., None]
    """`matmul.library_linear`: any number of rows."""
    route: Callable[..., Routed]
    """`expert_routing.route`."""
    experts: Callable[..., None]
    """`experts.experts`."""
    rotate_and_store: Callable[..., Tensor]
    """`store.rotate_and_store`."""
    prefill_tiles: Callable[..., Tensor]
    """`prefill_tiles.prefill_tiles`."""
    prefill_attention: Callable[..., Tensor]
    """`prefill_attention.prefill_attention`; plain torch reads no `tiles`."""
    paged_attention: Callable[..., Tensor]
    """`paged_attention.triton_paged_attention`, of layers that are not in a `GpuStack`."""
    head: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """`head.head`; the number of chunks is that of the version."""
    pick_greedy: Callable[..., Tensor]
    """`greedy.pick_greedy`."""
    pick_of_ranks: Callable[..., Tensor]
    """`rank_operations.pick_of_ranks`: over the vocabulary of all ranks of a group."""

    @classmethod
    def native(cls) -> Operations:
        """The Triton kernels, and products of the library around them."""
        return cls(
            begin_decode=begin_decode,
            norm_linear=norm_linear,
            decode_attention=decode_attention,
            residual_linear=residual_linear,
            combine_output=combine_output,
            gate_up=gate_up,
            norm_rows=norm_rows,
            sum_rows=sum_rows,
            activate_rows=activate_rows,
            linear=library_linear,
            route=route,
            experts=experts,
            rotate_and_store=rotate_and_store,
            prefill_tiles=prefill_tiles,
            prefill_attention=prefill_attention,
            paged_attention=triton_paged_attention,
            head=head,
            pick_greedy=pick_greedy,
            pick_of_ranks=pick_of_ranks,
        )

    @classmethod
    def batch_invariant(cls) -> Operations:
        """Those of `GpuStack` with `any_batch`: none of its sums depends on the rows of a step."""
        return replace(
            cls.native(),
            linear=linear_of_any_rows,
            route=partial(route, any_tokens=True),
            experts=experts_of_any_tokens,
        )

    @classmethod
    def reference(cls) -> Operations:
        """Plain torch; no kernel of this package."""
        return cls(
            begin_decode=plain.begin_decode,
            norm_linear=plain.norm_linear,
            decode_attention=plain.decode_attention,
            residual_linear=plain.residual_linear,
            combine_output=plain.combine_output,
            gate_up=plain.gate_up,
            norm_rows=plain.norm_rows,
            sum_rows=plain_sum_rows,
            activate_rows=plain.activate_rows,
            linear=plain.linear,
            route=plain.route,
            experts=plain.experts,
            rotate_and_store=plain.rotate_and_store,
            prefill_tiles=plain.prefill_tiles,
            prefill_attention=plain.prefill_attention,
            paged_attention=plain.paged_attention,
            head=plain.head,
            pick_greedy=plain.pick_greedy,
            pick_of_ranks=plain_pick_of_ranks,
        )

    def mixture(
        self, op: Experts, x_TD: Tensor, tensors: ExpertTensors, live_T: Tensor | None = None
    ) -> Tensor:
        """Return the output of a mixture of experts; as `ops.experts.reference_experts`."""
        x_TD = x_TD.contiguous()
        out_TD = torch.empty_like(x_TD)
        self.experts(op, x_TD, tensors, self.route(op, x_TD, tensors, live_T), None, out_TD)
        return out_TD

    def with_reference(self, names: Iterable[str]) -> Operations:
        """Return these operations with the plain versions of those named.

        Raises AttributeError for a name that is no operation.
        """
        reference = Operations.reference()
        return replace(self, **{name: getattr(reference, name) for name in names})
