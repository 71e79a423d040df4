"""Fixed buffers for a dataclass of tensors, one host mirror, one copy a step."""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stepgraph.graphs.buffers import CUDA_ALIGNMENT, StaticBuffers, TensorSpec
from torch.utils._python_dispatch import TorchDispatchMode

devices = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

X = TypeVar("X")


@dataclass
class Inputs(Generic[X]):
    """Token ids and rows of a step, and one sampling parameter."""

    token_ids: X
    rows: X
    temperature: X


SPECS = {
    "token_ids": TensorSpec((7,), torch.int64),
    "rows": TensorSpec((7,), torch.int32, fill=9),
    "temperature": TensorSpec((3, 5), torch.float32, fill=1.0),
}
dtypes = st.sampled_from(
    [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.bool]
)
shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
random_specs = st.lists(
    st.builds(TensorSpec, shapes, dtypes, st.integers(0, 1)), min_size=1, max_size=8
).map(lambda specs: {f"field_{i}": spec for i, spec in enumerate(specs)})


def random_values(spec, generator):
    if spec.dtype is torch.bool:
        return torch.randint(0, 2, spec.shape, generator=generator).bool()
    return torch.randint(-100, 100, spec.shape, generator=generator).to(spec.dtype)


@pytest.mark.parametrize("device", devices)
@given(specs=random_specs, seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_any_layout(device, specs, seed):
    """Aligned, disjoint, and what is written through the mirror is what the device reads."""
    layout = dataclasses.make_dataclass("Layout", list(specs), frozen=True)
    buffers = StaticBuffers(layout, specs, device)
    alignment = 64 if device == "cpu" else CUDA_ALIGNMENT
    ranges = sorted((address, specs[name].nbytes) for name, address in buffers.addresses().items())
    assert all(address % alignment == 0 for address, _ in ranges)
    for (address, nbytes), (following, _) in pairwise(ranges):
        assert address + nbytes <= following
    assert ranges[-1][0] + ranges[-1][1] - ranges[0][0] == buffers.nbytes
    for name, spec in specs.items():
        assert (getattr(buffers.device, name) == spec.fill).all()

    generator = torch.Generator().manual_seed(seed)
    wanted = {name: random_values(spec, generator) for name, spec in specs.items()}
    buffers.begin_write()
    for name, values in wanted.items():  # all of them before any is read: overlaps would show
        getattr(buffers.host, name).copy_(values)
    buffers.copy_to_device()
    for name, values in wanted.items():
        field = getattr(buffers.device, name)
        assert (field.device.type, field.dtype) == (device, specs[name].dtype)
        assert torch.equal(field.cpu(), values)


class Operations(TorchDispatchMode):
    """Names what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class BuffersAgainstACopy(RuleBasedStateMachine):
    """Any order of writes and copies: the device has what plain arrays held at the last copy.

    Of two allocations of the CPU, one stands in for the memory of a device.
    """

    def __init__(self):
        super().__init__()
        self.buffers = StaticBuffers(Inputs[torch.Tensor], SPECS, "cpu", mirrored=True)
        arrays = self.buffers.arrays(Inputs[np.ndarray])
        self.arrays = {name: getattr(arrays, name) for name in SPECS}
        self.written = {name: array.copy() for name, array in self.arrays.items()}
        self.copied = {name: array.copy() for name, array in self.written.items()}

    @rule(
        name=st.sampled_from(sorted(SPECS)),
        span=st.tuples(st.integers(0, 7), st.integers(0, 7)),
        value=st.integers(-1000, 1000),
    )
    def write(self, name, span, value):
        self.buffers.begin_write()
        self.arrays[name][span[0] : span[1]] = value
        self.written[name][span[0] : span[1]] = value

    @rule()
    def copy(self):
        with Operations() as operations:
            self.buffers.copy_to_device()
        assert operations.names == ["copy_"]
        self.copied = {name: array.copy() for name, array in self.written.items()}

    @invariant()
    def same(self):
        for name, values in self.copied.items():
            assert np.array_equal(getattr(self.buffers.device, name).numpy(), values)


TestBuffersAgainstACopy = BuffersAgainstACopy.TestCase
TestBuffersAgainstACopy.settings = settings(max_examples=30, deadline=None)


@pytest.mark.gpu
def test_writing_waits_for_the_copy_in_flight():
    buffers = StaticBuffers(Inputs[torch.Tensor], SPECS, "cuda")
    arrays = buffers.arrays(Inputs[np.ndarray])
    assert buffers.host.token_ids.is_pinned()
    seen = []
    for turn in range(20):
        buffers.begin_write()
        arrays.token_ids[:] = turn
        torch.cuda._sleep(2_000_000)  # about a millisecond, in which the copy has yet to start
        buffers.copy_to_device()
        seen.append(buffers.device.token_ids.clone())
    assert [row.tolist() for row in seen] == [[turn] * 7 for turn in range(20)]
