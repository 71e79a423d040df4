"""Rotary position embeddings (Su et al. 2021, "RoFormer"): frequencies and rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch

from ..arguments import Range, check_fields
from ..errors import ConfigError

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional"]

Factor = Annotated[float, Range(1e-9, 1e9)]
"""Logarithms and quotients of factors stay finite in float32."""

Weight = Annotated[float, Range(0.0, 1e9)]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled for contexts longer than in the first training.

    `linear` divides every frequency by `factor`; `llama3` and `yarn` divide the low ones, keep the
    high ones and blend those between. `longrope` and `dynamic` depend on the length of the sequence
    (see `modules.py`). `proportional` rotates the first pairs of a head as a rotation of all pairs
    does, with frequencies divided by `factor`, and not the others (Gemma 4). Raises `ConfigError`
    if the type is unknown, or a number is out of range.
    """

    type: RopeType = "default"
    factor: Annotated[float, Range(1.0, 1e9)] = 1.0
    original_max_position_embeddings: Annotated[int, Range(1, 2**31 - 1)] = 8192
    """All but `linear`: context length of the first training, in tokens; `dynamic`: the
    `max_position_embeddings` of the config."""
    low_freq_factor: Factor = 1.0
    """`llama3`: frequencies with wavelengths above `original_max_position_embeddings` / this are
    divided by `factor`."""
    high_freq_factor: Factor = 4.0
    """`llama3`: those with wavelengths below `original_max_position_embeddings` / this are kept."""
    beta_fast: Factor = 32.0
    """`yarn`: pairs that turn more often than this in the first training's context are kept."""
    beta_slow: Factor = 1.0
    """`yarn`: frequencies of pairs that turn less often than this are divided by `factor`."""
    truncate: bool = True
    """`yarn`: whether the blend begins and ends at whole pairs. transformers 5.23 reads the key at
    the top level of `rope_parameters` only, and ignores it where parameters are nested by the kind
    of layer, as in Gemma 3; here it counts there too."""
    short_factor: tuple[Factor, ...] = ()
    """`longrope`: divisor of the frequency of each pair, for sequences within the first training's
    context."""
    long_factor: tuple[Factor, ...] = ()
    """`longrope`: the same for longer sequences."""
    attention_factor: Factor | None = None
    """`yarn`, `longrope`: the multiplier of cosines and sines; None: computed from `factor`."""
    mscale: Weight | None = None
    """`yarn`: weight of log(factor) in the multiplier of cosines and sines."""
    mscale_all_dim: Weight | None = None
    """Weight of log(factor) in the multiplier of the scores of latent attention. `yarn` divides
    cosines and sines by the root of that multiplier if `mscale` is given too."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError, "rope")
        if self.type == "longrope" and self.original_max_position_embeddings < 2:
            raise ConfigError("rope original_max_position_embeddings = 1 must be at least 2")
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor = {self.low_freq_factor} must be below "
                f"high_freq_factor = {self.high_freq_factor}"
            )
        if self.type == "yarn" and self.beta_slow > self.beta_fast:
            raise ConfigError(
                f"rope beta_slow = {self.beta_slow} must be at most beta_fast = {self.beta_fast}"
            )

    @property
    def amplitude(self) -> float:
        """Multiplier of cosines and sines; 1 except for `yarn` and `longrope`."""
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.type == "longrope":  # Ding et al. 2024 ("LongRoPE")
            if self.factor == 1.0:
                return 1.0
            return math.sqrt(
                1.0 + math.log(self.factor) / math.log(self.original_max_position_embeddings)
            )
        if self.mscale and self.mscale_all_dim:
            return self._log_scale(self.mscale) / self._log_scale(self.mscale_all_dim)
        return self._log_scale(1.0)

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on the length of the sequence."""
        return self.type in ("longrope", "dynamic")

    @property
    def latent_score_scale(self) -> float:
        """Multiplier of the scores of latent attention (DeepSeek-V2)."""
        if self.type == "default" or not self.mscale_all_dim:
            return 1.0
        return self._log_scale(self.mscale_all_dim) ** 2

    def _log_scale(self, weight: float) -> float:
        """The attention temperature of YaRN for `factor` (Peng et al. 2023, equation 22)."""
        return 0.1 * weight * math.log(self.factor) + 1.0


UNSCALED = RopeScaling()


class Rope(NamedTuple):
    """The rotary embedding of a layer: its base and how its frequencies are scaled."""

    theta: float
    scaling: RopeScaling = UNSCALED
    partial: float = 1.0
    """Share of the elements of a head, from the first on, that is rotated; 0: none. Of
    `proportional` ropes the share of its pairs (i, i + head_dim / 2)."""
    head_dim: int = 0
    """Elements of a head where layers differ in them; 0: of every layer the same."""

    def dim(self, head_dim: int) -> int:
        """Elements that the share amounts to; frequencies are computed from this number."""
        return int((self.head_dim or head_dim) * self.partial)

    def rotated_elements(self, head_dim: int) -> int:
        """Elements of a head that are rotated, or paired: `dim`, rounded up to whole pairs."""
        if self.scaling.type == "proportional":
            return self.head_dim or head_dim
        dim = self.dim(head_dim)
        return dim + dim % 2

    def check(self, head_dim: int) -> None:
        """Raise `ConfigError` if heads of `head_dim` elements cannot be rotated so.

        A base below 1 has frequencies that overflow float32.
        """
        scaling, yarn = self.scaling, self.scaling.type == "yarn"
        dim = self.dim(head_dim) if 0 < self.partial <= 1 else 0
        if not (1 <= self.theta < math.inf) or (yarn and self.theta == 1):
            bound = "above 1 for yarn scaling" if yarn else "a number of at least 1"
            raise ConfigError(f"rope_theta = {self.theta} must be {bound}")
        if dim == 0:
            raise ConfigError(
                f"partial_rotary_factor = {self.partial} must be above 0 and at most 1, and rotate"
                f" at least one of head_dim = {head_dim} elements"
            )
        if scaling.type == "dynamic" and dim <= 2:
            raise ConfigError(
                f"dynamic rope scaling needs more than 2 rotated elements of a head, not {dim}"
            )
        pairs = (dim + 1) // 2
        for name in ("short_factor", "long_factor") if scaling.type == "longrope" else ():
            if len(factors := getattr(scaling, name)) != pairs:
                raise ConfigError(
                    f"rope {name} lists {len(factors)} factors, but {pairs} pairs of elements of a "
                    "head are rotated"
                )


UNROTATED = Rope(1.0, UNSCALED, 0.0)
"""No rotation."""


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the angle by which each pair of a head turns per position, in radians.

    Float32 `[head_dim / 2]`; zero for the pairs that are not rotated, which come last. Where
    frequencies depend on the length, they are those within the first training's context.
    """
    frequencies = torch.zeros(head_dim // 2)
    if rope.scaling.type == "proportional":
        whole = rope.head_dim or head_dim
        pairs = int(rope.partial * whole // 2)
        exponents = pair_exponents(whole)[:pairs]
        frequencies[:pairs] = 1.0 / rope.theta**exponents / rope.scaling.factor
    elif dim := rope.dim(head_dim):
        rotated = _rotated_frequencies(rope, dim)
        frequencies[: rotated.numel()] = rotated
    return frequencies


def pair_amplitudes(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the factor of each pair's cosine and sine: float32 `[head_dim / 2]`."""
    amplitudes = torch.ones(head_dim // 2)
    amplitudes[: rope.rotated_elements(head_dim) // 2] = rope.scaling.amplitude
    return amplitudes


def _rotated_frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """Return the frequencies of the rotated pairs, float32 `[ceil(dim / 2)]`.

    Without scaling pair i turns by `theta ** (-2i / dim)`. `linear` scaling divides all by the
    factor (Chen et al. 2023). The others weigh by how often a pair turns within the context L of
    the first training, n = L / wavelength: slow pairs are divided by the factor, fast ones kept.
    `llama3` blends linearly in n between `low_freq_factor` and `high_freq_factor` (Llama 3.1);
    `yarn` blends linearly in i between the pairs that turn `beta_fast` and `beta_slow` times (Peng
    et al. 2023, section 3.2). `longrope` divides each by a factor of its own (Ding et al. 2024).
    """
    scaling = rope.scaling
    frequencies: torch.Tensor = 1.0 / (rope.theta ** pair_exponents(dim))
    if scaling.type == "longrope":
        return frequencies / torch.tensor(scaling.short_factor)
    if scaling.type in ("default", "dynamic"):
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.type == "linear":
        return stretched
    if scaling.type == "llama3":
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    else:
        first, last = _yarn_blend(rope, dim)
        pairs = torch.arange(frequencies.numel())
        kept = 1.0 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)
    return (1.0 - kept) * stretched + kept * frequencies


def pair_exponents(dim: int) -> torch.Tensor:
    """Return the power of the base by which each pair's frequency is divided: float32, 2i / dim."""
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _yarn_blend(rope: Rope, dim: int) -> tuple[float, float]:
    """Return the pair numbers where the blend begins and ends; fractions if not truncated."""
    theta, scaling = rope.theta, rope.scaling

    def pair_that_turns(times: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # Floating point: with a base close to 1 the pair's number does not fit 64 bits.
    first, last = float(max(first, 0)), float(min(last, dim - 1))
    return first, last + 0.001 if first == last else last
