"""The gated delta rule: Gated DeltaNet, and Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from ...errors import ConfigError
from ...kernels.ops.delta_rule import DeltaRule
from ...kernels.ops.norms import GatedNorm
from ...kernels.ops.operation import Operation
from ...kernels.ops.parameter import HeadRows, Source
from .dimensions import Mixer, Size
from .tensors import Part, convolution, in_float32, linear, vector


@dataclass(frozen=True, kw_only=True)
class DeltaRuleLayout:
    """The tensors of a layer with the delta rule in a checkpoint, and what differs by family.

    Names are relative to the module. A projection with two names has low rank: the first one has
    as many outputs as a head has elements.
    """

    module: str = "linear_attn"
    qkv: tuple[str, ...] = ("in_proj_qkv",)
    """Projections to queries, keys and values; one if fused."""
    gate: tuple[str, ...] = ("in_proj_z",)
    """Projection to the gate of the output."""
    decay: tuple[str, ...] = ("in_proj_a",)
    """Projection to what the decays are made of; of low rank for a decay of each key channel."""
    beta: str = "in_proj_b"
    by_key_head: bool = False
    """Whether `qkv` is one tensor with `gate`, and `beta` with `decay`, that have queries, keys,
    values and gate, or beta and decay, of one key head after the other (Qwen3-Next)."""
    norm: str = "norm"
    output: str = "out_proj"
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    norm_eps: float | None = None
    """Epsilon of the norm of the output; None: the model's."""
    norm_in_float32: bool = False
    """As `GatedNorm.in_float32`."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaRule(Mixer):
    """Gated DeltaNet, or Kimi Delta Attention. Raises `ConfigError`."""

    linear_num_key_heads: Size
    """Heads of queries and keys."""
    linear_num_value_heads: Size
    """Heads of values; a multiple of the key heads."""
    linear_key_head_dim: Size
    """Elements of a head's queries and keys."""
    linear_value_head_dim: Size
    """Elements of a head's values."""
    linear_conv_kernel_dim: Size
    """Tokens that the convolution of queries, keys and values sees, the newest included."""
    linear_allow_neg_eigval: bool = False
    """Whether beta is from 0 to 2, not to 1."""
    layout: DeltaRuleLayout = field(default_factory=DeltaRuleLayout)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads = {self.linear_num_value_heads} must be a multiple of"
                f" linear_num_key_heads = {self.linear_num_key_heads}"
            )

    def operations(self, hidden: int, eps: float) -> Iterator[Operation]:
        """See `Mixer.operations`."""
        layout, key, value = self.layout, self.linear_key_head_dim, self.linear_value_head_dim
        at, heads, key_heads = layout.module, self.linear_num_value_heads, self.linear_num_key_heads
        keys, values = key_heads * key, heads * value
        qkv, by_channel = (keys, keys, values), len(layout.decay) > 1
        decays = heads * key if by_channel else heads
        gate = value if len(layout.gate) > 1 else values
        split = (sum(qkv), gate, key if by_channel else heads, heads)
        yield linear("delta.inputs", self._inputs(split), hidden, split=split)
        for part, (own, names, size) in enumerate(
            (("gate", layout.gate, values), ("decay", layout.decay, decays)), start=1
        ):
            if len(names) > 1:
                yield linear(f"delta.{own}", {f"{at}.{names[1]}": size}, split[part], part=part)
        third, taps = -(-sum(qkv) // 3), self.linear_conv_kernel_dim
        # transformers 5.24 saves them as three equal parts, whatever their sizes are.
        equal = (third, third, sum(qkv) - 2 * third)
        conv = convolution("delta.conv", f"{at}.conv1d", sum(qkv), taps)
        apart = tuple(
            tuple(
                Source(f"{at}.{name}_conv1d.weight", (size, 1, taps))
                for name, size in zip("qkv", sizes, strict=True)
            )
            for sizes in (qkv, equal)
        )
        yield replace(conv, weight=conv.weight._replace(alternatives=apart), blocks=qkv)
        stored = (1, 1, heads, 1) if by_channel else (heads,)
        yield DeltaRule(
            name="delta_rule",
            a_log=in_float32("delta.A_log", f"{at}.A_log", *stored, shape=(heads,)),
            dt_bias=in_float32("delta.dt_bias", f"{at}.dt_bias", decays, shape=(decays,)),
            key_heads=key_heads,
            key_dim=key,
            value_dim=value,
            beta_scale=2.0 if self.linear_allow_neg_eigval else 1.0,
        )
        yield GatedNorm(
            name="gated_norm",
            weight=vector("delta.norm", f"{at}.{layout.norm}", value),
            eps=layout.norm_eps or eps,
            features=values,
            group=value,
            gate=layout.gate_activation,
            in_float32=layout.norm_in_float32,
        )
        yield linear("delta.output", {f"{at}.{layout.output}": hidden}, values)

    def _inputs(self, split: Sequence[int]) -> Sequence[Part]:
        """The tensors of queries, keys and values, the gate, decays and beta, in this order, with
        their rows and which of them."""
        layout, heads = self.layout, self.linear_num_key_heads
        at, key, value = layout.module, self.linear_key_head_dim, self.linear_value_head_dim
        each = self.linear_num_value_heads // heads
        if not layout.by_key_head:
            qkv = (heads * key, heads * key, each * heads * value)
            sizes = qkv if len(layout.qkv) > 1 else (sum(qkv),)
            names = (*layout.qkv, layout.gate[0], layout.decay[0], layout.beta)
            rows = (*sizes, *split[1:])
            return [(f"{at}.{name}", n, None) for name, n in zip(names, rows, strict=True)]

        def parts(name: str, sizes: Sequence[int]) -> list[Part]:
            stride, starts = sum(sizes), accumulate(sizes, initial=0)
            return [
                (f"{at}.{name}", heads * stride, HeadRows(start, heads, size, 0, stride=stride))
                for start, size in zip(starts, sizes, strict=False)
            ]

        beta, decay = parts(layout.beta, (each, each))
        return [*parts(layout.qkv[0], (key, key, each * value, each * value)), decay, beta]
