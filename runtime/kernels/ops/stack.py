"""All layers of a decoder as one operation (the stack), over packed weights.

Shapes: T tokens, D hidden_size, F intermediate_size, G layer groups, E half of head_dim, K kinds of
rotation. The arithmetic follows `ops/operation.py`, with results rounded to the model's
dtype at the same places; `csrc/stack_thread.h` describes fusion and threading. The result of a row
is bitwise the same in any batch and with any number of threads.

Weights are not arguments: a stack is created once from them, and calls pass its handle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints

import torch
from torch import Tensor

from .activation import Activate
from .attention import Attend
from .batch import RaggedBatch
from .experts import Experts
from .experts_operator import OperatorArguments
from .layer_plan import BoundLayer, BoundModel, LayerPlan, ModelPlan
from .linear import Linear
from .norms import JoinNorms, Norm, QKNorm
from .operation import AllReduce, Known, Operation, Residual, unsupported
from .rotation import Rotate

KNOWN_TO_STACK: Known = {
    Norm: frozenset({"offset"}),
    JoinNorms: frozenset({"offset"}),
    Linear: frozenset({"bias", "split", "unit"}),
    QKNorm: frozenset({"offset", "all_heads", "ranks"}),
    Rotate: frozenset(),
    Attend: frozenset({"window", "chunk", "softcap", "sinks", "temperature"}),
    Activate: frozenset({"limit", "alpha", "up_offset"}),
    AllReduce: frozenset(),
    Residual: frozenset({"scale"}),
    Experts: frozenset(
        {"router_bias", "correction", "gate_up_bias", "down_bias", "shared", "scaled_inputs"}
    ),
}
"""Supported by the C++ stack."""

torch.library.define(
    "stepgraph::stack_create",
    "(Tensor?[] tensors, int[] integers, float[] numbers, ScalarType dtype, str storage) -> int",
)
torch.library.define("stepgraph::stack_destroy", "(int handle) -> ()")
torch.library.define("stepgraph::stack_workspace", "(int handle) -> int")
torch.library.define(
    "stepgraph::decoder_stack",
    "(Tensor x, Tensor(a!) arena, Tensor positions, Tensor slots, Tensor block_tables,"
    " Tensor token_rows, Tensor cos, Tensor sin, int read_blocks, Tensor handle, int[] aux_layers,"
    " Tensor? embeddings) -> (Tensor, Tensor)",
)


@torch.library.register_fake("stepgraph::decoder_stack")
def _fake_decoder_stack(x_TD: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *_, aux_layers, _embeddings = arguments
    return torch.empty_like(x_TD), x_TD.new_empty(x_TD.shape[0], len(aux_layers) * x_TD.shape[1])


class AttentionBlock(NamedTuple):
    """Attention with keys and values, added to the hidden states."""

    input_norm: Norm | JoinNorms | None
    qkv: Linear
    qk_norm: QKNorm | None
    rotate: Rotate
    attend: Attend
    output: Linear
    sum: AllReduce | None
    output_norm: Norm | None
    residual: Residual


class GatedBlock(NamedTuple):
    """A gated MLP, added to the hidden states."""

    norm: Norm | None
    gate_up: Linear
    activate: Activate
    down: Linear
    sum: AllReduce | None
    output_norm: Norm | None
    residual: Residual


class ExpertsBlock(NamedTuple):
    """A mixture of gated MLPs, added to the hidden states."""

    norm: Norm | None
    experts: Experts
    sum: AllReduce | None
    output_norm: Norm | None
    residual: Residual


Block = AttentionBlock | GatedBlock | ExpertsBlock


def blocks_of(plan: LayerPlan) -> list[Block]:
    """Return a layer as the blocks that native layers are made of.

    Raises ValueError for an operation that begins none of them; the message is its title.
    """
    blocks: list[Block] = []
    left = plan.operations
    while left:
        found = (_first_block(pattern, left) for pattern in get_args(Block))
        if (block := next((one for one in found if one is not None), None)) is None:
            raise ValueError(left[0].title)
        blocks.append(block)
        left = left[sum(op is not None for op in block) :]
    return blocks


def _first_block(pattern: Any, operations: Sequence[Operation]) -> Block | None:
    """Return the block of this kind that the operations begin with, or None."""
    found: list[Operation | None] = []
    left = list(operations)
    for kinds, optional in _roles(pattern):
        if left and isinstance(left[0], kinds):
            found.append(left.pop(0))
        elif optional:
            found.append(None)
        else:
            return None
    block: Block = pattern(*found)
    return block


@cache
def _roles(pattern: Any) -> list[tuple[tuple[type, ...], bool]]:
    """The classes of the operation in each role of a block, and whether it may be missing."""
    kinds = [get_args(kind) or (kind,) for kind in get_type_hints(pattern).values()]
    return [(own, type(None) in own) for own in kinds]


def blocks_obstacle(plan: ModelPlan, known: Known) -> str | None:
    """Return why a model is not made of blocks of `known` operations with equal heads, or None.

    Unknown kinds of operations come before unknown traits: they say more about the model.
    """
    for op in sorted(plan.operations, key=lambda op: type(op) in known):
        if (missing := unsupported(op, known)) is not None:
            return missing
    heads = set()
    for layer in set(plan.layers):
        try:
            blocks = blocks_of(layer)
        except ValueError as error:
            return str(error)
        attention = [block.attend for block in blocks if isinstance(block, AttentionBlock)]
        if len(attention) != 1:
            return f"layers with {len(attention)} attentions"
        heads |= {(op.heads, op.kv_heads, op.head_dim, op.value_dim) for op in attention}
    return "layers with different heads" if len(heads) > 1 else None


def stack_obstacle(plan: ModelPlan) -> str | None:
    """Return the reason why the C++ stack does not support a model's layers, or None."""
    return blocks_obstacle(plan, KNOWN_TO_STACK)


StackInputs = tuple[Tensor, Tensor, tuple[Tensor, ...], RaggedBatch, Tensor | None]
"""The fields of a `LayerStep`, with one arena."""


class Stack(Protocol):
    """All layers of a decoder and its final norm, as one operation."""

    def run(
        self, x_TD: Tensor, inputs: StackInputs, aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers and the final norm: `[T, D]`; writes keys and values.

        Also returns the outputs of the layers `aux_layers`, which are ascending, side by side:
        `[T, len(aux_layers) * D]`, or None without any. All positions are below `read_blocks`
        blocks of the batch. Layers with `JoinNorms` need the embeddings.
        """

    def workspace_bytes(self) -> int:
        """Bytes of workspace that steps have left allocated."""

    def close(self) -> None:
        """Release the weights; `run` must not be called afterwards. Idempotent."""


DecodeStep = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
"""A decode step up to the hidden states, which reads the row state itself: of rows int64 `[T]`, the
tokens and positions of the state, block tables, arena, blocks to read and block size.

It writes the keys and values of the rows' newest tokens. It returns the normed hidden states after
them, `[T, D]`, and their positions, int64 `[T]`.
"""


class DecoderStack:
    """The C++ stack: all layers of one model and its final norm. Needs `load_cpu_ops`.

    It keeps the weights alive until `close` or its deletion.
    """

    def __init__(self, model: BoundModel) -> None:
        """Register the weights. `stack_obstacle` must be None for the plan.

        Raises RuntimeError for inconsistent weights.
        """
        number: int = torch.ops.stepgraph.stack_create.default(*stack_arguments(model))
        # A tensor, so that compiled code does not depend on the number.
        self.handle = torch.tensor(number, device="cpu")
        """Names it in calls of operators. int64."""
        self._number = number
        self._close = weakref.finalize(self, torch.ops.stepgraph.stack_destroy.default, number)

    def close(self) -> None:
        """Release the weights; `run` raises RuntimeError afterwards."""
        self._close()

    def workspace_bytes(self) -> int:
        """See `Stack.workspace_bytes`: activations, and the scratch memory of attention."""
        count: int = torch.ops.stepgraph.stack_workspace.default(self._number)
        return count

    def run(
        self, x_TD: Tensor, inputs: StackInputs, aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """See `Stack.run`.

        Opaque to torch.compile. Raises RuntimeError for inconsistent arguments and IndexError for
        an index out of range, in both cases before anything is written.
        """
        cos_KTE, sin_KTE, (arena,), batch, embeddings_TD = inputs
        out_TD, outputs_TD = torch.ops.stepgraph.decoder_stack.default(
            *(x_TD, arena, batch.positions, batch.slots, batch.block_tables, batch.token_rows),
            *(cos_KTE, sin_KTE, batch.read_blocks, self.handle, aux_layers, embeddings_TD),
        )
        return out_TD, outputs_TD if aux_layers else None


def stack_arguments(
    model: BoundModel,
) -> tuple[list[Tensor | None], list[int], list[float], torch.dtype, str]:
    """Return the arguments of `stack_create`, in the order of `csrc/stack_ops.h`."""
    arguments = OperatorArguments()
    attend = model.plan.attend
    arguments.integers += [model.plan.hidden_size, attend.heads, attend.kv_heads, attend.head_dim]
    arguments.integers.append(0 if model.collectives is None else model.collectives.communicator)
    blocks: list[tuple[BoundLayer, Block, bool]] = []
    for layer in model.layers:
        found = blocks_of(layer.plan)
        blocks += [(layer, block, block is found[-1]) for block in found]
    arguments.integers.append(len(blocks))
    for layer, block, ends_layer in blocks:
        arguments.integers.append(isinstance(block, AttentionBlock))
        if isinstance(block, AttentionBlock):
            _add_attention(arguments, layer, block)
        else:
            _add_mlp(arguments, layer, block)
        arguments.integers.append(block.sum is not None)
        arguments.add_norm(*_bound(layer, block.output_norm))
        arguments.numbers.append(block.residual.scale)
        arguments.integers.append(ends_layer)
    arguments.add_norm(model.plan.norm, model.norm)
    return (
        *(arguments.tensors, arguments.integers, arguments.numbers),
        *(model.norm.dtype, model.storage),
    )


def _add_attention(arguments: OperatorArguments, layer: BoundLayer, block: AttentionBlock) -> None:
    attend, temperature, qk_norm = block.attend, block.attend.temperature, block.qk_norm
    arguments.integers += [layer.place.group, layer.place.position, attend.window, attend.chunk]
    arguments.integers.append(block.rotate.kind)
    if isinstance(block.input_norm, JoinNorms):
        norm, hidden = block.input_norm, block.input_norm.hidden
        arguments.add_norm(norm, layer.tensor(norm.embeddings))
        arguments.add_norm(norm, None if hidden is None else layer.tensor(hidden))
    else:
        arguments.add_norm(None, None)
        arguments.add_norm(*_bound(layer, block.input_norm))
    arguments.tensors += layer.linear(block.qkv)
    arguments.integers += [
        qk_norm is not None and qk_norm.all_heads,
        1 if qk_norm is None else qk_norm.ranks,
    ]
    for weight in (None, None) if qk_norm is None else (qk_norm.q, qk_norm.k):
        arguments.add_norm(qk_norm, None if weight is None else layer.tensor(weight))
    arguments.numbers += [attend.scale, attend.softcap]
    arguments.tensors.append(None if attend.sinks is None else layer.tensor(attend.sinks))
    arguments.integers.append(0 if temperature is None else temperature.floor)
    arguments.numbers.append(0.0 if temperature is None else temperature.scale)
    arguments.tensors += layer.linear(block.output)


def _add_mlp(
    arguments: OperatorArguments, layer: BoundLayer, block: GatedBlock | ExpertsBlock
) -> None:
    arguments.add_norm(*_bound(layer, block.norm))
    arguments.integers.append(isinstance(block, ExpertsBlock))
    if isinstance(block, ExpertsBlock):
        arguments.add_experts(block.experts, layer.experts(block.experts))
    else:
        arguments.integers.append(block.activate.features)
        arguments.tensors += layer.linear(block.gate_up)
        arguments.add_activate(block.activate)
        arguments.tensors += layer.linear(block.down)


def _bound(layer: BoundLayer, norm: Norm | None) -> tuple[Norm | None, Tensor | None]:
    return norm, None if norm is None else layer.tensor(norm.weight)
