"""The sizes that linear kernels are launched with where nothing was tuned."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import itertools

import torch
from stepgraph.runtime.kernels.gpu.launch import record_launches
from stepgraph.runtime.kernels.gpu.linear import (
    FEW_ROWS,
    ROW_CLASSES,
    candidate_configs,
    default_config,
    row_class,
)
from stepgraph.runtime.kernels.gpu.tuning import best_config, is_tight

KERNELS = ("norm_linear", "gate_up", "residual_linear", "combine_output")
SHAPES = ((3072, 2048), (8192, 2048), (2048, 8192), (1024, 3072), (4096, 14336), (37, 21), (1, 1))


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weight_bytes", [1, 2, 4])
@pytest.mark.parametrize("tight", [False, True])
def test_candidates_are_launchable(kernel: str, weight_bytes: int, tight: bool) -> None:
    for rows, (n, k) in itertools.product(ROW_CLASSES, SHAPES):
        if kernel == "combine_output" and rows > FEW_ROWS:
            continue
        configs = candidate_configs(kernel, rows, n, k, weight_bytes, 132, tight=tight)
        assert configs[0] == default_config(kernel, rows, n, k, weight_bytes, 132, tight=tight)
        assert len(set(configs)) == len(configs)
        for config in configs:
            assert is_power_of_two(config.block_n)
            assert is_power_of_two(config.block_k)
            assert config.parts or rows <= FEW_ROWS
            if config.parts:
                assert is_power_of_two(config.parts)
                assert config.block_k // config.parts >= 16


def test_one_row_is_one_wave_of_programs() -> None:
    """Four programs of four warps fit on a multiprocessor together, whatever they are of."""
    for kernel, (n, k) in itertools.product(KERNELS[:3], SHAPES):
        config = default_config(kernel, 1, n, k, 2, 132)
        assert -(-n // config.block_n) <= 4 * 132


def test_a_program_has_16_kib_on_their_way() -> None:
    """In one tile or two, of weights that have so much: 64 KiB of four programs."""
    for kernel, (n, k) in itertools.product(KERNELS[:3], SHAPES[:5]):
        config = default_config(kernel, 1, n, k, 2, 132)
        features = config.block_n * (2 if kernel == "gate_up" else 1)
        whole = features * k * 2
        tiles = 1 if config.block_k >= k else 2
        assert min(whole, tiles * features * config.block_k * 2) >= min(whole, 16384)


@pytest.mark.parametrize("kernel", ["norm_linear", "gate_up", "residual_linear", "head"])
def test_few_registers_mean_fewer_weights_for_each_thread(kernel: str) -> None:
    """The tile is as high as ever: of 16 rows it is cut where it spilled, of 32 more share it."""
    halves = 2 if kernel == "gate_up" else 1
    for rows, (n, k) in itertools.product((16, 32), SHAPES[:5]):
        config = default_config(kernel, rows, n, k, 2, 132)
        tight = default_config(kernel, rows, n, k, 2, 132, tight=True)
        assert tight.block_n == config.block_n
        share = tight.block_k / tight.num_warps / (config.block_k / config.num_warps)
        fits = rows == 16 and (config.block_n * halves > 16 or config.block_k * 2 >= k)
        assert share == (1 if fits else 0.5)


def test_sizes_are_chosen_for_the_device_that_launches_are_recorded_for() -> None:
    assert not is_tight(pending=False) or torch.cuda.is_available()
    for capability, tight in ((80, True), (89, True), (90, False)):
        with record_launches(capability):
            assert is_tight(pending=False) == tight
            assert is_tight(pending=True)
    shape = ("norm_linear", 32, 3072, 2048, torch.bfloat16, torch.bfloat16, torch.device("meta"))
    with record_launches(80):
        older = best_config(*shape)
    with record_launches(90):
        assert best_config(*shape, pending=True) == older
        assert best_config(*shape) != older


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 2), (3, 4), (5, 16), (17, 32), (32, 32)])
def test_row_class(rows: int, size: int) -> None:
    assert row_class(rows) == size


def test_too_many_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match="at most 32 rows, got 33"):
        row_class(33)
