"""Two products with a barrier between them, against plain torch and the separate kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels import WeightStorage
from stepgraph.runtime.kernels.triton import kernel_calls
from stepgraph.runtime.kernels.triton.fused_pair import (
    PairShape,
    PairTiles,
    fused_pair,
    new_barrier,
    reference_fused_pair,
)
from stepgraph.runtime.kernels.triton.gate_up import gate_up
from stepgraph.runtime.kernels.triton.linear import SEPARATE, LinearConfig
from stepgraph.runtime.kernels.triton.residual_linear import residual_linear
from stepgraph.runtime.tools.pair_problems import PairProblem

from ..rigs.gpu_linear_rig import (
    DEVICE,
    DTYPES,
    STORAGES,
    error,
    poisoned,
    random_linear,
    random_norm,
    rows,
    tolerance,
)

K, D, N = 45, 21, 37
SMALL = PairTiles(4, 32, 8, 16)
"""Several programs, several tiles of a program, several steps of a tile, and the last not whole."""


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "MULTIPROCESSORS", 3)


def check(
    count: int,
    dtype: torch.dtype,
    tiles: PairTiles | None,
    *,
    gated: bool,
    gelu: bool = False,
    storage: str = "model",
    offset: bool = False,
    sizes: tuple[int, int, int] = (K, D, N),
    launches: int = 1,
) -> None:
    """So many launches over one counter, each into poisoned outputs."""
    k, hidden, n = sizes
    a_TK, residual_TD = rows(count, k, dtype), rows(count, hidden, dtype)
    norm = random_norm(hidden, dtype, offset=offset)
    first = random_linear(hidden, k, dtype, storage, bias=True)
    second = random_linear(n * (2 if gated else 1), hidden, dtype, storage, bias=True)
    kind = {"gated": gated, "gelu": gelu}
    x, out = reference_fused_pair(a_TK, first, residual_TD, norm, second, **kind)
    barrier = new_barrier(a_TK.device)
    for number in range(launches):
        x_TD, out_TN = poisoned(*x.shape, dtype=dtype), poisoned(*out.shape, dtype=dtype)
        outputs = (residual_TD, x_TD, norm, second, out_TN, barrier)
        fused_pair(a_TK, first, *outputs, **kind, tiles=tiles)
        assert error(x_TD, x) < tolerance(dtype)
        assert error(out_TN, out) < tolerance(dtype)
        # All programs have arrived: the highest bit is turned and the lower ones are zero.
        assert barrier.item() == (0 if number % 2 else -(2**31))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_odd_shapes(count: int, gated: bool, dtype: torch.dtype) -> None:
    check(count, dtype, SMALL, gated=gated)


@pytest.mark.parametrize("count", [2, 4])
def test_gelu_and_a_norm_of_one_plus_its_weight(count: int) -> None:
    check(count, torch.bfloat16, SMALL, gated=True, gelu=True, offset=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("gated", [False, True])
def test_weights_of_8_bits(gated: bool, storage: str) -> None:
    tiles = PairTiles(16, 128, 8, 256)
    check(1, torch.bfloat16, tiles, gated=gated, storage=storage, sizes=(160, 144, 19))


def test_the_counter_serves_launch_after_launch() -> None:
    check(1, torch.bfloat16, PairTiles(8, 64, 16, 32), gated=True, launches=3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [(64, 16), (16, 16), (64, 8)])
def test_tiles_of_one_step_and_of_many(steps: tuple[int, int]) -> None:
    """Runs of an odd and of an even number of steps, with and without a part of a step."""
    tiles = PairTiles(8, steps[0], 4, steps[1])
    check(1, torch.float32, tiles, gated=False, sizes=(64, 40, 30))


@pytest.mark.parametrize("gated", [False, True])
def test_the_default_sizes(gated: bool) -> None:
    check(1, torch.bfloat16, None, gated=gated, sizes=(K, D, N))


def test_more_programs_than_tiles() -> None:
    """Programs without a tile of one product arrive, and have tiles of the other."""
    check(1, torch.float32, PairTiles(16, 64, 2, 32), gated=False, sizes=(K, 16, N))


def test_results_are_those_of_the_separate_kernels() -> None:
    """Bit by bit: sums of a tile are in one order."""
    dtype = torch.bfloat16
    a_TK, residual_TD, norm = rows(2, 64, dtype), rows(2, 32, dtype), random_norm(32, dtype)
    first, second = random_linear(32, 64, dtype), random_linear(48, 32, dtype)
    x_TD, inner_TF = poisoned(2, 32, dtype=dtype), poisoned(2, 24, dtype=dtype)
    barrier = new_barrier(a_TK.device)
    tiles = PairTiles(8, 64, 8, 32)
    fused_pair(
        a_TK, first, residual_TD, x_TD, norm, second, inner_TF, barrier, gated=True, tiles=tiles
    )  # fmt: skip
    separate_TD, separate_TF = torch.empty_like(x_TD), torch.empty_like(inner_TF)
    residual_linear(a_TK, first, residual_TD, separate_TD, LinearConfig(8, 64))
    gate_up(separate_TD, norm, second, separate_TF, gelu=False, config=LinearConfig(8, 32))
    assert torch.equal(x_TD, separate_TD)
    assert torch.equal(inner_TF, separate_TF)


def test_wrong_calls_are_refused() -> None:
    dtype = torch.float32
    first, second = random_linear(8, 16, dtype), random_linear(12, 8, dtype)
    norm, barrier = random_norm(8, dtype), new_barrier(torch.device(DEVICE))

    def call(count: int, k: int, n: int) -> None:
        x_TD = rows(count, 8, dtype)
        out_TN = rows(count, n, dtype)
        fused_pair(
            rows(count, k, dtype), first, x_TD.clone(), x_TD, norm, second, out_TN, barrier,
            gated=False,
        )  # fmt: skip

    with pytest.raises(ValueError, match="at most 4 rows, got 5"):
        call(5, 16, 12)
    with pytest.raises(ValueError, match=r"to \(1, 8\) and \(1, 11\)"):
        call(1, 16, 11)
    with pytest.raises(ValueError, match=r"of \(1, 15\)"):
        call(1, 15, 12)
    wrong = first._replace(weight=first.weight.double())
    with pytest.raises(TypeError, match=r"torch\.float64"):
        fused_pair(
            rows(1, 16, dtype), wrong, rows(1, 8, dtype), rows(1, 8, dtype), norm, second,
            rows(1, 12, dtype), barrier, gated=False,
        )  # fmt: skip


@pytest.mark.parametrize(("gated", "weights"), [(True, "model"), (False, "int8")])
def test_what_is_timed_is_right(gated: bool, weights: WeightStorage) -> None:
    problem = PairProblem(PairShape(2, K, D, N, gated, 4), torch.float32, weights)
    operands = problem.operands(torch.device(DEVICE), copies=2)
    for config in (SEPARATE, LinearConfig(16, 64, 4, "pair")):
        operands.poison()
        assert not operands.error() < 1
        operands.run(2, config)  # of two copies the first one
        assert operands.error() < 1e-4
