"""Mamba layers of both kinds: selective state spaces."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ...arguments import Range
from ...bounded_repr import bounded_repr
from ...errors import ConfigError
from ...kernels.ops.norms import GatedNorm
from ...kernels.ops.operation import Operation
from ...kernels.ops.parameter import Slice
from ...kernels.ops.state_space import SelectiveInputs, StateSpace
from .dimensions import Mixer, Number, Size
from .tensors import convolution, in_float32, linear, matrix, vector


@dataclass(frozen=True, kw_only=True)
class Mamba(Mixer, ABC):
    """What both kinds of Mamba layers have."""

    mamba_module: str = "mamba"
    """Its name in a checkpoint."""
    mamba_d_state: Size
    """Elements of the state for each feature."""
    mamba_d_conv: Size
    """Tokens that the convolution sees, the newest included."""
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    """Whether the projection of its inputs has a bias."""


@dataclass(frozen=True, kw_only=True)
class Mamba1(Mamba):
    """A Mamba layer (Gu and Dao, arXiv 2312.00752) with norms of time steps, B and C (Jamba).

    `mamba_proj_bias` is of the projection of its output too. Raises `ConfigError`.
    """

    mamba_expand: Size
    """Features, in multiples of the hidden size."""
    mamba_dt_rank: Size
    """Rank of the projection to time steps."""

    def operations(self, hidden: int, eps: float) -> Iterator[Operation]:
        """See `Mixer.operations`."""
        at, inner = self.mamba_module, self.mamba_expand * hidden
        size, rank, biased = self.mamba_d_state, self.mamba_dt_rank, self.mamba_proj_bias
        inputs, taps = {f"{at}.in_proj": 2 * inner}, self.mamba_d_conv
        yield linear("mamba.inputs", inputs, hidden, biased, split=(inner, inner))
        yield convolution("mamba.conv", f"{at}.conv1d", inner, taps, biased=self.mamba_conv_bias)
        yield SelectiveInputs(
            name="selective_inputs",
            projection=matrix("mamba.selection", f"{at}.x_proj", rank + 2 * size, inner),
            time_projection=matrix("mamba.time", f"{at}.dt_proj", inner, rank),
            time_norm=vector("mamba.time_norm", f"{at}.dt_layernorm", rank),
            b_norm=vector("mamba.b_norm", f"{at}.b_layernorm", size),
            c_norm=vector("mamba.c_norm", f"{at}.c_layernorm", size),
            eps=eps,
        )
        yield StateSpace(
            name="state_space",
            decay=in_float32("mamba.decay", f"{at}.A_log", inner, size),
            time_bias=in_float32("mamba.time_bias", f"{at}.dt_proj.bias", inner),
            skip=in_float32("mamba.skip", f"{at}.D", inner),
            head_dim=1,
            groups=1,
            state_size=size,
            gated=True,
        )
        yield linear("mamba.output", {f"{at}.out_proj": hidden}, inner, biased)


@dataclass(frozen=True, kw_only=True)
class Mamba2(Mamba):
    """A Mamba-2 layer (Dao and Gu, arXiv 2405.21060). Raises `ConfigError`."""

    mamba_n_heads: Size
    mamba_d_head: Size
    """Elements of a head."""
    mamba_n_groups: Size
    """Groups of heads that share what is written to the state, and read from it."""
    mamba_output_bias: bool = False
    mamba_rms_norm: bool = True
    """Whether its output is normed, in groups."""
    mamba_norm_before_gate: bool = False
    """Whether the gate multiplies the output of that norm, not its input."""
    least_time_step: Annotated[float, Range(0.0, 1e18)] = 0.0
    largest_time_step: Annotated[float, Range(0.0, 1e18)] = 1e18
    ssm_in_multiplier: Number = 1.0
    """Factor of all its inputs (muP, arXiv 2203.03466)."""
    ssm_multipliers: tuple[Number, ...] = (1.0,) * 5
    """Factors of its gate, of its x, B and C, and of its time steps."""
    ssm_out_multiplier: Number = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mamba_n_heads % self.mamba_n_groups:
            raise ConfigError(
                f"mamba_n_heads = {self.mamba_n_heads} must be a multiple of mamba_n_groups ="
                f" {self.mamba_n_groups}"
            )
        if len(found := self.ssm_multipliers) != 5:
            raise ConfigError(f"ssm_multipliers = {bounded_repr(found)} must have 5 numbers")

    def operations(self, hidden: int, eps: float) -> Iterator[Operation]:
        """See `Mixer.operations`."""
        at, size, groups = self.mamba_module, self.mamba_d_state, self.mamba_n_groups
        heads, inner = self.mamba_n_heads, self.mamba_n_heads * self.mamba_d_head
        shared, taps = groups * size, self.mamba_d_conv
        convolved = inner + 2 * shared
        # Stored are the gate, x, B and C, and the time steps.
        stored, rows = f"{at}.in_proj", inner + convolved + heads
        parts = [(inner, convolved), (0, inner), (inner + convolved, heads)]
        z, x, b, c, dt = (by * self.ssm_in_multiplier for by in self.ssm_multipliers)
        yield linear(
            "mamba.inputs",
            [(stored, rows, Slice(0, *part)) for part in parts],
            hidden,
            self.mamba_proj_bias,
            split=(convolved, inner, heads),
            factors=((inner, x), (shared, b), (shared, c), (inner, z), (heads, dt)),
        )
        yield convolution(
            "mamba.conv", f"{at}.conv1d", convolved, taps, biased=self.mamba_conv_bias
        )
        yield StateSpace(
            name="state_space",
            decay=in_float32("mamba.decay", f"{at}.A_log", heads),
            time_bias=in_float32("mamba.time_bias", f"{at}.dt_bias", heads),
            skip=in_float32("mamba.skip", f"{at}.D", heads),
            head_dim=self.mamba_d_head,
            groups=groups,
            state_size=size,
            time_limits=(self.least_time_step, self.largest_time_step),
            gated=not self.mamba_rms_norm,
        )
        if self.mamba_rms_norm:
            yield GatedNorm(
                name="gated_norm",
                weight=vector("mamba.norm", f"{at}.norm", inner),
                eps=eps,
                features=inner,
                group=inner // groups,
                gate_first=not self.mamba_norm_before_gate,
            )
        output, biased = {f"{at}.out_proj": hidden}, self.mamba_output_bias
        factors = ((hidden, self.ssm_out_multiplier),)
        yield linear("mamba.output", output, inner, biased, factors=factors)
