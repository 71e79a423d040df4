"""The MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from ...kernels.ops.activation import Activate
from ...kernels.ops.operation import Operation
from .tensors import linear


def mlp(
    hidden: int,
    names: Sequence[str],
    function: Activate,
    biased: Container[str] | bool = (),
    *,
    ours: str = "",
    factors: tuple[float, float] = (1.0, 1.0),
) -> Iterator[Operation]:
    """A gated MLP (Shazeer 2020, "GLU Variants Improve Transformer"), or one without gate.

    The last of `names` is the output; `factors` are of the gate and of the output.
    """
    (*up, down), inner, (of_gate, of_output) = names, function.features, factors
    gate_up = dict.fromkeys(up, function.parts * inner // len(up))
    split = (inner, inner) if function.gated else ()
    scales = ((inner, of_gate), (inner, 1.0)) if function.gated else ()
    yield linear(f"{ours}gate_up", gate_up, hidden, biased, split=split, factors=scales)
    yield function
    yield linear(f"{ours}down", {down: hidden}, inner, biased, factors=((hidden, of_output),))
