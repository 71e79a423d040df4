"""Packed weights in numbers and codes of every format, against their float64 numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.kernels import (
    Routing,
    packed_experts,
    packed_linear,
    reference_experts,
    select_kernels,
)
from stepgraph.runtime.kernels.ops.layer_plan import ModelPlan
from stepgraph.runtime.kernels.ops.linear import Projection, packed_embedding
from stepgraph.runtime.kernels.ops.packed_parts import int8_inputs, parts_bytes
from stepgraph.runtime.kernels.weights.grouped import (
    DOUBLED_E2M1,
    E4M3,
    INT8,
    GroupedFormat,
    GroupedWeight,
    Levels,
    ScaleFormat,
    Scales,
    integers,
    random_weight,
)
from torch import Tensor

from ..rigs.expert_cases import make_mixture
from ..rigs.packed_weights import packed as packed_weight
from ..rigs.stack_plans import PlanDecoder, PlanRig, plans
from ..rigs.stack_rig import CHUNKS, assert_agrees
from ..rigs.thread_rig import kernel_threads

pytestmark = pytest.mark.usefixtures("cpu_ops")

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FLOAT]
BYTES = (torch.int8, torch.uint8, torch.float8_e4m3fn)
FORMATS = {
    "q4_0": GroupedFormat(integers(4, 8), 32, ScaleFormat(HALF)),
    "q4_1": GroupedFormat(integers(4), 32, ScaleFormat(HALF), ScaleFormat(HALF)),
    "q5_1": GroupedFormat(integers(5), 32, ScaleFormat(HALF), ScaleFormat(HALF)),
    "q8_0": GroupedFormat(INT8, 32, ScaleFormat(HALF)),
    "q2_k": GroupedFormat(
        integers(2), 16, ScaleFormat(HALF, torch.uint8, 16), ScaleFormat(HALF, torch.uint8, 16)
    ),
    "q3_k": GroupedFormat(integers(3, 4), 16, ScaleFormat(HALF, torch.int8, 16)),
    "q4_k": GroupedFormat(
        integers(4), 32, ScaleFormat(HALF, torch.uint8, 8), ScaleFormat(HALF, torch.uint8, 8)
    ),
    "q6_k": GroupedFormat(integers(6, 32), 16, ScaleFormat(HALF, torch.int8, 16)),
    "nvfp4": GroupedFormat(DOUBLED_E2M1, 16, ScaleFormat(FLOAT, torch.float8_e4m3fn, 99)),
    "mxfp4": GroupedFormat(DOUBLED_E2M1, 32, ScaleFormat(FLOAT)),
    "awq": GroupedFormat(integers(4), 128, ScaleFormat(HALF), ScaleFormat(HALF, torch.uint8)),
    "fp8": GroupedFormat(E4M3, 128, ScaleFormat(FLOAT)),
    "fp8_rows": GroupedFormat(E4M3, 1 << 20, ScaleFormat(BF16)),
    "int8_rows": GroupedFormat(INT8, 1 << 20, ScaleFormat(FLOAT)),
    "5_bits_of_8": GroupedFormat(
        integers(5, 16), 8, ScaleFormat(BF16), ScaleFormat(FLOAT, torch.int8, 3)
    ),
    "6_bits_of_24": GroupedFormat(integers(6), 24, ScaleFormat(FLOAT), ScaleFormat(BF16)),
}
STORAGES = ("model", *FORMATS)
"""Forms of a packed weight: numbers of the model, and codes."""
# N, K: whole blocks and groups, less than one, odd K, a last group that is shorter
SHAPES = [(64, 512), (96, 1056), (7, 3), (33, 65), (1, 200), (100, 1025)]


def numbers(part: Tensor | GroupedWeight) -> Tensor:
    """The weight in float64; its float32 numbers are rounded once or twice."""
    return part.double() if isinstance(part, Tensor) else part.decode().double()


def assert_is_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """The result is within the rounding errors of sums of products, and of the result's dtype."""
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    size = x.double().abs().sum(1, keepdim=True) * weight.abs().max() + expected.abs()
    error = (out.double() - expected).abs()
    allowed = size * 1e-6 + (expected.abs() * 2**-8 if out.dtype == BF16 else 0)
    assert (error <= allowed).all(), (error / allowed).max()


class Layer(NamedTuple):
    """A packed linear layer, and its weight in float64."""

    packed: Tensor
    exact: Tensor

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_linear(x, self.packed, bias, len(self.exact))


INT8_INPUTS = " with int8 inputs"


def make_layer(storage: str, n: int, k: int, dtype: torch.dtype) -> Layer:
    name = storage.removesuffix(INT8_INPUTS)
    if name in FORMATS:
        weight = random_weight(FORMATS[name], n, k)
        packed = packed_weight([weight], dtype, int8_inputs=name != storage)
        return Layer(packed, numbers(weight))
    data = torch.randn(n, k).to(dtype)
    return Layer(packed_weight([data], dtype), data.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_product_matches_float64(storage: str, n: int, k: int, dtype: torch.dtype) -> None:
    layer, bias = make_layer(storage, n, k, dtype), torch.randn(n).to(dtype)
    few = storage in FORMATS and storage != "int8_rows"
    for t in (1, 2, 5, 13, 31) if few else (*range(1, 31), 97, 200):
        x = torch.randn(t, k).to(dtype)
        assert_is_product(layer(x), x, layer.exact)
        assert_is_product(layer(x, bias), x, layer.exact, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("mxfp4", "nvfp4")])
def test_inputs_of_each_group_are_rounded_to_int8(
    cpu_ops: None, name: str, dtype: torch.dtype
) -> None:
    """Of codes that are consecutive integers; others are multiplied as they are."""
    if not int8_inputs():
        pytest.skip("needs AVX512-VNNI")
    form = FORMATS[name]
    for n, k in SHAPES:
        layer = make_layer(name + INT8_INPUTS, n, k, dtype)
        group = min(form.group, -(-k // 8) * 8)
        for t in (1, 2, 5, 13, 100):
            # Numbers that int8 represents, times a scale for each group
            whole = torch.randint(-127, 128, (t, -(-k // group), group))
            whole[..., 0] = 127
            x = (whole * 2.0 ** torch.randint(-3, 3, whole.shape[:2])[..., None]).flatten(1)[:, :k]
            assert_is_product(layer(x.to(dtype)), x, layer.exact)
            x = torch.randn(t, k).to(dtype)
            error = (layer(x).double() - x.double() @ layer.exact.T).abs()
            half_step = x.double().abs().amax(1, keepdim=True) / 127 / 2
            size = x.double().abs() @ layer.exact.abs().T
            # Codes that stand for 0 are integers too, whose sums cancel up to rounding.
            cancelled = x.double().abs().sum(1, keepdim=True) * 2**-20
            bound = half_step * layer.exact.abs().sum(1) + size * 2**-8 + cancelled
            assert (error <= bound).all()
            if dtype == FLOAT and t == 100 and form.levels is not E4M3:
                assert (error > size * 1e-5).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_packed_codes_are_the_weight(name: str, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        weight = random_weight(FORMATS[name], n, k)
        packed = packed_weight([weight], dtype)
        tokens = torch.randint(n, (40,))
        rows = packed_embedding(tokens, packed, k, dtype)
        expected = weight.decode()[tokens]
        tolerance = 2**-7 if dtype == BF16 else 1e-6
        torch.testing.assert_close(rows.float(), expected, rtol=tolerance, atol=tolerance)
        if weight.minimums is None:
            assert torch.equal(rows, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_packed_numbers_are_the_weight(dtype: torch.dtype) -> None:
    for n, k in (*SHAPES, (1, 1), (45, 1), (257, 31)):
        weight = torch.randint(-127, 128, (n, k)).to(dtype)
        packed = packed_weight([weight], dtype)
        for tokens in (torch.arange(n), torch.randint(n, (700,))):
            assert torch.equal(packed_embedding(tokens, packed, k, dtype), weight[tokens])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "storage",
    ["model", "int8_rows", "q4_k", "q5_1", "q6_k", "q8_0", "fp8_rows", f"q4_k{INT8_INPUTS}"],
)
def test_a_row_does_not_see_its_batch(storage: str, dtype: torch.dtype) -> None:
    """Nor what lies between rows of a wider tensor."""
    for n, k in ((100, 1056), (33, 65)) if storage in ("model", "int8_rows") else ((100, 1056),):
        layer, bias = make_layer(storage, n, k, dtype), torch.randn(n).to(dtype)
        x = torch.randn(150, k).to(dtype)
        out = layer(x, bias)
        for columns in (k + 1, k + 2, k + 6):
            poisoned = torch.full((150, columns), torch.nan, dtype=dtype)
            poisoned[0, :k] = x[0]
            after = layer(poisoned[:, :k], bias)
            assert torch.equal(after[0], out[0])
            assert after[1:].isnan().all()
        assert torch.equal(layer(x.T.contiguous().T, bias), out)
        for count in (1, 2, 3):
            with kernel_threads(count):
                for t in (*range(1, 14), 31, 96, 97):
                    assert torch.equal(layer(x[150 - t :], bias), out[150 - t :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_any_formats_are_one_weight(dtype: torch.dtype) -> None:
    k = 328
    parts: Sequence[Tensor | GroupedWeight] = [
        random_weight(FORMATS["q4_k"], 64, k),
        torch.randn(32, k).to(dtype),
        *(random_weight(FORMATS[name], 32, k) for name in ("q6_k", "awq", "q8_0", "q5_1")),
        random_weight(FORMATS["q4_1"], 40, k),
    ]
    exact = torch.cat([numbers(part) for part in parts])
    n, packed = len(exact), packed_weight(parts, dtype)
    for t in (1, 3, 12, 100):
        x = torch.randn(t, k).to(dtype)
        assert_is_product(packed_linear(x, packed, None, n), x, exact)
    rows = packed_embedding(torch.arange(n), packed, k, dtype)
    torch.testing.assert_close(rows.double(), exact, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("q4_k", 4.75), ("q6_k", 6.7), ("q4_1", 5.1), ("q8_0", 8.6), ("nvfp4", 4.6), ("awq", 4.4)],
)
def test_packed_codes_stay_compact(name: str, bits: float) -> None:
    n, k = 1024, 2048
    assert 8 * (parts_bytes([random_weight(FORMATS[name], n, k)], BF16) or n * k) <= bits * n * k


def test_every_code_counts_in_every_place() -> None:
    """One input at a time and every code at every column."""
    signed = (integers(bits, 1 << bits - 1) for bits in (4, 5, 6, 8))
    for levels in (*signed, integers(8), INT8):
        bits = levels.bits
        codes = (torch.arange(256)[:, None] * 5 + torch.arange(40)) % (1 << bits)
        weight = GroupedWeight(levels, codes.to(torch.uint8), 40, Scales(torch.ones(256, 1)))
        decoded = weight.decode()
        for dtype in DTYPES:
            eye = torch.eye(40, dtype=dtype)
            out = packed_linear(eye, packed_weight([weight], dtype), None, 256)
            assert torch.equal(out, decoded.T.to(dtype))


Q4_0 = FORMATS["q4_0"]


@pytest.mark.parametrize(
    "shapes",
    [
        [(33, 64, None), (32, 64, Q4_0)],
        [(32, 64, None), (32, 72, None)],
        [(32, 64, Q4_0._replace(group=1))],
        [(32, 64, Q4_0._replace(group=20))],
        [(32, 64, Q4_0._replace(scales=ScaleFormat(torch.float64)))],
        [(32, 64, Q4_0._replace(levels=Levels("third", (0.0, 1 / 3))))],
    ],
)
def test_parts_that_operators_cannot_read_are_refused(
    shapes: list[tuple[int, int, GroupedFormat | None]],
) -> None:
    parts = [torch.ones(n, k) if f is None else random_weight(f, n, k) for n, k, f in shapes]
    assert parts_bytes(parts, BF16) is None
    assert parts_bytes([random_weight(Q4_0._replace(group=64), 20, 64)], BF16) is not None
    assert parts_bytes([torch.ones(20, 64)], HALF) is None


def test_wrong_packed_parts_are_refused() -> None:
    weight = random_weight(FORMATS["q4_k"], 64, 256)
    packed, x = packed_weight([weight], BF16), torch.zeros(1, 256, dtype=BF16)
    wrong = [
        (packed[64:], 64, x),
        (packed[:-64], 64, x),
        (packed, 65, x),
        (packed, 64, x[:, :255]),
        (packed, 64, x.float()),
        (packed.view(2, -1), 64, x),
    ]
    for weight, n, inputs in wrong:
        with pytest.raises(RuntimeError):
            packed_linear(inputs, weight, None, n)
    for dtype, k in ((FLOAT, 256), (BF16, 255)):
        with pytest.raises(RuntimeError):
            packed_embedding(torch.tensor([0]), packed, k, dtype)
    with pytest.raises(IndexError):
        packed_embedding(torch.tensor([64]), packed, 256, BF16)


ZEROS = torch.zeros(2, 8, dtype=torch.bfloat16)
PACKED = packed_weight([torch.zeros(40, 8)], torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "out_features", "packed"),
    [
        *((x, 40, PACKED) for x in (ZEROS.float(), ZEROS.half(), ZEROS[0], ZEROS[:, :5])),
        *((ZEROS, out_features, PACKED) for out_features in (32, 65)),
        (ZEROS, 40, torch.zeros(2, 4, 32, 2, dtype=torch.bfloat16)),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    x: Tensor, out_features: int, packed: Tensor
) -> None:
    with pytest.raises(RuntimeError):
        packed_linear(x, packed, None, out_features)


def pack_matrices(
    form: GroupedFormat, matrices: int, n: int, k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Random matrices of one format: their numbers and their packed codes, one after another."""
    weights = [random_weight(form, n, k) for _ in range(matrices)]
    packed = [packed_weight([weight], dtype) for weight in weights]
    return torch.cat([weight.decode() for weight in weights]), torch.cat(packed)


@pytest.mark.parametrize("scaled_inputs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "features"), [(328, 264), (67, 33)])
@pytest.mark.parametrize(("up", "down"), [("q4_k", "q6_k"), ("nvfp4", "q5_1")])
def test_experts_in_codes_equal_decoded_ones(
    up: str, down: str, hidden: int, features: int, dtype: torch.dtype, scaled_inputs: bool
) -> None:
    mixture = make_mixture(
        Routing(2),
        routed=5,
        shared=1,
        hidden=hidden,
        features=features,
        biases=True,
        dtype=dtype,
        scaled_inputs=scaled_inputs,
    )
    total = mixture.op.total
    ups, packed_ups = pack_matrices(FORMATS[up], 2 * total, features, hidden, dtype)
    downs, packed_downs = pack_matrices(FORMATS[down], total, hidden, features, dtype)
    decoded, coded = (
        mixture.tensors._replace(
            gate_up=mixture.tensors.gate_up._replace(weight=gate_up),
            down=mixture.tensors.down._replace(weight=down),
        )
        for gate_up, down in ((ups.to(dtype), downs.to(dtype)), (packed_ups, packed_downs))
    )
    for tokens in (1, 3, 40, 130):
        x = torch.randn(tokens, hidden).to(dtype)
        expected = reference_experts(mixture.op, x, decoded)
        found = packed_experts(mixture.op, x, coded)
        tolerance = (2e-5 if dtype == FLOAT else 0.03) * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        with kernel_threads(3):
            assert torch.equal(packed_experts(mixture.op, x, coded), found)
            assert torch.equal(packed_experts(mixture.op, x[-1:], coded), found[-1:])


@settings(max_examples=15, deadline=None)
@given(plan=plans(), formats=st.lists(st.sampled_from(sorted(FORMATS)), min_size=1, max_size=9))
def test_stack_over_codes_agrees_with_decoded_weights(plan: ModelPlan, formats: list[str]) -> None:
    rig, forms = PlanRig(plan, FLOAT), itertools.cycle(formats)
    kernels, coded = select_kernels("cpu", "compile", FLOAT), {}
    for path, module in rig.decoder.named_modules():
        if isinstance(module, Projection):
            form = FORMATS[next(forms)]
            n, k = module.out_features // module.matrices, module.in_features
            matrices = [random_weight(form, n, k) for _ in range(module.matrices)]
            coded[f"{path}.weight"] = matrices
    rig.decoder.store((name, torch.cat([m.decode() for m in ms])) for name, ms in coded.items())
    sizes = {n: len(ms) * (parts_bytes(ms[:1], FLOAT) or 0) for n, ms in coded.items()}
    kernels = replace(kernels, codes=sizes)
    native = PlanDecoder(plan, kernels, FLOAT, rig.groups, rig.storage)
    native.store((rig.values | coded).items())
    rig.decoder.stack = native.stack
    arena = rig.arena
    for chunks in CHUNKS.values():
        inputs = rig.inputs(chunks)
        rig.arena = arena.clone()
        rig.poison(inputs)
        assert_agrees(rig, inputs, rig.hidden(inputs))
