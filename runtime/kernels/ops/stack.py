"""All layers of a decoder as one operation over weights that are packed once.

Shapes: T tokens, D hidden_size, F intermediate_size, G layer groups, E half of head_dim, K kinds of
rotation. The arithmetic is that of the modules in `models/decoder.py`, with results rounded to the
model's dtype at the same places; what is fused or shared out among threads, and how, is said in
`cpu_stack.cpp`. Like the operations it is made of, it computes a row's result bitwise the same in
any batch and with any number of threads.

Weights are no arguments: a stack is created once over them and known by a handle.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .batch import RaggedBatch

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


class StackLinear(NamedTuple):
    """A linear layer: its packed weight, and what its sums are multiplied by and added to."""

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer. Weights of norms are in the model's dtype; None: there is no such norm."""

    input_norm: Tensor
    qkv: StackLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: StackLinear
    attention_output_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: StackLinear
    down: StackLinear
    mlp_output_norm: Tensor | None
    group: int
    """Its layer group."""
    position: int
    """Its position in the group: the first coordinate of the arena."""
    window: int
    """Tokens that a token attends to, itself included; 0: all before it."""
    rope: int
    """Its kind of rotation: the first coordinate of cosines and sines."""

    def weights(self) -> tuple[Tensor | None, ...]:
        """In the order in which `stack_create` reads them."""
        return (
            self.input_norm,
            *self.qkv,
            self.q_norm,
            self.k_norm,
            *self.output,
            self.attention_output_norm,
            self.mlp_norm,
            *self.gate_up,
            *self.down,
            self.mlp_output_norm,
        )


@dataclass(frozen=True, slots=True)
class StackShape:
    """What all layers have in common."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    """Multiplies q . k."""
    softcap: float
    """Of scores; 0: none."""
    offset_norms: bool
    """Norms multiply by one plus their weight, in float32."""
    gelu: bool
    """The activation is tanh's approximation of gelu; else silu."""
    storage: str
    """How the arena stores vectors: `model`, `int8` or `fp8`."""


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
        """Normed hidden states `[T, D]` behind the last layer; writes keys and values.

        Cosines and sines are float32. All positions are below `batch.read_blocks` blocks.
        """

    def workspace_bytes(self, tokens: int) -> int:
        """Bytes that steps of at most `tokens` tokens keep beside their tensors."""

    def close(self) -> None:
        """Let go of the weights; `run` may not be called any more. Idempotent."""


class DecodeEnds(NamedTuple):
    """What a decode step begins and ends with, besides its layers."""

    embedding: StackLinear
    embedding_factor: float
    """Embeddings are multiplied by it; a number of the model's dtype."""
    frequencies: Tensor
    """float32 `[K, E]`: radians that pairs of elements turn a position, for each kind."""
    amplitudes: Tensor
    """float32 `[K]`: cosines and sines are multiplied by it."""
    norm: Tensor
    """Weight of the final norm."""
    head: StackLinear
    logit_softcap: float
    """Logits l become softcap * tanh(l / softcap); 0: they stay."""


class DecodeResult(NamedTuple):
    """What a decode step leaves for whoever picks tokens; T rows, V vocabulary, C chunks."""

    logits: Tensor
    """`[T, V]` in the model's dtype."""
    positions: Tensor
    """int64 `[T]`: of the tokens that went in."""
    maxima: Tensor
    """float32 `[T, C]`: the largest logit of each chunk of neighbouring tokens."""
    ids: Tensor
    """int32 `[T, C]`: its token."""


class DecodeStep(Protocol):
    """A decode step from the device's state to logits, and back to the state if it is greedy."""

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
        """Logits of the rows' next tokens; writes keys and values of their newest ones."""

    def pick(
        self, result: DecodeResult, rows_T: Tensor, token_ids_R: Tensor, positions_R: Tensor
    ) -> Tensor:
        """The best tokens, int64 `[T]`, which become the rows' newest; the null row stays at 0."""


class DecoderStack:
    """The layers of one model and its final norm, ready to run; needs `load_cpu_ops`.

    It keeps the weights alive, and ends with itself or with `close`.
    """

    def __init__(self, shape: StackShape, layers: Sequence[StackLayer], norm: Tensor) -> None:
        """Raises RuntimeError for weights that do not fit together."""
        number: int = torch.ops.stepgraph.stack_create.default(
            norm.detach(),
            [None if w is None else w.detach() for layer in layers for w in layer.weights()],
            [n for x in layers for n in (x.group, x.position, x.window, x.rope)],
            [
                shape.hidden_size,
                shape.intermediate_size,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
            ],
            [shape.eps, shape.scale, shape.softcap],
            shape.offset_norms,
            shape.gelu,
            shape.storage,
        )
        # A tensor, so that compiled code does not depend on the number.
        self._handle = torch.tensor(number, device="cpu")
        self._number = number
        self._close = weakref.finalize(self, torch.ops.stepgraph.stack_destroy.default, number)

    def close(self) -> None:
        """Let go of the weights; `run` raises RuntimeError from now on."""
        self._close()

    def workspace_bytes(self, tokens: int) -> int:
        """Bound of the work space kept for steps of at most `tokens` tokens, by as many
        threads as `limit_threads` was given.

        Activations and attention's scratch. The parts of long rows, which steps of few tokens are
        split into, are not counted: the reserve of the memory plan has room for them.
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

        Opaque to torch.compile. Raises RuntimeError for arguments that do not fit together and
        IndexError for an index out of range, in both cases before anything is written.
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
