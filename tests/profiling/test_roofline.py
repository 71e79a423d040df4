import math
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from stepgraph.profiling.bandwidth import measure_read_bandwidth
from stepgraph.profiling.roofline import Roofline, floor_seconds, step_flops


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama family: grouped-query attention, gated MLP, RMS norms."""

    vocab: int
    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False

    @property
    def weights_per_step(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (q + 2 * kv) + q * self.hidden
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * self.hidden * self.inter + norms
        return self.layers * layer + self.hidden + self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


QWEN3_0_6B = Shape(151936, 1024, 3072, 28, 16, 8, 128, qk_norm=True)
LLAMA_3_2_1B = Shape(128256, 2048, 8192, 16, 32, 8, 64)
LLAMA_3_1_8B = Shape(128256, 4096, 14336, 32, 32, 8, 128)

# Whole microseconds a bf16 step at 4.3 TB/s: rows -> floor at a context of 1024 and of 8192.
PUBLISHED = [
    (QWEN3_0_6B, {1: (305, 496), 8: (496, 2025), 32: (1151, 7269), 128: (3773, 28244)}),
    (LLAMA_3_2_1B, {1: (583, 637), 8: (637, 1074), 32: (825, 2573), 128: (1574, 8566)}),
    (LLAMA_3_1_8B, {1: (3522, 3740), 8: (3740, 5488), 32: (4490, 11481), 128: (7486, None)}),
]


@pytest.mark.parametrize(("shape", "floors"), PUBLISHED, ids=["0.6B", "1B", "8B"])
def test_floors_of_known_models(shape: Shape, floors: dict[int, tuple[int, int | None]]) -> None:
    for rows, pair in floors.items():
        for context, microseconds in zip((1024, 8192), pair, strict=True):
            if microseconds is not None:
                moved = 2 * shape.weights_per_step + rows * context * shape.kv_bytes_per_token
                assert floor_seconds(moved, 4.3e12) * 1e6 == pytest.approx(microseconds, abs=1)


def test_flops_against_matrix_multiplications_counted_one_by_one() -> None:
    rows, context, layers, heads, head_dim, hidden, vocab = 3, 7, 2, 4, 5, 11, 13
    products = []  # (m, k, n) of each product of a step
    for _ in range(layers):
        products += [(rows, hidden, heads * head_dim), (rows, heads * head_dim, hidden)]
        products += [(1, head_dim, context), (1, context, head_dim)] * (heads * rows)
    products.append((rows, hidden, vocab))
    weights = layers * 2 * hidden * heads * head_dim + hidden * vocab
    expected = sum(2 * m * k * n for m, k, n in products)
    assert step_flops(weights, rows, layers * context, heads, head_dim, head_dim) == expected


def test_roofline_reports_a_measured_step() -> None:
    roofline = Roofline(bytes_per_step=2 * 10**9, flops_per_step=10**9, bandwidth_bytes_per_s=4e12)
    assert roofline.floor_seconds == 5e-4
    assert roofline.fraction(6.25e-4) == pytest.approx(0.8)
    assert roofline.to_json(1e-3) == {
        "bytes_per_step": 2 * 10**9,
        "bandwidth_gb_s": 4000.0,
        "floor_ms": 0.5,
        "fraction": 0.5,
    }
    assert roofline.fraction(2.5e-4) == 2.0, "above 1 where a cache holds the model"


@pytest.mark.parametrize(("read", "bandwidth"), [(1, 0.0), (1, math.nan), (-1, 1.0)])
def test_floor_of_numbers_that_cannot_be(read: int, bandwidth: float) -> None:
    with pytest.raises(ValueError, match="reading"):
        floor_seconds(read, bandwidth)


def test_roofline_needs_neither_torch_nor_numpy() -> None:
    heavy = (
        "import sys; from stepgraph.profiling import roofline, stats, timeline; "
        "sys.exit(' '.join({'torch', 'numpy', 'nvtx'} & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_measured_bandwidth_of_this_cpu_is_plausible() -> None:
    measured = measure_read_bandwidth("cpu", repeats=2, buffer_bytes=64 * 2**20)
    # One channel of the oldest memory torch runs on, and far more than any socket has.
    assert 0.5e9 < measured < 20e12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_measured_bandwidth_of_this_gpu_is_plausible() -> None:
    before = torch.cuda.memory_allocated()
    assert 50e9 < measure_read_bandwidth("cuda") < 50e12
    assert torch.cuda.memory_allocated() == before
