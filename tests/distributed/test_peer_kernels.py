"""Kernels that exchange data between GPUs, interpreted in a process for each rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.kernels.ops.batch import NON_FINITE, Feedback
from stepgraph.runtime.kernels.triton.all_reduce import (
    Algorithm,
    all_reduce,
    fits_rows,
    reference_sum_rows,
    sum_rows,
)
from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.kernels.triton.linear import GpuNorm
from stepgraph.runtime.kernels.triton.peer_exchange import (
    ABORT,
    FAILURE,
    GAVE_UP_ON_ABORT,
    LIMIT,
    PROGRAMS,
    PeerRegions,
)
from stepgraph.runtime.kernels.triton.peer_gather import gather_columns, largest, pick_of_ranks

from ..rigs.gpu_references import reference_pick_greedy
from ..rigs.peer_rig import SLOT_BYTES, PeerRanks, run_peers

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="these ranks are processes on a CPU")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Tensors = list[torch.Tensor]


def part(rank: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """What a rank adds, known to all ranks."""
    generator = torch.Generator().manual_seed(1000 * rank + shape[-1])
    return torch.randn(*shape, generator=generator).to(dtype)


def total(ranks: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The sum in float32 in the order of ranks, rounded once."""
    parts = [part(rank, *shape, dtype=dtype).float() for rank in range(ranks)]
    return sum(parts[1:], start=parts[0]).to(dtype)


def bits(tensors: Tensors) -> Tensors:
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


def on_ranks(ranks: int, body: Any, **sizes: int) -> list[Tensors]:
    """Return the tensors of all ranks, sent as bytes and shapes."""

    def run(regions: PeerRegions) -> list[Any]:
        return [(t.dtype, t.shape, bytes(t.reshape(-1).view(torch.uint8))) for t in body(regions)]

    return [
        [torch.frombuffer(bytearray(data), dtype=dtype).view(shape) for dtype, shape, data in found]
        for found in run_peers(ranks, run, **sizes)
    ]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_all_reduce(algorithm: Algorithm, ranks: int) -> None:
    """Sizes and dtypes, several times over the same slots."""
    check_sums(algorithm, ranks, [((3, 21), dtype) for dtype in DTYPES])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_all_reduce_of_long_tensors(algorithm: Algorithm) -> None:
    """More than the slots hold at once, and others."""
    bf16 = torch.bfloat16
    long = ((PROGRAMS * SLOT_BYTES // 4 + 5,), torch.float32)
    check_sums(algorithm, 2, [((1,), bf16), ((1, 4096), bf16), ((5, 1031), bf16), long])


def check_sums(algorithm: Algorithm, ranks: int, cases: list[Any]) -> None:

    def body(regions: PeerRegions) -> Tensors:
        parts = [part(regions.rank, *size, dtype=dtype) for size, dtype in cases]
        found = [all_reduce(regions, x, algorithm) for x in parts for _ in range(2)]
        assert regions.control[FAILURE] == 0
        return found

    slot = max(SLOT_BYTES, 4096 * ranks)
    for found in on_ranks(ranks, body, slot_bytes=slot):
        for index, (size, dtype) in enumerate(cases):
            for result in found[2 * index : 2 * index + 2]:
                assert torch.equal(result, total(ranks, *size, dtype=dtype)), (size, dtype)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sum_rows(ranks: int) -> None:
    rows, dtype, eps = 2, torch.bfloat16, 1e-5
    cases = [
        (features, residual, post, norm, scale)
        for features in (21, 300)
        for residual, post, norm, scale in [
            (True, False, True, 1.0), (True, True, True, 1.0), (True, False, False, 0.22),
            (False, False, True, 1.0), (True, True, False, 1.0),
        ]
    ]  # fmt: skip

    def arguments(case: Any) -> tuple[Any, ...]:
        features, residual, post, norm, _ = case
        weights = [part(90 + i, features, dtype=dtype) for i in range(2)]
        sums = [torch.full((rows, features), torch.nan, dtype=dtype) for _ in range(2)]
        return (
            part(99, rows, features, dtype=dtype) if residual else None,
            GpuNorm(weights[0], eps, offset=True) if post else None,
            GpuNorm(weights[1], eps) if norm else None,
            sums[0],
            sums[1] if norm else None,
        )

    def body(regions: PeerRegions) -> Tensors:
        results: Tensors = []
        for case in cases:
            given = arguments(case)
            x_TD = part(regions.rank, rows, case[0], dtype=dtype)
            assert fits_rows(regions, x_TD)
            sum_rows(regions, x_TD, *given, scale=case[-1])
            results += [tensor for tensor in given[3:] if tensor is not None]
        return results

    found = on_ranks(ranks, body)
    assert all(all(map(torch.equal, bits(found[0]), bits(other))) for other in found[1:])
    expected: Tensors = []
    for case in cases:
        given = arguments(case)
        reference_sum_rows(total(ranks, rows, case[0], dtype=dtype), *given, scale=case[-1])
        expected += [tensor for tensor in given[3:] if tensor is not None]
    for result, right in zip(found[0], expected, strict=True):
        torch.testing.assert_close(result, right, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gather(ranks: int) -> None:
    sizes = [301 - (rank % 2) for rank in range(ranks)]
    cases = [(1, torch.bfloat16), (5, torch.float32)]

    def body(regions: PeerRegions) -> Tensors:
        own = sizes[regions.rank]
        return [
            gather_columns(regions, part(regions.rank, rows, own, dtype=dtype), sizes)
            for rows, dtype in cases
        ]

    for found in on_ranks(ranks, body):
        for result, (rows, dtype) in zip(found, cases, strict=True):
            columns = [part(r, rows, size, dtype=dtype) for r, size in enumerate(sizes)]
            assert torch.equal(result, torch.cat(columns, dim=1))


@pytest.mark.slow
def test_gather_of_more_rows_than_fit_at_once() -> None:
    sizes, rows = [50_000, 49_999], 5

    def body(regions: PeerRegions) -> Tensors:
        x_BF = part(regions.rank, rows, sizes[regions.rank])
        with pytest.raises(ValueError, match="do not fit"):
            gather_columns(regions, x_BF, [1 << 20, 1])
        return [gather_columns(regions, x_BF, sizes)]

    expected = torch.cat([part(r, rows, size) for r, size in enumerate(sizes)], dim=1)
    for (found,) in on_ranks(2, body, slot_bytes=4096):
        assert torch.equal(found, expected)


def extremes(rank: int, ranks: int) -> torch.Tensor:
    """Values with ties, NaN on one or several ranks, and infinities; known to all ranks."""
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor(
        [[1, 2, 3, 4], [4, 3, 2, 1], [2, 2, 2, 2], [nan, 5, 5, 5], [5, nan, nan, 5],
         [-inf, -inf, -inf, -inf], [inf, nan, 1, inf], [-inf, -3, -inf, -3], [0.0, -0.0, 0, 0]]
    )  # fmt: skip
    return torch.cat([rows[:, rank], part(rank, 300, dtype=torch.float32)[: 300 - ranks]])


@pytest.mark.parametrize("ranks", [2, 4])
def test_largest(ranks: int) -> None:
    def body(regions: PeerRegions) -> Tensors:
        values_B = extremes(regions.rank, ranks)
        ids_B = torch.arange(len(values_B)) + (regions.rank << 40)
        return [*largest(regions, values_B, ids_B), *largest(regions, values_B[:1], ids_B[:1])]

    stacked = torch.stack([extremes(rank, ranks) for rank in range(ranks)])
    best_B = stacked.argmax(0)  # of equal ones the first, NaN as the largest
    for values_B, ids_B, first_value, first_id in on_ranks(ranks, body):
        torch.testing.assert_close(
            values_B, stacked.gather(0, best_B[None])[0], rtol=0, atol=0, equal_nan=True
        )
        assert torch.equal(ids_B, torch.arange(len(best_B)) + (best_B << 40))
        assert first_value[0] == ranks
        assert first_id[0] == (ranks - 1) << 40


def test_greedy_tokens_of_ranks() -> None:
    """As one device picks from the chunks of all ranks; the state gets the tokens."""
    ranks, rows, chunks, held = 2, 6, 5, 1000
    inf = torch.inf

    def chunk_maxima(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        maxima_TC = part(rank, rows, chunks, dtype=torch.float32)
        maxima_TC[0] = inf if rank == 1 else 0.0  # NaN on one rank
        maxima_TC[1] = -inf
        maxima_TC[2] = 7.0  # equal on all ranks
        return maxima_TC, torch.randint(held, (rows, chunks), dtype=torch.int32)

    def feed() -> Feedback:
        rows_T = torch.tensor([3, 0, 5, 1, 2, 7])  # 7: padding
        return Feedback(rows_T, torch.arange(rows), torch.full((8,), -5), torch.full((8,), -5))

    def body(regions: PeerRegions) -> Tensors:
        torch.manual_seed(regions.rank)
        state = feed()
        given = (*chunk_maxima(regions.rank), regions.rank * held)
        tokens_T = pick_of_ranks(regions, *given, state)
        alone_T = pick_of_ranks(regions, *given)
        return [tokens_T, alone_T, state.token_ids, state.state_positions]

    found = on_ranks(ranks, body)
    all_ids: Tensors = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        all_ids.append(chunk_maxima(rank)[1] + rank * held)
    maxima_TC = torch.cat([chunk_maxima(rank)[0] for rank in range(ranks)], dim=1)
    state = feed()
    expected_T = reference_pick_greedy(maxima_TC, torch.cat(all_ids, dim=1), state)
    assert expected_T[:2].tolist() == [NON_FINITE, NON_FINITE]
    for tokens_T, alone_T, token_ids, positions in found:
        assert torch.equal(tokens_T, expected_T)
        assert torch.equal(alone_T, expected_T)
        assert torch.equal(token_ids, state.token_ids)
        assert torch.equal(positions, state.state_positions)


def test_slow_and_fast_ranks() -> None:
    """A rank that runs ahead overwrites nothing that a slow one still reads."""

    def body(regions: PeerRegions) -> Tensors:
        results: Tensors = []
        for turn in range(4):
            if turn % 2 == regions.rank:
                time.sleep(0.02)
            results.append(
                all_reduce(regions, torch.full((700,), 1.0 * turn + regions.rank), "one_shot")
            )
            results.append(
                all_reduce(regions, torch.full((7,), 1.0 * turn + regions.rank), "two_shot")
            )
        return results

    for found in on_ranks(2, body):
        for turn in range(4):
            assert (found[2 * turn] == 2 * turn + 1).all()
            assert (found[2 * turn + 1] == 2 * turn + 1).all()


def test_a_launch_ends_without_its_peers() -> None:
    """The time limit sets the failure word; later launches then give up at once."""
    group = PeerRanks(3)

    def body(regions: PeerRegions) -> Any:
        all_reduce(regions, part(regions.rank, 40), "one_shot")  # all have started
        if regions.rank == 2:
            os._exit(1)
        regions.control[LIMIT] = 2_000_000_000  # 2,000 polls
        ids = torch.full((2,), 7)
        all_reduce(regions, part(regions.rank, 40), "one_shot")
        first = int(regions.control[FAILURE])
        _, best = largest(regions, torch.ones(2), ids)
        return first, best.tolist(), int(regions.control[FAILURE])

    group.start(body)
    results = group.results()
    assert results == [(3, [0, 0], 3), (3, [0, 0], 3), None]


def test_the_abort_word_ends_a_launch() -> None:
    group = PeerRanks(2)

    def body(regions: PeerRegions) -> Any:
        if regions.rank == 1:
            time.sleep(0.2)
            group.controls[0, ABORT] = 1  # the host of rank 0
            return None
        all_reduce(regions, part(0, 40), "two_shot")
        return int(regions.control[FAILURE])

    group.start(body, limit_seconds=1e6)
    assert group.results()[0] == GAVE_UP_ON_ABORT


@pytest.mark.slow
def test_compiled_for_hopper(tmp_path: Path) -> None:
    """Without a device: what is released, acquired and waited for, and where the switch adds."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = str(Path(__file__).parents[1] / "rigs" / "peer_kernels_ahead.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) == 12
    for kernel in kernels:
        name, ptx = kernel["title"], kernel["ptx"]
        stages = 2 if name == "two_shot_kernel" else 1
        assert kernel["faults"] == [], name
        assert kernel["waits"] == 1, name
        assert "griddepcontrol.launch_dependents" in ptx, name
        assert ptx.count("st.release.sys.global.u32") == stages, name
        assert ptx.count("atom.global.sys.acquire.add.u32") == stages, name
        assert "%globaltimer" in ptx, name
        # What one thread polls all threads get, so that all leave the loop together.
        polled = ptx[ptx.index("atom.global.sys.acquire") :]
        assert re.match(r"atom[^{}]*?st\.shared.*?bar\.sync.*?ld\.shared", polled, re.S), name
        # All threads have stored their parts when the flags are released.
        before = ptx[: ptx.index("st.release.sys")]
        assert before.rindex("bar.sync") > before.rindex("st.global"), name
        if name not in ("pick_of_ranks_kernel", "largest_kernel"):
            assert re.search(r"ld\.global\.cg\.v[48]\.b32", ptx), "16 bytes a thread"
        switch = re.findall(r"multimem\.\S+", ptx)
        if not kernel["constants"].get("MULTIMEM"):
            assert not switch, name
            continue
        kind = kernel["constants"]["KIND"]
        assert switch == [
            f"multimem.ld_reduce.relaxed.sys.global.add{kind}",
            "multimem.st.relaxed.sys.global.v4.f32",
        ]
        assert ptx.count("fence.proxy.alias") == 4
