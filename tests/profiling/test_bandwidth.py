import subprocess
import sys

import pytest
import torch
from stepgraph.profiling.bandwidth import measure_read_bandwidth


def test_timeline_needs_neither_torch_nor_numpy() -> None:
    heavy = (
        "import sys; from stepgraph.profiling import stats, timeline; "
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
