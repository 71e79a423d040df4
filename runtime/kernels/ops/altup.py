"""Alternating updates (AltUp, arXiv 2301.13310) and low-rank residuals (Laurel, arXiv 2411.07501),
as Gemma 3n has them.

The hidden states of a token are N streams. A layer predicts all streams, updates the active one,
and corrects the others by what the update changed.

Shapes: T tokens, N streams, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import projection
from .norms import RMSNorm, mean_square
from .operation import Binding, LayerStep, Operation, Run, Vector, per_token
from .parameter import Parameter

_LEAST_SQUARE = 1e-5
"""Least mean square of a projected stream."""


class StreamOperation(Operation):
    """An operation on the streams of AltUp."""

    @property
    def title(self) -> str:
        return "several residual streams (AltUp)"


def _as_large_as(x_TD: Tensor, stream_TD: Tensor) -> Tensor:
    """Return `x_TD` with the root mean square of a stream."""
    target_T1, own_T1 = mean_square(stream_TD)[:, None], mean_square(x_TD)[:, None]
    factor_T1 = target_T1.sqrt() / own_T1.clamp(min=_LEAST_SQUARE).sqrt()
    return (x_TD.float() * factor_T1).to(x_TD.dtype)


@dataclass(frozen=True, kw_only=True)
class ProjectedStreams(StreamOperation):
    """An operation with a matrix for each stream but the first."""

    projections: tuple[Parameter, ...]
    """`[D, D]` of each stream but the first."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.projections


@dataclass(frozen=True, kw_only=True)
class ExpandStreams(ProjectedStreams):
    """Hidden states `[T, D]` as N streams, `[T, N, D]`: the first as it is, others projected."""

    def bind(self, to: Binding) -> Run:
        linears = [projection(to, weight) for weight in self.projections]
        scaled = per_token(to.kernels, _as_large_as)

        def run(x_TD: Tensor, step: LayerStep) -> Tensor:
            return torch.stack([x_TD, *(scaled(linear(x_TD), x_TD) for linear in linears)], 1)

        return run

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return hidden * (itemsize * 2 * (len(self.projections) + 1) + 8)


@dataclass(frozen=True, kw_only=True)
class MergeStreams(ProjectedStreams):
    """The mean `[T, D]` of N streams `[T, N, D]`, of which all but the first are projected."""

    def bind(self, to: Binding) -> Run:
        linears = [projection(to, weight) for weight in self.projections]
        scaled = per_token(to.kernels, _as_large_as)

        def run(x_TND: Tensor, step: LayerStep) -> Tensor:
            first_TD, *others = x_TND.unbind(1)
            projected = [
                scaled(linear(x_TD), first_TD) for linear, x_TD in zip(linears, others, strict=True)
            ]
            return torch.stack([first_TD, *projected]).mean(0)

        return run

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return hidden * (itemsize * 3 * (len(self.projections) + 1) + 8)


@dataclass(frozen=True, kw_only=True)
class RoutedStreams(StreamOperation):
    """An operation with coefficients of each token: `coefs(tanh(router(norm(x) / D)))`."""

    norm: Parameter
    """`[D]`."""
    router: Parameter
    """`[N, D]`."""
    coefs: Parameter
    """`[coefficients, N]`."""
    eps: float
    active: int
    """The stream that layers update."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.norm, self.router, self.coefs

    def coefficients(self, to: Binding) -> Callable[[Tensor], Tensor]:
        """Return the function of a stream `[T, D]` to `[T, coefficients]`."""
        norm = to.module(self.norm, lambda: RMSNorm(self.eps))
        router, coefs = to.module(self.router, Vector), to.module(self.coefs, Vector)
        scale = 1.0 / self.norm.shape[0]

        def run(x_TD: Tensor) -> Tensor:
            routed_TN = F.linear(norm(x_TD) * scale, router.weight)
            return F.linear(torch.tanh(routed_TN.float()).to(x_TD.dtype), coefs.weight)

        return per_token(to.kernels, run)

    def kept_features(self, hidden: int) -> int:
        return self.router.shape[0] * hidden

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        return hidden * (itemsize * 4 * self.router.shape[0] + (12 if eager else 0))


@dataclass(frozen=True, kw_only=True)
class PredictStreams(RoutedStreams):
    """Each stream plus a combination of all, by N * N coefficients of the active one."""

    def bind(self, to: Binding) -> Run:
        coefficients, active, streams = self.coefficients(to), self.active, self.router.shape[0]
        combined = per_token(to.kernels, torch.bmm)

        def run(x_TND: Tensor, step: LayerStep) -> Tensor:
            coefs_TNN = coefficients(x_TND[:, active]).unflatten(1, (streams, streams))
            return x_TND + combined(coefs_TNN, x_TND)

        return run


@dataclass(frozen=True, kw_only=True)
class CorrectStreams(RoutedStreams):
    """Of (predictions, updated active stream), all streams corrected by N coefficients of it."""

    def bind(self, to: Binding) -> Run:
        coefficients, active = self.coefficients(to), self.active

        def run(value: tuple[Tensor, Tensor], step: LayerStep) -> Tensor:
            x_TND, updated_TD = value
            change_TD = updated_TD - x_TND[:, active]
            coefs_TN = coefficients(updated_TD) + 1.0
            return x_TND + change_TD[:, None] * coefs_TN[:, :, None]

        return run


@dataclass(frozen=True, kw_only=True)
class SelectStream(StreamOperation):
    """One stream, `[T, D]`."""

    index: int

    def bind(self, to: Binding) -> Run:
        index = self.index
        return lambda x_TND, step: x_TND[:, index]


@dataclass(frozen=True, kw_only=True)
class AddToOthers(StreamOperation):
    """Of (streams, `[T, D]`), the streams with the second added to all but the first."""

    def bind(self, to: Binding) -> Run:
        def run(value: tuple[Tensor, Tensor], step: LayerStep) -> Tensor:
            x_TND, added_TD = value
            return torch.cat((x_TND[:, :1], x_TND[:, 1:] + added_TD[:, None]), dim=1)

        return run


@dataclass(frozen=True, kw_only=True)
class Laurel(Operation):
    """`x + norm(right(left(x)))`, a learned residual of low rank."""

    left: Parameter
    """`[rank, D]`."""
    right: Parameter
    """`[D, rank]`."""
    norm: Parameter
    eps: float

    @property
    def title(self) -> str:
        return "low-rank residuals (Laurel)"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.left, self.right, self.norm

    def bind(self, to: Binding) -> Run:
        left, right = projection(to, self.left), projection(to, self.right)
        norm = per_token(to.kernels, to.module(self.norm, lambda: RMSNorm(self.eps)))
        return lambda x_TD, step: x_TD + norm(right(left(x_TD)))
