"""What carries out products where nothing was tuned, and what is timed."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import itertools
from dataclasses import replace

import torch
from stepgraph.runtime.kernels.triton.kernel_calls import record_kernel_calls
from stepgraph.runtime.kernels.triton.linear import (
    ROW_CLASSES,
    GpuLinear,
    GpuNorm,
    LinearConfig,
    bounded_prefetch,
    candidate_configs,
    default_config,
)
from stepgraph.runtime.kernels.triton.linear_kernels import gate_up
from stepgraph.runtime.kernels.triton.tuning import best_config, is_tight

KERNELS = ("norm_linear", "gate_up", "residual_linear")
SHAPES = ((3072, 2048), (8192, 2048), (2048, 8192), (1024, 3072), (4096, 14336), (37, 21), (1, 1))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weight_bytes", [1, 2, 4])
@pytest.mark.parametrize("tight", [False, True])
def test_candidates_are_launchable(kernel: str, weight_bytes: int, tight: bool) -> None:
    for rows, (n, k) in itertools.product(ROW_CLASSES, SHAPES):
        configs = candidate_configs(kernel, rows, n, k, weight_bytes, 132, tight=tight)
        assert configs[0] == default_config(kernel, rows, n, k, weight_bytes, 132, tight=tight)
        assert len(set(configs)) == len(configs)
        for config in configs:
            for size in (config.block_n, config.block_k):
                assert size >= 1
                assert not size & (size - 1)


def prefetched(config: LinearConfig, n: int, k: int) -> int:
    """The rows of gate that its kernel is compiled to request."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    linear = GpuLinear(empty(2 * n, k))
    with record_kernel_calls() as calls:
        gate_up(empty(1, k), linear, empty(1, n), norm=GpuNorm(empty(k), 1e-5), config=config)
    amount: int = calls[0].constants["PREFETCH"]
    return amount


def test_prefetch_is_rounded_to_what_kernels_request() -> None:
    config, sizes = LinearConfig(16, 256), ("gate_up", 8192, 2048, 2)
    assert prefetched(config, 8192, 2048) == 0
    assert prefetched(bounded_prefetch(config, *sizes, 24 << 20), 8192, 2048) == 6
    assert prefetched(bounded_prefetch(config, *sizes, 64 << 20), 8192, 2048) == 16
    assert prefetched(replace(config, prefetch=1 << 30), 8192, 2048) == 16
    assert prefetched(replace(config, prefetch=1 << 30), 8192, 2047) == 0, "rows are not aligned"


def test_sizes_are_chosen_for_the_device_that_launches_are_recorded_for() -> None:
    assert not is_tight(pending=False) or torch.cuda.is_available()
    for capability, tight in ((80, True), (89, True), (90, False)):
        with record_kernel_calls(capability):
            assert is_tight(pending=False) == tight
            assert is_tight(pending=True)
    meta = torch.device("meta")
    shape = ("gate_up", 4, 8192, 2048, torch.bfloat16, torch.bfloat16, meta)
    with record_kernel_calls(80):
        older = best_config(*shape)
    with record_kernel_calls(90):
        assert best_config(*shape, pending=True) == older
        assert best_config(*shape) != older
