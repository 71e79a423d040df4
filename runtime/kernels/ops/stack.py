"""All layers of a decoder as one operation (the stack), over packed weights.

Shapes: T tokens, D hidden_size, F intermediate_size, G layer groups, E half of head_dim, K kinds of
rotation. The arithmetic follows `ops/operation.py`, with results rounded to the model's
dtype at the same places; `csrc/stack_thread.h` describes fusion and threading. The result of a row
is bitwise the same in any batch and with any number of threads.

Weights are not arguments: a stack is created once from them, and calls pass its handle.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints

import torch
from torch import Tensor

from .activation import Activate, GateOutput
from .attention import Attend
from .batch import RaggedBatch
from .causal_conv import CausalConv
from .delta_rule import DeltaRule
from .experts import Experts
from .experts_operator import OperatorArguments
from .layer_plan import BoundLayer, BoundModel, LayerPlan, ModelPlan
from .linear import Linear
from .norms import GatedNorm, JoinNorms, Norm, QKNorm
from .operation import Add, AllReduce, Known, Operation, Residual, unsupported
from .rotation import Rotate
from .state_space import StateSpace

KNOWN_TO_STACK: Known = {
    Norm: frozenset({"offset", "writes"}),
    CausalConv: frozenset({"bias", "silu", "gated", "blocks"}),
    DeltaRule: frozenset({"beta_scale"}),
    StateSpace: frozenset({"time_limits", "gated"}),
    GatedNorm: frozenset({"gate", "gate_first", "in_float32"}),
    JoinNorms: frozenset({"offset"}),
    Linear: frozenset({"bias", "split", "unit", "reads", "writes"}),
    QKNorm: frozenset({"offset", "all_heads", "ranks"}),
    Rotate: frozenset(),
    Attend: frozenset({"window", "chunk", "softcap", "sinks", "temperature", "writes"}),
    GateOutput: frozenset({"reads", "writes", "per_feature"}),
    Add: frozenset({"reads"}),
    Activate: frozenset({"limit", "alpha", "up_offset"}),
    AllReduce: frozenset(),
    Residual: frozenset({"scale"}),
    Experts: frozenset(
        {
            *("router_bias", "correction", "gate_up_bias", "down_bias", "shared"),
            *("scaled_inputs", "writes"),
        }
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
    " Tensor? embeddings, Tensor(b!)? snapshots, Tensor(c!)? inputs, Tensor? snapshot_tables,"
    " Tensor? input_tables, Tensor? stored) -> (Tensor, Tensor)",
)


_AUX_LAYERS = 9
"""The index of `aux_layers` in the arguments after x."""


@torch.library.register_fake("stepgraph::decoder_stack")
def _fake_decoder_stack(x_TD: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    width = len(arguments[_AUX_LAYERS]) * x_TD.shape[1]
    return torch.empty_like(x_TD), x_TD.new_empty(x_TD.shape[0], width)


class AttentionBlock(NamedTuple):
    """Attention with keys and values, added to the hidden states."""

    input_norm: Norm | JoinNorms | None
    qkv: Linear
    qk_norm: QKNorm | None
    rotate: Rotate
    attend: Attend
    gate: Linear | None
    gate_output: GateOutput | None
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
    """A mixture of gated MLPs, perhaps with a shared one beside it, added to the hidden states."""

    norm: Norm | None
    experts: Experts
    shared_up: Linear | None
    shared_activate: Activate | None
    shared_down: Linear | None
    shared_gate: Linear | None
    gate_shared: GateOutput | None
    add: Add | None
    sum: AllReduce | None
    output_norm: Norm | None
    residual: Residual


class RecurrentBlock(NamedTuple):
    """A convolution and a recurrence, or a gated convolution, added to the hidden states."""

    norm: Norm | None
    inputs: Linear
    conv: CausalConv
    rule: DeltaRule | StateSpace | None
    gated_norm: GatedNorm | None
    output: Linear
    sum: AllReduce | None
    output_norm: Norm | None
    residual: Residual


Block = AttentionBlock | GatedBlock | ExpertsBlock | RecurrentBlock


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
    found = _assigned(_roles(pattern), operations)
    if found is None:
        return None
    block: Block = pattern(*found)
    return block if _is_connected(block) else None


def _assigned(
    roles: Sequence[tuple[tuple[type, ...], bool]], operations: Sequence[Operation]
) -> list[Operation | None] | None:
    """Return the first operations by role, with None for missing ones; None: they do not fit."""
    if not roles:
        return []
    (kinds, optional), *others = roles
    if operations and isinstance(operations[0], kinds):
        rest = _assigned(others, operations[1:])
        if rest is not None:
            return [operations[0], *rest]
    rest = _assigned(others, operations) if optional else None
    return None if rest is None else [None, *rest]


def _is_connected(block: Block) -> bool:
    """Whether each operation reads the one before it, but for the gate of attention."""
    expected: dict[Operation | None, tuple[str, ...]] = {}
    if isinstance(block, RecurrentBlock):
        rule = block.rule
        if block.conv.gated == (rule is not None):
            return False
        if isinstance(rule, StateSpace) and rule.decay.elements != rule.heads:
            return False
    if isinstance(block, AttentionBlock) and block.gate is not None:
        if block.input_norm is None or block.gate_output is None:
            return False
        expected[block.gate] = (block.input_norm.writes,)
        expected[block.gate_output] = (block.attend.writes, block.gate.writes)
    if isinstance(block, ExpertsBlock) and block.shared_up is not None:
        if block.norm is None or block.shared_down is None or block.add is None:
            return False
        normed, shared = (block.norm.writes,), block.shared_down.writes
        expected |= {block.shared_up: normed, block.shared_gate: normed}
        if block.gate_shared is not None and block.shared_gate is not None:
            expected[block.gate_shared] = (shared, block.shared_gate.writes)
            shared = block.gate_shared.writes
        expected[block.add] = (block.experts.writes, shared)
    return all(op is None or op.reads == expected.get(op, ()) for op in block)


@cache
def _roles(pattern: Any) -> list[tuple[tuple[type, ...], bool]]:
    """The classes of the operation in each role of a block, and whether it may be missing."""
    kinds = [get_args(kind) or (kind,) for kind in get_type_hints(pattern).values()]
    return [(own, type(None) in own) for own in kinds]


def blocks_obstacle(plan: ModelPlan, known: Known) -> str | None:
    """Return why a model is not made of blocks of `known` operations with equal heads, or None.

    Unknown kinds of operations, first those that mix tokens, come before unknown traits: they say
    more about the model.
    """
    for op in sorted(plan.operations, key=lambda op: (type(op) in known, op.row_state is None)):
        if (missing := unsupported(op, known)) is not None:
            return missing
    heads = set()
    for layer in set(plan.layers):
        try:
            blocks = blocks_of(layer)
        except ValueError as error:
            return str(error)
        attention = [block.attend for block in blocks if isinstance(block, AttentionBlock)]
        if len(attention) > 1:
            return f"layers with {len(attention)} attentions"
        heads |= {(op.heads, op.kv_heads, op.head_dim, op.value_dim) for op in attention}
    if not heads:
        return "models without attention"
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
            *((None,) * 5 if batch.states is None else batch.states),
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
        if isinstance(block, AttentionBlock):
            arguments.integers.append(1)
            _add_attention(arguments, layer, block)
        elif isinstance(block, RecurrentBlock):
            arguments.integers.append(2)
            _add_recurrent(arguments, layer, block)
        else:
            arguments.integers.append(0)
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
    assert layer.place is not None, "attention has keys and values"
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
    arguments.integers.append(block.gate is not None)
    if block.gate is not None:
        arguments.tensors += layer.linear(block.gate)
    arguments.tensors += layer.linear(block.output)


def _add_recurrent(arguments: OperatorArguments, layer: BoundLayer, block: RecurrentBlock) -> None:
    arguments.add_norm(*_bound(layer, block.norm))
    conv, rule, place = block.conv, block.rule, layer.row_places[block.conv]
    arguments.integers.append(_RULES.index(None if rule is None else type(rule)))
    arguments.integers += [conv.features, conv.weight.shape[2], conv.silu]
    arguments.integers += [*place.snapshot, *place.inputs]
    arguments.tensors.append(layer.tensor(conv.weight))
    arguments.tensors.append(None if conv.bias is None else layer.tensor(conv.bias))
    if rule is not None:
        _add_rule(arguments, layer, rule, block)
    arguments.integers.append(block.inputs.out_features)
    arguments.tensors += layer.linear(block.inputs)
    arguments.tensors += layer.linear(block.output)


_RULES = (None, DeltaRule, StateSpace)
"""In the order of `RecurrentKind` in `csrc/stack_recurrent.h`."""


def _add_rule(
    arguments: OperatorArguments,
    layer: BoundLayer,
    rule: DeltaRule | StateSpace,
    block: RecurrentBlock,
) -> None:
    (state,), (keys, _, decays) = rule.row_state.snapshot, rule.row_state.inputs
    place, (heads, key, value) = layer.row_places[rule], state.shape
    arguments.integers += [keys.shape[0], heads, key, value, decays.shape[1]]
    arguments.integers += [*place.snapshot, *place.inputs]
    skip, scales = None, [1.0, 0.0, math.inf, 1.0]
    if isinstance(rule, DeltaRule):
        decay, bias = rule.a_log, rule.dt_bias
        scales = [rule.beta_scale, 0.0, math.inf, key**-0.5]
    else:
        decay, bias, skip = rule.decay, rule.time_bias, rule.skip
        scales = [1.0, *rule.time_limits, 1.0]
    arguments.tensors += [layer.tensor(decay), layer.tensor(bias)]
    arguments.tensors.append(None if skip is None else layer.tensor(skip))
    features, gates, times, *_ = block.inputs.split
    arguments.integers += [features, features + gates, features + gates + times]
    arguments.numbers += scales
    arguments.integers.append(isinstance(rule, StateSpace) and rule.gated)
    norm = block.gated_norm
    arguments.integers += [0, 0] if norm is None else [norm.group, norm.weight.shape[0]]
    arguments.tensors.append(None if norm is None else layer.tensor(norm.weight))
    arguments.numbers.append(0.0 if norm is None else norm.eps)
    arguments.integers += [
        norm is not None and norm.gate == "sigmoid",
        norm is not None and norm.gate_first,
        norm is not None and norm.in_float32,
    ]


def _add_mlp(
    arguments: OperatorArguments, layer: BoundLayer, block: GatedBlock | ExpertsBlock
) -> None:
    arguments.add_norm(*_bound(layer, block.norm))
    arguments.integers.append(isinstance(block, ExpertsBlock))
    if isinstance(block, ExpertsBlock):
        arguments.add_experts(block.experts, layer.experts(block.experts))
        arguments.integers.append(block.shared_gate is not None)
        if block.shared_gate is not None:
            arguments.tensors += layer.linear(block.shared_gate)
        up, activate, down = block.shared_up, block.shared_activate, block.shared_down
    else:
        up, activate, down = block.gate_up, block.activate, block.down
    arguments.integers.append(up is not None)
    if up is not None and activate is not None and down is not None:
        arguments.integers.append(activate.features)
        arguments.tensors += layer.linear(up)
        arguments.add_activate(activate)
        arguments.tensors += layer.linear(down)


def _bound(layer: BoundLayer, norm: Norm | None) -> tuple[Norm | None, Tensor | None]:
    return norm, None if norm is None else layer.tensor(norm.weight)
