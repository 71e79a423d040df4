import subprocess
import sys

import pytest
import torch
from stepgraph.profiling.bandwidth import measure_read_bandwidth
from stepgraph.profiling.roofline import Roofline, step_flops


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
