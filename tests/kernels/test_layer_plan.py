"""Plans of layers: which names of values operations may read and write."""

import pytest
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.kernels.ops.layer_plan import LayerPlan
from stepgraph.runtime.kernels.ops.linear import Linear
from stepgraph.runtime.kernels.ops.operation import (
    LAYER_INPUT,
    AllReduce,
    Operation,
    Rank,
    Residual,
    ShardedLayer,
)
from stepgraph.runtime.kernels.ops.parameter import Parameter, Source


def op(name: str, *reads: str, writes: str = "") -> Operation:
    return Residual(name=name, reads=reads, writes=writes)


def test_values_are_read_after_they_are_written() -> None:
    plan = (op("a", LAYER_INPUT, writes="x"), op("b", writes="y"), op("c", "y", "x"))
    assert LayerPlan(plan).operations == plan


@pytest.mark.parametrize(
    ("operations", "named"),
    [
        ((op("a"), op("b", "x")), ("b", "x")),
        ((op("a", "x"), op("b", "y", writes="x"), op("c", writes="y")), ("a", "x", "b")),
        ((op("a", "x", writes="x"),), ("a", "x")),
        ((op("a", writes="x"), op("b", writes="x")), ("a", "b", "x")),
        ((op("a", writes=LAYER_INPUT),), ("a", LAYER_INPUT)),
    ],
)
def test_a_layer_whose_values_do_not_fit(
    operations: tuple[Operation, ...], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        LayerPlan(operations)
    assert all(repr(name) in str(caught.value) for name in named)


def test_ranks_write_sums() -> None:
    """A value that is read again is what all ranks have added, not the part of one."""
    weight = Parameter("w", (Source("w", (6, 8)),))
    linear = Linear(name="output", weight=weight, writes="out")
    product, total = linear.shard(ShardedLayer(Rank(0, 2), 2, 2, is_cut=True), None)
    assert isinstance(total, AllReduce)
    assert (product.writes, total.writes) == ("", "out")
