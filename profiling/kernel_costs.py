"""What each kernel of a decode step on a GPU must move, and how long that takes at least.

A decode step is `begin`, five operations a layer, `head` and `greedy`. Up to four rows each of them
is one kernel; for more rows the norm before a product and its epilogue (residual, activation, sum
of parts) are kernels of their own. Each operation reads its weights once and its share of the
cache, like the floor of the step (`roofline.py`); it also reads and writes what the floor leaves
out: activations, partial results, the keys and values of the new tokens. All of that is counted as
if it came from memory, though what one kernel leaves to the next mostly stays in the L2 cache. A
prediction is bytes over bandwidth, and for each kernel an edge: what passes between the end of one
and the first loads of the next.

Plain numbers in, plain numbers out; standard library only.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .kernel_names import OperationCost
from .roofline import floor_seconds

__all__ = [
    "DEPENDENT_EDGE_SECONDS",
    "EDGE_SECONDS",
    "DecoderShape",
    "KernelCost",
    "Parts",
    "floor_bytes",
    "kernel_costs",
    "operation_costs",
    "predicted_seconds",
]

EDGE_SECONDS = 1.3e-6
"""Between two kernels of a CUDA graph on an H100 or H200: an assumption, nothing measured here."""

DEPENDENT_EDGE_SECONDS = 0.35e-6
"""The same with programmatic dependent launch (CUDA Programming Guide), where the next kernel is
set up and may load its weights before the one before it has ended."""

FEW_ROWS = 4
"""Rows up to which every operation is one kernel (`gpu/linear.py`)."""

VOCABULARY_CHUNK = 32
"""Neighbouring tokens of which the head keeps the largest logit, for `greedy` to choose from: those
of a program for few rows, by default for vocabularies of more than 17,000."""

ROWS_CHUNK = 128
"""The same of more rows, where a kernel of this package makes the logits (`gpu/row_product.py`)."""

LIBRARY_CHUNK = 1024
"""The same where the library makes the logits (`gpu/head.py`)."""

Parts = Callable[[str, int, int], int]
"""(operation, output features, input features) -> how its product of more than four rows is
computed: 0 by the library, else the parts of the input features of `gpu/row_product.py`. The output
features of `gate_up` are those of the result."""

_FLOAT32 = 4
_INT32 = 4
_INT64 = 8


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What a decoder is made of, as far as its bytes depend on it.

    Whether the embedding is tied to the head makes no difference to a step: it reads all of the
    head, and one row of the embedding for each row that decodes.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    """Of each layer: the tokens that it attends to at most; None: all of them."""
    matrix_bytes: Callable[[int, int], int]
    """(output features, input features) -> bytes of the weight of a linear layer, or of so many
    rows of the embedding, as stored: scales included."""
    element_bytes: int
    """Of an activation, of the weight of a norm and of a bias."""
    kv_vector_bytes: int
    """Of a key or a value of one head as the cache stores it, scale included."""
    rope_kinds: int = 1
    qk_norm: bool = False
    output_norms: bool = False
    """Whether what attention and MLP return is normed before it is added."""
    attention_bias: bool = False
    mlp_bias: bool = False

    def linear_bytes(self, n: int, k: int, *, bias: bool = False) -> int:
        """Bytes of a linear layer of `n` output and `k` input features."""
        return self.matrix_bytes(n, k) + (n * self.element_bytes if bias else 0)


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What one launch of a kernel moves, in bytes."""

    name: str
    launches: int
    """In a step."""
    weight_bytes: int
    cache_bytes: int
    """Keys and values that rows attend to."""
    other_bytes: int
    """What the floor of a step leaves out."""
    window: int | None = None
    """Tokens that the layers attend to at most; of attention."""
    kernels: int = 1
    """Kernels that one launch of the operation consists of."""
    library_kernels: int = 0
    """How many of them are the library's, which have no dependent launch."""

    @property
    def bytes(self) -> int:
        """All that one launch moves."""
        return self.weight_bytes + self.cache_bytes + self.other_bytes

    def seconds(self, bandwidth_bytes_per_s: float) -> float:
        """Return the seconds of one launch at the bandwidth, without edges."""
        return floor_seconds(self.bytes, bandwidth_bytes_per_s)

    def edge_seconds(self, edge_seconds: float) -> float:
        """Return the seconds of the edges of one launch, given those of one edge.

        The edges before and after a kernel of the library take at least `EDGE_SECONDS`.
        """
        plain = max(EDGE_SECONDS, edge_seconds)
        return self.kernels * edge_seconds + 2 * self.library_kernels * (plain - edge_seconds)


@dataclass(frozen=True, slots=True)
class _Product:
    """Which kernels compute a product of a decode step."""

    parts: int
    """0: by the library."""
    kernels: int
    """The product, and the kernels before and after it."""
    bytes: int
    """Written by one of them and read by another."""

    @property
    def library_kernels(self) -> int:
        return int(self.parts == 0)


_ONE_KERNEL = _Product(1, 1, 0)


def kernel_costs(
    shape: DecoderShape,
    *,
    rows: int,
    context: int,
    splits: int,
    parts: Parts = lambda operation, n, k: 0,
) -> tuple[KernelCost, ...]:
    """Return the operations of a decode step in the order of their first launch.

    Layers of different windows have an attention of their own each.

    Args:
        shape: the model.
        rows: that decode, without padding.
        context: tokens of each row, the newest included.
        splits: parts that the positions of a row are attended to in.
        parts: what carries out the products of more than four rows; the library, if not given.

    Raises:
        ValueError: one of these numbers is less than 1.
    """
    for name, value in (("rows", rows), ("context", context), ("splits", splits)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    size, hidden, inner = shape.element_bytes, shape.hidden_size, shape.intermediate_size
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    layers = len(shape.windows)
    x = rows * hidden * size
    """Bytes of the hidden states."""
    qkv = rows * (queries + 2 * keys) * size
    rotations = rows * shape.head_dim * _FLOAT32  # half of them cosines, half of them sines
    # Of each split a vector of sums, a maximum and a denominator.
    partials = rows * shape.num_heads * splits * (shape.head_dim + 2) * _FLOAT32
    position_bytes = 2 * shape.num_kv_heads * shape.kv_vector_bytes
    norm = hidden * size
    output_norm = norm if shape.output_norms else 0
    width = queries + 2 * keys
    attended = rows * queries * size
    few = rows <= FEW_ROWS

    def product(name: str, n: int, k: int, *, stored: int = 0, normed: bool = False) -> _Product:
        """The kernels of a product, and the bytes that they pass to each other."""
        if few:
            return _ONE_KERNEL
        count, stored = parts(name, n, k), stored or n
        bare = name == "norm_linear" or (shape.output_norms and name in ("combine_output", "down"))
        finished = not bare if count == 0 else count > 1
        moved = 2 * rows * stored * (count * _FLOAT32 if count else size) if finished else 0
        if name == "head" and count == 0:
            moved //= 2  # the logits are a result too, which is written anyway
        return _Product(count, 1 + normed + finished, moved + 2 * normed * rows * k * size)

    qkv_product = product("norm_linear", width, hidden, normed=True)
    output_product = product("combine_output", hidden, queries)
    gate_up_product = product("gate_up", inner, hidden, stored=2 * inner, normed=True)
    down_product = product("down", hidden, inner)
    head_product = product("head", shape.vocab_size, hidden, normed=True)
    chunk = VOCABULARY_CHUNK if few else ROWS_CHUNK if head_product.parts else LIBRARY_CHUNK
    maxima = rows * -(-shape.vocab_size // chunk)
    # Up to four rows the next kernel reads the partials, of more rows attention itself does.
    if few:
        attention_bytes, output_bytes = partials, partials
    else:
        attention_bytes, output_bytes = attended, attended
        if splits > 1:
            attention_bytes += 2 * partials

    def cost(name: str, launches: int, weights: int, other: int, made: _Product) -> KernelCost:
        return KernelCost(
            name,
            launches,
            weight_bytes=weights,
            cache_bytes=0,
            other_bytes=other + made.bytes,
            kernels=made.kernels,
            library_kernels=made.library_kernels,
        )

    attention = [
        KernelCost(
            "decode_attention",
            launches,
            weight_bytes=2 * shape.head_dim * size if shape.qk_norm else 0,
            cache_bytes=rows * min(context, window or context) * position_bytes,
            other_bytes=qkv + rotations + rows * position_bytes + attention_bytes,
            window=window,
        )
        for window, launches in Counter(shape.windows).items()
    ]
    biased, mlp_biased = shape.attention_bias, shape.mlp_bias
    embedded = shape.matrix_bytes(rows, hidden) + x + shape.rope_kinds * rotations
    # Of greedy the token, as the row's newest one and as the step's output, and its position.
    return (
        cost("begin", 1, 0, embedded, _ONE_KERNEL),
        cost(
            "norm_linear",
            layers,
            norm + shape.linear_bytes(width, hidden, bias=biased),
            x + qkv,
            qkv_product,
        ),
        *attention,
        cost(
            "combine_output",
            layers,
            output_norm + shape.linear_bytes(hidden, queries, bias=biased),
            output_bytes + 2 * x,
            output_product,
        ),
        cost(
            "gate_up",
            layers,
            norm + shape.linear_bytes(2 * inner, hidden, bias=mlp_biased),
            x + rows * inner * size,
            gate_up_product,
        ),
        cost(
            "down",
            layers,
            output_norm + shape.linear_bytes(hidden, inner, bias=mlp_biased),
            rows * inner * size + 2 * x,
            down_product,
        ),
        cost(
            "head",
            1,
            norm + shape.linear_bytes(shape.vocab_size, hidden),
            x + rows * shape.vocab_size * size + maxima * (_FLOAT32 + _INT32),
            head_product,
        ),
        cost("greedy", 1, 0, maxima * _FLOAT32 + rows * 3 * _INT64, _ONE_KERNEL),
    )


def floor_bytes(costs: Sequence[KernelCost]) -> int:
    """Return what the step's floor counts: the weights and the cache (`roofline.step_bytes`)."""
    return sum(cost.launches * (cost.weight_bytes + cost.cache_bytes) for cost in costs)


def operation_costs(costs: Sequence[KernelCost]) -> list[OperationCost]:
    """Return what one launch of each operation must read: what the floor counts of it.

    Layers of different windows are one operation, of which a launch reads the mean.
    """
    launches: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for cost in costs:
        launches[cost.name] += cost.launches
        read[cost.name] += cost.launches * (cost.weight_bytes + cost.cache_bytes)
    return [
        OperationCost(name, count, round(read[name] / count)) for name, count in launches.items()
    ]


def predicted_seconds(
    costs: Sequence[KernelCost],
    bandwidth_bytes_per_s: float,
    edge_seconds: float = DEPENDENT_EDGE_SECONDS,
) -> float:
    """Return the seconds of the step: all bytes at the bandwidth, and an edge for each kernel.

    Raises:
        ValueError: the bandwidth is not positive, or an edge takes less than no time.
    """
    if not edge_seconds >= 0:  # NaN fails too
        raise ValueError(f"edge_seconds is {edge_seconds}; it must not be negative")
    return sum(
        cost.launches * (cost.seconds(bandwidth_bytes_per_s) + cost.edge_seconds(edge_seconds))
        for cost in costs
    )
