"""All layers of a decoder as one operation (the stack), over packed weights.

Shapes: T tokens, D hidden_size, F intermediate_size, G layer groups, E half of head_dim, K kinds of
rotation. The arithmetic is that of `models/operations.py`, with results rounded to the model's
dtype at the same places; `csrc/stack_thread.h` describes fusion and threading. The result of a row
is bitwise the same in any batch and with any number of threads.

Weights are not arguments: a stack is created once from them, and calls pass its handle.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints

import torch
from torch import Tensor

from .batch import RaggedBatch
from .bound_model import BoundModel
from .layer_operations import (
    KNOWN_TO_LAYERS,
    UNEQUAL_LAYERS,
    Activate,
    Attend,
    Linear,
    Norm,
    Operation,
    QKNorm,
    Residual,
    Rotate,
    unsupported,
)
from .layer_plan import LayerPlan, ModelPlan

torch.library.define(
    "stepgraph::stack_create",
    "(Tensor norm, Tensor?[] weights, int[] places, int[] sizes, float[] numbers,"
    " bool offset_norms, bool gelu, str storage) -> int",
)
torch.library.define("stepgraph::stack_destroy", "(int handle) -> ()")
torch.library.define("stepgraph::stack_workspace", "(int handle, int tokens) -> int")
torch.library.define(
    "stepgraph::decoder_stack",
    "(Tensor x, Tensor(a!) arena, Tensor positions, Tensor slots, Tensor block_tables,"
    " Tensor token_rows, Tensor cos, Tensor sin, int read_blocks, Tensor handle) -> Tensor",
)


def _fake_decoder_stack(
    x_TD: Tensor,
    arena: Tensor,
    positions_T: Tensor,
    slots_GT: Tensor,
    block_tables: Tensor,
    token_rows_T: Tensor,
    cos_KTE: Tensor,
    sin_KTE: Tensor,
    read_blocks: int,
    handle: Tensor,
) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


torch.library.register_fake("stepgraph::decoder_stack", _fake_decoder_stack)


class GatedLayer(NamedTuple):
    """A layer that the stack supports: attention with keys and values, and a gated MLP."""

    input_norm: Norm
    qkv: Linear
    qk_norm: QKNorm | None
    rotate: Rotate
    attend: Attend
    output: Linear
    attention_output_norm: Norm | None
    attention_residual: Residual
    mlp_norm: Norm
    gate_up: Linear
    activate: Activate
    down: Linear
    mlp_output_norm: Norm | None
    mlp_residual: Residual

    @classmethod
    def of(cls, plan: LayerPlan) -> GatedLayer | Operation:
        """Return the operations of a layer by role, or the first operation without a role."""
        found: dict[str, Operation | None] = {}
        left = list(plan.operations)
        for place, kind in get_type_hints(cls).items():
            optional = type(None) in get_args(kind)
            if left and isinstance(left[0], get_args(kind) or kind):
                found[place] = left.pop(0)
            elif optional:
                found[place] = None
            else:
                return left[0] if left else plan.operations[-1]
        if left:
            return left[0]
        return cls(**found)  # type: ignore[arg-type]  # checked by their classes

    @property
    def norms(self) -> list[Norm | QKNorm]:
        """All norms of the layer."""
        return [operation for operation in self if isinstance(operation, Norm | QKNorm)]


def stack_obstacle(plan: ModelPlan) -> str | None:
    """Return the reason why the C++ stack does not support a model's layers, or None."""
    for op in plan.operations:
        if (missing := unsupported(op, KNOWN_TO_LAYERS)) is not None:
            return missing
    if not plan.is_uniform:
        return UNEQUAL_LAYERS
    layer = GatedLayer.of(plan.layers[0])
    if not isinstance(layer, GatedLayer):
        return layer.title
    if {(norm.eps, norm.offset) for norm in layer.norms} != {(plan.norm.eps, plan.norm.offset)}:
        return "norms of several kinds"
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
    ) -> Tensor:
        """Run all layers and the final norm: `[T, D]`; writes keys and values.

        Cosines and sines are float32. All positions are below `batch.read_blocks` blocks.
        """

    def workspace_bytes(self, tokens: int) -> int:
        """Bytes of workspace for steps of at most `tokens` tokens."""

    def close(self) -> None:
        """Release the weights; `run` must not be called afterwards. Idempotent."""


class DecodeResult(NamedTuple):
    """Input of the sampler after a decode step; T rows, V vocabulary, C chunks."""

    logits: Tensor
    """`[T, V]` in the model's dtype."""
    positions: Tensor
    """int64 `[T]`: positions of the input tokens."""
    maxima: Tensor
    """float32 `[T, C]`: the largest logit of each chunk of consecutive tokens."""
    ids: Tensor
    """int32 `[T, C]`: its token."""


class DecodeStep(Protocol):
    """A decode step: reads the row state and computes logits; if greedy, updates the row state."""

    def run(
        self,
        rows_T: Tensor,
        token_ids_R: Tensor,
        positions_R: Tensor,
        block_tables: Tensor,
        arena: Tensor,
        read_blocks: int,
        block_size: int,
    ) -> DecodeResult:
        """Return the logits of the rows' next tokens; write the keys and values of the newest."""

    def pick(
        self, result: DecodeResult, rows_T: Tensor, token_ids_R: Tensor, positions_R: Tensor
    ) -> Tensor:
        """Return the most likely tokens, int64 `[T]`, and store them as the rows' newest tokens.

        The null row remains at position 0.
        """


class DecoderStack:
    """The C++ stack: all layers of one model and its final norm. Needs `load_cpu_ops`.

    It keeps the weights alive until `close` or its deletion.
    """

    def __init__(self, model: BoundModel) -> None:
        """Register the weights. `stack_obstacle` must be None for the plan.

        Raises RuntimeError for inconsistent weights.
        """
        number: int = torch.ops.stepgraph.stack_create.default(model.norm, *stack_arguments(model))
        # A tensor, so that compiled code does not depend on the number.
        self._handle = torch.tensor(number, device="cpu")
        self._number = number
        self._close = weakref.finalize(self, torch.ops.stepgraph.stack_destroy.default, number)

    def close(self) -> None:
        """Release the weights; `run` raises RuntimeError afterwards."""
        self._close()

    def workspace_bytes(self, tokens: int) -> int:
        """Upper bound of the workspace of steps of at most `tokens` tokens, in bytes.

        Counts activations and the scratch memory of attention, for the current thread limit
        (`limit_threads`). Partial results of long rows are not counted: the reserve of the memory
        plan covers them.
        """
        count: int = torch.ops.stepgraph.stack_workspace.default(self._number, tokens)
        return count

    def run(
        self,
        x_TD: Tensor,
        arena: Tensor,
        batch: RaggedBatch,
        cos_KTE: Tensor,
        sin_KTE: Tensor,
    ) -> Tensor:
        """See `Stack.run`.

        Opaque to torch.compile. Raises RuntimeError for inconsistent arguments and IndexError for
        an index out of range, in both cases before anything is written.
        """
        out: Tensor = torch.ops.stepgraph.decoder_stack.default(
            x_TD,
            arena,
            batch.positions,
            batch.slots,
            batch.block_tables,
            batch.token_rows,
            cos_KTE,
            sin_KTE,
            batch.read_blocks,
            self._handle,
        )
        return out


def stack_arguments(model: BoundModel) -> tuple[Any, ...]:
    """Return the arguments of `stack_create` after the final norm."""
    weights: list[Tensor | None] = []
    places: list[int] = []
    for layer in model.layers:
        ops = GatedLayer.of(layer.plan)
        assert isinstance(ops, GatedLayer), "a plan that `stack_obstacle` refuses"
        for place, op in ops._asdict().items():
            match op:
                case Linear():
                    weights += layer.linear(op)
                case Norm():
                    weights.append(layer.tensor(op.weight))
                case QKNorm():
                    weights += [layer.tensor(op.q), layer.tensor(op.k)]
                case None:  # of queries and keys there would be two
                    weights += [None, None] if place == "qk_norm" else [None]
        places += [*layer.place, ops.attend.window, ops.rotate.kind]
    alike = GatedLayer.of(model.plan.layers[0])  # in what follows
    assert isinstance(alike, GatedLayer)
    attend, activate, norm = alike.attend, alike.activate, model.plan.norm
    return (
        weights,
        places,
        [model.plan.hidden_size, activate.features, attend.heads, attend.kv_heads, attend.head_dim],
        [norm.eps, attend.scale, attend.softcap],
        norm.offset,
        activate.function == "gelu_tanh",
        model.storage,
    )
