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
from .layer_plan import BoundLayer, BoundModel, LayerPlan, ModelPlan
from .linear import Linear
from .norms import JoinNorms, Norm, QKNorm
from .operation import AllReduce, Known, Operation, Residual, unsupported
from .operator_arguments import OperatorArguments
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


class GatedLayer(NamedTuple):
    """A layer that the stack supports: attention with keys and values, and a gated MLP or a
    mixture of them."""

    input_norm: Norm | JoinNorms | None
    qkv: Linear
    qk_norm: QKNorm | None
    rotate: Rotate
    attend: Attend
    output: Linear
    attention_sum: AllReduce | None
    attention_output_norm: Norm | None
    attention_residual: Residual
    mlp_norm: Norm | None
    gate_up: Linear | None
    activate: Activate | None
    down: Linear | None
    experts: Experts | None
    mlp_sum: AllReduce | None
    mlp_output_norm: Norm | None
    mlp_residual: Residual

    @classmethod
    def of(cls, plan: LayerPlan) -> GatedLayer | Operation:
        """Return the operations of a layer by role, or the first operation without a role."""
        found: dict[str, Operation | None] = {}
        left = list(plan.operations)
        for place, (kinds, optional) in _roles().items():
            if left and isinstance(left[0], kinds):
                found[place] = left.pop(0)
            elif optional:
                found[place] = None
            else:
                return left[0] if left else plan.operations[-1]
        if left:
            return left[0]
        mlp = [found[place] is not None for place in ("gate_up", "activate", "down")]
        if set(mlp) != {found["experts"] is None}:
            return plan.operations[-1]
        return cls(**found)  # type: ignore[arg-type]  # checked by their classes


@cache
def _roles() -> dict[str, tuple[tuple[type, ...], bool]]:
    """The roles of `GatedLayer`: the classes of their operations, and whether it may be None."""
    hints = {place: get_args(kind) or (kind,) for place, kind in get_type_hints(GatedLayer).items()}
    return {place: (kinds, type(None) in kinds) for place, kinds in hints.items()}


def stack_obstacle(plan: ModelPlan) -> str | None:
    """Return the reason why the C++ stack does not support a model's layers, or None."""
    for op in plan.operations:
        if (missing := unsupported(op, KNOWN_TO_STACK)) is not None:
            return missing
    heads = set()
    for layer in set(plan.layers):
        found = GatedLayer.of(layer)
        if not isinstance(found, GatedLayer):
            return found.title
        attend = found.attend
        heads.add((attend.heads, attend.kv_heads, attend.head_dim, attend.value_dim))
    if len(heads) > 1:
        return "layers with different heads"
    return None


class Stack(Protocol):
    """All layers of a decoder and its final norm, as one operation."""

    def run(
        self,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
        aux_layers: Sequence[int] = (),
        embeddings_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers and the final norm: `[T, D]`; writes keys and values.

        Also returns the outputs of the layers `aux_layers`, which are ascending, side by side:
        `[T, len(aux_layers) * D]`, or None without any. Cosines and sines are float32. All
        positions are below `batch.read_blocks` blocks. Layers with `JoinNorms` need
        `embeddings_TD`.
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
        self,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
        aux_layers: Sequence[int] = (),
        embeddings_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Stack.run`.

        Opaque to torch.compile. Raises RuntimeError for inconsistent arguments and IndexError for
        an index out of range, in both cases before anything is written.
        """
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
    attend = model.plan.layers[0].attend
    arguments.integers += [model.plan.hidden_size, attend.heads, attend.kv_heads, attend.head_dim]
    arguments.integers.append(0 if model.collectives is None else model.collectives.communicator)
    arguments.integers.append(len(model.layers))
    for layer in model.layers:
        ops = GatedLayer.of(layer.plan)
        assert isinstance(ops, GatedLayer), "a plan that `stack_obstacle` refuses"
        _add_attention(arguments, layer, ops)
        _add_mlp(arguments, layer, ops)
    arguments.add_norm(model.plan.norm, model.norm)
    return (
        *(arguments.tensors, arguments.integers, arguments.numbers),
        *(model.norm.dtype, model.storage),
    )


def _add_attention(arguments: OperatorArguments, layer: BoundLayer, ops: GatedLayer) -> None:
    attend, temperature, qk_norm = ops.attend, ops.attend.temperature, ops.qk_norm
    arguments.integers += [*layer.place, attend.window, attend.chunk, ops.rotate.kind]
    _add_input_norm(arguments, layer, ops.input_norm)
    arguments.tensors += layer.linear(ops.qkv)
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
    arguments.tensors += layer.linear(ops.output)
    arguments.integers.append(ops.attention_sum is not None)
    _add_norm(arguments, layer, ops.attention_output_norm)
    arguments.numbers.append(ops.attention_residual.scale)


def _add_input_norm(
    arguments: OperatorArguments, layer: BoundLayer, norm: Norm | JoinNorms | None
) -> None:
    if not isinstance(norm, JoinNorms):
        arguments.add_norm(None, None)
        _add_norm(arguments, layer, norm)
        return
    arguments.add_norm(norm, layer.tensor(norm.embeddings))
    arguments.add_norm(norm, None if norm.hidden is None else layer.tensor(norm.hidden))


def _add_mlp(arguments: OperatorArguments, layer: BoundLayer, ops: GatedLayer) -> None:
    _add_norm(arguments, layer, ops.mlp_norm)
    arguments.integers.append(ops.experts is not None)
    if ops.experts is not None:
        arguments.add_experts(ops.experts, layer.experts(ops.experts))
    else:
        assert ops.gate_up is not None
        assert ops.activate is not None
        assert ops.down is not None
        arguments.integers.append(ops.activate.features)
        arguments.tensors += layer.linear(ops.gate_up)
        arguments.add_activate(ops.activate)
        arguments.tensors += layer.linear(ops.down)
    arguments.integers.append(ops.mlp_sum is not None)
    _add_norm(arguments, layer, ops.mlp_output_norm)
    arguments.numbers.append(ops.mlp_residual.scale)


def _add_norm(arguments: OperatorArguments, layer: BoundLayer, norm: Norm | None) -> None:
    arguments.add_norm(norm, None if norm is None else layer.tensor(norm.weight))
