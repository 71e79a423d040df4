"""Several streams of hidden states, of which layers update one (Gemma 3n)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from ...arguments import Range
from ...errors import ConfigError
from ...kernels.ops.altup import (
    AddToOthers,
    CorrectStreams,
    ExpandStreams,
    Laurel,
    MergeStreams,
    PredictStreams,
    SelectStream,
)
from ...kernels.ops.layer_plan import LayerPlan
from ...kernels.ops.operation import Add, Multiply, Operation, Replace
from ...kernels.ops.parameter import Parameter, Source
from .dimensions import Dimensions, Size
from .tensors import matrix, vector


@dataclass(frozen=True, kw_only=True)
class AltUp(Dimensions):
    """Alternating updates of several streams of hidden states. Raises `ConfigError`.

    In its methods, `hidden` is the hidden size and `eps` the epsilon of the model's norms.
    """

    num_streams: Annotated[int, Range(2, 64)]
    active: Annotated[int, Range(0, 63)]
    """The stream that layers update."""
    scaled: bool
    """Whether the active stream has a scale, where it makes the input from per-layer embeddings."""
    laurel_rank: Size
    """Rank of the learned residual of each layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active >= self.num_streams:
            raise ConfigError(
                f"active = {self.active} must be below num_streams = {self.num_streams}"
            )

    def before(self, hidden: int) -> LayerPlan:
        """Embeddings become streams."""
        expand = ExpandStreams(name="expand", projections=self._projections(hidden, ""))
        return LayerPlan((expand, Replace(name="streams")))

    def after(self, hidden: int) -> LayerPlan:
        """Streams become the hidden states of a token."""
        merge = MergeStreams(name="merge", projections=self._projections(hidden, "unembed_"))
        return LayerPlan((merge, Replace(name="output")))

    def predicted(self, hidden: int, eps: float) -> Iterator[Operation]:
        """Predict the streams; the active one becomes the hidden states of the layer."""
        fields = self._routed(hidden, eps, "prediction_coefs", self.num_streams**2)
        yield PredictStreams(name="predict", writes="predictions", **fields)
        yield SelectStream(name="active", index=self.active)
        yield Replace(name="active")

    def laurel(self, hidden: int, eps: float) -> Iterator[Operation]:
        """The mean of attention and of a residual of low rank, times the root of 2."""
        rank = self.laurel_rank
        yield Laurel(
            name="laurel",
            left=matrix("laurel.left", "laurel.linear_left", rank, hidden),
            right=matrix("laurel.right", "laurel.linear_right", hidden, rank),
            norm=vector("laurel.norm", "laurel.post_laurel_norm", hidden),
            eps=eps,
            reads=("normed",),
            writes="laurel",
        )
        yield Add(name="sum", reads=("attended", "laurel"), factor=2**-0.5)
        yield Replace(name="sum")

    def corrected(
        self, hidden: int, eps: float, layer_input: Sequence[Operation]
    ) -> Iterator[Operation]:
        """Correct the streams, and add the layer's input of the token, if it has one, to all but
        the first."""
        fields = self._routed(hidden, eps, "correction_coefs", self.num_streams)
        reads = ("predictions", "updated")
        yield CorrectStreams(name="correct", reads=reads, writes="corrected", **fields)
        if layer_input:
            yield SelectStream(name="active", index=self.active)
            if self.scaled:
                source = Source("altup.correct_output_scale", (hidden,))
                yield Multiply(name="scale", weight=Parameter("altup.scale.weight", (source,)))
            *others, last = layer_input
            yield from (*others, replace(last, writes="token_input"))
            yield AddToOthers(name="add", reads=("corrected", "token_input"))
        yield Replace(name="streams")

    def _projections(self, hidden: int, kind: str) -> tuple[Parameter, ...]:
        """The matrices of all streams but the first."""
        return tuple(
            matrix(f"streams.{stream}", f"altup_{kind}projections.{stream}", hidden, hidden)
            for stream in range(self.num_streams - 1)
        )

    def _routed(self, hidden: int, eps: float, name: str, rows: int) -> dict[str, Any]:
        """The fields of a `RoutedStreams` with this number of coefficients."""
        streams = self.num_streams
        router = matrix("altup.router", "altup.modality_router", streams, hidden)
        return {
            "norm": vector("altup.router_norm", "altup.router_norm", hidden),
            "router": router._replace(exact=True),
            "coefs": matrix(f"altup.{name}", f"altup.{name}", rows, streams)._replace(exact=True),
            "eps": eps,
            "active": self.active,
        }
