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
    """Token ids, positions and rows of a step, and one sampling parameter."""

    token_ids: X
    positions: X
    rows: X
    temperature: X


NULL_ROW = 9
SPECS = {
    "token_ids": TensorSpec((7,), torch.int64),
    "positions": TensorSpec((7,), torch.int64),
    "rows": TensorSpec((7,), torch.int32, fill=NULL_ROW),
    "temperature": TensorSpec((3, 5), torch.float32, fill=1.0),
}


def allocate(device="cpu"):
    return StaticBuffers.allocate(Inputs[torch.Tensor], SPECS, device)


dtypes = st.sampled_from(
    [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.bool]
)
shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
random_specs = st.lists(st.builds(TensorSpec, shapes, dtypes), min_size=1, max_size=8).map(
    lambda specs: {f"field_{i}": spec for i, spec in enumerate(specs)}
)


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
    buffers = StaticBuffers.allocate(layout, specs, device)
    alignment = 64 if device == "cpu" else CUDA_ALIGNMENT
    ranges = sorted((address, specs[name].nbytes) for name, address in buffers.addresses().items())
    assert all(address % alignment == 0 for address, _ in ranges)
    for (address, nbytes), (following, _) in pairwise(ranges):
        assert address + nbytes <= following
    assert ranges[-1][0] + ranges[-1][1] - ranges[0][0] == buffers.nbytes

    generator = torch.Generator().manual_seed(seed)
    wanted = {name: random_values(spec, generator) for name, spec in specs.items()}
    buffers.begin_write()
    for name, values in wanted.items():  # all of them before any is read: overlaps would show
        getattr(buffers.host, name).copy_(values)
    buffers.copy_to_device()
    for name, values in wanted.items():
        field = getattr(buffers.device, name)
        assert field.device.type == device
        assert field.dtype == specs[name].dtype
        assert torch.equal(field.cpu(), values)
    buffers.check_integrity()


def test_memory_of_its_own_is_reached_by_one_copy():
    """What a device other than the CPU does, on two allocations of the CPU."""

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    names = []
    offsets = {"token_ids": 0, "positions": 64, "rows": 128, "temperature": 192}
    device_bytes, host_bytes = torch.randint(0, 256, (2, 256), dtype=torch.uint8)
    buffers = StaticBuffers(Inputs[torch.Tensor], SPECS, device_bytes, host_bytes, offsets)
    buffers.reset()
    buffers.copy_to_device()
    buffers.arrays(Inputs[np.ndarray]).rows[:] = range(7)
    assert (buffers.device.rows == NULL_ROW).all()
    with Operations():
        buffers.copy_to_device()
    assert names == ["copy_"]
    assert buffers.device.rows.tolist() == list(range(7))
    buffers.check_integrity()


def test_arrays_of_some_of_the_fields():
    @dataclass
    class Two:
        half: torch.Tensor
        whole: torch.Tensor

    @dataclass
    class Whole:
        whole: np.ndarray

    specs = {"half": TensorSpec((2,), torch.bfloat16), "whole": TensorSpec((), torch.int32)}
    buffers = StaticBuffers.allocate(Two, specs, "cpu")
    buffers.arrays(Whole).whole[...] = 5
    assert buffers.device.whole.item() == 5
    with pytest.raises(TypeError):
        buffers.arrays(Two)
    with pytest.raises(ValueError, match=r"Inputs has fields .* \['positions', "):
        buffers.arrays(Inputs[np.ndarray])


class BuffersAgainstACopy(RuleBasedStateMachine):
    """Any order of writes, copies and resets leaves what plain arrays would hold."""

    def __init__(self):
        super().__init__()
        self.buffers = allocate()
        self.arrays = self.buffers.arrays(Inputs[np.ndarray])
        self.model = {
            name: np.full(spec.shape, spec.fill, getattr(self.arrays, name).dtype)
            for name, spec in SPECS.items()
        }
        self.copies = 0

    @rule(
        name=st.sampled_from(sorted(SPECS)),
        span=st.tuples(st.integers(0, 7), st.integers(0, 7)),
        value=st.integers(-1000, 1000),
    )
    def write(self, name, span, value):
        self.buffers.begin_write()
        getattr(self.arrays, name)[span[0] : span[1]] = value
        self.model[name][span[0] : span[1]] = value

    @rule()
    def reset(self):
        self.buffers.reset()
        for name, spec in SPECS.items():
            self.model[name][:] = spec.fill

    @rule()
    def copy(self):
        self.buffers.copy_to_device()
        self.copies += 1

    @invariant()
    def same(self):
        for name, values in self.model.items():
            assert np.array_equal(getattr(self.buffers.device, name).numpy(), values)
        assert self.buffers.copies == self.copies
        self.buffers.check_integrity()


TestBuffersAgainstACopy = BuffersAgainstACopy.TestCase
TestBuffersAgainstACopy.settings = settings(max_examples=30, deadline=None)


@pytest.mark.gpu
def test_writing_waits_for_the_copy_in_flight():
    buffers = allocate("cuda")
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
